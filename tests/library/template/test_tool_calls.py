"""Tool calls in the formats that models write, and no calls in texts without any."""

import pytest

from twinkle.template import (
    ClineParser,
    DeepseekV4Template,
    HermesQwenParser,
    ReActParser,
    Template,
    ToolCallRegistry,
    VCPParser,
)


def calls(parser, text):
    parsed = parser.parse(text)
    assert all(call["type"] == "function" for call in parsed)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in parsed]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [("f", {"a": 1})]),
        ('<tool_call>{"tool_name": "f", "arguments": "{\\"a\\": [1]}"}</tool_call>', [("f", {"a": [1]})]),
        ('<tool_call>{"name": "f"}', [("f", {})]),
        ('<tool_call>{"name": "f"</tool_call><tool_call>{"name": "g"}</tool_call>', [("g", {})]),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', []),
        ("<tool_call>[1]</tool_call>", []),
        (
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\ny\n</parameter>\n"
            "</function>\n</tool_call>",
            [("f", {"a": 1, "b": "x\ny"})],
        ),
    ],
)
def test_hermes_and_qwen(text, expected):
    assert calls(HermesQwenParser(), text) == expected


def test_cline():
    parser = ClineParser()
    text = "Reading.\n<read_file>\n<path> a.py </path>\n<lines>1-2</lines>\n</read_file>\n"
    assert calls(parser, text) == [("read_file", {"path": "a.py", "lines": "1-2"})]
    assert parser.clean(text) == "Reading."
    for nothing in ("<think><read><a>b</a></read></think>", "<b>bold</b>", "<ul><li>x</li></ul>", "<x>y</x>", "1 < 2"):
        assert not parser.detect(nothing)
    assert parser.extract_tool_result("[read_file for 'a.py'] Result:\nprint(1)") == "print(1)"
    assert parser.extract_tool_result("no result") is None


def test_vcp():
    parser = VCPParser()
    text = (
        "ok <<<[TOOL_REQUEST]>>>\ntool_name: 「始」Search「末」,\nq: 「始」two\nlines「末」,\n"
        "raw: 「始ESCAPE」a「末」b「末ESCAPE」\n<<<[END_TOOL_REQUEST]>>>"
    )
    assert calls(parser, text) == [("Search", {"q": "two\nlines", "raw": "a「末」b"})]
    assert parser.clean(text) == "ok"
    assert calls(parser, "<<<[TOOL_REQUEST]>>>\nq: 「始」x「末」\n<<<[END_TOOL_REQUEST]>>>") == []


def test_react():
    parser = ReActParser()
    text = "Thought: look\nAction: search[weather in [Paris]]\n"
    assert calls(parser, text) == [("search", {"input": "weather in [Paris]"})]
    assert parser.clean(text) == "Thought: look"
    assert not parser.detect("The Action: search[x] is inline")


def test_the_first_format_that_fits_wins():
    assert [parser.name for parser in ToolCallRegistry.parsers()] == ["hermes_qwen", "cline", "vcp", "react"]
    both = 'Action: f[x]\n<tool_call>{"name": "g"}</tool_call>'
    assert ToolCallRegistry.detect_first(both).name == "hermes_qwen"
    assert ToolCallRegistry.detect_first("nothing here") is None


def test_a_name_is_registered_once():
    taken = ToolCallRegistry.parsers()[0]
    assert ToolCallRegistry.register(HermesQwenParser()) is taken
    assert len(ToolCallRegistry.parsers()) == 4


def test_a_template_reads_them_all():
    template = Template.__new__(Template)
    assert template.parse_tool_call("plain ") == []
    assert template.clean_tool_call("plain \n") == "plain"
    text = 'a\n<tool_call>{"name": "g"}</tool_call>'
    assert template.parse_tool_call(text)[0]["function"]["name"] == "g"
    assert template.clean_tool_call(text) == "a"


DSML = (
    'Let me.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="a" string="true">1</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="b" string="false">{"c": 2}</｜DSML｜parameter>\n'
    '</｜DSML｜invoke>\n<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)


def test_dsml():
    template = DeepseekV4Template.__new__(DeepseekV4Template)
    functions = [call["function"] for call in template.parse_tool_call(DSML)]
    assert functions == [{"name": "f", "arguments": {"a": "1", "b": {"c": 2}}}, {"name": "g", "arguments": {}}]
    assert template.parse(DSML) == template.parse_tool_call(DSML)
    assert template.clean(DSML) == template.clean_tool_call(DSML) == "Let me."
    assert template.parse_tool_call('<tool_call>{"name": "h"}</tool_call>')[0]["function"]["name"] == "h"


@pytest.mark.parametrize("old", ['string="false">{"c": 2}', "</｜DSML｜tool_calls>", "</｜DSML｜parameter>"])
def test_malformed_dsml_is_no_call(old):
    broken = DSML.replace(old, 'string="false">{"c": ' if "false" in old else "", 1)
    assert DeepseekV4Template.__new__(DeepseekV4Template).parse_tool_call(broken) == []
