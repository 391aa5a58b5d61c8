"""Programs that run a stage of a model on every rank, and the models that they load from a folder."""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.support.models.peak_memory import measured
from twinkle.errors import TwinkleError, UnsupportedError
from twinkle.hub import LocalModel
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model.decoder.attention import Packing
from twinkle.model.decoder.layers import LayerBatch, bind_layers
from twinkle.model.decoder.linear_attention.bounds import Bounds
from twinkle.model.decoder.linear_attention.layer import PackedRows
from twinkle.model.megatron.gathering import cut_weights, whole_tensors
from twinkle.model.megatron.mesh import MegatronMesh, join_mesh, leave_mesh
from twinkle.model.megatron.stage import Stage, build_stage, empty_stage

CPU = torch.device("cpu")
_PR_SET_THP_DISABLE, _M_MMAP_THRESHOLD = 41, -3  # Linux: sys/prctl.h, malloc.h
LENGTHS = (5, 9, 1, 6)  # 21 tokens: sequence parallel has to pad them

_SIZES: dict[str, Any] = {
    "vocab_size": 97,  # not a multiple of 2: the last rank's part is padded
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
_LINEAR_ATTENTION: dict[str, Any] = {  # the first stage of two has linear attention alone
    **_SIZES,
    "initializer_range": 0.05,  # larger weights amplify rounding: other batches of the same model then differ by 1e-4
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_SIZES, rope_parameters=_LLAMA3),
    "llama_biases": lambda: LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True, rope_parameters=_LINEAR),
    "llama_tied": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "qwen2_window": lambda: Qwen2Config(**_SIZES, use_sliding_window=True, sliding_window=3, max_window_layers=2),
    "qwen3": lambda: Qwen3Config(**_SIZES, rope_parameters=_YARN),
    "qwen3_5": lambda: Qwen3_5TextConfig(**_LINEAR_ATTENTION),
    "qwen3_5_tied": lambda: Qwen3_5TextConfig(**_LINEAR_ATTENTION, tie_word_embeddings=True),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_SIZES, **_EXPERTS, norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3_moe_plain": lambda: Qwen3MoeConfig(**_SIZES, **_EXPERTS, norm_topk_prob=False),
}


def make_model(name: str) -> PreTrainedModel:
    """Make a small model; all weights are random, also biases and norms, which begin as 0 or 1 otherwise."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval()
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                offset = 1.0 if "norm" in parameter_name else 0.0
                parameter.data.normal_(offset, 0.3)
    return model


def make_tokens() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 97, (length,), generator=generator) for length in LENGTHS]


def make_batch(stage: Stage, tokens: Sequence[Tensor], recompute: bool) -> tuple[Tensor, Tensor, LayerBatch]:
    """Return ids, positions and a batch without adapters."""
    positions = torch.cat([torch.arange(len(each)) for each in tokens]).to(stage.device)
    packing = Packing.from_lengths(tuple(map(len, tokens)), stage.device)
    rows = PackedRows(Bounds.from_lengths(tuple(map(len, tokens)), stage.device))
    batch = LayerBatch(packing, bind_layers([], stage.architecture), recompute, rows=rows)
    return torch.cat(list(tokens)).to(stage.device)[None], positions[None], batch


def make_mesh(sizes: Mapping[str, Any], device: torch.device = CPU) -> MegatronMesh:
    """Join a mesh; leave the one of an earlier program if it has other sizes. Making its groups takes seconds."""
    try:
        return join_mesh(device_mesh(sizes), device)
    except UnsupportedError:
        leave_mesh()
        return join_mesh(device_mesh(sizes), device)


def make_stage(
    folder: Path, sizes: Mapping[str, Any], dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> Stage:
    return build_stage(LocalModel("test", folder, None), make_mesh(sizes, device), dtype, device)


def device_mesh(sizes: Mapping[str, Any]) -> DeviceMesh | None:
    return DeviceMesh.from_sizes(device_type="cpu", **sizes) if sizes else None


class Pipeline:
    """Runs one batch forth and back through all stages, one after another."""

    def __init__(self, stage: Stage, *, recompute: bool = False) -> None:
        self.stage, self.mesh = stage, stage.mesh
        self.recompute = recompute

    def forward(self, tokens: Sequence[Tensor]) -> Tensor:
        """Return the hidden states (T, H) on the last stage, elsewhere what the next stage got."""
        ids, positions, batch = make_batch(self.stage, tokens, self.recompute)
        self.entered = ids
        if not self.mesh.is_first:
            self.entered = self._receive(self.mesh.pp.number - 1).requires_grad_()
        self.left = self.stage.hidden_states(self.entered, positions, batch)
        if not self.mesh.is_last:
            self._send(self.left.detach(), self.mesh.pp.number + 1)
        return self.left

    def backward(self, gradient: Tensor | None) -> None:
        """Run backward. ``gradient``: that of the hidden states, on the last stage."""
        if gradient is None:
            gradient = self._receive(self.mesh.pp.number + 1)
        self.left.backward(gradient)
        if not self.mesh.is_first:
            self._send(self.entered.grad, self.mesh.pp.number - 1)

    def _send(self, tensor: Tensor, stage: int) -> None:
        dist.send_object_list([tensor], group=self.mesh.pp.group, group_dst=stage)

    def _receive(self, stage: int) -> Tensor:
        objects: list[Any] = [None]
        dist.recv_object_list(objects, group=self.mesh.pp.group, group_src=stage)
        return objects[0]


def whole_logits(stage: Stage, hidden_TH: Tensor) -> Tensor:
    """Return the logits (T, V) of the whole vocabulary."""
    assert stage.head_weight_VH is not None
    parts = stage.mesh.tp.gather((hidden_TH @ stage.head_weight_VH.t()).detach().float().cpu())
    return torch.cat(parts, 1)[:, : stage.shape.vocabulary]


def own_tokens(mesh: MegatronMesh, tokens: Sequence[Tensor]) -> list[Tensor]:
    """Return the sequences of this process's data rank. Data ranks have different numbers of tokens."""
    return list(tokens[mesh.dp.number :: mesh.dp.size])


def score(
    folder: Path, sizes: Mapping[str, Any], dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> list[Tensor] | None:
    """Return the log-probabilities (T, V) of this rank's sequences; None on ranks without a head."""
    stage = make_stage(folder, sizes, dtype, device)
    tokens = own_tokens(stage.mesh, make_tokens())
    with torch.no_grad():
        hidden_TH = Pipeline(stage).forward(tokens)
        if not stage.is_last:
            return None
        logprobs = whole_logits(stage, hidden_TH).log_softmax(-1)
    return list(logprobs.split([len(each) for each in tokens]))


def gradients(
    folder: Path, sizes: Mapping[str, Any], recompute: bool = False
) -> list[tuple[str, int | None, int, int, Tensor]]:
    """Return this rank's part of the gradient of its weights, for the sum of squares of all hidden states.

    The sum of the ranks' parts is the gradient: what is the same on all ranks of tp is divided by their number.
    """
    stage = make_stage(folder, sizes)
    stage.model.requires_grad_(True)
    pipeline = Pipeline(stage, recompute=recompute)
    hidden_TH = pipeline.forward(own_tokens(stage.mesh, make_tokens()))
    pipeline.backward(2 * hidden_TH.detach() if stage.is_last else None)
    found = []
    for piece in stage.pieces(fused_experts=True):
        view = _gradient_view(stage, piece.view)
        if view is not None:
            copies = stage.mesh.tp.size if _same_on_all(stage, piece.name) else 1
            found.append((piece.name, piece.dim, piece.start, piece.stop, view / copies))
    return found


def _same_on_all(stage: Stage, name: str) -> bool:
    """Return whether all ranks of tp compute the same gradient of a weight.

    Without sequence parallel they do for norms of hidden states, and for biases that are added to hidden states.
    """
    outside = "layernorm" in name or name == "model.norm.weight" or name.endswith(("o_proj.bias", "down_proj.bias"))
    return outside and not stage.mesh.sequence_parallel


def _gradient_view(stage: Stage, view: Tensor) -> Tensor | None:
    """Return the part of a parameter's gradient at the place of a view; None if it has no gradient."""
    for parameter in stage.model.parameters():
        if parameter.untyped_storage().data_ptr() == view.untyped_storage().data_ptr():
            if parameter.grad is None:
                return None
            return parameter.grad.as_strided(view.shape, view.stride(), view.storage_offset())
    raise AssertionError("the view belongs to no parameter")


def round_trip(folder: Path, sizes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return all weights as the mesh gives them back."""
    return whole_weights(make_stage(folder, sizes))


def random_weights(folder: Path, seed: int, sizes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a random model with the configuration in a folder."""
    stage = build_stage(LocalModel("random", folder, seed), make_mesh(sizes), torch.bfloat16, CPU)
    return whole_weights(stage)


def whole_weights(stage: Stage) -> dict[str, Tensor]:
    return dict(whole_tensors(cut_weights(stage.pieces(), stage.mesh.world)))


def loading_memory(folder: Path, sizes: Mapping[str, Any]) -> tuple[float, float]:
    """Return how far this process's memory rises while a model is loaded, and the size of its cut; in MiB."""
    mesh, rises = make_mesh(sizes), list[float]()
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)  # no huge pages, of which a tensor may use a part
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)  # tensors have pages of their own, which are freed with them
    with measured(rises):
        stage = build_stage(LocalModel("test", folder, None), mesh, torch.float32, CPU)
    return rises[0], sum(each.nbytes for each in stage.model.parameters()) / 2**20


def refusal(sizes: Mapping[str, Any], name: str = "llama") -> str:
    """Return the error for a mesh."""
    try:
        empty_stage(CONFIGS[name](), make_mesh(sizes), torch.float32, CPU)
    except TwinkleError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def second_mesh(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Return the error for a second mesh in the same process. The first one still works afterwards."""
    make_mesh(first)
    try:
        join_mesh(device_mesh(second), CPU)
    except TwinkleError as error:
        join_mesh(device_mesh(first), CPU)
        return f"{type(error).__name__}: {error}"
    return "nothing"
