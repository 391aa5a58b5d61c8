"""create_custom_loss on the wire: the JSON of a traced function becomes a :class:`~twinkle.loss.graph.nodes.LossGraph`.

Nothing of the function is run here, and torch is not needed: nodes are looked up in the catalog, and arguments become
plain data. The size of a graph is limited in every respect, so that storing, reading and walking it is always cheap.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from twinkle.errors import InvalidInputError
from twinkle.loss.graph.catalog import DTYPES, INERT, rule_of
from twinkle.loss.graph.nodes import (
    LOGPROBS,
    Argument,
    Device,
    Dots,
    DType,
    GraphCall,
    Items,
    LossGraph,
    LossInput,
    Ref,
    Slice,
)
from twinkle.server.wire.fields import Id, Number, Request, parse, short

MAX_BODY_BYTES = 262_144
MAX_INPUTS = 16
MAX_NODES = 512
MAX_METRICS = 64
_MAX_DEPTH = 6  # nested lists in one argument
_MAX_ARGUMENTS = 8192  # of all nodes together; each element of a list counts as one
_MAX_TEXT = 128
_MAX_INTEGER = 2**63 - 1
_FORMAT = 1

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,127}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,128}:(sum|mean)")
_FLOATS = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


class _Input(Request):
    name: Id
    rank: Annotated[int, Field(ge=0, le=2)]


class _Node(Request):
    op: Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]
    name: Id
    target: Id
    args: Annotated[list[Any], Field(default_factory=list)]
    kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]


class _Graph(Request):
    format: int
    nodes: Annotated[list[_Node], Field(max_length=MAX_NODES + MAX_INPUTS + 1, fail_fast=True)]


class CustomLossPlace(Request):
    """The fields that name the future of the request. They must be valid; other mistakes become a failed future."""

    session_id: Id
    custom_loss_seq_id: Number


class CreateCustomLossRequest(CustomLossPlace):
    name: Annotated[str, Field(max_length=_MAX_TEXT)] = ""
    inputs: Annotated[list[_Input], Field(min_length=1, max_length=MAX_INPUTS)]
    graph: _Graph
    type: Literal["create_custom_loss"] = "create_custom_loss"


def decode_custom_loss(body: bytes) -> LossGraph:
    """Return the graph in a request; :class:`~twinkle.errors.UserError` for the first mistake."""
    request = parse(CreateCustomLossRequest, body)
    if request.graph.format != _FORMAT:
        raise InvalidInputError("graph.format", request.graph.format, str(_FORMAT))
    inputs = _inputs(request.inputs)
    reader = _Reader()
    calls: list[GraphCall] = []
    for number, node in enumerate(request.graph.nodes):
        where = f"graph.nodes[{number}]"
        if not _NAME.fullmatch(node.name) or node.name in reader.known:
            raise InvalidInputError(f"{where}.name", node.name, "an identifier that no earlier node has")
        if node.op == "output":
            if number != len(request.graph.nodes) - 1:
                raise InvalidInputError(where, "output", "output as the last node")
            loss, metrics = reader.output(node, where)
            return LossGraph(request.name or "unnamed", inputs, _needed(calls, loss, metrics), loss, metrics)
        if node.op == "placeholder":
            _check_placeholder(node, inputs, len(reader.known), where)
        else:
            calls.append(reader.call(node, where))
        reader.known.add(node.name)
    raise InvalidInputError("graph.nodes", f"{len(request.graph.nodes)} nodes", "nodes of which the last is output")


def _inputs(given: Sequence[_Input]) -> tuple[LossInput, ...]:
    inputs = tuple(LossInput(each.name, each.rank) for each in given)
    if inputs[0].name != LOGPROBS or inputs[0].rank not in (1, 2):
        raise InvalidInputError("inputs[0]", f"{inputs[0].name} of rank {inputs[0].rank}", "logprobs of rank 1 or 2")
    if len({each.name for each in inputs}) != len(inputs):
        raise InvalidInputError("inputs", [each.name for each in inputs], "names that differ")
    return inputs


def _check_placeholder(node: _Node, inputs: Sequence[LossInput], number: int, where: str) -> None:
    """Raise InvalidInputError unless placeholder ``number`` has the name of that input and no node came in between.

    So the placeholders come before all other nodes, in the order of the inputs.
    """
    if number >= len(inputs) or node.target != inputs[number].name or node.name != node.target or node.args:
        names = ", ".join(each.name for each in inputs)
        raise InvalidInputError(
            where, node.name, f"placeholders of the inputs, in their order ({names}), before all else"
        )


def _needed(calls: Sequence[GraphCall], loss: Argument, metrics: Mapping[str, Argument]) -> tuple[GraphCall, ...]:
    """Return the calls whose values the loss or a metric depends on, directly or through other calls."""
    read = set(_references((loss, *metrics.values())))
    kept = []
    for call in reversed(calls):
        if call.name in read:
            kept.append(call)
            read.update(_references((*call.arguments, *call.keywords.values())))
    return tuple(reversed(kept))


def _references(arguments: Iterable[Argument]) -> Iterator[str]:
    for argument in arguments:
        match argument:
            case Ref(name):
                yield name
            case Items(values):
                yield from _references(values)
            case Slice(start, stop, step):
                yield from _references((start, stop, step))


class _Reader:
    """Reads the nodes of one graph. ``known``: the names of the nodes read so far, which later nodes may refer to."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self._left = _MAX_ARGUMENTS

    def call(self, node: _Node, where: str) -> GraphCall:
        if node.op not in ("call_function", "call_method"):
            raise InvalidInputError(f"{where}.op", node.op, "placeholder, call_function, call_method or output")
        target = f".{node.target}" if node.op == "call_method" else node.target
        rule = rule_of(target, f"{where}.target")
        given = {key: value for key, value in node.kwargs.items() if not _is_inert(key, value)}
        if len(node.args) > rule.arguments:
            raise InvalidInputError(f"{where}.args", f"{len(node.args)} of them", f"at most {rule.arguments}")
        for key in given:
            if key not in rule.keywords:
                allowed = ", ".join(sorted(rule.keywords)) or "none"
                raise InvalidInputError(f"{where}.kwargs", f"{key[:_MAX_TEXT]}={short(given[key])}", allowed)
        arguments = tuple(self.argument(value, f"{where}.args[{n}]") for n, value in enumerate(node.args))
        keywords = {key: self.argument(value, f"{where}.kwargs[{key!r}]") for key, value in given.items()}
        return GraphCall(node.name, target, arguments, keywords)

    def output(self, node: _Node, where: str) -> tuple[Argument, dict[str, Argument]]:
        """Return the loss and the metrics by name, from an output node of the form ``(loss, {name: metric})``."""
        match node.args:
            case [{"tuple": [loss, {"dict": dict() as metrics}]}]:
                pass
            case _:
                raise InvalidInputError(f"{where}.args", node.args, "(loss, {name: metric})")
        if len(metrics) > MAX_METRICS:
            raise InvalidInputError(f"{where}.args", f"{len(metrics)} metrics", f"at most {MAX_METRICS}")
        for name in metrics:
            if not _METRIC.fullmatch(name):
                allowed = "custom/<name>:sum or custom/<name>:mean, in lower case"
                raise InvalidInputError(f"{where}: metric", name, allowed)
        read = {name: self.argument(value, f"{where}: metric {name!r}") for name, value in metrics.items()}
        return self.argument(loss, f"{where}: loss"), read

    def argument(self, value: object, where: str, depth: int = 0) -> Argument:
        self._left -= 1
        if self._left < 0:
            raise InvalidInputError(where, f"more than {_MAX_ARGUMENTS} arguments", "that many in all nodes together")
        if depth > _MAX_DEPTH:
            raise InvalidInputError(where, "deeper lists", f"{_MAX_DEPTH} levels")
        if isinstance(value, list):
            return Items(tuple(self.argument(each, where, depth + 1) for each in value), is_list=True)
        if isinstance(value, dict):
            return self._tagged(value, where, depth)
        return _plain(value, where)

    def _tagged(self, value: Mapping[str, Any], where: str, depth: int) -> Argument:
        match dict(value):
            case {"ref": str() as name, **rest} if not rest:
                if name not in self.known:
                    raise InvalidInputError(where, name, "a node that stands before this one")
                return Ref(name)
            case {"tuple": list() as items, **rest} if not rest:
                return Items(tuple(self.argument(each, where, depth + 1) for each in items))
            case {"slice": [start, stop, step], **rest} if not rest:
                return Slice(*(self.argument(each, where, depth + 1) for each in (start, stop, step)))
            case {"ellipsis": True, **rest} if not rest:
                return Dots()
            case {"float": str() as text, **rest} if not rest and text in _FLOATS:
                return _FLOATS[text]
            case {"dtype": str() as name, **rest} if not rest and name in DTYPES:
                return DType(name)
            case {"device": "cpu", **rest} if not rest:
                return Device()
        raise InvalidInputError(where, value, f"a value, a reference, a slice, the device cpu or a dtype of {DTYPES}")


def _plain(value: object, where: str) -> Argument:
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and -_MAX_INTEGER <= value <= _MAX_INTEGER:
        return value
    if isinstance(value, str) and len(value) <= _MAX_TEXT:
        return value
    raise InvalidInputError(where, short(value), f"integers of 64 bits, texts of {_MAX_TEXT} characters")


def _is_inert(key: str, value: object) -> bool:
    """Return whether a keyword has a value without effect, which tracing writes down.

    With any other value the keyword is refused, unless the operation's rule has it.
    """
    if isinstance(value, dict) and len(value) == 1 and key in value:  # {"layout": {"layout": "strided"}}
        value = value[key]
    return any(
        value is allowed or (type(value) is type(allowed) and value == allowed) for allowed in INERT.get(key, ())
    )
