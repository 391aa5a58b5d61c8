"""The data types of a loss graph, without torch. The code that builds a graph has checked it against the catalog."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "LOGPROBS",
    "Argument",
    "DType",
    "Device",
    "Dots",
    "GraphCall",
    "Items",
    "LossGraph",
    "LossInput",
    "Ref",
    "Slice",
]

LOGPROBS = "logprobs"  # the first input of every loss, and the only one with a gradient


@dataclass(frozen=True)
class Ref:
    """A reference to an input or to the result of an earlier call."""

    name: str


@dataclass(frozen=True)
class Items:
    """A tuple or a list. The two mean different things when used as an index."""

    values: "tuple[Argument, ...]"
    is_list: bool = False


@dataclass(frozen=True)
class Slice:
    start: "Argument"
    stop: "Argument"
    step: "Argument"


@dataclass(frozen=True)
class Dots:
    """An ellipsis in an index."""


@dataclass(frozen=True)
class DType:
    name: str


@dataclass(frozen=True)
class Device:
    """The device ``cpu``, on which a loss is computed. A graph may name no other device."""


Argument = None | bool | int | float | str | Ref | Items | Slice | Dots | DType | Device


@dataclass(frozen=True)
class GraphCall:
    """One operation. ``target`` is its name in the catalog: ``torch.exp``, or ``.exp`` for a method."""

    name: str
    target: str
    arguments: tuple[Argument, ...]
    keywords: Mapping[str, Argument]


@dataclass(frozen=True)
class LossInput:
    """One input of a graph. ``rank``: 0 for a number, 1 for (T,), 2 for (T, K)."""

    name: str
    rank: int


@dataclass(frozen=True)
class LossGraph:
    """A custom loss of one sequence. Keys of ``metrics``: ``custom/<name>:sum`` or ``custom/<name>:mean``."""

    name: str
    inputs: tuple[LossInput, ...]
    calls: tuple[GraphCall, ...]
    loss: Argument
    metrics: Mapping[str, Argument]
