"""The decoder layers of a stage: attention, feed-forward block and norms, each rank with its cut of the weights.

Layers with linear attention are not cut, and models that have some run without tensor parallelism.

They stand in the slots of megatron-core's ``GPTModel``, in place of its own layers. Projections have the names of
Hugging Face's models and are apart from each other (q, k, v; gate, up), so an adapter's matrices are cut like the
base's and need no reordering. LoRA is computed inside the cut: a column layer has all of A and its rows of B, a row
layer its columns of A and all of B, so LoRA adds no communication to a pass.

Shapes: T tokens, N rows of a rank (T, or its part of them with sequence parallel), H hidden features, D head dimension.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init
from transformers.activations import ACT2FN

from twinkle.model.decoder.attention import Packing, attend_packed
from twinkle.model.decoder.fused.norms import CenteredRmsNorm, FusedRmsNorm, GatedRmsNorm
from twinkle.model.decoder.linear_attention.layer import JOINT, PARTS, DeltaNet, StatefulRows
from twinkle.model.decoder.lora.lora import LoraLinear
from twinkle.model.decoder.lora.split import SplitLoraLinear
from twinkle.model.megatron.config import StageSpec
from twinkle.model.megatron.experts import ExpertMlp
from twinkle.model.megatron.mcore import TransformerConfig
from twinkle.model.megatron.regions import enter_cut, leave_cut

__all__ = [
    "Attention",
    "CenteredFinalNorm",
    "DecoderLayer",
    "FinalNorm",
    "Mlp",
    "RotaryTables",
    "RowLinear",
    "rotary_tables",
]

# Cosines and sines in the compute dtype: (T, D), or fewer columns where only the first features of a head are rotated.
RotaryTables = tuple[Tensor, Tensor]


def rotary_tables(frequencies_F: Tensor, scaling: float, positions_T: Tensor, dtype: torch.dtype) -> RotaryTables:
    """Return the cosines and sines of the rotary embeddings of tokens at these positions, as transformers has them."""
    angles_TF = positions_T[:, None].float() * frequencies_F
    angles_TD = torch.cat((angles_TF, angles_TF), dim=-1)
    return (angles_TD.cos() * scaling).to(dtype), (angles_TD.sin() * scaling).to(dtype)


class RowLinear(nn.Module):
    """A linear layer that is cut along its inputs. The ranks' products are added up, then the bias is added."""

    def __init__(self, spec: StageSpec, in_features: int, name: str, *, bias: bool) -> None:
        super().__init__()
        self._mesh = spec.mesh
        self.linear = _linear(spec, in_features // self._mesh.tp.size, spec.shape.hidden, name, bias=False)
        self.bias_O = nn.Parameter(self.linear.weight_OI.new_empty(spec.shape.hidden)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = leave_cut(self.linear(x), self._mesh.tp, by_rows=self._mesh.sequence_parallel)
        return y if self.bias_O is None else y + self.bias_O


class Attention(nn.Module):
    """Causal attention over packed sequences with this rank's heads."""

    def __init__(self, spec: StageSpec, index: int) -> None:
        super().__init__()
        shape, tp = spec.shape, spec.mesh.tp.size
        q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        q_rows = 2 * q_size if shape.gated else q_size
        self.q_proj = _linear(spec, shape.hidden, q_rows // tp, "self_attn.q_proj", bias=shape.qkv_bias)
        self.k_proj = _linear(spec, shape.hidden, kv_size // tp, "self_attn.k_proj", bias=shape.qkv_bias)
        self.v_proj = _linear(spec, shape.hidden, kv_size // tp, "self_attn.v_proj", bias=shape.qkv_bias)
        self.o_proj = RowLinear(spec, q_size, "self_attn.o_proj", bias=shape.output_bias)
        self.q_norm = _norm(spec, shape.head_dim) if shape.qk_norm else None
        self.k_norm = _norm(spec, shape.head_dim) if shape.qk_norm else None
        self._head_dim, self._gated = shape.head_dim, shape.gated
        self._window = shape.windows[index]
        self._mesh = spec.mesh

    def forward(self, x_NH: Tensor, packing: Packing, rotary: RotaryTables) -> Tensor:
        x_TH = enter_cut(x_NH, self._mesh.tp, len(rotary[0]), by_rows=self._mesh.sequence_parallel)
        q, k, v = self.q_proj(x_TH), self.k_proj(x_TH), self.v_proj(x_TH)
        gate = None
        if self._gated:
            q, gate = q.view(len(q), -1, 2 * self._head_dim).chunk(2, dim=-1)
        q, k, v = (each.reshape(len(each), -1, self._head_dim) for each in (q, k, v))  # (T, heads, D)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.transpose(0, 1) for each in (q, k, v))
        q, k = _rotated(q, rotary), _rotated(k, rotary)
        out = attend_packed(q[None], k[None], v[None], packing, self._head_dim**-0.5, self._window, None, None)
        y = out[0] if gate is None else out[0] * torch.sigmoid(gate)
        return self.o_proj(y.flatten(1))


class _DeltaNetModules(nn.Module):
    """The parts of a gated delta net with uninitialized weights, by the names that :class:`DeltaNet` takes over."""

    activation = "silu"

    def __init__(self, spec: StageSpec) -> None:
        super().__init__()
        shape, hidden, place = spec.shape.linear, spec.shape.hidden, _place(spec)
        assert shape is not None, "the decoder has no linear attention"
        keys, values = shape.key_heads * shape.key_width, shape.value_heads * shape.value_width
        sizes, front = (keys, keys, values), "linear_attn."
        joint = skip_init(nn.Linear, hidden, sum(sizes), bias=False, **place)
        self.head_k_dim, self.head_v_dim = shape.key_width, shape.value_width
        self.in_proj_qkv = SplitLoraLinear(joint, front + JOINT, [front + part for part in PARTS], sizes)
        self.in_proj_z = _linear(spec, hidden, values, f"{front}in_proj_z", bias=False)
        self.in_proj_b = _linear(spec, hidden, shape.value_heads, f"{front}in_proj_b", bias=False)
        self.in_proj_a = _linear(spec, hidden, shape.value_heads, f"{front}in_proj_a", bias=False)
        self.out_proj = _linear(spec, values, hidden, f"{front}out_proj", bias=False)
        features = sum(sizes)
        self.conv1d = skip_init(nn.Conv1d, features, features, shape.window, groups=features, bias=False, **place)
        self.norm = GatedRmsNorm(torch.empty(shape.value_width, **place), spec.shape.eps)
        self.A_log = nn.Parameter(torch.empty(shape.value_heads, **place))
        self.dt_bias = nn.Parameter(torch.empty(shape.value_heads, **place))


class Mlp(nn.Module):
    """The feed-forward block with this rank's intermediate features."""

    def __init__(self, spec: StageSpec) -> None:
        super().__init__()
        shape, self._mesh = spec.shape, spec.mesh
        size = shape.intermediate // self._mesh.tp.size
        self.gate_proj = _linear(spec, shape.hidden, size, "mlp.gate_proj", bias=shape.mlp_bias)
        self.up_proj = _linear(spec, shape.hidden, size, "mlp.up_proj", bias=shape.mlp_bias)
        self.down_proj = RowLinear(spec, shape.intermediate, "mlp.down_proj", bias=shape.mlp_bias)
        self._activation = ACT2FN[shape.activation]

    def forward(self, x_NH: Tensor, rows: int) -> Tensor:
        x_TH = enter_cut(x_NH, self._mesh.tp, rows, by_rows=self._mesh.sequence_parallel)
        return self.down_proj(self._activation(self.gate_proj(x_TH)) * self.up_proj(x_TH))


class DecoderLayer(nn.Module):
    """One decoder layer. The first four arguments are what megatron-core passes to any layer."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: object,
        vp_stage: int | None,
        *,
        spec: StageSpec,
        index: int,
    ) -> None:
        super().__init__()
        self.input_norm = _norm(spec, spec.shape.hidden)
        linear = index in spec.shape.linear_layers
        self.attention: Attention | DeltaNet = DeltaNet(_DeltaNetModules(spec)) if linear else Attention(spec, index)
        self.mlp_norm = _norm(spec, spec.shape.hidden)
        self.mlp: Mlp | ExpertMlp = ExpertMlp(spec) if index in spec.shape.expert_layers else Mlp(spec)

    def forward(
        self, x_NH: Tensor, *, packing: Packing, rotary: RotaryTables, rows: StatefulRows | None = None
    ) -> Tensor:
        """Return the outputs. ``rows``: those of linear attention, which has them already when this is called."""
        normed_NH = self.input_norm(x_NH)
        if isinstance(self.attention, DeltaNet):
            x_NH = x_NH + self.attention(normed_NH[None])[0]
        else:
            x_NH = x_NH + self.attention(normed_NH, packing, rotary)
        return x_NH + self.mlp(self.mlp_norm(x_NH), len(rotary[0]))


class FinalNorm(FusedRmsNorm):
    """The norm before the head, with the arguments that megatron-core passes to its norms."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(torch.empty(hidden_size, dtype=config.params_dtype), eps)


class CenteredFinalNorm(CenteredRmsNorm):
    """The same for models whose norms multiply by 1 + weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(torch.empty(hidden_size, dtype=config.params_dtype), eps)


def _norm(spec: StageSpec, size: int) -> FusedRmsNorm:
    kind = CenteredRmsNorm if spec.shape.centered_norms else FusedRmsNorm
    return kind(torch.empty(size, **_place(spec)), spec.shape.eps)


def _linear(spec: StageSpec, in_features: int, out_features: int, name: str, *, bias: bool) -> LoraLinear:
    """Return a linear layer with uninitialized weights. ``name``: within its decoder layer, as Hugging Face has it."""
    return LoraLinear(skip_init(nn.Linear, in_features, out_features, bias=bias, **_place(spec)), name)


def _place(spec: StageSpec) -> dict[str, Any]:
    return {"device": spec.device, "dtype": spec.dtype}


def _rotated(x_hTD: Tensor, rotary: RotaryTables) -> Tensor:
    """Apply rotary embeddings: pairs of features i and i + R/2 are rotated by the token's angles.

    R is D, or fewer: then the features behind the first R stay as they are.
    """
    cos_TR, sin_TR = rotary
    size = cos_TR.shape[-1]
    x_hTR = x_hTD[..., :size]
    first, second = x_hTR.chunk(2, dim=-1)
    rotated_hTR = x_hTR * cos_TR + torch.cat((-second, first), dim=-1) * sin_TR
    return rotated_hTR if size == x_hTD.shape[-1] else torch.cat((rotated_hTR, x_hTD[..., size:]), dim=-1)
