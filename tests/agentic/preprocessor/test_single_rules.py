"""DedupFilter, ModelFilter, RefuseFilter and TokenSoupFilter, with values worked out by hand."""

import pytest

from twinkle.errors import InvalidInputError
from twinkle.utils.logger import get_logger
from twinkle_agentic.preprocessor import DedupFilter, ModelFilter, RefuseFilter, TokenSoupFilter
from twinkle_agentic.preprocessor.refuse_filter import RefuseFilter as FromItsModule
from twinkle_agentic.preprocessor.token_soup import TokenSoupFilter as AlsoFromItsModule


def talk(*contents, **more):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)], **more}


# --- DedupFilter ------------------------------------------------------------------------------------------------------


def dedup(rows, **options):
    kept, dropped = DedupFilter(**options)(rows)
    assert all(row["drop_reason"] == "duplicate" for row in dropped)
    return [row["n"] for row in kept], [row["n"] for row in dropped]


def test_the_longest_of_equal_beginnings_stays():
    rows = [
        talk("What is entropy?", "A measure.", n=0),
        talk("what  is\nENTROPY?", "a measure.", "And more?", "Yes.", n=1),
        talk("What is entropy?", "Disorder.", n=2),
        talk("What is enthalpy?", "A measure.", n=3),
        talk("What is entropy?", "<think>hm</think>A measure.", "x", "y", n=4),
    ]
    assert dedup(rows) == ([1, 2, 3], [0, 4])


def test_head_and_tail_count():
    middle = ["a" * 100 + str(n) + "z" * 100 for n in range(2)]
    assert dedup([talk("q", middle[0], n=0), talk("q", middle[1], n=1)]) == ([0], [1])
    assert dedup([talk("q", middle[0], n=0), talk("q", middle[1], n=1)], asst_chars=101) == ([0, 1], [])
    assert dedup([talk("q" * 100 + "1", "a", n=0), talk("q" * 100 + "2", "a", n=1)]) == ([0], [1])
    assert dedup([talk("q" * 100 + "1", "a", n=0), talk("q" * 100 + "2", "a", n=1)], prefix_chars=101) == ([0, 1], [])


def test_the_first_real_user_turn_counts():
    beat = ("Reply HEARTBEAT_OK if nothing needs attention.", "HEARTBEAT_OK")
    rows = [talk(*beat, "What is entropy?", "A measure.", n=0), talk("What is entropy?", "A measure.", n=1)]
    assert dedup(rows) == ([0], [1])
    assert dedup([talk(*beat, n=0), talk(*beat, n=1), talk("q", n=2), talk("q", n=3), {"n": 4}, {"n": 5}])[1] == []


def test_a_second_call_is_warned_about(monkeypatch):
    warnings = []
    monkeypatch.setattr(get_logger(), "warning", warnings.append)
    step = DedupFilter()
    step([talk("q", "a")])
    assert warnings == []
    step([talk("q", "a")])
    step([talk("q", "a")])
    assert len(warnings) == 1
    assert "batch_size=-1" in warnings[0]
    with pytest.raises(InvalidInputError, match="prefix_chars"):
        DedupFilter(prefix_chars=0)


# --- ModelFilter ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "allowed"),
    [
        ("Qwen/Qwen3-32B", True),
        ("qwen3-max-2026-01-01", True),
        ("Qwen/Qwen2.5-0.5B", False),
        ("anthropic/claude-opus-4", True),
        ("my-claude", False),
        ("gpt-4o", True),
        ("gpt-3.5-turbo", False),
        ("o3-mini", True),
        ("DeepSeek-V3.2", True),
        ("", False),
        (None, False),
        (3, False),
    ],
)
def test_default_families(model, allowed):
    kept, dropped = ModelFilter()([{"model_id": model}])
    assert ([] if allowed else [{"model_id": model, "drop_reason": "model_not_allowed"}]) == dropped
    assert len(kept) == allowed


def test_own_patterns_and_field():
    step = ModelFilter(["llama-?[34]"], field="source")
    rows = [{"source": name} for name in ("LLAMA-3.1-8B", "llama4", "xllama3", "llama2")] + [{}]
    assert [row["source"] for row in step(rows)[0]] == ["LLAMA-3.1-8B", "llama4"]
    with pytest.raises(InvalidInputError, match="regular expressions"):
        ModelFilter(["("])
    with pytest.raises(InvalidInputError, match="a list"):
        ModelFilter("llama")


# --- RefuseFilter -----------------------------------------------------------------------------------------------------

REFUSALS = [
    "I'm sorry, but I can't help with that.",
    "I cannot assist with this request.",
    "Sorry. I won't provide instructions for that.",
    "I’m not able to discuss this topic.",
    "I am unable to comply.",
    "I must decline this request.",
    "As an AI language model, I cannot have opinions.",
    "This goes against my guidelines.",
    "<think>Could I help? I cannot help.</think>I can't assist with that.",
    "很抱歉，我无法提供这方面的信息。",
    "作为一个人工智能语言模型，我不能回答。",
    "我不能帮助你完成这个请求。",
    "申し訳ありませんが、その質問にはお答えできません。",
    "私はその依頼に対応できません。",
    "죄송하지만 그 요청은 도와드릴 수 없습니다.",
    "저는 그 정보를 제공할 수 없습니다.",
]
ANSWERS = [
    "The witness said that she could not help the police.",
    "You can't help it: entropy grows.",
    "I cannot write my name in snow, I cannot give you spring.",
    "I won't lie: the policy says no, but you may ask.",
    "I can't overstate how important this is.",
    "<think>I cannot help with that.</think>Sure, here is the recipe.",
    "他无法提供证据，因此败诉。",
    "この関数は値を返すことができません。",
    "x " * 300 + "I cannot help with that.",
    "",
]


@pytest.mark.parametrize("text", REFUSALS)
def test_refusals(text):
    row = talk("q", text)
    assert RefuseFilter()([row]) == ([], [{**row, "drop_reason": "refusal"}])


@pytest.mark.parametrize("text", ANSWERS)
def test_answers(text):
    assert RefuseFilter()([talk("q", text)])[1] == []


def test_only_the_first_text_of_the_assistant_counts():
    assert FromItsModule is RefuseFilter
    assert RefuseFilter()([talk("q", "Sure.", "more", REFUSALS[0])])[1] == []
    late = talk("q", "x " * 300 + REFUSALS[1])
    assert len(RefuseFilter(check_window=700)([late])[1]) == 1
    parts = [{"type": "text", "text": "I cannot "}, {"type": "text", "text": "assist with this."}]
    assert len(RefuseFilter()([talk("q", parts)])[1]) == 1
    called = [
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "content": "no"},
        {"role": "assistant", "content": REFUSALS[0]},
    ]
    assert len(RefuseFilter()([{"messages": called}])[1]) == 1
    with pytest.raises(InvalidInputError):
        RefuseFilter(check_window=0)


# --- TokenSoupFilter --------------------------------------------------------------------------------------------------


def soup(text, **options):
    row = talk("q", text)
    kept, dropped = TokenSoupFilter(**options)([row])
    assert dropped in ([], [{**row, "drop_reason": "token_soup"}])
    return not kept


@pytest.mark.parametrize(
    ("character", "allowed"),
    [("\ufffd", 2), ("\x01", 1), ("\ue000", 3)],  # of 100 characters
)
def test_shares_of_characters(character, allowed):
    words = ("ab " * 40)[: 100 - allowed]
    assert not soup(words + character * allowed)
    assert soup(words[:-1] + character * (allowed + 1))


def test_options_of_shares():
    assert not soup("ab\ufffd", replacement_char_ratio=0.5)
    assert not soup("ab\x01", control_char_ratio=0.5)
    assert not soup("ab\ue000", private_use_ratio=0.5)
    assert not soup("a\tb\r\nc\n\n\n\n")


def test_special_tokens():
    assert not soup("<|im_end|> a " * 19)
    assert soup("<|im_end|> a " * 20)
    assert soup("<unk> [PAD] </s> <pad> " * 5)
    assert not soup("<|im_end|> a " * 20, special_token_count=21)
    assert not soup("a <b> c [d] | e " * 30)


def test_one_character_in_a_row():
    assert not soup("ok " + "a" * 19)
    assert soup("ok " + "a" * 20)
    assert soup("哈" * 20)
    assert soup("!" * 20)
    assert not soup("if x:\n" + " " * 40 + "y\n" + "-" * 60 + "\n| a | b |\n" + "=" * 30)


def test_script_chaos():
    mixed = "aж" * 20  # 40 letters, every neighbour is of another script
    assert soup(mixed)
    assert not soup(mixed[:-1])  # 39 letters
    assert not soup(mixed, script_chaos_min_chars=41)
    assert not soup(mixed, script_chaos_threshold=1.0)
    assert not soup("aaжж" * 10)  # 19 of 39 neighbours: 0.487
    assert not soup("使用Python和PyTorch训练模型，然后在GPU上推理。" * 3)
    assert not soup("これは漢字とひらがなとカタカナのテストです。" * 3)  # one script for this purpose


def test_only_the_assistant_and_only_the_first_characters():
    assert AlsoFromItsModule is TokenSoupFilter
    assert TokenSoupFilter()([talk("\ufffd" * 50, "Fine."), {}, {"messages": None}])[1] == []
    assert not soup("fine " * 20 + "\ufffd" * 50, max_chars=100)
    thoughts = {"messages": [{"role": "assistant", "content": "ok", "reasoning_content": "\ufffd" * 9}]}
    assert len(TokenSoupFilter()([thoughts])[1]) == 1
