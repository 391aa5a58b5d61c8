"""Causal attention over packed sequences, plugged into transformers through its ``AttentionInterface``.

A packed batch is one row of tokens; no token may see another sequence. transformers passes every keyword argument of
the model's forward on to the attention function, so the bounds of the sequences are passed as a :class:`Packing`. On
CUDA this uses our own kernels where they are faster, or torch's variable-length flash attention. On other devices, and
for cases that these kernels do not support, there is one SDPA call for neighbouring sequences of equal length. Logit
soft-capping (Gemma 2) is computed by the plain formula only.

Some models (gpt-oss) have attention sinks: each head has one more score in the softmax, a trained number, whose weight
is dropped.

Shapes: T tokens, N sequences, H query heads, J key/value heads, D head dimension.
"""

import functools
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from twinkle.errors import UnsupportedError
from twinkle.model.decoder import packed_attention as own
from twinkle.model.decoder.transfer import to_device

PACKED = "twinkle_packed"

_LARGEST_KERNEL_HEAD = 256


@dataclass(frozen=True)
class Packing:
    """Where the sequences of a packed batch begin and end. ``longest`` is an upper bound of their lengths.

    In a captured pass only ``tiles_n3`` says where sequences are, on the device; ``lengths`` and ``ends_N1`` are empty.
    """

    lengths: tuple[int, ...]
    ends_N1: Tensor  # int32 on the device: 0, then cumulative lengths
    longest: int
    tiles_n3: Tensor | None  # the tiles of our own kernels; None where these do not run on the device

    @classmethod
    def from_lengths(cls, lengths: tuple[int, ...], device: torch.device) -> "Packing":
        ends = to_device(torch.tensor((0, *lengths)).cumsum(0).int(), device)
        # The kernel only needs an upper bound of the longest length. A power of two keeps the number of distinct values
        # small, so that compiled code is not compiled again for every length.
        tiles = to_device(torch.from_numpy(own.tile_table(lengths)), device) if runs_own_kernels(device) else None
        return cls(lengths, ends, 1 << (max(lengths) - 1).bit_length(), tiles)


@functools.cache
def runs_own_kernels(device: torch.device) -> bool:
    """Return whether our own kernels run on the device: they are for Hopper GPUs."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


class CachedAttention(Protocol):
    """Attention of one layer with a cache of earlier keys and values. The sampler implements this."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """Return the attention output; shapes are as in :func:`packed_attention`."""
        ...


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    cached: CachedAttention | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # Transformers' name for attention sinks, (H,)
    **_transformers: object,  # other arguments that model families pass to attention functions
) -> tuple[Tensor, None]:
    """Compute attention: query (1, H, T, D), key and value (1, J, T, D) → (1, T, H, D), as transformers expects."""
    if (packing is None and cached is None) or attention_mask is not None or dropout != 0.0:
        raise UnsupportedError(
            f"{type(module).__name__} cannot run packed: it needs the bounds of sequences, no mask and no dropout"
        )
    if query.dtype != value.dtype:  # under autocast, rotary embeddings leave queries and keys in fp32
        query, key = query.to(value.dtype), key.to(value.dtype)
    if packing is None:
        assert cached is not None
        return cached.attend(query, key, value, scaling, sliding_window, softcap, s_aux), None
    return attend_packed(query, key, value, packing, scaling, sliding_window, softcap, s_aux), None


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Compute causal attention: every token sees itself and the tokens before it in its own sequence."""
    if query.is_cuda and softcap is None and _kernel_takes(query, value):
        q_THD, k_TJD, v_TJD = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        size = query.shape[-1]
        if packing.tiles_n3 is not None and size in own.HEAD_SIZES:
            scale = size**-0.5 if scale is None else scale
            return own.attend(q_THD, k_TJD, v_TJD, packing.tiles_n3, scale, window, sinks_H).unsqueeze(0)
        if packing.lengths and sinks_H is not None:
            out: Tensor = _VarlenWithSinks.apply(q_THD, k_TJD, v_TJD, sinks_H, packing, scale, window)
            return out.unsqueeze(0)
        if packing.lengths:
            return _varlen(q_THD, k_TJD, v_TJD, packing, scale, window)[0].unsqueeze(0)
    if not packing.lengths:
        raise UnsupportedError(
            f"a captured pass cannot compute attention with heads of {query.shape[-1]} numbers in {query.dtype}, "
            f"window={window} and softcap={softcap}"
        )
    return _by_runs(query[0], key[0], value[0], packing.lengths, scale, window, softcap, sinks_H)


def _kernel_takes(query: Tensor, value: Tensor) -> bool:
    size = query.shape[-1]
    half = query.dtype in (torch.bfloat16, torch.float16)
    return half and size == value.shape[-1] and size % 8 == 0 and size <= _LARGEST_KERNEL_HEAD


def _varlen(
    q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, packing: Packing, scale: float | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """Call the kernel behind ``torch.nn.attention.varlen.varlen_attn``.

    It is called directly because this call is the same in every torch version we support, and because the wrapper takes
    half a millisecond per layer. Return the output, and the logarithms of the softmax's denominators, (H, T) fp32.
    """
    ends, longest = packing.ends_N1, packing.longest
    out_THD, norm_HT, *_ = torch.ops.aten._flash_attention_forward(
        q_THD,
        k_TJD,
        v_TJD,
        ends,
        ends,
        longest,
        longest,
        0.0,  # dropout
        window is None,  # causal
        False,
        scale=scale,
        **_window_sizes(window),
    )
    return out_THD, norm_HT


def _window_sizes(window: int | None) -> dict[str, int]:
    """Return the window as torch's kernel counts it: without the token itself, which Transformers counts."""
    return {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}


class _VarlenWithSinks(torch.autograd.Function):
    """torch's kernel, which does not know sinks, with sinks.

    A sink changes the denominator of the softmax alone. So the output is multiplied by the old denominator's share of
    the new one. The kernel's backward pass computes the weights again from the scores and the denominator it is given,
    so that with the new output and the new denominator it gives the gradients of attention with sinks.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        q_THD, k_TJD, v_TJD, sinks_H, packing, scale, window = inputs
        out_THD, norm_HT = _varlen(q_THD, k_TJD, v_TJD, packing, scale, window)
        out_THD, norm_HT = with_sinks(out_THD, norm_HT, sinks_H)
        ctx.save_for_backward(q_THD, k_TJD, v_TJD, sinks_H, out_THD, norm_HT)
        ctx.packing, ctx.scale, ctx.window = packing, scale, window
        return out_THD

    @staticmethod
    def backward(ctx: Any, dout_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TJD, v_TJD, sinks_H, out_THD, norm_HT = ctx.saved_tensors
        ends, longest = ctx.packing.ends_N1, ctx.packing.longest
        gradients = torch.ops.aten._flash_attention_backward(
            dout_THD.contiguous(),
            q_THD,
            k_TJD,
            v_TJD,
            out_THD,
            norm_HT,
            ends,
            ends,
            longest,
            longest,
            0.0,  # dropout
            ctx.window is None,  # causal
            torch.zeros(2, dtype=torch.uint64, device=ends.device),  # the state of random numbers, which dropout needs
            torch.empty(0, device=ends.device),
            scale=ctx.scale,
            **_window_sizes(ctx.window),
        )
        dsinks_H = own.sinks_gradient(dout_THD, out_THD, norm_HT, sinks_H) if ctx.needs_input_grad[3] else None
        return *gradients, dsinks_H, None, None, None


def with_sinks(out_THD: Tensor, norm_HT: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of attention, and the logarithms of its denominators, as sinks change them."""
    sinks_H1 = sinks_H.float()[:, None]
    share_TH = (norm_HT - sinks_H1).sigmoid().t()
    return (out_THD * share_TH[..., None]).to(out_THD.dtype), torch.logaddexp(norm_HT, sinks_H1)


def _by_runs(
    q_HTD: Tensor,
    k_JTD: Tensor,
    v_JTD: Tensor,
    lengths: tuple[int, ...],
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Compute neighbouring sequences of equal length as one batch; the result is (1, T, H, D)."""
    outputs, start = [], 0
    for length, run in groupby(lengths):
        count = len(list(run))
        stop = start + count * length
        # (heads, n·L, D) → (n, heads, L, D)
        q, k, v = (x[:, start:stop].unflatten(1, (count, length)).transpose(0, 1) for x in (q_HTD, k_JTD, v_JTD))
        mask = None if window is None or length <= window else _window_mask(length, window, q.device)
        if q.device.type == "cpu":  # half precision is slower there, and its backward much slower
            q, k, v = q.float(), k.float(), v.float()
        if softcap is None and sinks_H is None:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )
        else:
            out = plain_attention(q, k, v, mask, scale, softcap, None if sinks_H is None else sinks_H[:, None, None])
        outputs.append(out.to(q_HTD.dtype).transpose(1, 2).flatten(0, 1))
        start = stop
    return torch.cat(outputs).unsqueeze(0)


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Return a mask that is True where query i (row) may look at key j: j in (i - window, i]."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return softmax(softcap · tanh(q kᵀ · scale / softcap)) v, with the scores in fp32.

    mask: without one, attention is causal. sinks: one more score for each head, (H, 1, 1), or for each head and row,
    (H, rows, 1). It takes part in the softmax, and its weight is dropped.
    """
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = (q @ k.transpose(2, 3)).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    length = q.shape[2]
    allowed = _window_mask(length, length, q.device) if mask is None else mask
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is None:
        return scores.softmax(-1).to(v.dtype) @ v
    with_sink = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], -1)
    return with_sink.softmax(-1)[..., :-1].to(v.dtype) @ v


def register() -> None:
    """Register ``attn_implementation="twinkle_packed"`` with transformers, which builds no mask for unknown names."""
    AttentionInterface.register(PACKED, packed_attention)
