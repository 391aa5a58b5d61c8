"""DeepSeek V4's prompt format: layout, thinking, tools, and labels that cover exactly what the assistant says."""

import pytest

from tests.support.texts.conversations import TOOLS, save_tokenizer
from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.template import DeepseekV4Template

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SPECIAL = (BOS, EOS, "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜")
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "first", "reasoning_content": "r1"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "second", "reasoning_content": "r2"},
]
CALLS = [
    {"id": "x", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}},
    {"id": "y", "type": "function", "function": {"name": "find", "arguments": "{}"}},
]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return DeepseekV4Template(str(save_tokenizer(tmp_path_factory.mktemp("v4") / "v4", SPECIAL, "", BOS, EOS)))


def text(template, messages, prompt=False, tools=None, **variables):
    row = {"messages": messages, "tools": tools}
    return template.encode(row, prompt, tokenize=False, chat_template_kwargs=variables)["prompt"]


def learnt(template, row):
    return template.decode([label for label in template.encode(row)["labels"] if label != -100])


def test_thoughts_before_the_last_question_are_dropped(template):
    start = f"{BOS}Be brief.<｜User｜>one<｜Assistant｜>"
    assert text(template, TURNS) == f"{start}</think>first{EOS}<｜User｜>two<｜Assistant｜><think>r2</think>second{EOS}"
    kept = text(template, TURNS, drop_thinking=False)
    assert kept == f"{start}<think>r1</think>first{EOS}<｜User｜>two<｜Assistant｜><think>r2</think>second{EOS}"
    without = text(template, TURNS, enable_thinking=False)
    assert without == f"{start}</think>first{EOS}<｜User｜>two<｜Assistant｜></think>second{EOS}"


def test_what_is_learnt(template):
    assert learnt(template, {"messages": TURNS}) == f"first{EOS}r2</think>second{EOS}"


def test_the_prompt_opens_a_thought_or_skips_it(template):
    assert text(template, TURNS[:2], True).endswith("one<｜Assistant｜><think>")
    assert text(template, TURNS[:2], True, thinking=False).endswith("one<｜Assistant｜></think>")


def test_tools_calls_and_results(template):
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": CALLS},
        {"role": "tool", "content": "from y", "tool_call_id": "y"},
        {"role": "tool", "content": "from x", "tool_call_id": "x"},
    ]
    shown = text(template, messages, True, TOOLS)
    assert shown.startswith(f"{BOS}\n\n## Tools")
    assert '{"name": "find", "description": "Finds <it>"' in shown
    results = "<tool_result>from x</tool_result>\n\n<tool_result>from y</tool_result>"  # in the order of the calls
    assert shown.endswith(f"{EOS}<｜User｜>{results}<｜Assistant｜><think>")
    said = learnt(template, {"messages": messages, "tools": TOOLS})
    assert said.startswith('</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n')
    assert [call["function"] for call in template.parse_tool_call(said)] == [
        {"name": "add", "arguments": {"a": 1, "b": "é"}},
        {"name": "find", "arguments": {}},
    ]


def test_effort_and_unknown_variables(template):
    assert text(template, TURNS, reasoning_effort="max").startswith(f"{BOS}Reasoning effort: maximum")
    with pytest.raises(InvalidInputError, match="reasoning_effort"):
        text(template, TURNS, reasoning_effort="low")
    with pytest.raises(UnknownNameError, match="drop_thinking"):
        text(template, TURNS, drop_think=True)
    with pytest.raises(InvalidInputError, match="role"):
        text(template, [{"role": "narrator", "content": "x"}])


def test_the_tokenizer_itself_writes_the_same(template):
    tokenizer = template.tokenizer
    shown = tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert shown == text(template, TURNS)
    encoded = tokenizer.apply_chat_template(TURNS)
    assert encoded["input_ids"] == template.encode({"messages": TURNS})["input_ids"].tolist()
    assert tokenizer.apply_chat_template(TURNS, return_dict=False) == encoded["input_ids"]
