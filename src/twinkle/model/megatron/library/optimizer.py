"""Megatron's names of its optimizer and its scheduler, and what they mean here.

Megatron has one optimizer, Adam with decoupled weight decay, which is ``AdamW`` of torch; its distributed optimizer
gives the same results. Its scheduler, ``OptimizerParamScheduler``, changes the learning rate and the weight decay.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError
from twinkle.utils.logger import note_once

__all__ = ["OptimizerParamScheduler", "is_megatron_optimizer", "is_megatron_scheduler", "optimizer_options"]

_OPTIMIZERS = ("", "default", "Adam", "MegatronOptimizer", "MegatronDistributedOptimizer")
_SCHEDULERS = ("", "default", "OptimizerParamScheduler")
# Fields of Megatron's OptimizerConfig that change how it computes, but not what.
_WITHOUT_EFFECT = {
    "bf16": "optimizer state is fp32 in any case",
    "params_dtype": "optimizer state is fp32 in any case",
    "overlap_param_gather": "every process has the state of its own weights",
    "overlap_param_gather_with_optimizer_step": "every process has the state of its own weights",
    "use_distributed_optimizer": "the constructor's option of this name decides",
    "use_torch_optimizer_for_cpu_offload": "nothing is offloaded",
    "barrier_with_L1_time": "nothing is timed",
    "log_num_zeros_in_grad": "zeros are not counted",
}


def is_megatron_optimizer(optimizer_cls: object) -> bool:
    return isinstance(optimizer_cls, str) and optimizer_cls in _OPTIMIZERS


def is_megatron_scheduler(scheduler_cls: object) -> bool:
    return isinstance(scheduler_cls, str) and scheduler_cls in _SCHEDULERS


def optimizer_options(options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of the torch optimizer that fields of Megatron's OptimizerConfig describe."""
    given = dict(options)
    chosen: dict[str, Any] = {name: given.pop(name) for name in ("betas", "eps") if name in given}
    first, second = chosen.get("betas", (0.9, 0.999))
    chosen["betas"] = (given.pop("adam_beta1", first), given.pop("adam_beta2", second))
    chosen["eps"] = given.pop("adam_eps", chosen.get("eps", 1e-8))
    decoupled = given.pop("decoupled_weight_decay", True)
    if not isinstance(decoupled, bool):
        raise InvalidInputError("decoupled_weight_decay", decoupled, "True or False")
    if given.get("optimizer", "adam") != "adam":
        raise UnsupportedError(
            f"optimizer: got {given['optimizer']!r}, allowed: 'adam'; other optimizers are named by optimizer_cls"
        )
    if given.get("clip_grad", 1.0) != 1.0:
        raise UnsupportedError(
            f"clip_grad: got {given['clip_grad']!r}, allowed: 1.0; max_grad_norm of clip_grad_norm and of "
            "clip_grad_and_step says where gradients are clipped"
        )
    if given.get("min_lr", 0) != 0:
        raise UnsupportedError(f"min_lr: got {given['min_lr']!r}, allowed: 0; give it to set_lr_scheduler")
    if given.get("fp16"):
        raise UnsupportedError("fp16: got True, allowed: False; mixed_precision is 'bf16' or 'fp32'")
    for name in given.keys() - {"optimizer", "clip_grad", "min_lr", "fp16"}:
        if name not in _WITHOUT_EFFECT:
            known = ("adam_beta1", "adam_beta2", "adam_eps", "decoupled_weight_decay", *_WITHOUT_EFFECT)
            raise UnknownNameError("option of Megatron's optimizer", name, known)
        note_once(f"{name} of set_optimizer: no effect; {_WITHOUT_EFFECT[name]}")
    return "AdamW" if decoupled else "Adam", chosen


_STYLES = ("constant", "cosine", "inverse-square-root", "linear")
_DECAY_STYLES = ("constant", "cosine", "linear")


class OptimizerParamScheduler(LRScheduler):
    """Megatron's schedule: a linear warm-up, then a decay from ``max_lr`` to ``min_lr`` within ``lr_decay_steps``.

    max_lr: None means the optimizer's learning rate. start_wd and end_wd: None leaves the optimizer's weight decay as
    it is; otherwise it goes from one to the other within ``wd_incr_steps``, by default ``lr_decay_steps``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_decay_steps: int,
        max_lr: float | None = None,
        init_lr: float = 0.0,
        min_lr: float = 0.0,
        lr_warmup_steps: int = 0,
        lr_decay_style: str = "cosine",
        start_wd: float | None = None,
        end_wd: float | None = None,
        wd_incr_steps: int | None = None,
        wd_incr_style: str = "constant",
        last_epoch: int = -1,
    ) -> None:
        if lr_decay_style not in _STYLES:
            raise UnknownNameError("lr_decay_style", lr_decay_style, _STYLES)
        if wd_incr_style not in _DECAY_STYLES:
            raise UnknownNameError("wd_incr_style", wd_incr_style, _DECAY_STYLES)
        _check_steps(lr_warmup_steps, lr_decay_steps)
        self.max_lr = float(optimizer.param_groups[0]["lr"]) if max_lr is None else float(max_lr)
        self.init_lr, self.min_lr = float(init_lr), float(min_lr)
        for name, value in (("init_lr", self.init_lr), ("min_lr", self.min_lr)):
            if not 0 <= value <= self.max_lr:
                raise InvalidInputError(name, value, f"0 to max_lr = {self.max_lr:g}")
        self.lr_warmup_steps, self.lr_decay_steps = lr_warmup_steps, lr_decay_steps
        self.lr_decay_style, self.wd_incr_style = lr_decay_style, wd_incr_style
        if (start_wd is None) != (end_wd is None) or (wd_incr_style == "constant" and start_wd != end_wd):
            raise InvalidInputError("start_wd, end_wd", (start_wd, end_wd), "both or none; equal if wd is constant")
        self.start_wd, self.end_wd = start_wd, end_wd
        self.wd_incr_steps = lr_decay_steps if wd_incr_steps is None else wd_incr_steps
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:  # torch declares floats or tensors
        rate, decay = self.rate(self.last_epoch), self.weight_decay(self.last_epoch)
        for group in self.optimizer.param_groups:
            if decay is not None and group["weight_decay"] > 0:
                group["weight_decay"] = decay
        return [rate for _ in self.optimizer.param_groups]

    def rate(self, step: int) -> float:
        """Return the learning rate after ``step`` steps."""
        warmup, end = self.lr_warmup_steps, self.lr_decay_steps
        if warmup > 0 and step <= warmup:
            return self.init_lr + (self.max_lr - self.init_lr) * step / warmup
        if self.lr_decay_style == "constant":
            return self.max_lr
        if step > end:
            return self.min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * math.sqrt(max(warmup, 1) / max(step, 1)))
        share = _share(self.lr_decay_style, (step - warmup) / max(1, end - warmup))
        return self.min_lr + share * (self.max_lr - self.min_lr)

    def weight_decay(self, step: int) -> float | None:
        """Return the weight decay after ``step`` steps; None: that of the optimizer."""
        if self.start_wd is None or self.end_wd is None:
            return None
        if step > self.wd_incr_steps or self.wd_incr_style == "constant":
            return self.end_wd
        share = 1 - _share(self.wd_incr_style, step / max(1, self.wd_incr_steps))
        return self.start_wd + share * (self.end_wd - self.start_wd)


def _share(style: str, progress: float) -> float:
    """Return how much is left of a decay: 1 at its beginning, 0 at its end."""
    return 1.0 - progress if style == "linear" else 0.5 * (math.cos(math.pi * progress) + 1.0)


def _check_steps(warmup: int, decay: int) -> None:
    for name, value in (("lr_warmup_steps", warmup), ("lr_decay_steps", decay)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InvalidInputError(name, value, "an integer ≥ 0")
    if decay < 1 or warmup >= decay:
        raise InvalidInputError("lr_warmup_steps", warmup, f"less than lr_decay_steps = {decay}, which is at least 1")
