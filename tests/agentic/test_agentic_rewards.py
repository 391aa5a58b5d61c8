r"""Rewards of conversations with tools, with values worked out by hand."""

import sys

import pytest

from twinkle.data_format import pack_value
from twinkle.errors import InvalidInputError, MissingDependencyError
from twinkle_agentic.reward import CoTReward, F1Reward, ToolExploreReward, f1
from twinkle_agentic.reward.f1 import _extract_final_answer, _f1_score


def trajectory(answer, *truths, before=()):
    return {
        "messages": [{"role": "user", "content": "?"}, *before, {"role": "assistant", "content": answer}],
        "user_data": [("ground_truth", pack_value(truth)) for truth in truths],
    }


# --- F1Reward ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def stemmed():
    pytest.importorskip("nltk")


@pytest.mark.parametrize(
    ("text", "pattern", "expected"),
    [
        (r"\boxed{Paris}", None, "Paris"),
        (r"first \boxed{Rome}, then \boxed{Paris}.", None, "Paris"),
        (r"\boxed{\text{the {inner} braces}}", None, r"\text{the {inner} braces}"),
        (r"\boxed{Rome} and \boxed{Par", None, "Rome"),  # the last box is not complete
        ("Answer: Rome\nAnswer: Paris", r"Answer: (.*)", "Paris"),
        ("It is Paris", r"P\w+", "Paris"),
        (r"\boxed{Rome} Answer: Paris", r"Answer: (.*)", "Rome"),  # a box counts before the pattern
        ("It is Paris", None, ""),
        ("It is Paris", r"Answer: (.*)", ""),
    ],
)
def test_the_final_answer(text, pattern, expected):
    assert _extract_final_answer(text, pattern) == expected


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("Paris", "paris", 1.0),
        ("The  Eiffel-Tower!", "eiffel tower", 1.0),  # case, articles, punctuation
        ("running dogs", "run dog", 1.0),  # running → run, dogs → dog; shorter words stay
        ("President Obama", "Barack Obama", 2 * 1 / (2 + 2)),
        ("Obama", "Barack Hussein Obama", 2 * 1 / (1 + 3)),
        ("red red blue", "red green", 2 * 1 / (3 + 2)),  # a word counts as often as both have it
        ("Rome", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("Paris", "", 0.0),
        ("the", "a", 0.0),  # nothing is left of either
        # only filler words differ
        ("It is in Paris", "Paris", 1.0),
        ("University of Oxford", "Oxford University", 1.0),
        ("not Paris", "Paris", 2 * 1 / (2 + 1)),
        # numbers in excess, on the answer's side only
        ("Paris 1889", "Paris", 1.0),
        ("Paris", "Paris 1889", 2 * 1 / (1 + 2)),
    ],
)
def test_words_are_compared(stemmed, answer, truth, expected):
    assert _f1_score(answer, truth) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("word", "stem"),
    # examples of Porter's paper (1980), one for each group of rules
    [
        ("caresses", "caress"),
        ("ponies", "poni"),
        ("agreed", "agre"),
        ("plastered", "plaster"),
        ("motoring", "motor"),
        ("hopping", "hop"),
        ("filing", "file"),
        ("relational", "relat"),
        ("vietnamization", "vietnam"),
        ("triplicate", "triplic"),
        ("goodness", "good"),
        ("revival", "reviv"),
        ("effective", "effect"),
        ("probate", "probat"),
        ("controlling", "control"),
    ],
)
def test_porters_examples(stemmed, word, stem):
    assert f1._stem(word) == stem


def test_short_and_filler_words_are_not_stemmed():
    assert [f1._stem(word) for word in ("was", "gas", "this")] == ["was", "gas", "this"]


def test_the_best_of_several_truths_counts(stemmed):
    rows = [
        trajectory(r"\boxed{Obama}", "Paris", "Barack Obama"),
        trajectory(r"\boxed{Obama}", ["Barack Obama", "Obama"]),  # one entry that is a list
        trajectory([{"type": "text", "text": r"So \boxed{42}"}], 42),
        trajectory("Obama", "Obama"),
    ]
    assert F1Reward()(rows) == pytest.approx([2 / 3, 1.0, 1.0, 0.0])
    assert F1Reward(r"^(\w+)$")(rows[3:]) == [1.0]
    assert F1Reward()(rows[:1], [trajectory("", "Obama")]) == [1.0]


def test_rows_without_a_truth_are_refused(stemmed):
    with pytest.raises(InvalidInputError, match=r"user_data: got .*must hold 'ground_truth'"):
        F1Reward()([trajectory(r"\boxed{a}")])
    with pytest.raises(InvalidInputError, match=r"answer_pattern: .*a regular expression"):
        F1Reward("(")


def test_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "nltk.stem.porter", None)
    f1._stemmer.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"F1Reward needs .*pip install 'twinkle-posttrain\[agentic\]'"):
        F1Reward()


# --- CoTReward --------------------------------------------------------------------------------------------------------


def steps(*numbers):
    return "\n".join(f"Step {number}: think" for number in numbers) + "\nSo \\boxed{4}."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (steps(1, 2), 0.0),
        (steps(1, 2, 3), 0.3),
        (steps(1, 2, 3, 4, 5, 6), 0.3),
        (steps(1, 2, 3, 4, 5, 6, 7), 0.1),
        (steps(1, 1, 1, 1), 0.0),  # a number counts once
        (steps(1, 2, 3).replace("\\boxed{4}", "4"), 0.0),
        ("In Step 1: and Step 2: and Step 3: \\boxed{4}", 0.0),  # not at the beginning of lines
        ("**Step 1:** a\n## Step 2: b\n- step 3: c\n\\boxed{4}", 0.3),
        ([{"type": "text", "text": steps(1, 2, 3)}], 0.3),
    ],
)
def test_steps_are_counted(text, expected):
    assert CoTReward()([trajectory(text)]) == [expected]


# --- ToolExploreReward ------------------------------------------------------------------------------------------------


def turn(*results):
    calls = [{"id": str(number), "function": {"name": "find", "arguments": "{}"}} for number in range(len(results))]
    answers = [{"role": "tool", "content": result} for result in results]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *answers]


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([], 0.0),
        ([turn("Paris")], 1.0),
        ([turn("a"), turn("b"), turn("c")], 1.0),
        ([turn("a"), turn("b"), turn("c"), turn("d")], 0.5),
        ([turn("a", "b", "c", "d")], 1.0),  # one turn with four calls
        ([turn("")], 0.0),
        ([turn("  \n")], 0.0),
        ([turn("ERROR: no such page")], 0.0),
        ([turn("Error: unknown tool 'find'; known: none")], 0.0),  # as a ToolManager answers
        ([turn("Error rates fell in 2020")], 1.0),
        ([turn("Error: no", "Paris")], 1.0),  # one of the two calls worked
        ([turn("a"), turn("b"), turn("c"), turn("Error: no")], 1.0),
        ([turn([{"type": "text", "text": "Error: no"}])], 0.0),
        ([turn([{"type": "text", "text": "Paris"}])], 1.0),
    ],
)
def test_turns_with_results_are_counted(stemmed, turns, expected):
    before = [message for each in turns for message in each]
    assert ToolExploreReward()([trajectory(r"\boxed{Paris}", "Paris", before=before)]) == [expected]


def test_a_wrong_answer_gets_nothing(stemmed):
    rows = [trajectory(r"\boxed{Obama}", "Barack Hussein Obama", before=turn("x"))]  # F1 is 2 · 1 / (1 + 3) = 0.5
    assert ToolExploreReward()(rows) == [1.0]  # not below the threshold
    assert ToolExploreReward(0.51)(rows) == [0.0]
    assert ToolExploreReward(answer_pattern=r"is (\w+)")([trajectory("is Rome", "Rome", before=turn("x"))]) == [1.0]
    with pytest.raises(InvalidInputError, match="f1_threshold: got 50"):
        ToolExploreReward(50)
