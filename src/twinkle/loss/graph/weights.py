"""The cost of an operation for one number relative to a sum, in round figures. Without torch.

On a CPU, a sum of two floats takes about a nanosecond for each number, forward and backward; an operation without
vector instructions takes many times as long. With these weights, a graph's work is roughly proportional to its time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["weight_of"]

_SLOW = 50  # computed one number at a time
_SERIES = 8  # a polynomial for each number

_CLASSES: tuple[tuple[int, str], ...] = (
    (_SLOW, "pow float_power atan2 logaddexp logaddexp2 xlogy hypot logcumsumexp special_entr special_xlogy kl_div"),
    (_SLOW, "norm linalg_norm linalg_vector_norm vector_norm normalize cosine_similarity"),
    (_SERIES, "exp exp2 expm1 log log2 log10 log1p sin cos atan tanh sigmoid erf logit rsqrt"),
    (_SERIES, "logsumexp softmax log_softmax gelu softplus log_sigmoid logsigmoid silu elu"),
    (_SERIES, "special_expm1 special_log1p special_expit special_logsumexp special_log_softmax special_softmax"),
    (_SERIES, "binary_cross_entropy binary_cross_entropy_with_logits"),
)
_WEIGHTS: Mapping[str, int] = {name: weight for weight, names in _CLASSES for name in names.split()}
_POWERS = ("pow", "float_power")
_QUICK_EXPONENTS = (-2, -1, -0.5, 0, 0.5, 1, 2, 3)  # torch multiplies, divides or takes the root


def weight_of(target: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> int:
    """Return the weight of an operation, named as in the catalog. The weight of a power depends on its exponent."""
    name = target.rpartition(".")[2]
    if name in _POWERS:
        exponent = arguments[1] if len(arguments) > 1 else keywords.get("exponent")
        if type(exponent) in (int, float) and exponent in _QUICK_EXPONENTS:
            return 1
    return _WEIGHTS.get(name, 1)
