"""Rewards for whole trajectories."""

import math
import os
import subprocess
import sys
import warnings

import pytest

import twinkle.reward
from twinkle.data_format import pack_value
from twinkle.errors import InvalidInputError
from twinkle.reward import (
    FormatReward,
    GSM8KAccuracyReward,
    GSM8KFormatReward,
    MathReward,
    MultiModalAccuracyReward,
    OlympiadBenchAccuracyReward,
    OlympiadBenchFormatReward,
    OlympiadBenchQualityReward,
)


def trajectory(completion: object, **user_data: object) -> dict[str, object]:
    return {
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": completion}],
        "user_data": [(key, pack_value(value)) for key, value in user_data.items()],
    }


@pytest.fixture
def no_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("answers", "tags"):
        monkeypatch.setattr(f"twinkle.reward.{module}.has_math_verify", lambda: False)


# --- format -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a\nb</think> <answer>c</answer>", 1.0),
        ("<answer>c</answer> <think>a</think>", 1.0),
        ("<think>a</think> c", 0.0),
        ("<answer>c</answer>", 0.0),
        ("<think>a <answer>c</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format(text: str, expected: float) -> None:
    one = [trajectory(text)]
    assert FormatReward()(one) == FormatReward()(one, one) == [expected]


# --- GSM8K ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"thus \boxed{72}", "72"),
        ("first #### 1, then #### 72", "72"),
        (r"#### 5 but \boxed{72}", "72"),
        (r"\boxed{1} or \boxed{72}", "72"),
        (r"\boxed{1,234}", "1234"),
        (r"\boxed{\$1,234.50}", "1234.50"),
        (r"\boxed{-7}", "-7"),
        ("#### -7", "-7"),
        ("#### − 7", "-7"),
        ("#### $1,234", "1234"),
        ("####\n18 dollars", "18"),
        ("#### 3.5.", "3.5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{x+{y}}", "x+{y}"),
        ("the answer is 72", ""),
        ("", ""),
        (r"\boxed{72}" + " " * 500, ""),
        ("#### 72" + " " * 490, "72"),
    ],
)
def test_gsm8k_answers(text: str, answer: str) -> None:
    assert GSM8KAccuracyReward.extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        (r"\boxed{72}", "72", 1.0),
        (r"\boxed{72}", 72, 1.0),
        (r"\boxed{72.0}", "72", 1.0),
        (r"\boxed{72.000001}", "72", 1.0),
        (r"\boxed{72.001}", "72", 0.0),
        ("#### 1,000", "1000", 1.0),
        (r"\boxed{-5}", "5", 0.0),
        (r"\boxed{x}", "x", 1.0),
        ("72", "72", 0.0),
        ("nothing", "", 0.0),
    ],
)
def test_gsm8k_accuracy(text: str, truth: object, expected: float) -> None:
    assert GSM8KAccuracyReward()([trajectory(text, ground_truth=truth)]) == [expected]


def test_gsm8k_format() -> None:
    texts = [r"\boxed{1}", "#### 5", "#### five", "5", r"\boxed{1"]
    assert GSM8KFormatReward()([trajectory(text) for text in texts]) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_the_last_assistant_message_is_the_completion() -> None:
    messages = [
        {"role": "assistant", "content": r"\boxed{1}"},
        {"role": "user", "content": r"\boxed{2}"},
        {"role": "assistant", "content": r"\boxed{3}"},
        {"role": "tool", "content": r"\boxed{4}"},
    ]
    one = {"messages": messages, "user_data": [["ground_truth", "3"]]}
    assert GSM8KAccuracyReward()([one]) == [1.0]
    assert GSM8KAccuracyReward()([one | {"messages": messages[1:2]}]) == [0.0]


def test_truths_may_come_beside_the_trajectories() -> None:
    completions = [trajectory(r"\boxed{1}"), trajectory(r"\boxed{2}")]
    truths = [trajectory("", ground_truth="1"), trajectory("", ground_truth="1")]
    assert GSM8KAccuracyReward()(completions, truths) == [1.0, 0.0]
    with pytest.raises(InvalidInputError, match="ground_truths: got '1 of them', allowed: one for each of 2"):
        GSM8KAccuracyReward()(completions, truths[:1])


def test_a_missing_truth_is_an_error() -> None:
    with pytest.raises(InvalidInputError, match=r"user_data: got .*, allowed: must hold 'ground_truth'"):
        GSM8KAccuracyReward()([trajectory(r"\boxed{1}", solution="1")])
    with pytest.raises(InvalidInputError, match=r"trajectories: got .*, allowed: must hold 'messages'"):
        GSM8KFormatReward()([{"prompt": "?"}])


# --- competition mathematics ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "solution", "expected"),
    [
        (r"so \boxed{\frac{1}{2}}", r"We get $\boxed{\dfrac{1}{2}}$.", 1.0),
        (r"\boxed{0.5}", r"\boxed{\frac12}", 1.0),
        ("# Answer\n42", r"\boxed{42}", 1.0),
        (r"\boxed{1} # Answer \boxed{42}", r"\boxed{42}", 1.0),
        (r"\boxed{42} # Answer \boxed{1}", r"\boxed{42}", 0.0),
        (r"\boxed{10,\!000}", r"\boxed{10{,}000}", 1.0),
        (r"\boxed{-3}", r"\boxed{3}", 0.0),
        ("42", "42", 1.0),
        ("", r"\boxed{42}", 0.0),
        ("I do not know", r"\boxed{42}", 0.0),
    ],
)
@pytest.mark.usefixtures("no_math_verify")
@pytest.mark.filterwarnings("ignore:MathReward compares text")
def test_math_as_text_and_numbers(text: str, solution: str, expected: float) -> None:
    assert MathReward()([trajectory(text, solution=solution)]) == [expected]


def test_math_of_expressions() -> None:
    pytest.importorskip("math_verify")
    rows = [(r"\boxed{1+x}", 1.0), (r"\boxed{x+2}", 0.0), (r"\boxed{\sqrt{", 0.0), (r"\boxed{\frac{}{}}", 0.0)]
    assert MathReward()([trajectory(text, solution=r"\boxed{x+1}") for text, _ in rows]) == [value for _, value in rows]


def test_math_truth_is_the_last_message_without_the_key() -> None:
    truth = {"messages": [{"role": "assistant", "content": r"\boxed{7}"}]}
    assert MathReward()([trajectory(r"\boxed{7}")], [truth]) == [1.0]
    assert MathReward("answer")([trajectory(r"\boxed{7}", answer=7, solution="8")]) == [1.0]


@pytest.mark.usefixtures("no_math_verify")
@pytest.mark.parametrize("make", [MathReward, MultiModalAccuracyReward])
def test_comparing_less_is_said(make) -> None:
    with pytest.warns(UserWarning, match=rf"{make.__name__} compares text and numbers only, .* \(our extra 'math'"):
        make()


def test_nothing_is_said_with_math_verify() -> None:
    pytest.importorskip("math_verify")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MathReward()


# --- images -----------------------------------------------------------------------------------------------------------

IMAGE_ROWS = [
    ("<answer> Yes </answer>", {"ground_truth": "yes"}, 1.0),
    ("<answer>3</answer>", {"ground_truth": 3}, 1.0),
    ("<answer>3.0</answer>", {"ground_truth": "3"}, 1.0),
    ("<answer>1</answer> no: <answer>3</answer>", {"ground_truth": "3"}, 1.0),
    ("<answer>4</answer>", {"ground_truth": "3"}, 0.0),
    ("<answer>yes</answer>", {"ground_truth": "no"}, 0.0),
    ("<answer></answer>", {"ground_truth": "no"}, 0.0),
    ("<answer>3</answer>", {"solution": "<answer> 3 </answer>"}, 1.0),
    ([{"type": "image", "image": 1}, {"type": "text", "text": "<answer>3</answer>"}], {"ground_truth": "3"}, 1.0),
]


@pytest.mark.parametrize(("content", "user_data", "expected"), IMAGE_ROWS)
def test_multi_modal(content: object, user_data: dict[str, object], expected: float) -> None:
    pytest.importorskip("math_verify")
    assert MultiModalAccuracyReward()([trajectory(content, **user_data)]) == [expected]


@pytest.mark.parametrize(("content", "user_data", "expected"), IMAGE_ROWS)
@pytest.mark.usefixtures("no_math_verify")
@pytest.mark.filterwarnings("ignore:MultiModalAccuracyReward compares text")
def test_multi_modal_without_math_verify(content: object, user_data: dict[str, object], expected: float) -> None:
    assert MultiModalAccuracyReward()([trajectory(content, **user_data)]) == [expected]


def test_multi_modal_expressions() -> None:
    pytest.importorskip("math_verify")
    rows = [trajectory(text, solution=r"$2\sqrt{2}$") for text in (r"It is $\sqrt{8}$.", r"It is $\sqrt{7}$.")]
    assert MultiModalAccuracyReward()(rows) == [1.0, 0.0]


# --- OlympiadBench ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "user_data", "expected"),
    [
        (r"\boxed{100}", {"ground_truth": "100"}, 1.0),
        (r"\boxed{100.9}", {"ground_truth": "100"}, 1.0),
        (r"\boxed{0.00005}", {"ground_truth": "0"}, 1.0),
        (r"\boxed{1}", {"ground_truth": "0"}, 0.0),
        (r"\boxed{110}", {"ground_truth": "100"}, 0.99 * math.exp(-0.5)),
        (r"\boxed{-100}", {"ground_truth": "100"}, 0.99 * math.exp(-10)),
        (r"\boxed{\frac{\pi}{2}}", {"ground_truth": r"$\dfrac{\pi}{2}$"}, 1.0),
        (r"\boxed{x}", {"ground_truth": "100"}, 0.0),
        ("100", {"ground_truth": "100"}, 0.0),
        (r"\boxed{1} \boxed{2}", {"ground_truth": "2"}, 1.0),
        (r"\boxed{2}", {"ground_truth": ["2"]}, 1.0),
        (r"\boxed{(1, 2)}", {"ground_truth": "(1,2)"}, 1.0),
        (r"\boxed{1,000}", {"ground_truth": "1000"}, 1.0),
        # several answers
        (r"\boxed{3, 2}", {"ground_truth": "2, 3"}, 1.0),
        (r"\boxed{2}", {"ground_truth": "2, 3"}, 0.5),
        (r"\boxed{2} \boxed{3}", {"ground_truth": "2, 3"}, 1.0),
        (r"\boxed{2, 2}", {"ground_truth": "2, 3"}, 0.5),
        (r"\boxed{2, 3}", {"ground_truth": [2, 3, 5]}, 2 / 3),
        (r"\boxed{(1,2), (3,4)}", {"ground_truth": "(3, 4), (1, 2)"}, 1.0),
        (r"\boxed{a, b}", {"ground_truth": "a, b", "is_multiple_answer": False}, 1.0),
        (r"\boxed{b, a}", {"ground_truth": "a, b", "is_multiple_answer": False}, 0.0),
        (r"\boxed{b, a}", {"ground_truth": "a, b", "is_multiple_answer": True}, 1.0),
    ],
)
def test_olympiad_accuracy(text: str, user_data: dict[str, object], expected: float) -> None:
    assert OlympiadBenchAccuracyReward()([trajectory(text, **user_data)]) == pytest.approx([expected])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{1}", 1.0),
        (r"\boxed{\dfrac12} and again \boxed{\frac{1}{2}}", 1.0),
        (r"\boxed{1}" + "." * 201, 0.7),
        (r"\boxed{1}" + "." * 200, 1.0),
        (r"\boxed{1} \boxed{2}", 0.7),
        (r"\boxed{1} \boxed{2} \boxed{3}", 0.4),
        (r"\boxed{1} \boxed{2} \boxed{3}" + "." * 201, 0.1),
        ("1", 0.0),
    ],
)
def test_olympiad_format(text: str, expected: float) -> None:
    assert OlympiadBenchFormatReward()([trajectory(text)]) == pytest.approx([expected])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0.0),
        ("x" * 300, 0.3 + 0.3),
        ("x" * 150, 0.15 + 0.3),
        ("x" * 3000, 0.15 + 0.3),
        ("because therefore hence " + "x" * 276, 0.4 + 0.3 + 0.3),
        ("因为" + "x" * 298, 0.4 / 3 + 0.3 + 0.3),
        ("abcdefghi." * 100, 0.3 + 0.3 / 100),
    ],
)
def test_olympiad_quality(text: str, expected: float) -> None:
    assert OlympiadBenchQualityReward()([trajectory(text)]) == pytest.approx([expected])


# --- the package ------------------------------------------------------------------------------------------------------


def test_public_names() -> None:
    assert twinkle.reward.__all__ == sorted(twinkle.reward.__all__)


def test_rewards_need_neither_torch_nor_sympy() -> None:
    code = "import sys, twinkle.reward; sys.exit(bool({'torch', 'sympy', 'math_verify'} & set(sys.modules)))"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
