"""HardFilter: each reason, in order, with texts counted by hand."""

import pytest

from twinkle.errors import InvalidInputError
from twinkle_agentic.preprocessor import HardFilter

REPLY = "x" * 80


def talk(*contents, system=None):
    roles = ("user", "assistant")
    head = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": head + [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]}


def reason(row, **options):
    kept, dropped = HardFilter(**options)([row])
    assert len(kept) + len(dropped) == 1
    return dropped[0]["drop_reason"] if dropped else None


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "text",
        ["text"],
        [{"content": "no role"}],
        [{"role": "narrator", "content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [3]}],
    ],
)
def test_invalid_messages(messages):
    assert reason({"messages": messages}) == "invalid_messages"
    assert reason({}) == "invalid_messages"


def test_no_user():
    alone = {"messages": [{"role": "assistant", "content": REPLY}]}
    assert reason(alone) == "no_user"
    assert reason(talk("  ", REPLY)) == "no_user"
    assert reason(alone, allow_incomplete_role=True) is None


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("123456789", "trivial_single_turn"),  # 9 characters, 10 are needed
        ("1234567890", None),
        ("  123456789  ", "trivial_single_turn"),
        ("什么是熵呢", "trivial_single_turn"),  # 5 Chinese characters, 6 are needed
        ("什么是熵呢？", None),
        ("エントロピー", None),  # Japanese
        ("good morning", "trivial_single_turn"),  # 12 characters, but a greeting
        ("Hello! How are you?", "trivial_single_turn"),
        ("你好，在吗？你好啊", None),  # three greetings in a row are no longer one
        ("안녕하세요!!", "trivial_single_turn"),
        ("hello world program in C", None),
    ],
)
def test_trivial_single_turn(question, expected):
    assert reason(talk(question, REPLY)) == expected


def test_a_trivial_question_may_have_long_thoughts_media_or_further_turns():
    thoughts = "t" * 200
    assert reason(talk("2+2?", f"<think>{thoughts}</think>4")) is None
    assert reason(talk("2+2?", f"<think>{thoughts[1:]}</think>4")) == "trivial_single_turn"
    said = {"role": "assistant", "content": "4", "reasoning_content": thoughts}
    assert reason({"messages": [{"role": "user", "content": "2+2?"}, said]}) is None
    assert reason(talk("hi", REPLY, "hi", REPLY)) is None
    picture = {"role": "user", "content": [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "cat?"}]}
    assert reason({"messages": [picture, {"role": "assistant", "content": REPLY}]}) is None


def test_shallow_reply():
    question = "What is the capital of France?"
    assert reason(talk(question, "x" * 79)) == "shallow_reply"
    assert reason(talk(question, "x" * 80)) is None
    assert reason(talk(question, "x" * 79, system="Be brief.")) == "shallow_reply"
    assert reason(talk(question, "x" * 79), min_assistant_chars_2turn=79) is None
    assert reason(talk(question, "x" * 79 + "<think>" + "y" * 100 + "</think>")) == "shallow_reply"
    assert reason(talk(question, "Paris", "And of Germany?", "Berlin")) is None
    parts = {"role": "assistant", "content": [{"type": "text", "text": "x" * 40}, {"type": "text", "text": "x" * 40}]}
    assert reason({"messages": [{"role": "user", "content": question}, parts]}) is None


def test_agent_rows_may_be_short():
    call = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "ls"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "a.txt", "tool_call_id": "1"},
        {"role": "assistant", "content": "a.txt"},
    ]
    assert reason({"messages": messages}) is None
    # a table fills missing keys with None: that is no agent row
    plain = [{**message, "tool_calls": None} for message in talk("hi", REPLY)["messages"]]
    assert reason({"messages": plain}) == "trivial_single_turn"


def test_all_empty_assistant():
    assert reason(talk("A question long enough", "", "another one", " ")) == "all_empty_assistant"
    assert reason(talk("A question long enough", "", "another one", "yes")) is None
    only_user = talk("A question long enough")
    assert reason(only_user) == "all_empty_assistant"
    assert reason(only_user, allow_incomplete_role=True) is None


def test_system_deny_keyword():
    row = talk("A question long enough", REPLY, system="You are a PIRATE with a parrot.")
    assert reason(row, system_deny_keywords=["pirate"]) == "system_deny_keyword"
    assert reason(row, system_deny_keywords=["ninja"]) is None
    assert reason(talk("Are you a pirate today?", REPLY), system_deny_keywords=["pirate"]) is None
    with pytest.raises(InvalidInputError, match="a list of texts"):
        HardFilter(system_deny_keywords="pirate")


def test_lengths():
    row = talk("q" * 20, "a" * 80, "q" * 20, "a" * 100, system="s" * 10)  # rounds of 100 and 120, in all 230
    assert reason(row, max_chars_per_round=119) == "round_too_long"
    assert reason(row, max_chars_per_round=120) is None
    assert reason(row, max_total_chars=229) == "total_too_long"
    assert reason(row, max_total_chars=230) is None
    assert reason(row, max_rounds=1) == "too_many_rounds"
    assert reason(row, max_rounds=2) is None
    assert reason(row, max_chars_per_round=1, max_total_chars=1, max_rounds=1) == "round_too_long"


def test_rows_and_columns_give_the_same():
    rows = [talk("hi", REPLY), talk("A question long enough", REPLY)]
    kept, dropped = HardFilter()({"messages": [row["messages"] for row in rows]})
    assert (kept, dropped) == ([rows[1]], [{**rows[0], "drop_reason": "trivial_single_turn"}])
    assert HardFilter()(rows) == (kept, dropped)
    assert HardFilter()([]) == HardFilter()({}) == ([], [])
