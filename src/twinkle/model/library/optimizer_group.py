"""The state of the verbs for one adapter, or for a full model: loss, optimizer, metrics, progress of training."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from twinkle.errors import InvalidInputError, NonFiniteError, UserError
from twinkle.loss import CrossEntropyLoss, Loss
from twinkle.metric import LossMetric, Metric, TrainMetric
from twinkle.model.library.sequences import SequenceBatch
from twinkle.model.parallel import Ranks

# A context manager that is entered, with the name of a component, while a loss, metric, scheduler or processor that the
# user chose runs. With it a server can tell errors of a tenant's components, of any type, from errors of its own code.
Guard = Callable[[str], AbstractContextManager[object]]


@dataclass
class TrainStatus:
    """The training half or the evaluation half of a group: its metrics, and its last forward pass.

    ``num_tokens`` is the number of tokens of all backward passes since the gradient was last divided by it or dropped;
    ``last_count`` is that of the last loss, which the backward pass adds to ``num_tokens``. A mean loss counts as 1.
    """

    metrics: list[Metric] = field(default_factory=list)
    sequences: SequenceBatch | None = None
    outputs: dict[str, Any] | None = None
    forward_kwargs: dict[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    loss_value: Tensor | float | None = None
    last_count: float = 0.0
    reduction: str = "sum"  # of the last loss
    num_tokens: float = 0.0

    def begin(
        self, sequences: SequenceBatch, outputs: dict[str, Any], kwargs: dict[str, Any], temperature: float
    ) -> None:
        self.sequences, self.outputs, self.forward_kwargs = sequences, outputs, kwargs
        self.temperature = temperature
        self.loss_value, self.last_count = None, 0.0

    def has_loss(self, graph: Tensor | float, value: float, tokens: float) -> None:
        """Store the loss of the last forward pass. ``tokens`` is 0 for a mean, which counts as 1."""
        if not math.isfinite(value):
            self.clear()
            raise NonFiniteError(f"the loss is {value}: the pass was dropped")
        assert self.outputs is not None and self.sequences is not None
        self.reduction = "sum" if tokens > 0 else "mean"
        self.loss_value, self.last_count = graph, tokens if tokens > 0 else 1.0
        if self.sequences.empty or (tokens > 0 and not self.sequences.has_targets):
            self.last_count = tokens = 0.0  # a sum over no targets, whatever number the loss returned
        self.outputs["loss"], self.outputs["num_tokens"] = value, tokens

    def computed(self, verb: str) -> tuple[SequenceBatch, dict[str, Any]]:
        if self.sequences is None or self.outputs is None:
            raise UserError(f"{verb}: there is no forward pass to go on from; call forward or forward_only first")
        return self.sequences, self.outputs

    def clear(self) -> None:
        self.sequences, self.outputs, self.loss_value, self.forward_kwargs = None, None, None, {}


@dataclass
class OptimizerGroup:
    """The settings and the progress of training of one adapter or full model. ``cur_step`` counts backward passes."""

    adapter_name: str
    adapter_config: Mapping[str, object] | None = None
    gradient_accumulation_steps: int = 1
    cur_step: int = 0
    loss_instance: Loss = field(default_factory=lambda: CrossEntropyLoss(reduction="sum"))
    optimizer: Optimizer | None = None
    lr_scheduler: LRScheduler | None = None
    template: Any = None  # a twinkle.template.Template; None: the default is made when something must be encoded
    processor: Any = None  # a twinkle.processor.InputProcessor; None: the default is made at the first forward pass
    train_status: TrainStatus = field(default_factory=TrainStatus)
    eval_status: TrainStatus = field(default_factory=TrainStatus)
    training: bool = True  # whether the last forward pass was one of training, not of evaluation
    normalized: bool = False  # whether the gradient has been divided by num_tokens
    last_grad_norm: float = 0.0
    chosen: set[str] = field(default_factory=set)  # the verbs with which the user has set something
    last_lr: tuple[float, ...] = ()  # learning rates of the last update
    guard: Guard = nullcontext

    def __post_init__(self) -> None:
        self.set_accumulation(self.gradient_accumulation_steps)

    @property
    def status(self) -> TrainStatus:
        return self.train_status if self.training else self.eval_status

    def begin(
        self,
        status: TrainStatus,
        sequences: SequenceBatch,
        outputs: dict[str, Any],
        kwargs: dict[str, Any],
        temperature: float,
    ) -> None:
        """Store a forward pass that has just been computed.

        From now on ``calculate_loss`` and ``backward`` refer to it; until now they referred to the pass before.
        """
        self.training = status is self.train_status
        status.begin(sequences, outputs, kwargs, temperature)

    def set_accumulation(self, steps: int | None) -> None:
        """Set the length of a window, in backward passes; None does not change it."""
        check_accumulation(steps)
        if steps is not None:
            self.gradient_accumulation_steps = steps

    @property
    def at_boundary(self) -> bool:
        """Return whether a window of g backward passes is complete: after g, 2g, … passes; always if g is 1."""
        window = self.gradient_accumulation_steps
        return window == 1 or (self.cur_step > 0 and self.cur_step % window == 0)

    def after_backward(self) -> None:
        self.cur_step += 1
        self.train_status.num_tokens += self.train_status.last_count
        self.train_status.loss_value, self.train_status.last_count = None, 0.0
        self.normalized = False

    def take_divisor(self, ranks: Ranks) -> float | None:
        """Return the number by which the gradient of the window must be divided, and mark it as divided.

        It is the number of tokens (or of backward passes, for mean losses) of all ranks. It is None if the gradient has
        been divided already, or if there is none.
        """
        tokens = 0.0 if self.normalized else ranks.total(self.train_status.num_tokens)
        if tokens <= 0:
            return None
        self.normalized, self.train_status.num_tokens = True, 0.0
        return tokens

    def drop_window(self) -> None:
        """Forget the tokens of the window, after its gradient was dropped or used."""
        self.train_status.num_tokens, self.normalized = 0.0, False

    def required_optimizer(self, verb: str) -> Optimizer:
        if self.optimizer is None:
            raise UserError(f"{verb}: {self.adapter_name or 'the model'!r} has no optimizer; call set_optimizer first")
        return self.optimizer

    @property
    def lr(self) -> list[float]:
        """Return the learning rate of each parameter group; empty without an optimizer."""
        return [] if self.optimizer is None else [float(group["lr"]) for group in self.optimizer.param_groups]


def check_accumulation(steps: int | None) -> None:
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise InvalidInputError("gradient_accumulation_steps", steps, "an integer ≥ 1")


def check_clipping(max_grad_norm: float, norm_type: float) -> None:
    """Raise unless both are > 0: torch would accept a negative norm and reverse the gradient."""
    for name, value in (("max_grad_norm", max_grad_norm), ("norm_type", norm_type)):
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise InvalidInputError(name, value, "a number > 0, or infinity")


def accumulate_metrics(group: OptimizerGroup, status: TrainStatus) -> None:
    """Give the last forward pass to the metrics, once.

    This happens when the next pass begins or when metrics are calculated: only then are the pass's loss and gradient
    norm known.
    """
    sequences, outputs, forward_kwargs = status.sequences, status.outputs, status.forward_kwargs
    if sequences is None or outputs is None or "loss" not in outputs:
        return
    status.clear()  # before metrics run: if one of them raises, the next call must not count this pass again
    metrics, inputs = status.metrics, {} if sequences.empty else sequences.loss_inputs
    if sequences.empty:  # only other ranks had data in this step; these two metrics count steps as well
        metrics, outputs = [each for each in metrics if isinstance(each, LossMetric | TrainMetric)], {}
    for metric in metrics:
        with group.guard(type(metric).__name__):
            metric.accumulate(
                inputs,
                outputs,
                lr=list(group.last_lr) or group.lr,
                step=max(group.cur_step - 1, 0),
                gradient_accumulation_steps=group.gradient_accumulation_steps,
                grad_norm=group.last_grad_norm,
                loss_reduction=status.reduction,
                **forward_kwargs,
            )
