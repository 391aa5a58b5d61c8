"""A decoder for one new token of each sequence, with a third of the kernel launches of the model's own code.

It computes what Transformers' decoder layers of the Llama shape compute: RMS norm, rotary attention, RMS norm, gated
feed-forward block. Queries, keys and values are one product, and so are gate and up, where their weights are side by
side in memory (:mod:`twinkle.model.decoder.joined`). The weights are those of the model's modules at the time of a
call. Before it is used, its hidden states are compared with those of the model's own code.

Shapes: n rows, H features, D head dimension, O outputs of several linear layers side by side, B blocks of a sequence,
S linear layers of a set, N tiles.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twinkle.errors import UnsupportedError
from twinkle.model.decoder.fused.norms import FusedRmsNorm
from twinkle.model.decoder.joined import LLAMA_SHAPED, SPARE_ROWS, joint, with_spare_rows
from twinkle.model.decoder.layers import LayerBatch, TenantLayer, bind_layers
from twinkle.model.decoder.lora.lora import LoraLinear
from twinkle.model.trainer.engine import Engine
from twinkle.sampler.torch_sampler.attention_kernels import attend_one_token
from twinkle.sampler.torch_sampler.cache import KeyValueCache
from twinkle.sampler.torch_sampler.early_start_kernels import can_start_early
from twinkle.sampler.torch_sampler.layer_kernels import HeadNorms, add_and_norm, gated, rotate_and_store
from twinkle.sampler.torch_sampler.lora.slot_lora import SlotLora
from twinkle.sampler.torch_sampler.lora.slot_lora_kernels import Projected, Tiling, add_projected, project

logger = logging.getLogger(__name__)

_SILU = frozenset({"SiLU", "SiLUActivation"})  # by torch and by Transformers
_HEAD_SIZES = (32, 64, 128, 256)
_COMPARED = 4  # tokens of the sequence that both decoders compute
_CLOSE = {torch.bfloat16: 0.05, torch.float16: 0.02, torch.float32: 1e-3}  # ‖ours − theirs‖ / ‖theirs‖ at most


@dataclass(frozen=True)
class Inputs:
    """What a pass reads beside the weights: the new token of each row, its index, and the row's cache blocks.

    positions_n: what rotary embeddings read. They are the indices, except behind images.
    """

    ids_n: Tensor
    indices_n: Tensor
    positions_n: Tensor
    table_nB: Tensor


@dataclass(frozen=True)
class AttentionOptions:
    """The options that a layer of the model passes to its attention function."""

    scale: float | None
    window: int | None
    softcap: float | None


class _Beside:
    """Runs LoRA's kernels for x A.T at the same time as the model's large products, on a stream of its own.

    No further synchronisation is needed for memory: the second stream begins after all earlier work of the current one,
    so it never overwrites a tensor that is still read, and the current stream goes on only after it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, small: Callable[[], Projected], large: Callable[[], Tensor]) -> tuple[Projected, Tensor]:
        if self._stream is None:
            return small(), large()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            projected = small()
        product = large()
        current.wait_stream(self._stream)
        return projected, product


@dataclass(frozen=True)
class _Lora:
    """The adapters of a pass on one decoder layer."""

    slots: SlotLora
    prefix: str
    tiling: Tiling
    beside: _Beside
    in_spare_rows: bool  # whether the A of the adapters are in the spare rows

    def products(self, x_nI: Tensor, linears: Sequence[LoraLinear]) -> tuple[Tensor, Projected]:
        """Return the outputs of linear layers without LoRA, and LoRA's first products."""
        addresses_S2N = self.slots.addresses([self.prefix + linear.name for linear in linears])
        if self.in_spare_rows:
            y_nO, h_nSR = _with_first_products(x_nI, linears)
            return y_nO, Projected(h_nSR, addresses_S2N, self.tiling.of_b)
        projected, y_nO = self.beside.run(
            lambda: project(x_nI, addresses_S2N, self.tiling), lambda: _products(x_nI, linears)
        )
        return y_nO, projected


class _Layer:
    """One decoder layer of the Llama shape; reads the weights of the model's own modules."""

    def __init__(self, inner: nn.Module, index: int, options: AttentionOptions) -> None:
        modules: Any = inner  # the structure was checked before
        attention, mlp = modules.self_attn, modules.mlp
        self._first_norm: FusedRmsNorm = modules.input_layernorm
        self._second_norm: FusedRmsNorm = modules.post_attention_layernorm
        self._qkv: list[LoraLinear] = [attention.q_proj, attention.k_proj, attention.v_proj]
        self._o: LoraLinear = attention.o_proj
        self._gate_and_up: list[LoraLinear] = [mlp.gate_proj, mlp.up_proj]
        self._down: LoraLinear = mlp.down_proj
        self._head_norms = [attention._modules.get(name) for name in ("q_norm", "k_norm")]
        self._index = index
        self._options = options

    def run(
        self,
        residual_nH: Tensor,
        delta_nH: Tensor | None,
        rotation: tuple[Tensor, Tensor],
        inputs: Inputs,
        lengths_n: Tensor,
        cache: KeyValueCache,
        lora: _Lora | None,
        early: bool,
    ) -> Tensor:
        """Compute the layer. ``delta`` is what the layer before it adds to the residual; return what this one adds.

        early: whether kernels start early (see ``early_start_kernels``).
        """
        keys, values, options = cache.keys[self._index], cache.values[self._index], self._options
        x_nH = add_and_norm(residual_nH, delta_nH, self._first_norm.weight_H, self._first_norm.eps, early)
        qkv_nO, projected = _with_projection(x_nH, self._qkv, lora)
        q_nHD = rotate_and_store(
            qkv_nO, *rotation, keys, values, inputs.indices_n, inputs.table_nB, self._norms(), projected, early
        )
        scale = q_nHD.shape[2] ** -0.5 if options.scale is None else options.scale
        attended_nHD = attend_one_token(
            q_nHD, keys, values, inputs.table_nB, lengths_n, scale, options.window, options.softcap, early=early
        )
        delta_nH = _with_lora(attended_nHD.flatten(1), self._o, lora, early)
        x_nH = add_and_norm(residual_nH, delta_nH, self._second_norm.weight_H, self._second_norm.eps, early)
        gated_nI = gated(*_with_projection(x_nH, self._gate_and_up, lora), early)
        return _with_lora(gated_nI, self._down, lora, early)

    def sets(self) -> list[list[LoraLinear]]:
        """Return the linear layers, those with the same input together."""
        return [self._qkv, [self._o], self._gate_and_up, [self._down]]

    def _norms(self) -> HeadNorms | None:
        query, key = self._head_norms
        if query is None or key is None:
            return None
        assert isinstance(query, FusedRmsNorm) and isinstance(key, FusedRmsNorm), "checked before"
        return HeadNorms(query.weight_H, key.weight_H, query.eps)


def _with_lora(x_nI: Tensor, linear: LoraLinear, lora: _Lora | None, early: bool) -> Tensor:
    """Return the output of a linear layer, including LoRA if there are adapters."""
    y_nO, projected = _with_projection(x_nI, [linear], lora)
    if projected is not None:
        add_projected(y_nO, projected, early)
    return y_nO


def _with_projection(
    x_nI: Tensor, linears: Sequence[LoraLinear], lora: _Lora | None
) -> tuple[Tensor, Projected | None]:
    """Return the outputs of linear layers without LoRA, and LoRA's first products if there are adapters."""
    return (_products(x_nI, linears), None) if lora is None else lora.products(x_nI, linears)


def _products(x_nI: Tensor, linears: Sequence[LoraLinear]) -> Tensor:
    """Return the outputs of linear layers with the same input, without LoRA, side by side: one product if possible."""
    weight_OI = joint([linear.weight_OI for linear in linears])
    biases = [bias for linear in linears if (bias := linear.bias) is not None]
    bias_O = joint(biases) if biases else None
    if weight_OI is not None and (bias_O is not None or not biases):
        return nn.functional.linear(x_nI, weight_OI, bias_O)
    return torch.cat([nn.functional.linear(x_nI, each.weight_OI, each.bias_O) for each in linears], 1)


def _with_first_products(x_nI: Tensor, linears: Sequence[LoraLinear]) -> tuple[Tensor, Tensor]:
    """Return the outputs of linear layers, side by side, and x A.T for the A in the spare rows behind their weights."""
    weight_OI = with_spare_rows([linear.weight_OI for linear in linears])
    biases = [bias for linear in linears if (bias := linear.bias_O) is not None]
    bias_O = with_spare_rows(biases) if biases else None
    assert weight_OI is not None and (bias_O is not None or not biases), "checked before"
    y_nO = nn.functional.linear(x_nI, weight_OI, bias_O)
    outputs = len(weight_OI) - SPARE_ROWS * len(linears)
    return y_nO[:, :outputs], y_nO[:, outputs:].unflatten(1, (len(linears), SPARE_ROWS))


class FusedDecoder:
    """The decoder of an engine whose layers all have the Llama shape; see :func:`fuse_decoder`."""

    def __init__(self, engine: Engine, cache: KeyValueCache, options: Sequence[AttentionOptions]) -> None:
        decoder: Any = engine.model.get_decoder()
        self._embed: nn.Module = decoder.embed_tokens
        self._rotary: nn.Module = decoder.rotary_emb
        # Tokens that are decoded are text: their positions on the three axes of images are equal.
        self._three_axes = "mrope_section" in (decoder.config.rope_parameters or {})
        self._norm: FusedRmsNorm = decoder.norm
        self._cache = cache
        self._beside = _Beside(engine.device)
        self._early = can_start_early(engine.device)
        self._layers = [_Layer(layer.inner, layer.index, options[layer.index]) for layer in engine.layers]
        self._prefixes = [f"{engine.architecture.layers_path}.{layer.index}." for layer in engine.layers]

    def spare_rows(self) -> dict[str, Tensor] | None:
        """Return the spare rows of each linear layer, (SPARE_ROWS, inputs); None if not all of them have some."""
        found: dict[str, Tensor] = {}
        for layer, prefix in zip(self._layers, self._prefixes, strict=True):
            for linears in layer.sets():
                weight_OI = with_spare_rows([linear.weight_OI for linear in linears])
                biases = [bias for linear in linears if (bias := linear.bias_O) is not None]
                if weight_OI is None or (biases and with_spare_rows(biases) is None):
                    return None
                parts = weight_OI[-SPARE_ROWS * len(linears) :].split(SPARE_ROWS)
                found |= {prefix + linear.name: part for linear, part in zip(linears, parts, strict=True)}
        return found

    def hidden_states(self, inputs: Inputs, lora: SlotLora | None, *, in_spare_rows: bool = False) -> Tensor:
        """Return the hidden state of every row, (n, H). Keys and values of the new tokens are written to the cache.

        in_spare_rows: the A of the adapters are in the spare rows behind the base model's weights.
        """
        assert lora is not None or not in_spare_rows, "spare rows are for adapters"
        residual_nH = self._embed(inputs.ids_n)
        positions = inputs.positions_n[None]
        if self._three_axes:
            positions = positions.expand(3, 1, -1)
        cos, sin = self._rotary(residual_nH[None], position_ids=positions)
        rotation = cos.flatten(0, -3)[0].contiguous(), sin.flatten(0, -3)[0].contiguous()
        lengths_n = (inputs.indices_n + 1).int()
        tiling = None if lora is None else lora.tiling(len(residual_nH))
        early = self._early and (lora is None or in_spare_rows)  # other kernels of LoRA run on a second stream
        delta_nH = None
        for layer, prefix in zip(self._layers, self._prefixes, strict=True):
            bound = None if lora is None or tiling is None else _Lora(lora, prefix, tiling, self._beside, in_spare_rows)
            delta_nH = layer.run(residual_nH, delta_nH, rotation, inputs, lengths_n, self._cache, bound, early)
        return add_and_norm(residual_nH, delta_nH, self._norm.weight_H, self._norm.eps, early)


def fuse_decoder(engine: Engine, cache: KeyValueCache, block: int, slots: SlotLora) -> FusedDecoder | None:
    """Return a decoder that gives the hidden states of the model's own code with fewer launches.

    Return None if the model's layers do not have the Llama shape, or if the hidden states differ. block: a cache block
    that no sequence owns. The options of attention are those that the model's own code passes.
    """
    if not _has_shape(engine, slots):
        return None
    attention = [_Recorder(keys, values, block) for keys, values in zip(cache.keys, cache.values, strict=True)]
    passes = [
        Inputs(
            torch.tensor([7 * place + 3], device=engine.device),
            torch.tensor([place], device=engine.device),
            torch.tensor([place], device=engine.device),
            torch.tensor([[block]], dtype=torch.int32, device=engine.device),
        )
        for place in range(_COMPARED)
    ]
    with torch.no_grad():
        theirs = [_own_code(engine, each, attention) for each in passes]
        options = [each.options for each in attention if each.options is not None]
        if len(options) != len(engine.layers):
            return None
        fused = FusedDecoder(engine, cache, options)
        ours = [fused.hidden_states(each, None) for each in passes]
    expected = torch.cat(theirs).double()
    apart, size = float((torch.cat(ours) - expected).norm()), float(expected.norm())
    if not apart <= size * _CLOSE[cache.keys[0].dtype]:  # NaN is not close either
        logger.warning(
            "%s decodes with Transformers' own layers: fused ones differ by %.1e of %.1e",
            engine.architecture.family,
            apart,
            size,
        )
        return None
    return fused


def _own_code(engine: Engine, inputs: Inputs, attention: Sequence["_Recorder"]) -> Tensor:
    batch = LayerBatch(None, bind_layers((), engine.architecture), False, cached=tuple(attention))
    return engine.hidden_states(inputs.ids_n[None], inputs.positions_n[None], None, batch)


class _Recorder:
    """Plain attention of one sequence in one block of the cache; records the options of its calls.

    It implements :class:`~twinkle.model.decoder.attention.CachedAttention`.
    """

    def __init__(self, keys: Tensor, values: Tensor, block: int) -> None:
        self._keys, self._values = keys[block], values[block]  # (BLOCK, J, D)
        self._length = 0
        self.options: AttentionOptions | None = None

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
        if sinks_H is not None:
            raise UnsupportedError("fused layers compute attention without sinks")
        self.options = AttentionOptions(scale, window, softcap)
        for kept, new in ((self._keys, key), (self._values, value)):
            kept[self._length] = new[0, :, 0]
        self._length += 1
        first = 0 if window is None else max(0, self._length - window)
        group = query.shape[1] // key.shape[1]
        k_LHD, v_LHD = (
            kept[first : self._length].float().repeat_interleave(group, 1) for kept in (self._keys, self._values)
        )
        scores_HL = torch.einsum("hd,lhd->hl", query[0, :, 0].float(), k_LHD)
        scores_HL *= query.shape[3] ** -0.5 if scale is None else scale
        if softcap is not None:
            scores_HL = softcap * torch.tanh(scores_HL / softcap)
        out_HD = torch.einsum("hl,lhd->hd", scores_HL.softmax(1), v_LHD)
        return out_HD.to(query.dtype)[None, None]


def _has_shape(engine: Engine, slots: SlotLora) -> bool:
    """Return whether all decoder layers have the Llama shape, with modules that the kernels can stand in for."""
    decoder: Any = engine.model.get_decoder()
    names = ("embed_tokens", "rotary_emb", "norm")
    whole = engine.sharded_head is None and all(isinstance(decoder._modules.get(name), nn.Module) for name in names)
    if not whole or type(decoder.norm) is not FusedRmsNorm:
        return False
    path = engine.architecture.layers_path
    return all(_layer_has_shape(layer, f"{path}.{layer.index}.", slots) for layer in engine.layers)


def _layer_has_shape(layer: TenantLayer, prefix: str, slots: SlotLora) -> bool:
    inner: Any = layer.inner
    if type(inner).__name__ not in LLAMA_SHAPED:
        return False
    attention, mlp = inner.self_attn, inner.mlp
    sets = [
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [attention.o_proj],
        [mlp.gate_proj, mlp.up_proj],
        [mlp.down_proj],
    ]
    norms = [inner.input_layernorm, inner.post_attention_layernorm]
    norms += [norm for name in ("q_norm", "k_norm") if (norm := attention._modules.get(name)) is not None]
    return (
        all(type(linear) is LoraLinear for linears in sets for linear in linears)
        and all(slots.follow([prefix + linear.name for linear in linears]) for linears in sets)
        and all(len({linear.bias_O is None for linear in linears}) == 1 for linears in sets)
        and all(type(norm) is FusedRmsNorm for norm in norms)
        and len(norms) in (2, 4)
        and attention.head_dim in _HEAD_SIZES
        and type(mlp.act_fn).__name__ in _SILU
    )
