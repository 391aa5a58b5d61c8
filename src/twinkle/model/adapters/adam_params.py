"""Which hyper-parameters an optimizer step takes. Without torch: the server asks before it accepts a request."""

import sys
from collections.abc import Callable

from twinkle.errors import InvalidInputError
from twinkle.model.types import AdamParams

__all__ = ["check_adam_params"]


def check_adam_params(params: AdamParams) -> None:
    """Refuse what would poison the optimizer state."""
    for name in ("learning_rate", "weight_decay", "grad_clip_norm"):
        _require(name, vars(params)[name], lambda x: x >= 0, "a finite number ≥ 0")
    for name in ("beta1", "beta2"):
        _require(name, vars(params)[name], lambda x: 0 <= x < 1, "a number in [0, 1)")
    _require("eps", params.eps, lambda x: x > 0, "a finite number > 0")


def _require(field: str, value: object, allowed: Callable[[float], bool], text: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidInputError(field, value, text)
    if not abs(value) <= sys.float_info.max or not allowed(value):  # also an int that no float holds
        raise InvalidInputError(field, value, text)
