"""The reference for the trainer: a Transformers model with PEFT adapters, one tenant and one sequence at a time.

Losses are computed from full logits, the optimizer is ``torch.optim.AdamW`` and clipping is torch's. From Twinkle only
the request types are used. The models are small and random. Their weights are large enough for attention and positions
to matter, so a token that leaks from one sequence into another changes the result. This module also holds data and
comparisons that several tests share.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import peft
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.support.models.split_projections import split_projections
from twinkle.model import AdamParams, AdapterSnapshot, Datum, LoraSpec, Trainer, TrainItem

Arrays = Mapping[str, NDArray[np.float32]]

TOLERANCE = 1e-5  # fp32: the bound on what may differ from plain torch


def tolerance_of(family: str) -> float:
    """Return the bound for a family with experts, on which the tests have large adapters.

    Linear attention divides keys by their length, which magnifies rounding: sums in another order differ by up to
    1.5e-5 in gradients.
    """
    return 3e-5 if family == "qwen3_5_moe" else TOLERANCE


# --- models -----------------------------------------------------------------------------------------------------------


@cache
def _llama(seed: int, **config: object) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**config)).eval()


def toy_llama(**changes: object) -> PreTrainedModel:
    """Return a fresh copy of a Llama with hidden size 64."""
    config = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
    }
    return copy.deepcopy(_llama(0, **(config | changes)))


def wide_llama(**changes: object) -> PreTrainedModel:
    """Return a fresh copy of a Llama with hidden size 512. Toy models can be bit-equal where real models are not."""
    config = {
        "vocab_size": 1000,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.04,
        "tie_word_embeddings": False,
    }
    return copy.deepcopy(_llama(1, **(config | changes)))


MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {"toy": toy_llama, "wide": wide_llama}


# --- one tenant -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReferenceResult:
    logprobs: list[NDArray[np.float32]]
    loss: float


class Reference:
    """One tenant's PEFT adapter, starting from ``weights`` (by PEFT's names, as the trainer reports them)."""

    def __init__(
        self, base: PreTrainedModel, spec: LoraSpec, weights: Arrays, config: peft.LoraConfig | None = None
    ) -> None:
        """``config``: used as it is, instead of one with the spec's rank and alpha for the modules of ``weights``."""
        modules = sorted({name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in weights})
        if config is None:
            config = peft.LoraConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=modules, lora_dropout=0.0)
        plain = copy.deepcopy(base)
        if any(name.endswith("in_proj_q") for name in modules):
            plain = split_projections(plain)
        self.model = peft.get_peft_model(plain, config)
        self._parameters = {
            name.replace(".default.", "."): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        assert self._parameters.keys() == weights.keys()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(torch.from_numpy(weights[name]))
        self._optimizer = torch.optim.AdamW(self._parameters.values())

    def forward_backward(self, item: TrainItem) -> ReferenceResult:
        """Add the gradient of the request, sequence by sequence."""
        result = ReferenceResult([], 0.0)
        for datum in item.data:
            logprobs = target_logprobs(self.model, datum)
            loss = LOSSES[item.loss](logprobs.double(), loss_inputs(item, datum)).sum()
            loss.backward()
            result.logprobs.append(logprobs.detach().numpy())
            result = ReferenceResult(result.logprobs, result.loss + loss.item())
        return result

    def optim_step(self, params: AdamParams) -> float:
        """Take a step, clear the gradient, and return its norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), params.grad_clip_norm or math.inf)
        for group in self._optimizer.param_groups:
            group["lr"] = params.learning_rate
            group["betas"] = (params.beta1, params.beta2)
            group["eps"] = params.eps
            group["weight_decay"] = params.weight_decay
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm.item()

    def weights(self) -> dict[str, NDArray[np.float32]]:
        return {name: parameter.detach().numpy().copy() for name, parameter in self._parameters.items()}

    def gradients(self) -> dict[str, NDArray[np.float32]]:
        return {
            name: parameter.grad.numpy().copy()
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        }


def target_logprobs(model: torch.nn.Module, datum: Datum) -> Tensor:
    """Return log p(targets) of one sequence, computed from its full logits and shaped like the targets."""
    logits_TV = model(input_ids=torch.from_numpy(datum.tokens)[None], **seen(datum)).logits[0].float()
    return pick(logits_TV.log_softmax(-1), datum)


def seen(datum: Datum) -> dict[str, Tensor]:
    """Return the further arguments of a vision model, whose tokens of images have 2 × 2 patches."""
    if not datum.images:
        return {}
    types = np.zeros(len(datum.tokens), np.int64)
    for image in datum.images:
        types[image.first : image.first + image.tokens] = 1
    return {
        "pixel_values": torch.from_numpy(np.concatenate([image.pixels for image in datum.images])),
        "image_grid_thw": torch.tensor([(1, 2 * image.rows, 2 * image.columns) for image in datum.images]),
        "mm_token_type_ids": torch.from_numpy(types)[None],
    }


def padded_logprobs(model: torch.nn.Module, data: Sequence[Datum]) -> list[Tensor]:
    """Return :func:`target_logprobs` of several sequences, computed in one batch, padded on the right and masked."""
    longest = max(len(datum.tokens) for datum in data)
    rows = [np.pad(datum.tokens, (0, longest - len(datum.tokens))) for datum in data]
    mask = [np.arange(longest) < len(datum.tokens) for datum in data]
    logits_NLV = model(
        input_ids=torch.from_numpy(np.stack(rows)), attention_mask=torch.from_numpy(np.stack(mask)).long()
    ).logits.float()
    return [
        pick(logits_LV[: len(datum.tokens)].log_softmax(-1), datum)
        for logits_LV, datum in zip(logits_NLV, data, strict=True)
    ]


def pick(logprobs_TV: Tensor, datum: Datum) -> Tensor:
    targets = torch.from_numpy(datum.targets)
    return logprobs_TV.gather(1, targets.reshape(len(targets), -1)).reshape(targets.shape)


# --- how exact a result in fp32 can be --------------------------------------------------------------------------------


class KeepFp64(TorchFunctionMode):
    """Replace fp32 with fp64 in calls of torch.

    Model files compute norms and softmax in fp32, whatever their weights are.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


@dataclass(frozen=True)
class ExactLogprobs:
    """Log-probabilities of the next token in fp64, and how far a correct fp32 computation may be away from them."""

    values_TV: NDArray[np.float64]
    bound_TV: NDArray[np.float64]

    def rows(self, rows: NDArray[np.int64] | slice) -> "ExactLogprobs":
        return ExactLogprobs(self.values_TV[rows], self.bound_TV[rows])

    def at(self, ids_TK: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the values of the given tokens at each position, and their bounds; both are (T, K)."""
        return np.take_along_axis(self.values_TV, ids_TK, axis=1), np.take_along_axis(self.bound_TV, ids_TK, axis=1)


def exact_logprobs(model: PreTrainedModel, tokens: NDArray[np.int64], changes: int = 8) -> ExactLogprobs:
    """Run the plain model in fp64, once unchanged and ``changes`` times with slightly perturbed weights.

    A sum of n products in fp32 is the exact sum of products whose factors have a relative error of about √n·u, u =
    2⁻²⁴, from n roundings up or down. So weights with random errors of this size show what rounding does to the result,
    including whatever the model amplifies or damps. This estimate is the same on every machine. The bound of a position
    is five standard deviations of it; among some 10⁴ normal numbers none is further away. The bound is never smaller
    than ``TOLERANCE``.
    """
    generator = torch.Generator().manual_seed(0)
    exact = copy.deepcopy(model).double()
    weights = {name: parameter.detach().clone() for name, parameter in exact.named_parameters()}
    length = max(len(tokens), *(size for weight in weights.values() for size in weight.shape[1:]))
    scale = math.sqrt(length) * 2.0**-24

    def logprobs() -> NDArray[np.float64]:
        return exact(input_ids=torch.from_numpy(tokens)[None]).logits[0].log_softmax(-1).numpy()

    with torch.no_grad(), KeepFp64():
        values_TV = logprobs()
        squares_TV = np.zeros_like(values_TV)
        for _ in range(changes):
            for name, parameter in exact.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(weights[name] * (1 + scale * noise))
            squares_TV += np.square(logprobs() - values_TV)
    deviation_T1 = np.sqrt(squares_TV.mean(axis=1, keepdims=True) / changes)
    allowed_TV = TOLERANCE * np.maximum(1.0, np.abs(values_TV))
    return ExactLogprobs(values_TV, np.maximum(allowed_TV, 5 * deviation_T1))


# --- the losses of one sequence, as Tinker documents them -------------------------------------------------------------


def loss_inputs(item: TrainItem, datum: Datum) -> dict[str, Tensor]:
    """Return all inputs of the loss except the log-probabilities.

    A datum's values for each token override the configuration.
    """
    given = DEFAULTS[item.loss] | dict(item.loss_config) | dict(datum.extras)
    given["weights"] = 1.0 if datum.weights is None else datum.weights
    return {name: torch.as_tensor(value, dtype=torch.float64) for name, value in given.items()}


def _cross_entropy(lp: Tensor, x: Mapping[str, Tensor]) -> Tensor:
    return -x["weights"] * lp


def _importance_sampling(lp: Tensor, x: Mapping[str, Tensor]) -> Tensor:
    return -(lp - x["logprobs"]).exp() * x["advantages"]


def _ppo(lp: Tensor, x: Mapping[str, Tensor]) -> Tensor:
    return -_smaller((lp - x["logprobs"]).exp(), x)


def _cispo(lp: Tensor, x: Mapping[str, Tensor]) -> Tensor:
    ratio = (lp - x["logprobs"]).exp().detach()
    return -ratio.clamp(x["clip_low_threshold"], x["clip_high_threshold"]) * lp * x["advantages"]


def _dro(lp: Tensor, x: Mapping[str, Tensor]) -> Tensor:
    return -(lp * x["advantages"] - x["beta"] / 2 * (lp - x["logprobs"]).square())


def _gspo(lp: Tensor, x: Mapping[str, Tensor]) -> Tensor:
    mean = (lp.detach() - x["logprobs"])[x["sequence_ratio_mask"] != 0].mean()
    return -_smaller((mean + (lp - lp.detach())).exp(), x)


def _smaller(ratio: Tensor, x: Mapping[str, Tensor]) -> Tensor:
    clipped = ratio.clamp(x["clip_low_threshold"], x["clip_high_threshold"])
    return torch.minimum(ratio * x["advantages"], clipped * x["advantages"])


LOSSES: Mapping[str, Callable[[Tensor, Mapping[str, Tensor]], Tensor]] = {
    "cispo": _cispo,
    "cross_entropy": _cross_entropy,
    "dro": _dro,
    "gspo": _gspo,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
}

DEFAULTS: Mapping[str, dict[str, float]] = {
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "cross_entropy": {},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
}


# --- data -------------------------------------------------------------------------------------------------------------


def random_datum(model: PreTrainedModel, loss: str, length: int, seed: int, width: int = 0) -> Datum:
    """Return a sequence with all inputs that ``loss`` needs.

    width: K of (T, K) targets; 0 for (T,). The sampling log-probabilities lie around those of the base model, so that
    the ratios of tokens and of sequences fall on both sides of the usual clip bounds. About a fifth of the tokens, the
    prompt, have advantage 0. Weights and advantages have both signs but are mostly positive: otherwise large terms
    would cancel, and a loss near zero would have no digits to compare.
    """
    rng = np.random.default_rng(seed)
    vocab = model.config.vocab_size
    tokens = rng.integers(0, vocab, length)
    targets = rng.integers(0, vocab, (length, width) if width else length)
    if loss == "cross_entropy":
        return Datum(tokens, targets, rng.uniform(-0.5, 1.5, targets.shape).astype(np.float32))
    with torch.no_grad():
        known = target_logprobs(model, Datum(tokens, targets)).numpy()
    advantages = rng.uniform(-0.5, 1.5, length)
    advantages[: length // 5] = 0.0
    extras = {
        "logprobs": known + rng.uniform(-0.6, 0.6, length) + rng.uniform(-0.5, 0.5),
        "advantages": advantages,
    }
    if loss == "gspo":
        extras["sequence_ratio_mask"] = (np.arange(length) >= length // 5).astype(np.float32)
    return Datum(tokens, targets, extras={name: value.astype(np.float32) for name, value in extras.items()})


# --- adapters ---------------------------------------------------------------------------------------------------------


def with_random_weights(trainer: Trainer, adapter_id: str, seed: int = 0, size: float = 0.05) -> AdapterSnapshot:
    """Return a snapshot in which A and B are both random.

    At B = 0 the gradient of A is zero and would hide mistakes.
    """
    snapshot, used = trainer.snapshot(adapter_id), used_parameters(trainer, adapter_id)
    noise = np.random.default_rng(seed).normal(size=snapshot.weights.shape) * size
    return replace(snapshot, weights=np.where(used, noise, 0).astype(np.float32))


def used_parameters(trainer: Trainer, adapter_id: str) -> NDArray[np.bool_]:
    """Return which elements of the flat row are weights and not padding of the rank bucket."""
    layout = trainer._pool.get(adapter_id).layout
    ranks = trainer.spec(adapter_id).module_ranks([target.name for target in layout.targets])
    row_P = torch.zeros(layout.size)
    for target, rank in zip(layout.targets, ranks, strict=True):
        a_RI, b_OR = layout.views(row_P, target.name)
        a_RI[..., :rank, :] = 1
        b_OR[..., :rank] = 1
    return row_P.numpy() != 0


# --- comparison -------------------------------------------------------------------------------------------------------


def relative_error(ours: NDArray[np.generic], theirs: NDArray[np.generic]) -> float:
    """Return ‖a − b‖₂ / ‖b‖₂. If b is zero, a must be zero too."""
    norm = float(np.linalg.norm(theirs.astype(np.float64)))
    distance = float(np.linalg.norm(ours.astype(np.float64) - theirs))
    return distance / norm if norm > 0 else (math.inf if distance > 0 else 0.0)


def assert_tensors_close(ours: Arrays, theirs: Arrays, tolerance: float = TOLERANCE) -> None:
    """Compare weights or gradients, tensor by tensor."""
    assert ours.keys() == theirs.keys()
    errors = {name: relative_error(ours[name], theirs[name]) for name in theirs}
    far = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not far, f"relative errors above {tolerance}: {far}"


def assert_numbers_close(ours: object, theirs: object, tolerance: float = TOLERANCE) -> None:
    """Compare losses or log-probabilities, number by number."""
    left, right = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert left.shape == right.shape
    excess = np.abs(left - right) / np.maximum(1.0, np.abs(right))
    assert (excess <= tolerance).all(), f"largest difference {excess.max()} above {tolerance}"


def assert_within(ours: NDArray[np.float32], exact: NDArray[np.float64], bound: NDArray[np.float64]) -> None:
    """Compare fp32 numbers with exact ones; each has its own bound (see :func:`exact_logprobs`)."""
    assert ours.shape == exact.shape == bound.shape
    excess = np.abs(ours - exact) / bound
    assert (excess <= 1).all(), f"largest difference {excess.max()} times what rounding can do"


def assert_logprobs_close(
    ours: Sequence[NDArray[np.float32]], theirs: Sequence[NDArray[np.float32]], tolerance: float = TOLERANCE
) -> None:
    assert len(ours) == len(theirs)
    for left, right in zip(ours, theirs, strict=True):
        assert_numbers_close(left, right, tolerance)
