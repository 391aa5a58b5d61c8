"""The mock's trainer, and the model that trainer and sampler share.

An adapter is a vector w of eight numbers; with ``train_mode: full`` it is the only one, and begins as the base model's,
which is zero. The log-probability of a target y after token x at position i is

    lp = log σ(w · φ(x, y, i)),   φ₀ = 1, the others in [−1, 1]

so that losses have true gradients and training lowers them. An optimizer step is plain momentum, whose size grows with
the gradient (Adam would hide a gradient that was counted twice), and it also moves w₀ by a constant: w depends on its
first value, on the number and the parameters of steps, and on all data trained on. So tests notice a forward_backward
or a step that is lost, repeated or run out of order.
"""

import json
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from random import SystemRandom
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinkle.errors import (
    AdapterExistsError,
    AdapterNotFoundError,
    CapacityError,
    CheckpointError,
    InvalidInputError,
    NonFiniteError,
    NoOptimizerStateError,
    TwinkleError,
    UnknownNameError,
    UnsupportedError,
)
from twinkle.model.adapters.peft_config import peft_config
from twinkle.model.csr import dense
from twinkle.model.objectives.validation import check_data, check_recording
from twinkle.model.types import (
    EMPTY,
    AdamParams,
    AdapterSnapshot,
    Datum,
    FloatArray,
    FullSpec,
    IntArray,
    LoraSpec,
    TokenValues,
    TrainerNumbers,
    TrainFailure,
    TrainingSpec,
    TrainItem,
    TrainResult,
    check_adam_params,
)
from twinkle.server.backends.backend import TrainingBackend
from twinkle.server.types import stored_spec

SIZE = 8  # numbers in w
_LAYOUT = f"mock:{SIZE}"
_STEP = 0.01  # what every optimizer step adds to w₀
_MAX_RANK = 512
_NO_SPEC = LoraSpec(rank=1)  # for the base model, which the mock computes as an adapter of zeros
_WEIGHTS, _STATE, _PROGRESS = "adapter.npz", "state.json", "trainer_state.json"
_POLICY_INPUTS = ("logprobs", "advantages")
_CLIP = ("clip_low_threshold", "clip_high_threshold")


@dataclass(frozen=True)
class _Loss:
    name: str
    inputs: tuple[str, ...]
    optional_inputs: tuple[str, ...]
    config: tuple[str, ...]

    @property
    def allows_topk(self) -> bool:
        return self.name == "cross_entropy"


# Names and inputs are those of the real losses. All but cross_entropy have the objective of importance sampling.
_LOSSES = (
    _Loss("cross_entropy", (), ("weights",), ()),
    _Loss("importance_sampling", _POLICY_INPUTS, (), ()),
    _Loss("ppo", _POLICY_INPUTS, _CLIP, _CLIP),
    _Loss("cispo", _POLICY_INPUTS, _CLIP, _CLIP),
    _Loss("dro", _POLICY_INPUTS, (), ("beta",)),
    _Loss("gspo", (*_POLICY_INPUTS, "sequence_ratio_mask"), _CLIP, _CLIP),
)
LOSSES: Mapping[str, _Loss] = {loss.name: loss for loss in _LOSSES}

Doubles = NDArray[np.float64]


def features(tokens: IntArray, targets: IntArray, positions: IntArray) -> Doubles:
    """Return φ, (…, 8). The arguments broadcast. All values are exact in binary, so they are the same everywhere."""
    mixed = (tokens * 31 + targets * 17 + positions * 7)[..., None] + np.arange(SIZE) * 13
    phi = (mixed % 17 - 8) / 8.0
    phi[..., 0] = 1.0
    return phi


def logprobs(weights: FloatArray, phi: Doubles) -> Doubles:
    return -np.logaddexp(0.0, -(phi @ weights.astype(np.float64)))


# --- the trainer ------------------------------------------------------------------------------------------------------


@dataclass
class _Adapter:
    """An adapter with its optimizer; the fields are those of a snapshot without its layout."""

    spec: TrainingSpec
    weights: FloatArray
    exp_avg: FloatArray = field(default_factory=lambda: np.zeros(SIZE, np.float32))
    exp_avg_sq: FloatArray = field(default_factory=lambda: np.zeros(SIZE, np.float32))
    gradient: FloatArray | None = None
    step: int = 0
    optimizer: str = "Adam"
    scalars: Mapping[str, float] = field(default_factory=dict)


class MockTrainer(TrainingBackend):
    """A trainer without a model. Every batch of passes sleeps for ``pause`` seconds, and ``token_pause`` seconds more
    for each of its tokens.

    ``full``: it trains all parameters, of one run at a time, and not adapters.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 65_536,
        max_length: int = 4096,
        pause: float = 0.0,
        token_pause: float = 0.0,
        full: bool = False,
    ) -> None:
        self.full = full
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.pause = pause
        self.token_pause = token_pause
        self._rows = 0  # tokens of all passes
        self._adapters: dict[str, _Adapter] = {}

    def check_adapter(self, spec: TrainingSpec) -> None:
        self._checked(spec)

    def create_adapter(self, adapter_id: str, spec: TrainingSpec) -> TrainingSpec:
        if adapter_id in self._adapters:
            raise AdapterExistsError(adapter_id)
        checked = self._checked(spec)
        self._check_room(adapter_id)
        if isinstance(checked, FullSpec):
            self._adapters[adapter_id] = _Adapter(checked, np.zeros(SIZE, np.float32))
            return checked
        seed = checked.seed & (2**64 - 1) if checked.seed is not None else None
        self._adapters[adapter_id] = _Adapter(
            checked, np.random.default_rng(seed).uniform(-1, 1, SIZE).astype(np.float32)
        )
        return checked

    def _checked(self, spec: TrainingSpec) -> TrainingSpec:
        if isinstance(spec, FullSpec) is not self.full:
            raise InvalidInputError("spec", spec, "a FullSpec" if self.full else "a LoraSpec")
        return spec if isinstance(spec, FullSpec) else _check_spec(spec)

    def _check_room(self, adapter_id: str) -> None:
        if self.full and set(self._adapters) - {adapter_id}:
            raise CapacityError("this model trains all its parameters for one run at a time, and another run holds it")

    def remove_adapter(self, adapter_id: str) -> None:
        self._get(adapter_id)
        del self._adapters[adapter_id]

    def adapter_ids(self) -> list[str]:
        return list(self._adapters)

    def host_bytes(self) -> int:
        return sum(self.host_bytes_of(adapter.spec) for adapter in list(self._adapters.values()))

    def host_bytes_of(self, spec: TrainingSpec) -> int:
        """Return a kilobyte for each rank, or one for all parameters."""
        return 1024 * (1 if isinstance(spec, FullSpec) else spec.rank)

    def numbers(self) -> TrainerNumbers:
        return TrainerNumbers(len(self._adapters), 0, self._rows, 0)

    def vocabulary_size(self) -> int:
        return self.vocab_size

    def vector(self, adapter_id: str) -> FloatArray:
        return self._get(adapter_id).weights.copy()

    def shapes(self, adapter_id: str) -> dict[str, tuple[int, ...]]:
        return {"w": self._get(adapter_id).weights.shape}

    def weights(self, adapter_id: str) -> dict[str, FloatArray]:
        return {"w": self.vector(adapter_id)}

    def peft_config(self, adapter_id: str) -> dict[str, object]:
        spec = self._get(adapter_id).spec
        if isinstance(spec, FullSpec):
            raise UnsupportedError("peft_config: all parameters are trained, and there is no adapter")
        return peft_config(spec, ("w",), "mock")

    def forward(self, items: Sequence[TrainItem]) -> list[TrainResult | TrainFailure]:
        return self._run(items, train=False)

    def forward_backward(self, items: Sequence[TrainItem]) -> list[TrainResult | TrainFailure]:
        return self._run(items, train=True)

    def optim_step(
        self, adapter_id: str, params: AdamParams, *, decoupled: bool = True, decay_norms: bool = True
    ) -> dict[str, float]:
        """Make a step of plain momentum, after clipping and weight decay. Without a gradient nothing changes.

        ``decoupled`` and ``decay_norms`` have no effect: there is no Adam here, and there are no norms.
        """
        adapter = self._get(adapter_id)
        check_adam_params(params)
        if adapter.gradient is None:
            return {"unclipped_grad_l2:mean": 0.0, "no_gradient:max": 1.0}
        gradient = adapter.gradient
        norm = float(np.linalg.norm(gradient.astype(np.float64)))
        if params.grad_clip_norm > 0:
            gradient = gradient * np.float32(min(1.0, params.grad_clip_norm / (norm + 1e-6)))
        adapter.exp_avg = (params.beta1 * adapter.exp_avg + gradient).astype(np.float32)
        adapter.exp_avg_sq = (params.beta2 * adapter.exp_avg_sq + gradient**2).astype(np.float32)
        decayed = adapter.weights * (1 - params.learning_rate * params.weight_decay)
        adapter.weights = (decayed - params.learning_rate * adapter.exp_avg).astype(np.float32)
        adapter.weights[0] += _STEP
        adapter.gradient = None
        adapter.step += 1
        return {"unclipped_grad_l2:mean": norm}

    def optimizer_step(
        self, adapter_id: str, name: str, settings: Mapping[str, Any], *, decay_norms: bool = True
    ) -> dict[str, float]:
        """Make the same step as :meth:`optim_step`, with the learning rate and the weight decay of the settings."""
        decay = float(settings.get("weight_decay", 0.0))
        return self.optim_step(adapter_id, AdamParams(learning_rate=float(settings["lr"]), weight_decay=decay))

    def zero_grad(self, adapter_id: str) -> None:
        self._get(adapter_id).gradient = None

    def scale_gradient(self, adapter_id: str, factor: float) -> None:
        adapter = self._get(adapter_id)
        if adapter.gradient is not None:
            adapter.gradient = (adapter.gradient * np.float32(factor)).astype(np.float32)

    def gradient_norm(self, adapter_id: str, norm_type: float = 2.0) -> float:
        gradient = self._get(adapter_id).gradient
        return 0.0 if gradient is None else float(np.linalg.norm(gradient.astype(np.float64), norm_type))

    def snapshot(self, adapter_id: str) -> AdapterSnapshot:
        return AdapterSnapshot(layout=_LAYOUT, **vars(deepcopy(self._get(adapter_id))))

    def restore(self, adapter_id: str, snapshot: AdapterSnapshot) -> None:
        if snapshot.layout != _LAYOUT:
            raise InvalidInputError("snapshot.layout", snapshot.layout, _LAYOUT)
        spec = self._checked(snapshot.spec)
        self._check_room(adapter_id)
        own = {each.name: deepcopy(getattr(snapshot, each.name)) for each in fields(_Adapter)}
        self._adapters[adapter_id] = _Adapter(**{**own, "spec": spec})

    def prepare_save(
        self,
        adapter_id: str,
        optimizer: bool = True,
        state: Mapping[str, object] = EMPTY,
        companions: Callable[[Path], None] | None = None,
        synced: bool = True,
    ) -> Callable[[Path], None]:
        adapter = deepcopy(self._get(adapter_id))
        arrays = {"weights": adapter.weights}
        if optimizer:
            arrays |= {"exp_avg": adapter.exp_avg, "exp_avg_sq": adapter.exp_avg_sq}

        def write(directory: Path) -> None:
            """Write adapter.npz and the state files in place of the directory, which appears whole or not at all."""
            staging = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.tmp")
            staging.mkdir(parents=True)
            np.savez(staging / _WEIGHTS, allow_pickle=False, **arrays)
            own = {"layout": _LAYOUT, "step": adapter.step, "spec": stored_spec(adapter.spec)}
            (staging / _STATE).write_text(json.dumps(own))
            if state:
                (staging / _PROGRESS).write_text(json.dumps(dict(state)))
            if companions is not None:
                companions(staging)
            if directory.exists():
                shutil.rmtree(directory)
            os.replace(staging, directory)

        return write

    def load(self, adapter_id: str, directory: str | Path, optimizer: bool = True) -> None:
        adapter = self._get(adapter_id)
        arrays, state = read_checkpoint(Path(directory))
        held, own = state["spec"].get("rank"), stored_spec(adapter.spec).get("rank")
        if held != own:
            raise CheckpointError(f"{directory} holds rank {held}, the adapter has {own} (None: all parameters)")
        if optimizer and "exp_avg" not in arrays:
            raise NoOptimizerStateError(f"{directory} holds no optimizer state; load it with optimizer=False")
        fresh = _Adapter(adapter.spec, arrays["weights"])
        if optimizer:
            fresh.exp_avg, fresh.exp_avg_sq, fresh.step = arrays["exp_avg"], arrays["exp_avg_sq"], state["step"]
        self._adapters[adapter_id] = fresh

    def _get(self, adapter_id: str) -> _Adapter:
        if adapter_id not in self._adapters:
            raise AdapterNotFoundError(adapter_id)
        return self._adapters[adapter_id]

    def _run(self, items: Sequence[TrainItem], *, train: bool) -> list[TrainResult | TrainFailure]:
        time.sleep(self.pause + self.token_pause * sum(len(datum.tokens) for item in items for datum in item.data))
        results: list[TrainResult | TrainFailure] = []
        for item in items:
            try:
                results.append(self._pass(item, train))
            except TwinkleError as error:
                results.append(TrainFailure(error))
        return results

    def _pass(self, item: TrainItem, train: bool) -> TrainResult:
        if item.base_model and train:
            raise InvalidInputError("base_model", True, "False: the base model is not trained")
        if item.base_model and self.full:
            raise UnsupportedError("base_model: got True, allowed: False: a run trains all parameters of this model")
        adapter = _Adapter(_NO_SPEC, np.zeros(SIZE, np.float32)) if item.base_model else self._get(item.adapter_id)
        if item.output != "logps":
            raise UnsupportedError(f"{item.output}: the mock backend has no model; it computes log-probabilities")
        _check_item(item, self.vocab_size, self.max_length)
        item = replace(item, data=[_written_out(datum) for datum in item.data])
        self._rows += sum(len(datum.tokens) for datum in item.data)
        phis = [_features_of(datum) for datum in item.data]
        lps = [logprobs(adapter.weights, phi) for phi in phis]
        metrics: Mapping[str, float] = {}
        if item.objective is None:
            parts = [_terms(item.loss, lp, datum) for lp, datum in zip(lps, item.data, strict=True)]
            loss, slopes = sum(float(terms.sum()) for terms, _ in parts), [slope for _, slope in parts]
        else:
            value = item.objective([_values(lp) for lp in lps])
            loss, metrics = value.loss, value.metrics
            slopes = [slope.astype(np.float64) for slope in value.logprobs]
        gradient = np.zeros(SIZE)
        for lp, phi, slope in zip(lps, phis, slopes, strict=True):
            gradient += np.tensordot(slope * -np.expm1(lp), phi, axes=lp.ndim)  # dlp/ds = 1 − σ(s)
        earlier = 0.0 if adapter.gradient is None else adapter.gradient
        with np.errstate(over="ignore", invalid="ignore"):
            total = (earlier + gradient).astype(np.float32)
        if not math.isfinite(loss) or not np.isfinite(total).all():
            raise NonFiniteError(f"loss {item.loss!r} or its gradient holds NaN or infinity: nothing was kept")
        if train:
            adapter.gradient = total
        results = [lp.astype(np.float32) for lp in lps]
        values = tuple(_values(lp) for lp in lps) if item.statistics else ()
        return TrainResult(results, {"loss:sum": loss, **metrics}, values)


def _written_out(datum: Datum) -> Datum:
    """Return the datum with dense arrays, and without extras of another shape than its targets: no loss reads them."""
    weights = None if datum.weights is None else dense(datum.weights)
    extras = {name: dense(array) for name, array in datum.extras.items() if array.shape == datum.targets.shape}
    return Datum(datum.tokens, dense(datum.targets), weights, extras)


def _features_of(datum: Datum) -> Doubles:
    columns = (len(datum.tokens), *([1] * (datum.targets.ndim - 1)))
    return features(datum.tokens.reshape(columns), dense(datum.targets), np.arange(columns[0]).reshape(columns))


def _values(lp: Doubles) -> TokenValues:
    """Return values of each token. The mock knows only two choices: the target, or any other token.

    The entropy is that of these two; the likeliest token is always 0, because the mock does not know it.
    """
    entropies = -(np.exp(lp) * lp + -np.expm1(lp) * np.log(np.maximum(-np.expm1(lp), 1e-30)))
    return TokenValues(lp.astype(np.float32), entropies.astype(np.float32), np.zeros(len(lp), np.int64))


def _terms(loss: str, lp: Doubles, datum: Datum) -> tuple[Doubles, Doubles]:
    """Return the loss of each target and its derivative by lp."""
    if loss == "cross_entropy":
        weights = np.ones_like(lp) if datum.weights is None else dense(datum.weights).astype(np.float64)
        return -weights * lp, -weights
    advantages = dense(datum.extras["advantages"]).astype(np.float64)
    with np.errstate(over="ignore"):
        ratio = np.exp(np.where(advantages != 0, lp - dense(datum.extras["logprobs"]), 0.0))
        return -ratio * advantages, -ratio * advantages


def _check_item(item: TrainItem, vocab_size: int, max_length: int) -> None:
    """Check an item as :func:`twinkle.model.objectives.validation.check_item` does, which imports torch for losses."""
    if item.loss not in LOSSES:
        raise UnknownNameError("loss", item.loss, LOSSES)
    loss = LOSSES[item.loss]
    for key, value in item.loss_config.items():
        if key not in loss.config:
            raise UnknownNameError(f"config key of loss {item.loss}", key, loss.config or ("none",))
        if not math.isfinite(value):
            raise InvalidInputError(f"loss_config.{key}", value, "a finite number")
    check_data(item.data, loss, vocab_size=vocab_size, max_length=max_length)
    check_recording(item.records_routes, None, "records_routes")


def _check_spec(spec: LoraSpec) -> LoraSpec:
    if not 1 <= spec.rank <= _MAX_RANK:
        raise InvalidInputError("rank", spec.rank, f"an integer in [1, {_MAX_RANK}]")
    if not (spec.train_attn or spec.train_mlp or spec.train_unembed):
        raise InvalidInputError("train_attn, train_mlp, train_unembed", False, "at least one of them true")
    return spec if spec.seed is not None else replace(spec, seed=SystemRandom().randrange(2**63))


def read_checkpoint(directory: Path) -> tuple[dict[str, FloatArray], dict[str, Any]]:
    try:
        with np.load(directory / _WEIGHTS, allow_pickle=False) as file:
            arrays = dict(file)
        state = json.loads((directory / _STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"could not read {directory}: {error}") from error
    if state["layout"] != _LAYOUT:
        raise CheckpointError(f"{directory}: layout: got {state['layout']!r}, allowed: {_LAYOUT}")
    return arrays, state
