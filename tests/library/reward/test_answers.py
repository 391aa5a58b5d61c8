"""Finding and comparing answers."""

import sys
import threading

import pytest

from twinkle.reward.answers import answers_equal, boxed_answers, cleaned_latex, number_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{42}.", ["42"]),
        (r"\boxed{ \frac{1}{2} }", [r"\frac{1}{2}"]),
        (r"\boxed{\sqrt{\frac{a}{b}}} and \boxed{x^{2^{n}}}", [r"\sqrt{\frac{a}{b}}", "x^{2^{n}}"]),
        (r"\boxed {7}", ["7"]),
        (r"\boxed{\{1, 2\}}", [r"\{1, 2\}"]),
        (r"\boxed{\boxed{3}}", ["3"]),
        (r"\boxed{x = \boxed{3}}", [r"x = \boxed{3}"]),
        (r"\boxed{}", [""]),
        (r"\boxed{1} then \boxed{2", ["1"]),
        (r"\boxed{a \boxed{5}", ["5"]),
        ("no box, {braces} only", []),
        ("", []),
    ],
)
def test_boxes(text: str, expected: list[str]) -> None:
    assert [box.content for box in boxed_answers(text)] == expected


def test_boxes_know_where_they_end() -> None:
    text = r"a \boxed{1} b \boxed{{2}} c"
    assert [text[: box.end] for box in boxed_answers(text)] == [r"a \boxed{1}", r"a \boxed{1} b \boxed{{2}}"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        (" -3.5 ", -3.5),
        ("−3", -3),
        ("+7", 7),
        ("1,234,567.25", 1234567.25),
        ("1{,}000", 1000),
        (r"\$1,000", 1000),
        ("$5$", 5),
        ("-$5", -5),
        (r"50\%", 50),
        ("50%", 50),
        ("42.", 42),
        (".5", 0.5),
        ("3/4", 0.75),
        (r"\frac{3}{4}", 0.75),
        (r"-\dfrac{3}{4}", -0.75),
        (r"\frac12", 0.5),
        ("1e-3", 0.001),
        (r"1.5\times 10^{-3}", 0.0015),
        (r"2 \cdot 10^4", 20000),
        (r"18\text{ dollars}", 18),
        (r"90^\circ", 90),
        (r"90^{\circ}", 90),
        (r"1\,000", 1000),
    ],
)
def test_numbers(text: str, value: float) -> None:
    assert number_of(text) == pytest.approx(value)


@pytest.mark.parametrize(
    "text", ["", "x", "1,2", "12,34", "1.2.3", "--3", "1/0", "1/2/3", "nan", "inf", "1 2 x", r"\sqrt{2}", "-", ".", "%"]
)
def test_what_is_not_a_number(text: str) -> None:
    assert number_of(text) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\dfrac{1}{2}", r"\frac12"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"3\sqrt2", r"3\sqrt{2}"),
        (r"$x+1$.", "x + 1"),
        (r"60^\circ", "60"),
        (r"5 \text{ cm}", "5"),
    ],
)
def test_cleaning(one: str, other: str) -> None:
    assert cleaned_latex(one) == cleaned_latex(other)


def test_cleaning_keeps_what_matters() -> None:
    assert cleaned_latex(r"\leftarrow") == r"\leftarrow"
    assert cleaned_latex("-x") != cleaned_latex("x")
    assert cleaned_latex(r"\frac{1}{2}") != cleaned_latex(r"\frac{2}{1}")


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("0.5", r"\frac{1}{2}", True),
        ("1,000", "1000", True),
        ("0.3333333", r"\frac{1}{3}", True),
        ("0.33", r"\frac{1}{3}", False),
        ("5", "6", False),
        ("", "", False),
        (" ", "5", False),
        ("yes", "no", False),
    ],
)
@pytest.mark.parametrize("installed", [True, False])
def test_equality_of_numbers_and_text(one: str, other: str, equal: bool, installed: bool, monkeypatch) -> None:
    if not installed:
        monkeypatch.setattr("twinkle.reward.answers.has_math_verify", lambda: False)
    assert answers_equal(one, other) is equal


def test_equality_of_expressions_needs_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle.reward.answers.has_math_verify", lambda: False)
    assert not answers_equal("x+1", "1+x")
    assert answers_equal("x+1", "x + 1")


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("x+1", "1+x", True),
        ("(x+1)^2", "x^2+2x+1", True),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        (r"\frac{\pi}{2}", r"0.5\pi", True),
        ("x^2+y^2", "y^2+x^2", True),
        ("x+1", "x+2", False),
        (r"\sqrt{8}", r"2\sqrt{3}", False),
    ],
)
def test_equality_of_expressions(one: str, other: str, equal: bool) -> None:
    pytest.importorskip("math_verify")
    assert answers_equal(one, other) is equal


def test_equality_in_a_thread() -> None:
    """math_verify's time limit works only in the main thread."""
    pytest.importorskip("math_verify")
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(answers_equal("x+1", "1+x")))
    thread.start()
    thread.join()
    assert found == [True]


@pytest.mark.parametrize("bomb", ["9^{9^{9^9}}", "9^9^9", "2^{99999999}", "(10^{10})!", "((9^{99})^{99})^{99}"])
def test_expressions_that_would_take_for_ever_are_not_evaluated(bomb: str, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)  # importing it raises
    monkeypatch.setattr("twinkle.reward.answers.has_math_verify", lambda: True)
    assert not answers_equal(bomb, "x")
    with pytest.raises(ImportError):
        answers_equal("x^2", "x")


def test_infinite_values_are_not_numbers() -> None:
    assert number_of("1e999") is None
    assert number_of("9" * 400) is None
