"""Learning-rate schedules with a linear warm-up.

With W warm-up steps and N steps in total, step s has the learning rate lr · f(s):

    f(s) = s / W for s < W; after that, with p = (s − W) / (N − W) and 0 once p passes 1,
    cosine: max(0, ½·(1 + cos(2π · num_cycles · p)));  linear: 1 − p

If W is larger than N, the training ends during the warm-up and never reaches lr.
"""

import inspect
import math
from functools import partial

import torch.optim.lr_scheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from twinkle.errors import InvalidInputError, UnknownNameError

__all__ = ["CosineWarmupScheduler", "LinearWarmupScheduler", "scheduler_by_name"]


class CosineWarmupScheduler(LambdaLR):
    """A rate that, after the warm-up, falls from lr to 0 along half a cosine.

    With ``num_cycles`` above 0.5 it rises again in between.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        num_warmup_steps: int,
        num_training_steps: int,
        num_cycles: float = 0.5,
        last_epoch: int = -1,
    ) -> None:
        _check_steps(num_warmup_steps, num_training_steps)
        factor = partial(_cosine, warmup=num_warmup_steps, total=num_training_steps, cycles=num_cycles)
        super().__init__(optimizer, factor, last_epoch)


class LinearWarmupScheduler(LambdaLR):
    """A rate that, after the warm-up, falls from lr to 0 in a straight line."""

    def __init__(
        self, optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1
    ) -> None:
        _check_steps(num_warmup_steps, num_training_steps)
        super().__init__(optimizer, partial(_linear, warmup=num_warmup_steps, total=num_training_steps), last_epoch)


def scheduler_by_name(name: str) -> type[LRScheduler]:
    """Return the class of a scheduler: one of the two of this module, or one of ``torch.optim.lr_scheduler``."""
    known: dict[str, type[LRScheduler]] = {
        key: value
        for key, value in vars(torch.optim.lr_scheduler).items()
        if inspect.isclass(value)
        and issubclass(value, LRScheduler)
        and not key.startswith("_")
        and key != "LRScheduler"
    }
    known |= {"CosineWarmupScheduler": CosineWarmupScheduler, "LinearWarmupScheduler": LinearWarmupScheduler}
    if name not in known:
        raise UnknownNameError("learning-rate scheduler", name, known)
    return known[name]


def _cosine(step: int, *, warmup: int, total: int, cycles: float) -> float:
    if step < warmup:
        return step / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return 0.0 if progress > 1 else max(0.0, 0.5 * (1 + math.cos(2 * math.pi * cycles * progress)))


def _linear(step: int, *, warmup: int, total: int) -> float:
    if step < warmup:
        return step / warmup
    return max(0.0, (total - step) / max(1, total - warmup))


def _check_steps(warmup: int, total: int) -> None:
    for name, value in (("num_warmup_steps", warmup), ("num_training_steps", total)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidInputError(name, value, "an integer")
        if value < 0:
            raise InvalidInputError(name, value, "0 or more")
