"""Queries and keys turned to their positions, compared with Transformers' own function.

The kernel runs on CUDA, and without it in Triton's interpreter, if Triton is installed and TRITON_INTERPRET=1.
"""

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from tests.support.models.reference import relative_error
from tests.support.models.tiny_models import FAMILIES, tiny_model
from twinkle.model.decoder.fused import rotary
from twinkle.model.decoder.fused.rotary import fuse_rotary, turn_heads

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs_kernels = pytest.mark.skipif(
    find_spec("triton") is None or (DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="needs CUDA or TRITON_INTERPRET=1",
)
USUAL = ["llama", "qwen3", "qwen3_moe", "mixtral", "gemma2"]


def inputs(heads: int, keys: int, rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Return queries and keys as attention modules have them, which are transposed views, and positions."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((1, rows, heads, width), (1, rows, keys, width), (1, rows, width), (1, rows, width))
    q, k, cos, sin = (torch.randn(*size, generator=generator).to(DEVICE, dtype) for size in sizes)
    return [q.transpose(1, 2), k.transpose(1, 2), cos, sin]


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("sizes", [(4, 2, 5, 8), (3, 1, 17, 64), (5, 5, 2, 40)])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16 if DEVICE == "cuda" else torch.float16, 1e-2)]
)
def test_the_kernel_equals_transformers(sizes: tuple[int, ...], dtype: torch.dtype, bound: float) -> None:
    q, k, cos, sin = inputs(*sizes, dtype)
    outcomes = []
    for turn in (turn_heads, modeling_llama.apply_rotary_pos_emb):
        asked = [each.detach().clone(memory_format=torch.preserve_format).requires_grad_() for each in (q, k)]
        turned = turn(*asked, cos, sin)
        slopes = [each.detach().cos() for each in (q, k)]
        outcomes.append([*(each.detach() for each in turned), *torch.autograd.grad(turned, asked, slopes)])
    for ours, theirs in zip(*outcomes, strict=True):
        assert ours.shape == theirs.shape
        assert relative_error(ours.float().cpu().numpy(), theirs.float().cpu().numpy()) <= bound


@pytest.mark.parametrize("family", FAMILIES)
def test_models_compute_the_same(family: str) -> None:
    """On a CPU, bit-equal: there the copies of their attention call Transformers' function."""
    ids = torch.arange(24).view(2, 12)
    plain, fused = tiny_model(family), tiny_model(family)
    count = fuse_rotary(fused)
    assert count == (fused.config.num_hidden_layers if family in USUAL else count)
    with torch.no_grad():
        torch.testing.assert_close(fused(ids).logits, plain(ids).logits, rtol=0, atol=0)


def test_what_is_replaced_later_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels may come after the trainer: a function for the whole process, or another class of attention."""
    model, ids = tiny_model("llama"), torch.arange(8)[None]
    fuse_rotary(model)
    before = model(ids).logits
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
        assert not torch.equal(model(ids).logits, before)
        patch.undo()
        patch.setattr(modeling_llama, "eager_attention_forward", lambda module, q, *args, **kwargs: (0 * q, None))
        patch.setattr(modeling_llama.ALL_ATTENTION_FUNCTIONS, "get_interface", lambda name, default: default)
        assert not torch.allclose(model(ids).logits, before, atol=1e-3)
    assert torch.equal(model(ids).logits, before)

    class Silent(modeling_llama.LlamaAttention):
        def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, None]:
            return torch.zeros_like(hidden_states), None

    for layer in model.model.layers:
        layer.self_attn.__class__ = Silent
    assert not torch.equal(model(ids).logits, before)


def test_functions_of_another_form_are_left_alone() -> None:
    assert rotary._is_usual(modeling_llama.apply_rotary_pos_emb)
    assert not rotary._is_usual(modeling_gpt_oss.apply_rotary_pos_emb)
    assert fuse_rotary(tiny_model("gpt_oss")) == 0
    before = modeling_llama.apply_rotary_pos_emb
    assert fuse_rotary(tiny_model("llama")) > 0
    assert modeling_llama.apply_rotary_pos_emb is before
