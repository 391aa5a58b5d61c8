"""A check of model families that the tests do not cover: the engine must agree with the model's own forward pass.

It runs when a trainer is built. Two sequences, each with its own adapter, go through the plain model one at a time,
with its own attention and the adapters as plain hooks; then both go through the engine together. This finds a family
that mixes neighbours in a packed row, scales logits in its own way, or calls its linear layers with rows in another
order, before a tenant trains on it. It does not find differences that only long sequences show (a sliding window larger
than ``_LARGEST_WINDOW``).

In bf16 the engine replays the routes of the plain model to its experts. Where two experts are about as likely, rounding
decides, and other experts have other outputs: with 256 experts in 40 layers the difference would be half the spread.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from twinkle.errors import UnsupportedError
from twinkle.loss import get_loss
from twinkle.model.adapters.adapter import Adapter
from twinkle.model.decoder.architecture import TESTED_FAMILIES, Architecture
from twinkle.model.decoder.attention import PACKED
from twinkle.model.decoder.experts.replay import PassRoutes, watch_routers
from twinkle.model.decoder.loading import set_attention
from twinkle.model.decoder.lora.stacks import RowLayout, Stack, initial_row
from twinkle.model.decoder.precision import hide_bf16_trace
from twinkle.model.objectives.validation import CheckedDatum, CheckedItem
from twinkle.model.trainer.batch import Part
from twinkle.model.trainer.engine import Engine
from twinkle.model.types import FloatArray, IntArray, LoraSpec, RouteArray

_RANK = 8
_B_SCALE = 0.2
_SHORTEST = 24  # tokens
_LARGEST_WINDOW = 8192
_SCORED = 16  # tokens at either end of a sequence that are compared
# Bounds of ‖difference‖ divided by the spread of the log-probabilities. A Llama of 135M parameters has 1e-5 in fp32 and
# 0.05 in bf16 if everything is right, 0.3 with the two adapters exchanged, 0.7 when one sequence sees the other.
_BOUND_FP32 = 1e-3
_BOUND_BF16 = 0.15


@dataclass(frozen=True)
class Reference:
    """Sequences, the adapter of each as a flat row (P,), and the plain model's log-probabilities of scored tokens.

    ``routes``: to the experts, for each sequence; None where the engine's own routers choose.
    """

    family: str
    layout: RowLayout
    tokens: tuple[IntArray, ...]
    rows: tuple[Tensor, ...]
    logprobs: tuple[FloatArray, ...]
    routes: tuple[RouteArray | None, ...]


def plain_logprobs(
    model: PreTrainedModel, architecture: Architecture, *, with_adapters: bool = True
) -> Reference | None:
    """Return the plain model's log-probabilities; None for TESTED_FAMILIES, which need no check.

    This must be called before an engine replaces the model's layers. Without ``with_adapters`` both adapters are zero:
    a model whose own weights are trained has none.
    """
    family = model.config.model_type
    if family in TESTED_FAMILIES:
        return None
    layout = RowLayout(_RANK, architecture.linear)
    tokens = _tokens(model, architecture)
    scale = _B_SCALE if with_adapters else 0.0
    rows = tuple(_row(layout, seed, scale).to(model.device) for seed in range(len(tokens)))
    layers = list(model.get_submodule(architecture.layers_path).children())
    routers = None if model.dtype == torch.float32 else watch_routers(layers)
    passes = [None if routers is None else PassRoutes(records=True) for _ in tokens]
    logprobs = []
    with torch.no_grad(), _own_attention(model), warnings.catch_warnings():
        hide_bf16_trace()
        for row_P, each, routes in zip(rows, tokens, passes, strict=True):
            with nullcontext() if routers is None else routers.use(routes):
                logprobs.append(_plain(model, layout, row_P, each))
    if routers is not None:
        routers.remove()
    recorded = tuple(None if each is None else each.recorded(len(layers)).cpu().numpy() for each in passes)
    return Reference(family, layout, tokens, rows, tuple(logprobs), recorded)


def check_engine(engine: Engine, reference: Reference | None) -> None:
    """Raise :class:`UnsupportedError` where the engine and the plain model disagree."""
    if reference is None:
        return
    dtype = engine.head.spec.weight_VH.dtype
    stack = Stack(reference.layout, dtype, engine.device)
    stack.add_block()
    given = zip(reference.rows, reference.tokens, reference.routes, strict=True)
    parts = [_part(stack, index, *each) for index, each in enumerate(given)]
    try:
        logprobs_T = np.concatenate(engine.forward(parts).values)[:, 0]
    except TypeError as error:  # a layer was called without the batch, or with arguments that it does not take
        raise UnsupportedError(
            f"{reference.family}: its layers cannot serve several adapters at once: {error}"
        ) from error
    ends = np.cumsum([len(tokens) for tokens in reference.tokens])[:-1]
    ours = np.concatenate([each[_scored(len(each))] for each in np.split(logprobs_T, ends)])
    theirs = np.concatenate(reference.logprobs)
    deviation = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs - theirs.mean()))
    bound = _BOUND_FP32 if dtype == torch.float32 else _BOUND_BF16
    if not deviation <= bound:
        mode = "padded" if engine.architecture.padded else "packed"
        raise UnsupportedError(
            f"{reference.family}: run {mode}, its log-probabilities differ from the model's own by {deviation:.1e} of "
            f"their spread ({bound:g} is allowed), so training on it would be wrong. Please report this family, or use "
            f"one that is known to work: {', '.join(sorted(TESTED_FAMILIES))}"
        )


def _tokens(model: PreTrainedModel, architecture: Architecture) -> tuple[IntArray, ...]:
    """Return two sequences, both longer than the sliding window if that is feasible.

    Token ids come from the middle of the vocabulary, where there are no special tokens.
    """
    window = model.config.get_text_config().to_dict().get("sliding_window") or 0
    length = max(_SHORTEST, window + _SCORED) if window <= _LARGEST_WINDOW else _SHORTEST
    length = min(length, architecture.max_length)
    vocab, generator = architecture.vocab_size, np.random.default_rng(0)
    return tuple(generator.integers(vocab // 4, vocab // 2, size) for size in (max(1, length - 7), length))


def _scored(length: int) -> slice | IntArray:
    """Return the rows to compare: the first ones show mixing with neighbours, the last ones wrong sliding windows."""
    if length <= 2 * _SCORED:
        return slice(length)
    return np.r_[:_SCORED, length - _SCORED : length]


def _row(layout: RowLayout, seed: int, b_scale: float) -> Tensor:
    row_P = initial_row(layout, [_RANK] * len(layout.targets), seed)
    generator = torch.Generator().manual_seed(seed)
    row_P[layout.a_size :].normal_(0, b_scale / _RANK**0.5, generator=generator)
    return row_P


def _plain(model: PreTrainedModel, layout: RowLayout, row_P: Tensor, tokens: IntArray) -> FloatArray:
    ids_T = torch.from_numpy(tokens).to(model.device)
    with _hooks(model, layout, row_P):
        logits_TV = model(input_ids=ids_T[None]).logits[0]  # a plain call: some families differ without a cache
    rows = _scored(len(tokens))
    logprobs_SV = logits_TV[rows].float().log_softmax(-1)
    return logprobs_SV.gather(1, ids_T[rows][:, None])[:, 0].cpu().numpy()


@contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[None]:
    if model.config.get_text_config()._attn_implementation != PACKED:
        yield
        return
    set_attention(model, "eager")
    try:
        yield
    finally:
        set_attention(model, PACKED)


@contextmanager
def _hooks(model: PreTrainedModel, layout: RowLayout, row_P: Tensor) -> Iterator[None]:
    """Apply an adapter in the plain way: a hook on each target module adds B A x to its output."""
    handles, row_P = [], row_P.to(model.dtype)
    for target in layout.targets:
        a_RI, b_OR = layout.views(row_P, target.name)

        def add(module: nn.Module, args: tuple[Tensor], output: Tensor, a: Tensor = a_RI, b: Tensor = b_OR) -> Tensor:
            return output + args[0] @ a.t() @ b.t()

        handles.append(model.get_submodule(target.name).register_forward_hook(add))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _part(stack: Stack, index: int, row_P: Tensor, tokens: IntArray, routes: RouteArray | None) -> Part:
    adapter = Adapter.fresh(f"check-{index}", LoraSpec(_RANK, alpha=_RANK, seed=index), stack, row_P)
    adapter.slot = stack.take()
    adapter.refresh_compute_copy()
    datum = CheckedDatum(tokens, tokens[:, None], {}, tokens.shape, routes=routes)
    item = CheckedItem(adapter.adapter_id, get_loss("cross_entropy"), {}, (datum,))
    return Part(index, item, adapter, item.data)
