"""The fused decoder layers and their kernels, compared with the model's own code and with plain formulas.

The kernels need Triton. They run on CUDA in bf16, or without a GPU in Triton's interpreter (``TRITON_INTERPRET=1``) in
fp32.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.models.seeing_models import WIDE, wide_seeing_model
from tests.support.models.tiny_models import random_model, tiny_config, tiny_model, tiny_trainer
from twinkle.model import LoraSpec, Trainer
from twinkle.model.decoder.joined import join_weights
from twinkle.model.decoder.layers import LayerBatch
from twinkle.sampler.torch_sampler.binding import LoraBinder
from twinkle.sampler.torch_sampler.cache import BLOCK, KeyValueCache
from twinkle.sampler.torch_sampler.drawing import Draw, DrawPlan
from twinkle.sampler.torch_sampler.model_pass import probe_shapes

if TYPE_CHECKING:
    from twinkle.sampler.torch_sampler.lora.slot_lora_kernels import Tiles

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() and not INTERPRETED, reason="needs CUDA or Triton's interpreter"),
]

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
CLOSE = 1e-4 if INTERPRETED else 0.03
FAMILIES = {
    "llama": lambda: tiny_config("LlamaConfig", hidden_size=64, head_dim=32),
    "qwen2": lambda: tiny_config("Qwen2Config", hidden_size=128),
    "qwen3": lambda: tiny_config("Qwen3Config", head_dim=32),
    "mistral": lambda: tiny_config("MistralConfig", head_dim=32, sliding_window=5),
}
SPECS = {
    "a": LoraSpec(rank=8, seed=1),
    "b": LoraSpec(rank=40, seed=2, train_mlp=False, train_unembed=True),
    "c": LoraSpec(rank=32, seed=3, train_attn=False),
    "gate alone": LoraSpec(rank=8, seed=4, target_modules=["gate_proj", "k_proj"]),
    "up alone": LoraSpec(rank=16, seed=5, target_modules=["up_proj", "v_proj"]),
}


def trained(family: str, *, joined: bool = True, spare_rows: bool = False) -> Trainer:
    model = (wide_seeing_model(family) if family in WIDE else random_model(FAMILIES[family]())).to(DEVICE, DTYPE)
    if joined:
        assert join_weights(model, spare_rows=spare_rows) > 0
    trainer = tiny_trainer_on(model)
    generator = np.random.default_rng(0)
    for name, spec in SPECS.items():
        trainer.create_adapter(name, spec)
        snapshot = trainer.snapshot(name)
        noise = generator.normal(0, 0.1, snapshot.weights.shape).astype(np.float32)
        snapshot.weights[:] = np.where(snapshot.weights != 0, snapshot.weights, noise)
        trainer.restore(name, snapshot)
    return trainer


def tiny_trainer_on(model: torch.nn.Module) -> Trainer:
    """Return a trainer on this model itself: a copy would have separate weights."""
    from twinkle.model import adopt_model

    return Trainer(adopt_model(model), model_id="tiny")


@dataclass
class PlainAttention:
    """Attention of one layer in torch, on a cache of its own."""

    keys: Tensor
    values: Tensor
    indices: Tensor
    table: Tensor

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
        rows = []
        for row, position in enumerate(self.indices.tolist()):
            blocks = self.table[row].long()
            self.keys[blocks[position // BLOCK], position % BLOCK] = key[0, :, row]
            self.values[blocks[position // BLOCK], position % BLOCK] = value[0, :, row]
            first = 0 if window is None else max(0, position + 1 - window)
            k, v = (
                kept[blocks]
                .flatten(0, 1)[first : position + 1]
                .float()
                .repeat_interleave(query.shape[1] // key.shape[1], 1)
                for kept in (self.keys, self.values)
            )
            scores = torch.einsum("hd,lhd->hl", query[0, :, row].float(), k) * (scale or query.shape[3] ** -0.5)
            rows.append(torch.einsum("hl,lhd->hd", scores.softmax(1), v))
        return torch.stack(rows).to(query.dtype)[None]


@dataclass
class Case:
    """Sequences of unequal length in a cache with random contents, each with one new token."""

    trainer: Trainer
    cache: KeyValueCache
    ids: Tensor
    indices: Tensor
    positions: Tensor  # behind images they are not the indices
    table: Tensor

    @classmethod
    def make(cls, trainer: Trainer, rows: int, shift: int) -> "Case":
        shapes = probe_shapes(trainer.engine)
        cache = KeyValueCache(shapes, DTYPE, DEVICE, 1 << 23)
        torch.manual_seed(1)
        cache._buffer.normal_()
        indices = torch.arange(rows, device=DEVICE) * 7 % 45
        table = torch.stack([torch.tensor([1 + 3 * row, 2 + 3 * row, 3 + 3 * row]) for row in range(rows)])
        ids = torch.randint(0, 90, (rows,), device=DEVICE)
        return cls(trainer, cache, ids, indices, indices + shift * (indices % 3), table.int().to(DEVICE))

    def plain(self, runs: Sequence[tuple[object, int]]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the hidden states of the model's own code, and the keys and values after the pass."""
        keys, values = ([kept.clone() for kept in each] for each in (self.cache.keys, self.cache.values))
        attention = tuple(PlainAttention(k, v, self.indices, self.table) for k, v in zip(keys, values, strict=True))
        layers = LoraBinder(self.trainer.architecture).layers(runs)
        batch = LayerBatch(None, layers, False, cached=attention)
        with torch.no_grad():
            hidden = self.trainer.engine.hidden_states(self.ids[None], self.positions[None], None, batch)
        return hidden, keys, values


def close(ours: Tensor, theirs: Tensor) -> bool:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm()) <= CLOSE


@pytest.mark.parametrize("family", [*FAMILIES, *WIDE])
def test_fused_layers_give_what_the_models_own_code_gives(family: str) -> None:
    compare_with_own_code(family, trained(family, spare_rows=True), has_spare_rows=True)


@pytest.mark.parametrize("joined", [True, False])
def test_fused_layers_without_spare_rows(joined: bool) -> None:
    compare_with_own_code("qwen2", trained("qwen2", joined=joined), has_spare_rows=False)


def compare_with_own_code(family: str, trainer: Trainer, *, has_spare_rows: bool) -> None:
    from twinkle.sampler.torch_sampler.fused_layers import Inputs, fuse_decoder
    from twinkle.sampler.torch_sampler.lora.slot_lora import SlotLora

    case = Case.make(trainer, 19, shift=-2 if family in WIDE else 0)
    lora = SlotLora(trainer.architecture, 24, DEVICE)
    fused = fuse_decoder(trainer.engine, case.cache, case.cache.set_aside(), lora)
    assert fused is not None
    adapters = {name: trainer.pool.freeze(name) for name in SPECS}
    trainer.pool.make_resident(adapters.values())
    rows = fused.spare_rows()
    assert (rows is not None) == has_spare_rows
    lora.use_spare_rows(rows)
    for with_lora, in_spare_rows in [(False, False), (True, False), (True, True)][: 3 if has_spare_rows else 2]:
        counts = {"b": 10, "gate alone": 4, "up alone": 3, "c": 1}
        runs = [(adapters[name], count) for name, count in counts.items()] if with_lora else [(None, 19)]
        expected, keys, values = case.plain([*runs, (None, 1)] if with_lora else runs)
        if with_lora:
            # The row beyond the runs has no adapter. The kernels also work for versions in spare rows, as for the head.
            assert lora.bind(runs, 19) == has_spare_rows
        with torch.no_grad():
            inputs = Inputs(case.ids, case.indices, case.positions, case.table)
            hidden = fused.hidden_states(inputs, lora if with_lora else None, in_spare_rows=in_spare_rows)
        assert close(hidden, expected)
        for ours, theirs in zip([*case.cache.keys, *case.cache.values], [*keys, *values], strict=True):
            assert close(ours, theirs)


@pytest.mark.parametrize("family", ["gemma", "gemma2", "phi", "phi3", "qwen3_moe"])
def test_other_shapes_are_left_to_the_models_own_code(family: str) -> None:
    from twinkle.sampler.torch_sampler.fused_layers import fuse_decoder
    from twinkle.sampler.torch_sampler.lora.slot_lora import SlotLora

    trainer = tiny_trainer(tiny_model(family).to(DEVICE, DTYPE))
    cache = KeyValueCache(probe_shapes(trainer.engine), DTYPE, DEVICE, 1 << 20)
    lora = SlotLora(trainer.architecture, 4, DEVICE)
    assert fuse_decoder(trainer.engine, cache, cache.set_aside(), lora) is None


def torch_draw(logits: Tensor, draws: list[Draw], uniform: Tensor, choices: int) -> Tensor:
    """Draw with torch's operations, in float64."""
    rows = []
    for row, draw in enumerate(draws):
        logprobs = (logits[row].double() / (draw.temperature or 1.0)).log_softmax(0)
        if draw.temperature == 0:
            token = int(logprobs[:choices].argmax())
        else:
            sums = logprobs[:choices].exp().cumsum(0)
            token = int(torch.searchsorted(sums, uniform[row] * sums[-1], right=True))
        rows.append(torch.tensor([token, float(logprobs[token]), 1.0], dtype=torch.float64))
    return torch.stack(rows, 1)


@pytest.mark.parametrize(("size", "choices"), [(97, 97), (1000, 990), (256, 256), (5000, 4200), (9000, 9000)])
def test_draws_from_whole_distributions(size: int, choices: int) -> None:
    from twinkle.sampler.torch_sampler.drawing_kernels import draw_from_whole

    torch.manual_seed(size)
    rows = 12
    logits = torch.randn(rows, size) * 4
    logits[3, : size // 3] = float("-inf")  # tokens that were forbidden
    draws = [Draw([1.0, 0.0, 0.5, 1.7][row % 4], 0, 1.0, 0.0) for row in range(rows)]
    plan = DrawPlan.for_draws(draws, DEVICE)
    uniform = torch.rand(rows, dtype=torch.float64)
    uniform[0], uniform[2] = 2.0**-49, 0.999
    settings = plan.settings_M5
    values = draw_from_whole(logits.to(DEVICE), settings[:, 0], settings[:, 4], uniform.to(DEVICE), choices).cpu()
    expected = torch_draw(logits, draws, uniform, choices)
    np.testing.assert_array_equal(values[0], expected[0])
    np.testing.assert_allclose(values[1], expected[1], atol=2e-5)
    assert values[2].all()


def test_rows_that_are_not_finite_are_reported() -> None:
    from twinkle.sampler.torch_sampler.drawing_kernels import draw_from_whole

    logits = torch.zeros(4, 600)
    logits[0, 300], logits[1, 599], logits[2] = float("nan"), float("inf"), float("-inf")
    ones = torch.ones(4, dtype=torch.float64, device=DEVICE)
    values = draw_from_whole(logits.to(DEVICE), ones, 0 * ones, 0.5 * ones, 600).cpu()
    assert values[2].tolist() == [0, 0, 0, 1]
    assert ((values[0] >= 0) & (values[0] < 600)).all()


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (40, 3), (150, 4), (150, 60)])
def test_lora_of_many_versions(rows: int, groups: int) -> None:
    """There may be more tiles than programs, and the counters of parts are zero again after each launch."""
    from twinkle.sampler.torch_sampler.lora.slot_lora_kernels import (
        TILE_ROWS_OF_A,
        Tiling,
        add_projected,
        new_counters,
        project,
        tile_rows_of_b,
    )

    torch.manual_seed(rows)
    inputs, outputs = 520, 136
    ends = sorted({rows, *np.random.default_rng(rows).choice(np.arange(1, max(rows, 2)), groups - 1, replace=False)})
    x, y = (torch.randn(rows, size, device=DEVICE).to(DTYPE) for size in (inputs, outputs))
    ranks = [(8, 32, 128)[group % 3] for group in range(groups)]
    weights = [
        tuple(
            (torch.randn(*shape, device=DEVICE) * shape[1] ** -0.5).to(DTYPE)
            for shape in ((rank, inputs), (outputs, rank))
        )
        for rank in ranks
    ]
    expected, first, runs = y.double(), 0, []
    for group, (end, (a, b)) in enumerate(zip(ends, weights, strict=True)):
        with_adapter = group != 1
        runs.append((first, end, ranks[group], a.data_ptr() * with_adapter, b.data_ptr() * with_adapter))
        if with_adapter:
            expected[first:end] += x[first:end].double() @ a.double().T @ b.double().T
        first = end
    (of_a, addresses_of_a), (of_b, addresses_of_b) = tiles(runs, TILE_ROWS_OF_A), tiles(runs, tile_rows_of_b(rows))
    tiling = Tiling(of_a, of_b, new_counters(rows).to(DEVICE))
    addresses_12N = torch.stack([addresses_of_a[0], addresses_of_b[1]])[None]
    for _ in range(2):
        result = y.clone()
        add_projected(result, project(x, addresses_12N, tiling))
        assert close(result, expected)
        assert not tiling.done_NS.any()


@pytest.mark.parametrize("rows", [40, 150])
def test_gate_and_up_of_many_versions(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set of two layers, with tiles of both sizes, several tiles for a program, and several parts of x A.T."""
    from twinkle.sampler.torch_sampler.layer_kernels import gated
    from twinkle.sampler.torch_sampler.lora import slot_lora_kernels as kernels

    monkeypatch.setattr(kernels, "_PROGRAMS", 6)
    torch.manual_seed(rows)
    inputs, size, rank = 520, 72, 16
    x, y = (torch.randn(rows, width, device=DEVICE).to(DTYPE) for width in (inputs, 2 * size))
    shapes = {"a": (rank, inputs), "b": (size, rank)}
    expected, weights, addresses = y.double(), [], []
    # By layer: the first version has no LoRA on gate, the third none on up, the second none at all.
    for layer, without in enumerate(((0, 1), (1, 2))):
        runs = []
        for version, (first, end) in enumerate(((0, 21), (21, 30), (30, rows))):
            a, b = (torch.randn(*each, device=DEVICE).to(DTYPE) * each[1] ** -0.5 for each in shapes.values())
            runs.append((first, end, rank, *((0, 0) if version in without else (a.data_ptr(), b.data_ptr()))))
            weights += [a, b]  # they stay where they are
            if version not in without:
                place = expected[first:end, layer * size : (layer + 1) * size]
                place += x[first:end].double() @ a.double().T @ b.double().T
        of_a, addresses_of_a = tiles(runs, kernels.TILE_ROWS_OF_A)
        of_b, addresses_of_b = tiles(runs, kernels.tile_rows_of_b(rows))
        addresses.append(torch.stack([addresses_of_a[0], addresses_of_b[1]]))
    tiling = kernels.Tiling(of_a, of_b, kernels.new_counters(rows).to(DEVICE))
    out = gated(y, kernels.project(x, torch.stack(addresses), tiling))
    gate, up = expected.split(size, 1)
    assert close(out, gate * gate.sigmoid() * up)
    assert not tiling.done_NS.any()


def tiles(runs: Sequence[tuple[int, int, int, int, int]], size: int) -> tuple["Tiles", Tensor]:
    """Return the tiles of runs of rows, and their addresses, (2, N). Each run: first row, end, rank, both addresses."""
    from twinkle.sampler.torch_sampler.lora.slot_lora_kernels import Tiles, usual_tiles

    rows = runs[-1][1]
    cut = [(first, end, rank, a, b) for start, end, rank, a, b in runs for first in range(start, end, size)]
    table = torch.tensor(cut + [(0, 0, 0, 0, 0)] * (rows - len(cut)), dtype=torch.int64, device=DEVICE)
    count = torch.tensor([len(cut)], dtype=torch.int32, device=DEVICE)
    return Tiles(size, torch.nn.functional.pad(table[:, :3], (0, 1)).int(), count, usual_tiles(rows, size)), table[
        :, 3:
    ].T.contiguous()
