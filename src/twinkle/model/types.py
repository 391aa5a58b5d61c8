"""The nouns of training: what goes into the :class:`~twinkle.model.Trainer` and what comes out.

Plain frozen dataclasses over numpy; this file imports neither torch nor transformers, so that services and codecs can
build requests without them.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from twinkle.errors import InvalidInputError, TwinkleError
from twinkle.model.csr import Csr

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]

EMPTY: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True)
class LoraSpec:
    """The shape of one adapter. Its scaling is ``alpha / rank``, as in PEFT.

    ``target_modules`` overrides the ``train_*`` switches: names matched as PEFT matches them (a module's last path
    components), or ``"all-linear"`` for every linear layer but the head. ``seed=None`` draws one, which is then
    recorded in the adapter's spec.
    """

    rank: int
    alpha: float = 32.0
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = False
    target_modules: Sequence[str] | str | None = None

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class AdamParams:
    """Hyper-parameters of one AdamW step; all of them may change from step to step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # 0 = no clipping


@dataclass(frozen=True)
class Datum:
    """One sequence: ``targets[i]`` is predicted from ``tokens[: i + 1]``.

    tokens (T,) · targets (T,) or (T, K) · weights like targets · extras: further loss inputs, each (T,) or like
    targets. What is (T, K) may be sparse: cells that it does not list are 0.
    """

    tokens: IntArray
    targets: IntArray | Csr
    weights: FloatArray | Csr | None = None
    extras: Mapping[str, FloatArray | Csr] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """How many targets a token has."""
        return self.targets.shape[1] if self.targets.ndim == 2 else 1

    @property
    def cells(self) -> int:
        """How many targets there are in all."""
        return self.targets.size

    @property
    def nbytes(self) -> int:
        """The memory of its arrays."""
        arrays = (self.tokens, self.targets, self.weights, *self.extras.values())
        return sum(array.nbytes for array in arrays if array is not None)


@dataclass(frozen=True)
class Preference:
    """What DPO needs beside pairs of answers, chosen and rejected in turn: a reference's log-probabilities of the
    targets, (T,) a datum; how dear it is to leave it; and how much the chosen answers count by themselves.
    """

    ref_logps: Sequence[FloatArray]
    beta: float = 0.1
    sft_weight: float = 0.0


@dataclass(frozen=True)
class TokenValues:
    """What the model says of the targets of one sequence: logprobs of their shape, the others (T,).

    entropies and predictions (the likeliest token) are empty unless statistics were asked for.
    """

    logprobs: FloatArray
    entropies: FloatArray
    predictions: IntArray


@dataclass(frozen=True)
class ObjectiveValue:
    """What an objective makes of a request: its loss, and the loss's slope in every value, one array a datum.

    ``logprobs`` have the shapes of the targets; ``entropies`` is empty where the loss does not depend on them.
    ``metrics`` are named ``name:reduction``.
    """

    loss: float
    logprobs: Sequence[FloatArray]
    entropies: Sequence[FloatArray] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


# A loss of a whole request, all its sequences together. It is called once, with one entry a datum in the order of the
# data; a TwinkleError that it raises fails its own request alone.
Objective = Callable[[Sequence[TokenValues]], ObjectiveValue]


@dataclass(frozen=True)
class TrainItem:
    """One request of one tenant: some sequences, one loss, one adapter.

    ``objective`` takes the place of a named loss. ``temperature`` divides the logits. ``statistics`` asks for entropies
    and predictions. ``base_model`` leaves the adapter out, in ``forward`` alone.
    """

    adapter_id: str
    data: Sequence[Datum]
    loss: str = "cross_entropy"
    loss_config: Mapping[str, float] = field(default_factory=dict)
    objective: Objective | None = None
    temperature: float = 1.0
    statistics: bool = False
    base_model: bool = False


@dataclass(frozen=True)
class TrainResult:
    """Target log-probabilities, one array a datum and shaped like its targets, and metrics named ``name:reduction``.

    ``values`` has one entry a datum if the item asked for statistics, else none.
    """

    logprobs: list[FloatArray]
    metrics: dict[str, float]
    values: tuple[TokenValues, ...] = ()


@dataclass(frozen=True)
class TrainFailure:
    """Why one item failed. Nothing of it was kept, and no other item noticed."""

    error: TwinkleError


@dataclass(frozen=True)
class AdapterSnapshot:
    """Everything needed to go on exactly: weights, Adam state, step count and the gradient of an open window.

    The arrays are flat float32 in the order of ``layout`` (see :mod:`twinkle.model.decoder.lora.stacks`); ``gradient``
    is None between windows.
    """

    spec: LoraSpec
    step: int
    layout: str
    weights: FloatArray
    exp_avg: FloatArray
    exp_avg_sq: FloatArray
    gradient: FloatArray | None


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes: in tensors, held by torch's allocator, on the device in all."""

    allocated: int
    reserved: int
    total: int


@dataclass(frozen=True)
class TrainerNumbers:
    """How a trainer is doing. Rows are of passes since the start: of tokens, and of padding beside them."""

    resident_adapters: int
    paged_adapters: int  # in host memory
    token_rows: int
    padding_rows: int
    memory: DeviceMemory | None = None  # None: it computes in host memory


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
