"""Tools, and the manager that handles a model's tool calls."""

import pytest

from twinkle_agentic.tools import Tool, ToolManager
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


def test_calls_reach_their_tools():
    manager = ToolManager([Adder(), Adder("plus")])
    assert ToolManager is SameManager
    assert manager.names() == ["add", "plus"]
    assert manager(called("add", {"a": 1, "b": 2})) == "3"
    assert manager.call(called("plus", '{"a": 1, "b": 3}')) == "4"
    assert [info["function"]["name"] for info in manager.tool_infos()] == ["add", "plus"]
    assert ToolManager({"sum": Adder()})(called("sum", {"a": 1, "b": 1})) == "2"


def test_a_copy_is_another_one():
    manager = ToolManager([Adder()])
    copy = manager.copy()
    copy.unregister("add")
    copy.unregister("add")
    copy.register(Adder("plus"))
    assert (manager.names(), copy.names()) == (["add"], ["plus"])
    assert ToolManager().names() == []


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (called("sub", {}), "Error: unknown tool 'sub'; known: add"),
        ({}, "Error: unknown tool ''; known: add"),
        (called("add", "{'a'"), "Error: the arguments of 'add' are not JSON"),
        (called("add", "[1]"), "Error: the arguments of 'add' are a list, not a mapping"),
        (called("add", {"a": 1}), "Error: KeyError: 'b'"),
        (called("add", None), "Error: KeyError: 'a'"),
    ],
)
def test_the_model_is_told_of_mistakes(call, text):
    assert ToolManager([Adder()])(call).startswith(text)


def test_what_is_no_tool():
    with pytest.raises(ValueError, match="Adder has no name"):
        ToolManager([Adder("")])
    for wrong in ([len], {"x": len}, 3, "add"):
        with pytest.raises(TypeError, match=r"tools?: got a"):
            ToolManager(wrong)
