"""Markers that tell which part of a rendered conversation belongs to which message, in a single rendering.

A chat template is a program that loops over ``messages`` and prints. Before it is compiled, a call is inserted at the
start of the body of every ``for`` loop with one loop variable, and another one after the loop. At run time, the first
call prints a marker with the message's number if the loop variable is a message of this conversation, and nothing if it
is anything else (a tool, a block of content, a character). The second call prints a marker that returns to the message
of the outer loop. A template that uses indices (``{% set message = messages[i] %}`` in a loop over numbers) gets the
first call after that assignment, and ``{% generation %}`` blocks get a marker at both ends.

Whatever the template does with a message (trimming it, removing its thinking, writing its tool calls as text) happens
between two markers. The text between them, after the markers are removed, is therefore exactly the rendering of that
message. Nothing is rendered twice, and no text has to be searched for.
"""

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import nodes

__all__ = ["MARKING_FILTERS", "Region", "TurnTracker", "mark_loops", "marker_node", "split_markers"]

# The first is the name of the tracker in a compiled template, the others are filters that call it. Filters, because
# Jinja calls a filter directly but checks every function call with its sandbox, which costs more than the rest.
TRACKER, TURN, TURN_END, GENERATION = "twinkle_tracker", "twinkle_turn", "twinkle_turn_end", "twinkle_generation"

# A marker cannot be forged or occur by accident, because the author of a message does not know this number.
_SECRET = secrets.token_hex(8)
_MARKER = re.compile(f"\x02{_SECRET}(.*?)\x03")
_NOBODY = -1


@dataclass(frozen=True)
class Region:
    """Characters ``start`` to ``end`` of a rendered text. They belong to message number ``owner`` (−1: to none)."""

    owner: int
    start: int
    end: int
    generated: bool  # inside {% generation %}


@dataclass
class TurnTracker:
    """The state of one rendering: the message that the template is printing."""

    messages: list[dict[str, Any]]
    _numbers: dict[int, int] = field(init=False)
    _loops: list[tuple[int, int]] = field(init=False, default_factory=list)  # (loop, message) from the outside in

    def __post_init__(self) -> None:
        # Slices and filters in a template keep the same objects, so identity tells messages apart even if two of them
        # are equal.
        self._numbers = {id(message): number for number, message in enumerate(self.messages)}

    def turn(self, loop: int, item: object) -> str:
        number = self._numbers.get(id(item))
        if number is None:
            return ""
        if self._loops and self._loops[-1][0] == loop:
            self._loops.pop()
        self._loops.append((loop, number))
        return _marker(str(number))

    def turn_end(self, loop: int) -> str:
        if not self._loops or self._loops[-1][0] != loop:
            return ""
        self._loops.pop()
        return _marker(str(self._loops[-1][1] if self._loops else _NOBODY))

    def generation(self, begins: bool) -> str:
        return _marker("+" if begins else "-")


MARKING_FILTERS: dict[str, Callable[..., str]] = {
    TURN: lambda tracker, loop, item: tracker.turn(loop, item),
    TURN_END: lambda tracker, loop: tracker.turn_end(loop),
    GENERATION: lambda tracker, begins: tracker.generation(begins),
}


def mark_loops(tree: "nodes.Template") -> None:
    """Insert the marking calls into a parsed template, in place."""
    from jinja2 import nodes

    for number, loop in enumerate(list(tree.find_all(nodes.For))):
        if not isinstance(loop.target, nodes.Name):
            continue
        target = loop.target.name
        for assignment in list(loop.find_all(nodes.Assign)):
            if isinstance(assignment.target, nodes.Name) and _is_item(assignment.node, target):
                _insert_after(loop, assignment, _turn_node(number, assignment.target.name, assignment.lineno))
        loop.body.insert(0, _turn_node(number, target, loop.lineno))
        _insert_after(tree, loop, marker_node(TURN_END, [nodes.Const(number)], loop.lineno))


def _turn_node(loop: int, variable: str, line: int) -> "nodes.Output":
    from jinja2 import nodes

    return marker_node(TURN, [nodes.Const(loop), nodes.Name(variable, "load")], line)


def _is_item(node: "nodes.Node", index: str) -> bool:
    """Return whether the node is ``something[index]``, by which templates that use indices pick a message."""
    from jinja2 import nodes

    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Name) and node.arg.name == index


def marker_node(name: str, arguments: "list[nodes.Expr]", line: int) -> "nodes.Output":
    """Return the node for ``{{ twinkle_tracker | name(arguments) }}``."""
    from jinja2 import nodes

    tracker = nodes.Name(TRACKER, "load", lineno=line)
    return nodes.Output([nodes.Filter(tracker, name, arguments, [], None, None, lineno=line)], lineno=line)


def split_markers(marked: str, messages: int) -> tuple[str, list[Region]]:
    """Return the text without markers, and its regions in order. Text after the last message belongs to it."""
    pieces = _MARKER.split(marked)
    regions: list[Region] = []
    owner, last, generated, position = _NOBODY, _NOBODY, False, len(pieces[0])
    if position:
        regions.append(Region(_NOBODY, 0, position, False))
    for tag, text in zip(pieces[1::2], pieces[2::2], strict=True):
        if tag == "+" or tag == "-":
            generated = tag == "+"
        else:
            owner = int(tag)
        if not text:
            continue
        start, position = position, position + len(text)
        if owner != _NOBODY:
            last = owner
        regions.append(Region(owner, start, position, generated))
    if regions and regions[-1].owner == _NOBODY and last == messages - 1:
        tail = regions[-1]
        regions[-1] = Region(last, tail.start, tail.end, tail.generated)
    return "".join(pieces[::2]), _joined(regions)


def _joined(regions: list[Region]) -> list[Region]:
    """Join neighbouring regions of the same owner."""
    joined: list[Region] = []
    for region in regions:
        if joined and (joined[-1].owner, joined[-1].generated) == (region.owner, region.generated):
            joined[-1] = Region(region.owner, joined[-1].start, region.end, region.generated)
        else:
            joined.append(region)
    return joined


def _insert_after(tree: "nodes.Node", child: "nodes.Node", new: "nodes.Node") -> None:
    """Insert a node after ``child``, which is found by identity because equal nodes may occur twice."""
    for parent in _all_nodes(tree):
        for _, value in parent.iter_fields():
            if isinstance(value, list):
                for index, node in enumerate(value):
                    if node is child:
                        value.insert(index + 1, new)
                        return


def _all_nodes(tree: "nodes.Node") -> "list[nodes.Node]":
    from jinja2 import nodes

    return [tree, *tree.find_all(nodes.Node)]


def _marker(tag: str) -> str:
    return f"\x02{_SECRET}{tag}\x03"
