"""The gated delta net of a decoder layer, over packed sequences and with the adapters of many tenants.

It takes the place of the module of Transformers, whose code mixes the sequences of a packed row, and keeps its weights
under their names. Where the package ``fla-core`` is installed, its kernels compute the delta rule on CUDA.

Shapes: T rows, H hidden size, F = 2·K·D + V·E features, K key heads of width D, V value heads of width E.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinkle.errors import UnsupportedError
from twinkle.model.decoder.linear_attention.bounds import Bounds
from twinkle.model.decoder.linear_attention.convolution import silu_convolution
from twinkle.model.decoder.linear_attention.delta_rule import gated_delta_rule
from twinkle.model.decoder.linear_attention.kernels import delta_rule_kernel

# The modules of Transformers that are replaced, by their class.
_DELTA_NETS = frozenset({"Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"})
# The linear layer whose output is query, key and value, and the names under which adapters train the three apart.
JOINT = "in_proj_qkv"
PARTS = ("in_proj_q", "in_proj_k", "in_proj_v")


class StatefulRows(Protocol):
    """The rows of one layer, with the states of their sequences before them. The sampler implements this."""

    def convolve(self, x_TF: Tensor, weight_FW: Tensor) -> Tensor:
        """Return SiLU of the convolution of the rows (T, F), and keep the last columns of each sequence."""
        ...

    def delta_rule(self, q_TKD: Tensor, k_TKD: Tensor, v_TVE: Tensor, g_TV: Tensor, beta_TV: Tensor) -> Tensor:
        """Return the outputs (T, V, E), and keep the last state of each sequence."""
        ...


def is_delta_net(module: nn.Module) -> bool:
    """Return whether this is a module of Transformers that :class:`DeltaNet` can replace."""
    return type(module).__name__ in _DELTA_NETS


def part_sizes(net: Any) -> tuple[int, int, int]:
    """Return how many features of the joint projection are query, key and value."""
    return net.key_dim, net.key_dim, net.value_dim


class PackedRows:
    """The rows of packed sequences, each of which begins with the state 0."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds

    def convolve(self, x_TF: Tensor, weight_FW: Tensor) -> Tensor:
        return silu_convolution(x_TF, weight_FW, self._bounds)

    def delta_rule(self, q_TKD: Tensor, k_TKD: Tensor, v_TVE: Tensor, g_TV: Tensor, beta_TV: Tensor) -> Tensor:
        kernel = delta_rule_kernel(q_TKD, v_TVE)
        if kernel is not None:
            return kernel(q_TKD, k_TKD, v_TVE, g_TV, beta_TV, self._bounds)
        return gated_delta_rule(q_TKD, k_TKD, v_TVE, g_TV, beta_TV, self._bounds)[0]


class DeltaNet(nn.Module):
    """Replaces a gated delta net of Transformers. ``rows`` holds the batch for the time of one call of its layer."""

    in_proj_qkv: Any  # a SplitLoraLinear, once the decoder's linear layers are replaced
    in_proj_z: Any
    in_proj_b: Any
    in_proj_a: Any
    conv1d: Any
    norm: Any
    out_proj: Any

    def __init__(self, net: Any) -> None:
        super().__init__()
        if net.activation != "silu":
            raise UnsupportedError(f"hidden_act: got {net.activation!r}, linear attention is known with 'silu' only")
        self.key_width, self.value_width = net.head_k_dim, net.head_v_dim
        for name in (JOINT, "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "norm", "out_proj"):
            setattr(self, name, getattr(net, name))
        self.A_log, self.dt_bias = net.A_log, net.dt_bias
        self.rows: StatefulRows | None = None
        self.lora: object = None  # that of the layer; the linear layers inside have it, too

    # Its operations depend on the lengths of the batch, so compiled code would be compiled anew for every batch.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden_states: Tensor, **_transformers: object) -> Tensor:
        if self.rows is None:
            raise UnsupportedError(f"{type(self).__name__} cannot run without the bounds of sequences")
        rows, x_TH = self.rows, hidden_states.flatten(0, 1)
        mixed = self._convolved(rows, self.in_proj_qkv.projections(x_TH))
        q_TKD, k_TKD = (each.unflatten(1, (-1, self.key_width)) for each in mixed[:2])
        v_TVE = mixed[2].unflatten(1, (-1, self.value_width))
        beta_TV = self.in_proj_b(x_TH).sigmoid()
        g_TV = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x_TH).float() + self.dt_bias)
        out_TVE = rows.delta_rule(q_TKD, k_TKD, v_TVE, g_TV, beta_TV)
        z_TVE = self.in_proj_z(x_TH).view_as(out_TVE)
        gated = self.norm(out_TVE.reshape(-1, self.value_width), z_TVE.reshape(-1, self.value_width))
        output: Tensor = self.out_proj(gated.view(len(x_TH), -1))
        return output.view(*hidden_states.shape[:-1], -1)

    def _convolved(self, rows: StatefulRows, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return query, key and value (T, …) after the convolution."""
        sizes = [part.shape[1] for part in parts]
        return list(rows.convolve(torch.cat(list(parts), 1), self.conv1d.weight.squeeze(1)).split(sizes, 1))
