"""Tools, and the manager that handles a model's tool calls."""

import re

import pytest

from twinkle_agentic.tools import ExtractCondensed, Tool, ToolManager
from twinkle_agentic.tools.base import Tool as SameTool
from twinkle_agentic.tools.extract_condensed import TOOL_NAME
from twinkle_agentic.tools.extract_condensed import ExtractCondensed as SameExtract
from twinkle_agentic.tools.tool_manager import ToolManager as SameManager


class Adder(Tool):
    def __init__(self, name="add"):
        self.name = name

    def __call__(self, tool_name, arguments):
        return str(arguments["a"] + arguments["b"])

    def tool_info(self):
        return {"type": "function", "function": {"name": self.name, "description": "a + b", "parameters": {}}}


def called(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_the_modules_of_scripts():
    assert (Tool, ToolManager, ExtractCondensed) == (SameTool, SameManager, SameExtract)


def test_calls_reach_their_tools():
    manager = ToolManager([Adder(), Adder("plus")])
    assert manager.names() == ["add", "plus"]
    assert manager(called("add", {"a": 1, "b": 2})) == "3"
    assert manager.call(called("plus", '{"a": 1, "b": 3}')) == "4"
    assert [info["function"]["name"] for info in manager.tool_infos()] == ["add", "plus"]
    assert ToolManager((Adder(),)).names() == ["add"]


def test_the_names_of_a_dict_are_kept():
    manager = ToolManager({"sum": Adder(), "shout": lambda tool_name, arguments: f"{tool_name}: {len(arguments)}"})
    assert manager.names() == ["sum", "shout"]
    assert manager(called("sum", {"a": 1, "b": 1})) == "2"
    assert manager(called("shout", None)) == "shout: 0"
    with pytest.raises(TypeError, match=r"shout have no tool_info\(\)"):
        manager.tool_infos()


def test_a_copy_is_another_one():
    adder = Adder()
    manager = ToolManager([adder])
    copy = manager.copy()
    assert copy.unregister("add") is adder
    assert copy.unregister("add") is None
    copy.register(Adder("plus"))
    assert (manager.names(), copy.names()) == (["add"], ["plus"])
    assert ToolManager().names() == []


def deeply_nested():
    return "[" * 200_000


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("add", "Error: the tool call is a str, not an object"),
        ({}, 'Error: the tool call has no "function"'),
        ({"function": "add"}, 'Error: the tool call has no "function"'),
        ({"function": {"arguments": {}}}, 'Error: the tool call has no "function.name"'),
        (called("sub", {}), "Error: unknown tool 'sub'; available: add"),
        (called("add", "{'a'"), "Error: the arguments of 'add' are not JSON: Expecting property name"),
        (called("add", deeply_nested()), "Error: the arguments of 'add' are not JSON: "),
        (called("add", "[1]"), "Error: the arguments of 'add' are a list, not an object"),
        (called("add", 7), "Error: the arguments of 'add' are a int, not an object"),
        (called("add", {"a": 1}), "Error: tool 'add' raised KeyError: 'b'"),
        (called("add", None), "Error: tool 'add' raised KeyError: 'a'"),
        (called("add", " \n"), "Error: tool 'add' raised KeyError: 'a'"),
    ],
)
def test_the_model_is_told_of_mistakes(call, text):
    assert ToolManager([Adder()])(call).startswith(text)


class UnspeakableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def test_an_error_without_a_text_ends_no_conversation():
    def fails(tool_name, arguments):
        raise UnspeakableError

    assert ToolManager({"add": fails})(called("add", {})) == "Error: tool 'add' raised UnspeakableError"


def test_a_manager_without_tools_says_so():
    assert ToolManager()(called("add", {})) == "Error: unknown tool 'add'; available: (none)"


def test_what_is_no_tool():
    with pytest.raises(ValueError, match="Adder has no name"):
        ToolManager([Adder("")])
    for wrong in ([len], {"x": 3}, 3, "add", {Adder()}):
        with pytest.raises(TypeError, match="tool"):
            ToolManager(wrong)
    with pytest.raises(TypeError, match="got the class Adder, allowed: an object of it"):
        ToolManager([Adder])


# --- the originals of condensed texts ---------------------------------------------------------------------------------


def condensed(content, original=None, role="user", **raw):
    raw |= {"condensed": True} | ({} if original is None else {"original": original})
    return {"type": "text", "content": content, "role": role, "round": 1, "raw": raw}


CHUNKS = [
    {"type": "text", "content": "A question.", "role": "user", "round": 1},
    condensed("short one", "the first long text"),
    condensed("called", "the call", role="assistant", kind="tool_call"),  # calls and answers of tools have no block
    condensed("answer", "the answer", role="tool"),
    condensed("short two"),
    condensed("short three", "the third long text"),
]


def test_the_text_behind_a_block():
    tool = ExtractCondensed(CHUNKS)
    manager = ToolManager([tool])
    assert TOOL_NAME == "extract_condensed"
    assert manager.names() == ["extract_condensed"]
    assert tool.blocks == {1: "the first long text", 3: "the third long text"}
    assert manager(called("extract_condensed", {"blocks": 1})) == "the first long text"
    assert manager(called("extract_condensed", '{"block": " 3 "}')) == "the third long text"
    assert "blocks" in tool.tool_info()["function"]["parameters"]["properties"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([1], r"Error: blocks is \[1\]; allowed: the number of one block"),
        (True, "Error: blocks is True; allowed"),
        (1.0, r"Error: blocks is 1\.0; allowed"),
        ("one", "Error: blocks is 'one'; allowed"),
        ("-1", "Error: blocks is '-1'; allowed"),
        ("9" * 5000, "Error: blocks is '999"),
        (None, "Error: blocks is None; allowed"),
        (4, "Error: there is no block 4; available: 1, 2, 3"),
        (0, "Error: there is no block 0"),
        (2, "Error: the original of block 2 was not stored"),
        (3, "Error: block 3 was extracted before"),
    ],
)
def test_blocks_that_cannot_be_extracted(given, text):
    tool = ExtractCondensed(CHUNKS)
    assert tool("extract_condensed", {"blocks": 3}) == "the third long text"
    answer = tool("extract_condensed", {"blocks": given})
    assert re.match(text, answer)
    assert tool("extract_condensed", {"blocks": 1}) == "the first long text"  # a refusal changes nothing
