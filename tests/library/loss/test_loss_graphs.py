"""Loss graphs compute what the traced function computes, and nothing else."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.losses.traced import call, calls, decode_graph, ref, request
from twinkle.errors import NonFiniteError, UserError
from twinkle.loss.graph.bounds import BOUNDS
from twinkle.loss.graph.catalog import CATALOG
from twinkle.loss.graph.interpreter import DatumLoss, Limits, Meter, evaluate
from twinkle.loss.graph.operations import OPERATIONS

LOGPROBS = np.array([-0.5, -1.2, -0.1, -2.0, -0.7, -0.3], np.float32)
WEIGHTS = np.array([1.0, 0.0, 0.5, 2.0, -1.0, 3.0], np.float32)

# x: log-probabilities, w: an input; both have six elements.
FUNCTIONS = {
    "arithmetic": lambda x, w: ((x * w - 1) / (2 - x) + 2**x).sum() - -x.mean() + abs(x).sum() + (x % 2).sum(),
    "names of torch": lambda x, w: torch.exp(x).sum() + torch.log1p(x.exp()).sum() + torch.special.expm1(x).sum(),
    "activations": lambda x, w: (
        F.softplus(x, beta=2.0) + F.logsigmoid(x) + F.relu(x) + F.gelu(x) + F.silu(x) + torch.sigmoid(x) + x.tanh()
    ).sum(),
    "softmaxes": lambda x, w: F.softmax(x, dim=-1)[0] + x.log_softmax(0)[1] + torch.logsumexp(x, 0) + x.softmax(0)[2],
    "clipped": lambda x, w: -torch.minimum((x - w).exp() * w, (x - w).exp().clamp(0.8, 1.2) * w).sum(),
    "masks": lambda x, w: (
        torch.where(w > 0, x, torch.zeros_like(x)).sum() + x.masked_fill(w <= 0, 0.0).sum() + x[w > 0].sum()
    ),
    "logic": lambda x, w: (x * ((w > 0) & ~(w > 2)).float()).sum() + (x * torch.logical_or(w > 2, w < 0)).sum(),
    "statistics": lambda x, w: (
        x.std() + x.var(unbiased=False) + torch.var(x, dim=0, correction=0) + x.norm() + x.prod()
    ),
    "extremes": lambda x, w: (
        x.max() + x.min(0).values + torch.max(x, dim=0)[0] + torch.max(x, w).sum() + x.amax() + x.topk(2)[0].sum()
    ),
    "order": lambda x, w: (
        x.sort().values[0] + x.median() + torch.quantile(x, 0.3) + x.gather(0, torch.argsort(w)).sum()
    ),
    "along": lambda x, w: (
        x.cumsum(0)[-1] + torch.logcumsumexp(x, 0)[-1] + torch.diff(x).sum() + x.flip(0)[0] + x.roll(1)[0]
    ),
    "products": lambda x, w: (
        torch.dot(x, w) + x @ w + torch.outer(x, w).sum() + torch.einsum("i,i->", x, w) + (x[:, None] @ w[None]).sum()
    ),
    "slices": lambda x, w: (
        x[1:].sum()
        - x[:-1].mean()
        + x[-1]
        + x[::2].sum()
        + x[None, :].sum()
        + x[..., 0]
        + x[[0, 2]].sum()
        + x[torch.argmax(w)]
    ),
    "shapes": lambda x, w: (
        x.reshape(2, 3).transpose(0, 1).flatten()[1]
        + x.unsqueeze(0).expand(3, -1).sum()
        + x.view(3, 2).T.sum()
        + x.repeat(2).mean()
    ),
    "sizes": lambda x, w: (
        x.sum() / x.shape[0] + x.sum() / x.numel() + x.sum() / math.sqrt(x.size(0)) + x.mean() * x.ndim
    ),
    "new ones": lambda x, w: (
        (x * torch.arange(x.shape[0])).sum()
        + (x + torch.ones(x.shape[0])).mean()
        + (x * x.new_full((6,), 2.0)).sum()
        + torch.full_like(x, math.inf).clamp(max=3.0).sum()
    ),
    "pieces": lambda x, w: (
        x.chunk(2)[0].sum()
        + torch.split(x, 2)[1].mean()
        + x.unbind()[1]
        + torch.stack([x, w]).mean()
        + torch.cat((x, w)).sum()
    ),
    "dtypes": lambda x, w: (
        x.double().sum().float()
        + x.to(w.dtype).sum()
        + x.to(torch.float64).mean()
        + x.to(w.device).sum()
        + (w > 0).long().sum()
    ),
    "losses": lambda x, w: (
        F.mse_loss(x, w)
        + F.l1_loss(x, w, reduction="sum")
        + F.huber_loss(x, w, delta=0.5)
        + F.kl_div(x, w.abs(), reduction="sum")
        + F.binary_cross_entropy_with_logits(x, w.clamp(0, 1))
    ),
    "detached": lambda x, w: (x.exp().detach() * x).sum(),
}


def graph_of(function, **ranks: int):
    def loss(logprobs, w):
        return function(logprobs, w), {}

    return decode_graph(request(loss, {"logprobs": 1, "w": 1} | ranks))


def evaluated(body: dict, limits: Limits | None = None, **inputs: np.ndarray) -> DatumLoss:
    given = {"logprobs": LOGPROBS, **inputs}
    return evaluate(decode_graph(body), given, "data[0]", Meter(limits or Limits()))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_interpreter_is_autograd(name: str) -> None:
    function = FUNCTIONS[name]
    result = evaluate(graph_of(function), {"logprobs": LOGPROBS, "w": WEIGHTS}, "data[0]", Meter(Limits()))
    leaf = torch.tensor(LOGPROBS, requires_grad=True)
    expected = function(leaf, torch.tensor(WEIGHTS))
    expected.backward()
    assert result.loss == pytest.approx(float(expected.detach()), rel=1e-5)
    np.testing.assert_allclose(result.slope, leaf.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_metrics_and_integers() -> None:
    def loss(logprobs, ids):
        hits = (ids == 3).sum()
        return (logprobs * ids).sum(), {"custom/hits:sum": hits, "custom/share:mean": hits / ids.numel()}

    ids = np.array([3, 1, 3, 0, 2, 3])
    result = evaluated(request(loss, {"logprobs": 1, "ids": 1}), ids=ids)
    assert result.metrics == {"custom/hits:sum": 3.0, "custom/share:mean": 0.5}
    np.testing.assert_array_equal(result.slope, ids)


def test_every_name_has_a_bound_and_a_function() -> None:
    assert set(OPERATIONS) == set(CATALOG)
    assert {rule.bound for rule in CATALOG.values()} <= set(BOUNDS)


def test_nothing_in_place_random_or_uninitialised_is_listed() -> None:
    names = {f".{target.rpartition('.')[2]}" for target in CATALOG}
    assert not [name for name in names if name.endswith("_") and name not in (".and_", ".or_")]
    assert not [
        name for name in names if any(word in name for word in ("rand", "empty", "dropout", ".item", "save", "load"))
    ]


# --- what is too large ------------------------------------------------------------------------------------------------

HUGE = 10**12
# Each would take gigabytes or hours if it ran.
BOMBS = {
    "zeros": [call("a", "torch.zeros", HUGE)],
    "ones of a shape": [call("a", "torch.ones", {"tuple": [10**6, 10**6]})],
    "full": [call("a", "torch.full", [HUGE], 1.0)],
    "new": [call("a", ".new_zeros", ref("logprobs"), [HUGE])],
    "arange": [call("a", "torch.arange", HUGE)],
    "arange in small steps": [call("a", "torch.arange", 0, 1, 1e-12)],
    "expand": [call("u", ".unsqueeze", ref("logprobs"), 0), call("a", ".expand", ref("u"), HUGE, -1)],
    "repeat": [call("a", ".repeat", ref("logprobs"), HUGE)],
    "broadcast": [
        call("v", ".reshape", ref("logprobs"), -1, 1),
        call("w", "torch.arange", 3_000_000),
        call("a", "operator.add", ref("v"), ref("w")),
    ],
    "outer": [call("w", "torch.arange", 4_000_000), call("a", "torch.outer", ref("w"), ref("w"))],
    "matmul": [
        call("w", "torch.ones", 2000, 2000),
        *(call(f"m{n}", "operator.matmul", ref("w"), ref("w")) for n in range(200)),
        call("a", "torch.cat", [ref(f"m{n}") for n in range(200)]),
    ],
    "einsum": [call("w", "torch.ones", 1000, 1000), call("a", "torch.einsum", "ab,cd->abcd", ref("w"), ref("w"))],
    "padding": [call("a", "torch.nn.functional.pad", ref("logprobs"), {"tuple": [0, HUGE]})],
    "an index": [
        call("w", "torch.zeros", 4_000_000, dtype={"dtype": "int64"}),
        call("x", "torch.ones", 6, 600_000),
        call("a", "operator.getitem", ref("x"), ref("w")),
    ],
    "doubling": [
        call("d0", "torch.cat", [ref("logprobs"), ref("logprobs")]),
        *(call(f"d{n}", "torch.cat", [ref(f"d{n - 1}"), ref(f"d{n - 1}")]) for n in range(1, 60)),
        call("a", ".sum", ref("d59")),
    ],
    "many pieces": [
        call("w", "torch.ones", 100_000),
        call("p", ".unbind", ref("w")),
        call("a", "torch.stack", ref("p")),
    ],
    "powers of integers": [call("a", "operator.pow", 10, 10**9)],
    "towers of integers": [
        call("p0", "operator.mul", 2**62, 2**62),
        call("a", "operator.mul", ref("p0"), ref("p0")),
    ],
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_do_not_go_off(name: str) -> None:
    nodes = [*BOMBS[name], call("s", "torch.sum", ref("a")), call("l", ".add", ref("s"), ref("logprobs"))]
    with pytest.raises(
        UserError, match=r"custom loss 'by_hand': .*(it would make|it made|more work|pieces|64 bits|range)"
    ):
        evaluated(calls(*nodes, loss="l"))


def test_work_of_a_request_is_counted() -> None:
    body = calls(
        *(call(f"a{n}", ".tanh", ref(f"a{n - 1}" if n else "logprobs")) for n in range(50)),
        call("s", ".sum", ref("a49")),
        loss="s",
    )
    graph, meter = decode_graph(body), Meter(Limits(work=51 * 5000 * 3))
    inputs = {"logprobs": LOGPROBS}
    for _ in range(3):
        evaluate(graph, inputs, "data[0]", meter)
    with pytest.raises(UserError, match="more work"):
        evaluate(graph, inputs, "data[3]", meter)


def test_the_clock_is_the_last_resort() -> None:
    now = iter(range(100))
    graph = decode_graph(calls(call("a", ".exp", ref("logprobs")), call("s", ".sum", ref("a")), loss="s"))
    with pytest.raises(UserError, match="took more than 1 s"):
        evaluate(graph, {"logprobs": LOGPROBS}, "data[0]", Meter(Limits(seconds=1.0), clock=lambda: next(now)))


def test_numbers_of_a_datum_are_counted() -> None:
    nodes = [call(f"a{n}", ".tanh", ref(f"a{n - 1}" if n else "logprobs")) for n in range(50)]
    body = calls(*nodes, call("s", ".sum", ref("a49")), loss="s")
    with pytest.raises(UserError, match="numbers for one datum"):
        evaluated(body, Limits(datum=200))


# --- what is not a loss -----------------------------------------------------------------------------------------------

MISTAKES = {
    "a vector": (call("s", ".exp", ref("logprobs")), "one number"),
    "no gradient": (call("s", "torch.zeros", []), "does not depend on logprobs"),
    "a number": (call("s", ".numel", ref("logprobs")), "does not depend on logprobs"),
    "a text": (call("s", "operator.mul", "a", 10**9), "tensors and numbers, not str"),
    "a list": (call("s", "operator.mul", [1], 10**9), "tensors and numbers, not list"),
    "a text's method": (call("s", ".expand", "a", 5), "only tensors have methods"),
    "an attribute": (call("s", "getattr", ref("logprobs"), "__class__"), "attribute '__class__'"),
    "data": (call("s", "getattr", ref("logprobs"), "data"), "attribute 'data'"),
    "elsewhere": (call("s", ".to", ref("logprobs"), "cuda"), "to 'cuda'"),
    "a tensor in math": (call("s", "math.exp", ref("logprobs")), "takes numbers"),
    "torch's own complaint": (call("s", "torch.sum", ref("logprobs"), 7), "Dimension out of range"),
    "arguments that are none": (call("s", "torch.sum"), "sum"),
    "division": (call("s", "operator.floordiv", 1, 0), "by zero"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_users_errors(name: str) -> None:
    node, text = MISTAKES[name]
    with pytest.raises(UserError, match=text):
        evaluated(calls(node, loss="s"))


def test_what_is_not_finite() -> None:
    log = calls(call("a", ".log", ref("logprobs")), call("s", ".sum", ref("a")), loss="s")
    with pytest.raises(NonFiniteError, match="is nan"):
        evaluated(log)
    root = calls(
        call("z", ".sub", ref("logprobs"), ref("logprobs")),
        call("a", ".sqrt", ref("z")),
        call("s", ".sum", ref("a")),
        loss="s",
    )
    with pytest.raises(NonFiniteError, match="gradient"):
        evaluated(root)

    def loss(logprobs):
        return logprobs.sum(), {"custom/bad:mean": logprobs.sum() / 0}

    with pytest.raises(NonFiniteError, match="custom/bad:mean"):
        evaluated(request(loss, {"logprobs": 1}))


def test_inputs_are_not_written_to() -> None:
    before = WEIGHTS.copy()
    evaluate(graph_of(FUNCTIONS["shapes"]), {"logprobs": LOGPROBS, "w": WEIGHTS}, "data[0]", Meter(Limits()))
    np.testing.assert_array_equal(WEIGHTS, before)
