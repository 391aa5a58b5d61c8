"""IntentClassifier: which detector claims which round."""

import pytest

from twinkle.data_format import user_data_get
from twinkle.errors import InvalidInputError
from twinkle_agentic.preprocessor import IntentClassifier


def talk(*contents):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]}


def classified(row, **options):
    kept, dropped = IntentClassifier(**options)([row])
    assert len(kept) + len(dropped) == 1
    new = (kept or dropped)[0]
    return new["intent"], user_data_get(new["user_data"], "key_rounds"), user_data_get(new["user_data"], "intents")


CODE = "Here:\n```python\nprint(1)\n```"
MATH = "The area is \\frac{1}{2}, so \\boxed{0.5}."
LOGIC = (
    "Because it rains, the street is wet. Therefore it is slippery; however, if and only if it freezes. Thus: careful."
)
STEPS = "1. Boil water.\n2. Add salt.\n3. Wait for ten minutes."


@pytest.mark.parametrize(
    ("question", "answer", "intent"),
    [
        ("Print one", CODE, "code"),
        ("Write a python function", "def f(x):\n    return x", "code"),
        ("What is the area?", MATH, "math"),
        ("请求解方程 x+1=3", "x 等于 2。", "math"),
        ("What happens when it rains?", LOGIC, "complex_logic"),
        ("下雨会怎样？", "因为下雨，所以路滑；然而，如果结冰，因此更滑。", "complex_logic"),
        ("How do I cook?", STEPS, "reasoning"),
        ("怎么做饭？", "首先烧水，其次放盐，最后等十分钟。", "reasoning"),
        ("Why?", "<think>" + "t" * 200 + "</think>So.", "reasoning"),
        ("Why?", "<think>" + "t" * 199 + "</think>So.", "other"),
        ("How are you?", "Fine.", "other"),
    ],
)
def test_one_round(question, answer, intent):
    rounds = [] if intent == "other" else [1]
    assert classified(talk(question, answer)) == (intent, rounds, [intent] * len(rounds))


def test_the_first_detector_keeps_a_round_and_the_most_frequent_names_the_row():
    both = CODE + MATH
    assert classified(talk("a", both, "b", MATH, "c", "no", "d", MATH)) == ("math", [1, 3, 7], ["code", "math", "math"])


def test_a_reply_to_a_complaint():
    assert classified(talk("Name a fruit", "Carrot.", "That's wrong, try again", "Apple.")) == (
        "user_dissatisfaction", [3], ["user_dissatisfaction"])  # fmt: skip
    assert classified(talk("说一种水果", "胡萝卜。", "不对，重新回答", "苹果。"))[1] == [3]
    assert classified(talk("That's wrong: 1 + 1 = 3", "Right."))[1] == []  # nothing was said before


def test_tool_calls_end_the_search():
    call = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
    row = talk("a", CODE)
    row["messages"] += [
        {"role": "user", "content": "now use it"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "a"},
        {"role": "assistant", "content": MATH},
    ]
    assert classified(row) == ("tool_call", [3], ["tool_call"])


def test_rows_without_key_rounds():
    row = talk("How are you?", "Fine.")
    kept, dropped = IntentClassifier()([row])
    assert kept == []
    assert (dropped[0]["drop_reason"], dropped[0]["intent"]) == ("no_key_rounds", "other")
    kept, dropped = IntentClassifier(drop_no_key_rounds=False, intent_field="kind")([row])
    assert (kept[0]["kind"], dropped) == ("other", [])
    assert "user_data" not in row


def test_own_detectors_and_older_user_data():
    row = {**talk("q", "long answer", "q", "x"), "user_data": [["id", '"7"'], ["key_rounds", "[3]"]]}
    detectors = {"long": lambda messages, place: len(messages[place]["content"]) > 5}
    assert classified(row, detectors=detectors) == ("long", [1], ["long"])
    (kept,), _ = IntentClassifier(detectors)([row])
    assert kept["user_data"] == [("id", '"7"'), ("key_rounds", "[1]"), ("intents", '["long"]')]
    with pytest.raises(InvalidInputError, match="by intent"):
        IntentClassifier([lambda messages, place: True])
    with pytest.raises(InvalidInputError, match="user_data"):
        IntentClassifier()([{**talk("q", CODE), "user_data": [3]}])
