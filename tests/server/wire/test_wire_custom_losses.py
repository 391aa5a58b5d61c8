"""create_custom_loss on the wire: every limit of a graph, and the error beyond it."""

import copy
import json
from typing import Any

import pytest

from tests.support.losses.traced import call, calls, decode_graph, ref
from twinkle.errors import UserError
from twinkle.loss.graph.nodes import DType, GraphCall, Items, Ref, Slice
from twinkle.server.wire.custom_losses import MAX_INPUTS, MAX_METRICS, MAX_NODES, decode_custom_loss

GOOD = calls(call("p", "operator.mul", ref("logprobs"), ref("w")), call("s", ".sum", ref("p")), loss="s", w=1)


def changed(**paths: Any) -> dict[str, Any]:
    """Return GOOD with other values; a path looks like ``graph__nodes__2__target``."""
    body: Any = copy.deepcopy(GOOD)
    for path, value in paths.items():
        *parents, last = [int(part) if part.isdigit() else part for part in path.split("__")]
        place = body
        for parent in parents:
            place = place[parent]
        place[last] = value
    return body


def test_a_graph() -> None:
    graph = decode_custom_loss(json.dumps(GOOD).encode())
    assert [each.name for each in graph.inputs] == ["logprobs", "w"]
    assert graph.calls == (
        GraphCall("p", "operator.mul", (Ref("logprobs"), Ref("w")), {}),
        GraphCall("s", ".sum", (Ref("p"),), {}),
    )
    assert graph.loss == Ref("s")


def test_arguments_of_every_kind() -> None:
    index = {"tuple": [{"slice": [None, {"ref": "n"}, None]}, {"ellipsis": True}, None]}
    nodes = [
        call("n", ".size", ref("logprobs"), 0),
        call("a", "operator.getitem", ref("logprobs"), index),
        call("b", "torch.full_like", ref("a"), {"float": "-inf"}, dtype={"dtype": "float32"}, device={"device": "cpu"}),
        call("c", "torch.cat", [ref("a"), ref("b")], out=None, dim=0),
        call("s", ".sum", ref("c")),
    ]
    first, *_ = (each for each in decode_graph(calls(*nodes, loss="s")).calls if each.name == "a")
    assert isinstance(first.arguments[1], Items)
    assert first.arguments[1].values[0] == Slice(None, Ref("n"), None)
    filled = next(each for each in decode_graph(calls(*nodes, loss="s")).calls if each.name == "b")
    assert filled.arguments[1] == float("-inf")
    assert filled.keywords["dtype"] == DType("float32")


def test_what_nobody_reads_is_left_out() -> None:
    body = calls(call("dead", ".exp", ref("logprobs")), call("s", ".sum", ref("logprobs")), loss="s")
    assert [each.name for each in decode_graph(body).calls] == ["s"]


OUTPUT = {"op": "output", "name": "output", "target": "output", "kwargs": {}}
METRICS = {f"custom/m{n}:sum": ref("s") for n in range(MAX_METRICS + 1)}
CHAIN = [call(f"a{n}", ".exp", ref(f"a{n - 1}" if n else "logprobs")) for n in range(MAX_NODES + MAX_INPUTS)]
DEEP: Any = 1
for _ in range(8):
    DEEP = [DEEP]

REFUSED = {
    "a format of tomorrow": (changed(graph__format=2), "graph.format"),
    "no inputs": (changed(inputs=[]), "inputs"),
    "too many inputs": (
        changed(inputs=[{"name": "logprobs", "rank": 1}] + [{"name": f"i{n}", "rank": 1} for n in range(MAX_INPUTS)]),
        "inputs",
    ),
    "a rank of 3": (changed(inputs__1__rank=3), "rank"),
    "logprobs are no number": (changed(inputs__0__rank=0), r"inputs\[0\]"),
    "logprobs come first": (changed(inputs__0__name="w", inputs__1__name="logprobs"), r"inputs\[0\]"),
    "two of a name": (changed(inputs__1__name="logprobs"), "names that differ"),
    "placeholders in another order": (changed(graph__nodes__0__name="w", graph__nodes__0__target="w"), "placeholder"),
    "no output": (changed(graph__nodes=GOOD["graph"]["nodes"][:-1]), "the last is output"),
    "no nodes": (changed(graph__nodes=[]), "the last is output"),
    "output first": (changed(graph__nodes=[GOOD["graph"]["nodes"][-1], *GOOD["graph"]["nodes"]]), "last node"),
    "too many nodes": (calls(*CHAIN, loss="a0"), "nodes"),
    "a module": (changed(graph__nodes__2__op="call_module"), "call_function"),
    "a parameter": (changed(graph__nodes__2__op="get_attr"), "call_function"),
    "code": (changed(graph__nodes__2__target="builtins.eval"), "unknown operation 'builtins.eval'"),
    "imports": (changed(graph__nodes__2__target="os.system"), "unknown operation 'os.system'"),
    "files": (changed(graph__nodes__2__target="torch.load"), "unknown operation 'torch.load'"),
    "in place": (changed(graph__nodes__3__target="add_"), "unknown operation '.add_'"),
    "a hidden method": (changed(graph__nodes__3__target="__reduce__"), "unknown operation"),
    "into something": (changed(graph__nodes__3__kwargs={"out": ref("w")}), "out="),
    "unknown keyword": (changed(graph__nodes__3__kwargs={"generator": 3}), "generator=3"),
    "too many arguments": (changed(graph__nodes__3__args=[ref("p")] * 9), "args"),
    "a reference ahead": (changed(graph__nodes__2__args=[ref("s"), ref("w")]), "stands before"),
    "a reference to itself": (changed(graph__nodes__2__args=[ref("p"), ref("w")]), "stands before"),
    "the same name twice": (changed(graph__nodes__3__name="p"), "no earlier node has"),
    "a strange name": (changed(graph__nodes__3__name="s; import os"), "identifier"),
    "deep lists": (changed(graph__nodes__2__args=[ref("logprobs"), DEEP]), "levels"),
    "long texts": (changed(graph__nodes__2__args=[ref("logprobs"), "x" * 1000]), "texts of"),
    "large integers": (changed(graph__nodes__2__args=[ref("logprobs"), 2**64]), "64 bits"),
    "many arguments": (changed(graph__nodes__2__args=[ref("logprobs"), [1] * 10_000]), "arguments"),
    "another device": (changed(graph__nodes__2__args=[ref("logprobs"), {"device": "cuda:0"}]), "cpu"),
    "another dtype": (changed(graph__nodes__2__args=[ref("logprobs"), {"dtype": "qint8"}]), "dtype"),
    "an unknown tag": (changed(graph__nodes__2__args=[ref("logprobs"), {"pickle": "…"}]), "a reference"),
    "two tags": (changed(graph__nodes__2__args=[ref("logprobs"), {"ref": "w", "float": "inf"}]), "a reference"),
    "a metric's name": (
        changed(graph__nodes__4__args=[{"tuple": [ref("s"), {"dict": {"loss:sum": ref("s")}}]}]),
        "custom/<name>",
    ),
    "two colons": (
        changed(graph__nodes__4__args=[{"tuple": [ref("s"), {"dict": {"custom/a:b:sum": ref("s")}}]}]),
        "custom/<name>",
    ),
    "many metrics": (changed(graph__nodes__4__args=[{"tuple": [ref("s"), {"dict": METRICS}]}]), "metrics"),
    "no metrics": (changed(graph__nodes__4__args=[ref("s")]), r"\(loss"),
    "not a number": (changed(custom_loss_seq_id="0"), "custom_loss_seq_id"),
    "a list for a graph": (changed(graph=[]), "graph"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    body, text = REFUSED[name]
    with pytest.raises(UserError, match=text) as error:
        decode_graph(body)
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b'{"graph":' * 5000, b"\xff\xfe", b"null", b"NaN"])
def test_what_is_no_json(body: bytes) -> None:
    with pytest.raises(UserError):
        decode_custom_loss(body)
