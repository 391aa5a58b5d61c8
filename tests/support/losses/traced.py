"""Turn functions of tensors into the JSON of create_custom_loss, traced by torch.fx and written as by the SDK."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx
from torch.fx.node import _get_qualified_name

from twinkle.loss.graph.nodes import LossGraph
from twinkle.server.wire.custom_losses import decode_custom_loss


def traced(function: Callable[..., Any], ranks: Mapping[str, int]) -> dict[str, Any]:
    """Return the request body without session and sequence number. ``function`` returns (loss, metrics)."""
    graph = torch.fx.symbolic_trace(function).graph
    return {
        "name": function.__name__,
        "inputs": [{"name": name, "rank": rank} for name, rank in ranks.items()],
        "graph": {"format": 1, "nodes": [_node(node) for node in graph.nodes]},
        "type": "create_custom_loss",
    }


def request(function: Callable[..., Any], ranks: Mapping[str, int], session_id: str = "s", number: int = 0) -> dict:
    return {"session_id": session_id, "custom_loss_seq_id": number, **traced(function, ranks)}


def decode_graph(content: Mapping[str, Any]) -> LossGraph:
    """Return the graph of such a request as the server decodes it."""
    return decode_custom_loss(json.dumps(content).encode())


def calls(*nodes: dict[str, Any], loss: str = "logprobs", **inputs: int) -> dict[str, Any]:
    """Return a request made of hand-written nodes. ``inputs`` gives the ranks of inputs other than logprobs."""
    ranks = {"logprobs": 1, **inputs}
    output = {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": loss}, {"dict": {}}]}]}
    places = [{"op": "placeholder", "name": name, "target": name, "args": [], "kwargs": {}} for name in ranks]
    return {
        "session_id": "s",
        "custom_loss_seq_id": 0,
        "name": "by_hand",
        "inputs": [{"name": name, "rank": rank} for name, rank in ranks.items()],
        "graph": {"format": 1, "nodes": [*places, *nodes, output]},
    }


def call(name: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return a node of a graph. A target with a leading dot, as in ``.sum``, is a method; any other is a function."""
    op = "call_method" if target.startswith(".") else "call_function"
    return {"op": op, "name": name, "target": target.lstrip("."), "args": list(args), "kwargs": kwargs}


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


def _node(node: torch.fx.Node) -> dict[str, Any]:
    target = node.target if isinstance(node.target, str) else _get_qualified_name(node.target)
    return {
        "op": node.op,
        "name": node.name,
        "target": target.removeprefix("builtins.").replace("_operator.", "operator."),
        "args": [] if node.op == "placeholder" else [_argument(value) for value in node.args],
        "kwargs": {key: _argument(value) for key, value in node.kwargs.items()},
    }


def _argument(value: Any) -> Any:
    if isinstance(value, torch.fx.Node):
        return {"ref": value.name}
    if isinstance(value, tuple):
        return {"tuple": [_argument(each) for each in value]}
    if isinstance(value, list):
        return [_argument(each) for each in value]
    if isinstance(value, dict):
        return {"dict": {key: _argument(each) for key, each in value.items()}}
    if isinstance(value, slice):
        return {"slice": [_argument(each) for each in (value.start, value.stop, value.step)]}
    if value is ...:
        return {"ellipsis": True}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value
