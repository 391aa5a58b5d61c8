r"""Functions that find final answers in text and compare them: \boxed{…}, numbers, LaTeX."""

import math
import re
import threading
import warnings
from dataclasses import dataclass
from importlib.util import find_spec

__all__ = ["Boxed", "answers_equal", "boxed_answers", "cleaned_latex", "number_of", "warn_without_math_verify"]


@dataclass(frozen=True)
class Boxed:
    r"""One \boxed{…}: the content of its braces, and the position in the text where it ends."""

    content: str
    end: int


def boxed_answers(text: str) -> list[Boxed]:
    r"""Return the complete boxes in order. If a box begins with a box, its content is the inner one's."""
    found: list[Boxed] = []
    position = 0
    while match := _BOXED.search(text, position):
        end = _closing_brace(text, match.end())
        if end is None:  # cut off by a length limit; there may be a complete one inside
            position = match.end()
            continue
        content = text[match.end() : end].strip()
        inner = boxed_answers(content)
        found.append(Boxed(inner[-1].content if inner and _BOXED.match(content) else content, end + 1))
        position = end + 1
    return found


def number_of(text: str) -> float | None:
    r"""Return the value of a plain number, or None if the text is not one.

    Examples: 1,234.5 · −3 · \$5 · 50\% · 3/4 · \frac{3}{4} · 1.2\times 10^{-3}. A percent sign and a unit in \text{…}
    are dropped. Commas must separate thousands.
    """
    plain = cleaned_latex(text).replace("$", "").removesuffix("%")
    plain = _POWER_OF_TEN.sub(r"e\1", plain)
    plain = _FRACTION.sub(r"\1\2/\3", plain) if _FRACTION.fullmatch(plain) else plain
    numerator, slash, denominator = plain.partition("/")
    top, bottom = _decimal(numerator), _decimal(denominator) if slash else 1.0
    return top / bottom if top is not None and bottom else None


def cleaned_latex(text: str) -> str:
    r"""Remove parts that do not change the meaning: spaces, \left and \right, $, degrees, units, a final period.

    Also write \dfrac and \tfrac as \frac, and \frac12 and \sqrt2 with braces.
    """
    plain = text.strip().replace("−", "-").replace("{,}", ",").replace("\\$", "").replace("$", "").replace("\\%", "%")
    plain = _SPACING.sub("", _UNIT.sub("", plain))
    plain = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1", plain)
    plain = re.sub(r"\\[dt]frac", r"\\frac", plain)
    plain = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", plain)
    plain = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", plain)
    plain = re.sub(r"\^\{?\\circ\}?", "", plain)
    return re.sub(r"\s+", "", plain).rstrip(".")


def answers_equal(answer: str, truth: str) -> bool:
    """Return whether two answers are the same cleaned text, the same number or, with math_verify, equal expressions."""
    if not answer.strip() or not truth.strip():
        return False
    if cleaned_latex(answer) == cleaned_latex(truth):
        return True
    left, right = number_of(answer), number_of(truth)
    if left is not None and right is not None:
        return math.isclose(left, right, rel_tol=1e-6, abs_tol=1e-9)
    return verified(f"\\boxed{{{answer}}}", f"\\boxed{{{truth}}}")


def verified(text: str, truth: str) -> bool:
    """Return whether math_verify finds the answers in two texts equal.

    False if it is not installed, or if a text holds what might take sympy for ever (see :func:`_expensive`).
    """
    if not has_math_verify() or _expensive(text) or _expensive(truth):
        return False
    from math_verify import parse, verify

    # math_verify's time limit uses a signal, which only the main thread may set.
    seconds = 5 if threading.current_thread() is threading.main_thread() else None
    parsed = [parse(part, parsing_timeout=seconds) for part in (truth, text)]
    return bool(verify(*parsed, timeout_seconds=seconds))


def has_math_verify() -> bool:
    return find_spec("math_verify") is not None


def warn_without_math_verify(reward: str) -> None:
    if not has_math_verify():
        warnings.warn(
            f"{reward} compares text and numbers only, because math_verify is not installed: x+1 and 1+x are not equal "
            "to it (our extra 'math': pip install 'twinkle-posttrain[math]')",
            stacklevel=3,
        )


_BOXED = re.compile(r"\\boxed\s*\{")
_SPACING = re.compile(r"\\(?:left|right)(?![a-zA-Z])|\\[,;:! ]|\\q?quad|~")
_UNIT = re.compile(r"(?<=[\d}\s%])\\(?:text|mathrm)\s*\{[^{}]*\}\s*\.?$")  # blanks before it are removed later
_FRACTION = re.compile(r"([-+]?)\\frac\{([^{}]+)\}\{([^{}]+)\}")
_POWER_OF_TEN = re.compile(r"(?:\\times|\\cdot|[×*x])10\^\{?([-+]?\d+)\}?")
_DECIMAL = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?(?:[eE][-+]?\d{1,3})?")
_EXPENSIVE = re.compile(
    r"[\d)}]\s*!"  # a factorial
    r"|\^\s*\{[^{}]*\^|\^\s*[\w.]+\s*\^"  # a power in an exponent
    r"|\([^()]*\^[^()]*\)\s*\^|\}\}\s*\^"  # a power of a power
    r"|\^\s*\{?\s*-?\d{4}"  # a huge exponent
)


def _closing_brace(text: str, start: int) -> int | None:
    depth, position = 1, start
    while position < len(text):
        if text[position] == "\\":  # \{ and \} are characters, not braces
            position += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
        position += 1
    return None


def _decimal(text: str) -> float | None:
    if not any(character.isdigit() for character in text) or not _DECIMAL.fullmatch(text):
        return None
    value = float(text.replace(",", ""))
    return value if math.isfinite(value) else None


def _expensive(text: str) -> bool:
    """Return whether sympy might never finish: towers of powers, huge exponents, factorials."""
    return _EXPENSIVE.search(text) is not None
