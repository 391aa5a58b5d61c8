"""Compiled layers: one graph serves every batch and gives the numbers of eager layers."""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models.reference import (
    assert_numbers_close,
    assert_tensors_close,
    random_datum,
    relative_error,
    toy_llama,
    wide_llama,
    with_random_weights,
)
from tests.support.thorough import by_default
from twinkle.model import LoraSpec, Trainer, TrainItem, TrainResult
from twinkle.model.decoder import attention
from twinkle.model.decoder.attention import Packing
from twinkle.model.decoder.lora import lora

MakeTrainer = Callable[..., Trainer]

SPECS = {
    "rank 8": LoraSpec(8, seed=1),
    "rank 5": LoraSpec(5, seed=2),
    "rank 32": LoraSpec(32, seed=3),
    "attention": LoraSpec(32, seed=4, train_mlp=False),
    "with head": LoraSpec(16, seed=5, train_unembed=True),
    "head alone": LoraSpec(8, seed=6, train_attn=False, train_mlp=False, train_unembed=True),
}
BATCHES = (
    {"rank 32": (40,)},
    {"rank 8": (12,), "rank 5": (12,)},
    {"rank 8": (7, 3), "rank 5": (21,)},
    {name: (9 + number, 30) for number, name in enumerate(SPECS)},
)


def dense_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, *, packing: Packing, **_: object
) -> tuple[Tensor, None]:
    """Compute what the CUDA kernel does, in a form that compiles on CPU: bounds are a tensor, not a list."""
    places = torch.arange(query.shape[2])
    sequence = torch.searchsorted(packing.ends_N1, places, right=True)
    allowed = (sequence[:, None] == sequence) & (places[:, None] >= places)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, enable_gqa=True)
    return out.transpose(1, 2), None


def train(trainer: Trainer) -> tuple[list[Sequence[np.ndarray]], dict[str, dict[str, np.ndarray]]]:
    for name, spec in SPECS.items():
        trainer.create_adapter(name, spec)
        with_random_weights(trainer, name)
    logprobs = []
    for batch in BATCHES:
        items = [
            TrainItem(name, [random_datum(toy_llama(), "cross_entropy", length, seed=length) for length in lengths])
            for name, lengths in batch.items()
        ]
        for result in trainer.forward_backward(items):
            assert isinstance(result, TrainResult), result
            logprobs.append(result.logprobs)
    return logprobs, {name: trainer.gradients(name) for name in SPECS}


@pytest.mark.parametrize("tokens", by_default(8, of=[None, 8]))
def test_one_graph_serves_every_batch(
    tokens: int | None, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph serves all ranks, targets and lengths, with activations kept (None) and recomputed (8)."""
    monkeypatch.setattr(attention, "packed_attention", dense_attention)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    eager_logprobs, eager_gradients = train(make_trainer())
    torch._dynamo.utils.counters.clear()
    trainer = make_trainer(compiled=True, max_tokens_per_batch=tokens)
    monkeypatch.setattr(lora, "_LoraLinear", None)  # eager layers fail from here on
    logprobs, gradients = train(trainer)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for ours, theirs in zip(logprobs, eager_logprobs, strict=True):
        for left, right in zip(ours, theirs, strict=True):
            assert_numbers_close(left, right)
    for name in SPECS:
        assert_tensors_close(gradients[name], eager_gradients[name])


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_compiled_layers_on_cuda_equal_eager_ones(make_trainer: MakeTrainer) -> None:
    """In bf16 both round: the gradient of each compiled tensor must be as close to fp32 as that of eager layers."""
    outcomes = {}
    for mode, dtype, device in (("exact", torch.float32, "cpu"), ("eager", torch.bfloat16, "cuda")):
        outcomes[mode] = train(make_trainer(wide_llama().to(device, dtype)))
    outcomes["compiled"] = train(make_trainer(wide_llama().to("cuda", torch.bfloat16), compiled=True))
    for name in SPECS:
        flat = {
            mode: np.concatenate([array.ravel() for array in gradients[name].values()])
            for mode, (_, gradients) in outcomes.items()
        }
        eager, compiled = (relative_error(flat[mode], flat["exact"]) for mode in ("eager", "compiled"))
        assert eager <= 0.05
        assert compiled <= 0.05
