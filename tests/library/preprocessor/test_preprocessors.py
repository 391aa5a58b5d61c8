"""Preprocessors turn rows of the datasets they are named after into trajectories, in batches and one by one."""

import json

import pytest

import twinkle.preprocessor
from twinkle.data_format import user_data_get
from twinkle.errors import InvalidInputError
from twinkle.preprocessor import (
    AlpacaProcessor,
    CLEVRProcessor,
    CompetitionMathGRPOProcessor,
    CompetitionMathProcessor,
    CountdownProcessor,
    DataFilter,
    EmojiDPOProcessor,
    GSM8KProcessor,
    OlympiadBenchProcessor,
    Preprocessor,
    SelfCognitionProcessor,
)

MATH = {"problem": "1 + 1?", "solution": "\\boxed{2}"}
GSM8K = {"question": "How many?", "answer": "3 * 4 = <<3*4=12>>12\n#### 1,012"}
EMOJI = {"prompt": "hi", "answer_zh": "你好🙂", "answer_en": "hello", "other": 1}
SELF = {"query": "Who are you, {{NAME}}?", "response": "{{NAME}} by {{AUTHOR}}"}
COUNTDOWN = {"nums": [3, 4, 5], "target": 17}
CLEVR = {"image": b"png", "problem": "How many cubes?", "solution": "<answer> 3 </answer>"}
OLYMPIAD = {"question": "Find x.", "context": "Let x > 0.", "final_answer": ["1", "2"], "unit": "m"}

ALL = [
    (CompetitionMathProcessor(), MATH),
    (CompetitionMathGRPOProcessor(), MATH),
    (SelfCognitionProcessor(), SELF),
    (AlpacaProcessor(), {"instruction": "Add", "input": "1, 1", "output": "2"}),
    (CountdownProcessor(), COUNTDOWN),
    (GSM8KProcessor(), GSM8K),
    (EmojiDPOProcessor(), EMOJI),
    (CLEVRProcessor(), CLEVR),
    (OlympiadBenchProcessor(), OLYMPIAD),
]


def said(trajectory):
    return [(message["role"], message["content"]) for message in trajectory["messages"]]


@pytest.mark.parametrize(("processor", "row"), ALL, ids=lambda value: type(value).__name__)
def test_a_batch_is_its_rows(processor, row):
    expected = processor.preprocess(row)
    assert processor({key: [value, value] for key, value in row.items()}) == {
        key: [value, value] for key, value in expected.items()
    }
    assert processor({key: [] for key in row}) == {}


@pytest.mark.parametrize(("processor", "row"), ALL, ids=lambda value: type(value).__name__)
def test_notes_are_pairs_of_a_key_and_json(processor, row):
    for pair in processor.preprocess(row).get("user_data", []):
        key, value = pair
        assert isinstance(key, str)
        json.loads(value)


def test_math():
    assert said(CompetitionMathProcessor().preprocess(MATH)) == [("user", "1 + 1?"), ("assistant", "\\boxed{2}")]
    trajectory = CompetitionMathGRPOProcessor().preprocess(MATH)
    assert [role for role, _ in said(trajectory)] == ["system", "user", "assistant"]
    assert said(trajectory)[2] == ("assistant", "")
    assert user_data_get(trajectory["user_data"], "solution") == "\\boxed{2}"


def test_self_cognition():
    assert said(SelfCognitionProcessor("Twinkle", "us").preprocess(SELF)) == [
        ("system", "You are a helpful assistant."),
        ("user", "Who are you, Twinkle?"),
        ("assistant", "Twinkle by us"),
    ]
    assert said(SelfCognitionProcessor().preprocess(SELF))[2] == ("assistant", "twinkle robot by twinkle lab")


def test_alpaca_takes_what_is_there():
    assert said(AlpacaProcessor().preprocess({"instruction": "Add", "input": "1, 1", "output": "2"})) == [
        ("user", "Add\n1, 1"),
        ("assistant", "2"),
    ]
    assert said(AlpacaProcessor().preprocess({"instruction": "Add", "input": None})) == [
        ("user", "Add"),
        ("assistant", ""),
    ]


def test_countdown():
    trajectory = CountdownProcessor().preprocess(COUNTDOWN)
    assert "17" in said(trajectory)[1][1]
    assert "[3, 4, 5]" in said(trajectory)[1][1]
    assert user_data_get(trajectory["user_data"], "nums") == [3, 4, 5]
    assert user_data_get(CountdownProcessor().preprocess({"nums": [1], "response": 9})["user_data"], "target") == 9


def test_gsm8k():
    trajectory = GSM8KProcessor(system="Short.").preprocess(GSM8K)
    assert said(trajectory) == [("system", "Short."), ("user", "How many?")]
    assert user_data_get(trajectory["user_data"], "ground_truth") == "1012"
    assert said(GSM8KProcessor(add_assistant=True).preprocess(GSM8K))[2] == ("assistant", GSM8K["answer"])
    for answer, number in (("no number", ""), ("#### -3.5", "-3.5"), ("#### 1\n#### 2", "2")):
        assert GSM8KProcessor().extract_ground_truth(answer) == number


def test_emoji_preferences():
    row = EmojiDPOProcessor(system="s").preprocess(EMOJI)
    assert said(row["positive"]) == [("system", "s"), ("user", "hi"), ("assistant", "你好🙂")]
    assert said(EmojiDPOProcessor().preprocess(EMOJI)["negative"]) == [("user", "hi"), ("assistant", "hello")]
    turned = EmojiDPOProcessor(chosen_key="answer_en", rejected_key="answer_zh").preprocess(EMOJI)
    assert said(turned["positive"])[1] == ("assistant", "hello")


def test_clevr():
    trajectory = CLEVRProcessor().preprocess(CLEVR)
    blocks = trajectory["messages"][1]["content"]
    assert blocks == [{"type": "image", "image": b"png"}, {"type": "text", "text": "How many cubes?"}]
    assert isinstance(trajectory["messages"][0]["content"], list)
    assert user_data_get(trajectory["user_data"], "ground_truth") == "3"
    assert user_data_get(CLEVRProcessor().preprocess({**CLEVR, "solution": " 4 "})["user_data"], "ground_truth") == "4"


def test_olympiad():
    trajectory = OlympiadBenchProcessor(language="en").preprocess(OLYMPIAD)
    assert said(trajectory)[1] == ("user", "Let x > 0.\n\nFind x.")
    assert user_data_get(trajectory["user_data"], "ground_truth") == "1, 2"
    assert user_data_get(trajectory["user_data"], "is_multiple_answer") is None
    pictured = OlympiadBenchProcessor().preprocess({**OLYMPIAD, "image_2": b"x", "is_multiple_answer": True})
    assert [block["type"] for block in pictured["messages"][1]["content"]] == ["image", "text", "text"]
    assert user_data_get(pictured["user_data"], "is_multiple_answer") is True
    with pytest.raises(InvalidInputError, match="language: got 'fr', allowed: zh, en"):
        OlympiadBenchProcessor(language="fr")


def test_a_missing_column_is_named():
    with pytest.raises(InvalidInputError, match="one named response or target"):
        CountdownProcessor()({"nums": [[1]], "goal": [3]})


def test_rows_and_columns():
    rows = [{"a": 1}, {"a": 2, "b": 3}]
    assert Preprocessor.map_row_to_col(rows) == {"a": [1, 2], "b": [None, 3]}
    assert Preprocessor.map_row_to_col({"a": 1}) == {"a": [1]}
    assert Preprocessor.map_row_to_col([]) == {}
    assert Preprocessor.map_row_to_col([], keys=["a"]) == {"a": []}
    assert Preprocessor.map_col_to_row({"a": [1, 2], "b": [3, 4]}) == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]
    assert Preprocessor.map_col_to_row(rows) == rows
    with pytest.raises(InvalidInputError, match="columns of one length"):
        Preprocessor.map_col_to_row({"a": [1], "b": []})


def test_own_preprocessors_and_filters():
    class Upper(Preprocessor):
        def __call__(self, columns):
            return {"text": [text.upper() for text in columns["text"]]}

    class Short(DataFilter):
        def __call__(self, row):
            return len(row["text"]) < 3

    assert Upper()({"text": ["a"]}) == {"text": ["A"]}
    assert [Short()({"text": text}) for text in ("ab", "abc")] == [True, False]
    with pytest.raises(TypeError):
        Preprocessor()


def test_public_names():
    assert twinkle.preprocessor.__all__ == sorted(set(twinkle.preprocessor.__all__))
    assert all(hasattr(twinkle.preprocessor, name) for name in twinkle.preprocessor.__all__)
