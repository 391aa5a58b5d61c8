"""MessageSanityFilter: each check alone, with a row that only this check drops."""

import json

import pytest

from twinkle.data_format import pack_value, user_data_get
from twinkle.errors import InvalidInputError
from twinkle_agentic.preprocessor import MessageSanityFilter

SENTENCE = "The cat sits on the roof of the house, beside the chimney, and sleeps."


def user(content="Where is my cat today?"):
    return {"role": "user", "content": content}


def said(content=SENTENCE, *ids, **more):
    calls = [{"id": name, "type": "function", "function": {"name": "find", "arguments": "{}"}} for name in ids]
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {}), **more}


def tool(name, content="roof"):
    return {"role": "tool", "tool_call_id": name, "content": content}


def system(content):
    return {"role": "system", "content": content}


def reason(*messages, **options):
    row = {"messages": list(messages)}
    dropped = MessageSanityFilter(**options)([row])[1]
    found = dropped[0]["drop_reason"] if dropped else None
    if dropped:
        assert dropped == [{**row, "drop_reason": found}]
    if found not in (None, "invalid_messages", "no_assistant"):  # without this check the row passes
        assert MessageSanityFilter(**{**options, found: False})([row])[1] == []
    return found


def test_invalid_and_no_assistant():
    assert reason() == "invalid_messages"
    assert reason({"role": "nobody"}) == "invalid_messages"
    assert reason(user(), user()) == "no_assistant"
    assert reason(system("x"), said()) == "invalid_messages"  # one message, and min_turns is 2
    assert reason(user(), said(), min_turns=3) == "invalid_messages"
    assert reason(user(), said(), user(), said(), min_turns=4) is None


def test_system_messages_come_first_and_the_last_reply_ends_a_row():
    rows = [
        {
            "messages": [
                user(),
                system("A."),
                said(),
                {"role": "developer", "content": "B."},
                user("And now?"),
                tool("x"),
            ]
        }
    ]
    before = json.dumps(rows)
    kept, _ = MessageSanityFilter()(rows)
    assert kept[0]["messages"] == [system("A.\n\nB."), user(), said()]
    assert json.dumps(rows) == before
    kept, _ = MessageSanityFilter(trim_to_assistant=False)([{"messages": [user(), said(), user("And now?")]}])
    assert kept[0]["messages"] == [user(), said(), user("And now?")]


def test_key_rounds_follow_their_messages():
    data = [("key_rounds", pack_value([1, 4])), ("intents", pack_value(["code", "math"])), ("id", '"x"')]
    row = {"messages": [user(), said(), system("A."), user("And now?"), said("Still on the roof.")], "user_data": data}
    (kept,), _ = MessageSanityFilter()([row])
    assert user_data_get(kept["user_data"], "key_rounds") == [2, 4]
    assert user_data_get(kept["user_data"], "intents") == ["code", "math"]
    assert user_data_get(kept["user_data"], "id") == "x"
    assert [kept["messages"][place]["role"] for place in (2, 4)] == ["assistant"] * 2


@pytest.mark.parametrize(
    "messages",
    [
        [said(), user(), said()],
        [user(), user(), said()],
        [user(), said(), said()],
        [user(), tool("a"), said()],
        [user(), said("", "a"), user(), said()],
    ],
)
def test_role_order(messages):
    assert reason(*messages, check_tool_matching=False) == "check_role_order"


def test_tool_matching():
    good = [user(), said("", "a", "b"), tool("b"), tool("a"), said()]
    assert reason(*good) is None
    assert reason(user(), said("", "a", "b"), tool("a"), said()) == "check_tool_matching"
    assert reason(user(), said("", "a"), tool("x"), said()) == "check_tool_matching"
    assert reason(user(), said("", "a"), tool("a"), tool("a"), said()) == "check_tool_matching"
    assert reason(user(), said(SENTENCE, "a")) is None  # the last message's call has no result yet
    nameless = {"role": "tool", "content": "roof"}
    assert reason(user(), said("", "a"), nameless, said()) is None
    assert reason(user(), said("", None), tool("z"), said()) is None
    assert reason(user(), said("", "a"), nameless, nameless, said()) == "check_tool_matching"


@pytest.mark.parametrize(
    "messages",
    [
        [user(" "), said()],
        [user(), said("")],
        [user(), said("<think>I never stop")],
        [user(), said("Look:\n```python\nprint(1)\n")],
        [user(), said("x" * 101)],
        [
            user(),
            {**said("", "a"), "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}]},
            tool("a"),
            said(),
        ],
        [user(), {**said("", "a"), "tool_calls": [{"id": "a", "function": {"name": ""}}]}, tool("a"), said()],
        [
            user(),
            {**said("", "a"), "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[1]"}}]},
            tool("a"),
            said(),
        ],
    ],
)
def test_content_integrity(messages):
    assert reason(*messages, max_msg_chars=100) == "check_content_integrity"


def test_whole_content():
    assert reason(user(), said("<think>So.</think>Look:\n```\nx\n```\nThat is all there is to it.")) is None
    assert reason(user(), said("x" * 100), max_msg_chars=100, check_lang_match=False) is None
    assert reason(user(), said("", "a"), tool("a", ""), said()) is None
    arguments = {**said("", "a"), "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {"x": 1}}}]}
    assert reason(user(), arguments, tool("a"), said()) is None
    parts = [{"type": "image", "image": "cat.png"}]
    assert reason(user(parts), said()) is None


@pytest.mark.parametrize(
    ("question", "answer", "expected"),
    [
        ("我的猫今天在哪里？", SENTENCE, "check_lang_match"),
        ("Where is my cat today?", "你的猫今天在屋顶上睡觉，旁边是烟囱，它睡得很香，也很安静。", "check_lang_match"),
        ("我的猫今天在哪里？", "你的猫今天在屋顶上睡觉。", None),
        ("请翻译成英文：我的猫在屋顶上。", SENTENCE, None),
        ("Say it in Chinese: my cat sleeps.", "我的猫在睡觉，它睡得很香，也很安静，在屋顶上。", None),
        ("我的猫今天在哪里？", "```\n" + SENTENCE + "\n```\n在屋顶上睡觉。", None),
        ("写一个函数，计算两个数的和", "```\ndef add(first, second): return first + second\n```", None),
        ("我的猫今天在哪里？", "Roof.", None),  # too short to tell
        ("오늘 내 고양이는 어디에 있나요?", "고양이는 지붕 위에서 자고 있습니다.", None),
    ],
)
def test_lang_match(question, answer, expected):
    assert reason(user(question), said(answer)) == expected


def test_agent_min_visible():
    thought = "<think>" + "t" * 100 + "</think>"
    assert reason(user(), said("", "a"), tool("a"), said(thought + "x" * 49)) == "check_agent_min_visible"
    assert reason(user(), said("", "a"), tool("a"), said(thought + "x" * 50)) is None
    assert reason(user(), said("x" * 25, "a"), tool("a"), said("x" * 25)) is None
    assert reason(user(), said("", "a"), tool("a"), said("short"), min_agent_visible_chars=5) is None
    assert reason(user(), said("short")) is None  # no agent row


def test_sensitive_words(tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("烟囱\n\n chimney \n", encoding="utf-8")
    assert reason(user(), said(), sensitive_words_file=words) == "filter_sensitive"
    assert reason(user("The CHIMNEY?"), said("Yes."), sensitive_words_file=str(words)) == "filter_sensitive"
    assert reason(user("Two chimneys?"), said("Yes."), sensitive_words_file=words) is None  # another word
    assert reason(user("屋顶上的烟囱？"), said("是。"), sensitive_words_file=words) == "filter_sensitive"
    assert reason(user(), said(), extra_sensitive_words=["sleeps"]) == "filter_sensitive"
    assert reason(user(), said(), extra_sensitive_words=["c++", "slee"]) is None
    assert reason(user("C++?"), said("Yes."), extra_sensitive_words=["c++"]) == "filter_sensitive"
    assert (
        reason(user(), said("Yes.", reasoning_content="It sleeps."), extra_sensitive_words=["sleeps"])
        == "filter_sensitive"
    )
    with pytest.raises(InvalidInputError, match="one word in each line"):
        MessageSanityFilter(sensitive_words_file=tmp_path / "none.txt")
    with pytest.raises(InvalidInputError, match="a list of words"):
        MessageSanityFilter(extra_sensitive_words="word")


def test_the_first_check_names_the_reason():
    row = {"messages": [said(""), user(" "), said()]}
    assert MessageSanityFilter()([row])[1][0]["drop_reason"] == "check_role_order"
    assert MessageSanityFilter(check_role_order=False)([row])[1][0]["drop_reason"] == "check_content_integrity"
