"""Captured passes: their tables on any device, and on Hopper GPUs the numbers of the passes themselves."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.models.reference import random_datum, toy_llama, wide_llama, with_random_weights
from tests.support.models.tiny_models import tiny_config, tiny_model, tiny_trainer
from twinkle.loss import get_loss
from twinkle.model import LoraSpec, Trainer, TrainItem, TrainResult
from twinkle.model.decoder.attention import runs_own_kernels
from twinkle.model.decoder.packed_attention import tile_table
from twinkle.model.decoder.tiles import TILE_ROWS
from twinkle.model.objectives.validation import CheckedDatum, CheckedItem
from twinkle.model.trainer import probe
from twinkle.model.trainer.batch import GradientRows, Part
from twinkle.model.trainer.pass_graphs import BUCKETS
from twinkle.model.trainer.pass_tables import Bucket, PassTables, can_be_captured
from twinkle.model.trainer.preparation import most_tokens_of_a_batch, rows_to_capture

MakeTrainer = Callable[..., Trainer]
CPU = torch.device("cpu")


def parts_of(trainer: Trainer, ranks: list[int], lengths: list[int]) -> list[Part]:
    engine = trainer.engine
    adapters = probe.probe_adapters(engine.architecture, engine.device, torch.float32, ranks, init=False)
    return probe.probe_parts(engine.architecture, adapters, lengths)


def part_with(trainer: Trainer, name: str, spec: LoraSpec, length: int) -> Part:
    """Return one sequence of a new adapter."""
    trainer.create_adapter(name, spec)
    adapter = trainer.pool.get(name)
    trainer.pool.make_resident([adapter])
    tokens = np.arange(length)
    item = CheckedItem(name, get_loss("cross_entropy"), {}, (CheckedDatum(tokens, tokens[:, None], {}, (length,)),))
    return Part(0, item, adapter, item.data)


@pytest.mark.parametrize("lengths", [[1], [TILE_ROWS], [TILE_ROWS + 1, 3], [5, 200, 64, 1, 129]])
def test_every_row_is_in_one_tile_of_its_sequence(lengths: list[int]) -> None:
    found = np.zeros(sum(lengths), int)
    ends = np.cumsum(lengths)
    for first, length, start in tile_table(lengths):
        assert first in [0, *ends[:-1]]
        assert lengths[list(ends - lengths).index(first)] == length
        assert start % TILE_ROWS == 0
        found[first + start : first + min(start + TILE_ROWS, length)] += 1
    assert (found == 1).all()


def test_tables_say_where_rows_and_adapters_are(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    parts = parts_of(trainer, [16, 8, 16], [70, 3, 20])
    names = [target.name for target in trainer.architecture.linear]
    tables, bucket = PassTables(BUCKETS[2], names, CPU), BUCKETS[1]
    rows = [GradientRows(part.adapter.layout, torch.zeros(1, part.adapter.layout.size)) for part in parts]
    tables.fill(parts, bucket, rows)
    ids, positions = tables.ids_and_positions(bucket)
    assert ids[0].tolist() == [*np.concatenate([part.data[0].tokens for part in parts]), *[0] * (bucket.rows - 93)]
    assert positions[0].tolist() == [*range(70), *range(3), *range(20), *[0] * (bucket.rows - 93)]
    tiles = [tile for tile in tables._view("lora_tiles").tolist() if tile[1] < tile[2]]
    nobody = BUCKETS[2].requests
    assert tiles == [[0, 0, 70, 16], [0, 64, 70, 16], [1, 70, 73, 8], [2, 73, 93, 16], [nobody, 93, bucket.rows, 0]]
    addresses = tables._view("addresses")
    for number, part in enumerate(parts):
        for place, name in enumerate(names):
            a_RI, b_OR = part.adapter.layout.views(part.adapter.compute_copy, name)
            da_RI, db_OR = part.adapter.layout.views(rows[number].rows_GP[0], name)
            expected = [each.data_ptr() for each in (a_RI, b_OR, da_RI, db_OR)]
            assert addresses[place, :, number].tolist() == expected
    assert not addresses[:, :, nobody].any()
    tables.fill(parts[1:2], bucket, [])  # nothing of the earlier pass may remain
    assert not addresses[:, 2:].any()
    assert addresses[:, :2].count_nonzero() == 2 * len(names)


def test_tables_say_where_adapters_on_experts_are() -> None:
    """Their requests are numbered apart from the others; all other rows have the number of nobody."""
    trainer = tiny_trainer(tiny_model("qwen3_moe"))
    specs = {"attention": LoraSpec(8, train_mlp=False), "a": LoraSpec(8), "b": LoraSpec(32, train_attn=False)}
    lengths = {"attention": 20, "a": 30, "b": 7}
    parts = [part_with(trainer, name, spec, lengths[name]) for name, spec in specs.items()]
    experts, names = trainer.architecture.experts, [target.name for target in trainer.architecture.linear]
    bucket = BUCKETS[0]
    tables = PassTables(BUCKETS[2], names, CPU, experts)
    rows = [GradientRows(part.adapter.layout, torch.zeros(1, part.adapter.layout.size)) for part in parts]
    tables.fill(parts, bucket, rows)
    layers = tables.lora(bucket, [experts[0].name.removesuffix("mlp.experts")])
    found = layers[0].experts_on_device("mlp.experts", torch.zeros(bucket.rows, 1))
    assert found is not None
    assert layers[0].experts_on_device("mlp", torch.zeros(bucket.rows, 1)) is None
    nobody = found.groups.count
    assert nobody == bucket.requests_on_experts
    assert found.groups.group_T.tolist() == [nobody] * 20 + [0] * 30 + [1] * 7 + [nobody] * (bucket.rows - 57)
    assert found.groups.starts is not None
    assert found.groups.ends is not None
    assert found.groups.starts.tolist() == [20, 50] + [0] * (nobody - 1)
    assert found.groups.ends.tolist() == [50, 57] + [0] * (nobody - 1)
    projections = dict(zip(("w1", "w3", "w2"), (*found.up, *found.down), strict=True))
    for number, (part, gradient) in enumerate(zip(parts[1:], rows[1:], strict=True)):
        layout = part.adapter.layout
        for last, device_part in projections.items():
            rows_P = (part.adapter.compute_copy, gradient.rows_GP[0])
            views = [layout.views(row_P, f"{experts[0].name}.{last}") for row_P in rows_P]
            addresses = [each.data_ptr() for pair in views for each in pair]
            assert device_part.table_5G[:, number].tolist() == [*addresses, layout.rank]
            assert not device_part.table_5G[:, 2:].any()
    tables.fill(parts[:1], bucket, [])  # nothing of the earlier pass may remain
    assert (found.groups.group_T == nobody).all()
    assert not any(device_part.table_5G.any() for device_part in projections.values())


def test_which_adapters_on_experts_are_captured() -> None:
    trainer = tiny_trainer(tiny_model("qwen3_moe"))
    specs = {"a": LoraSpec(32), "large": LoraSpec(64), "peft": LoraSpec(8, experts="independent")}
    parts = {name: part_with(trainer, name, spec, 4) for name, spec in specs.items()}
    assert [can_be_captured(part) for part in parts.values()] == [True, False, False]
    large = BUCKETS[-1]
    assert large.takes([parts["a"]] * large.requests_on_experts)
    assert not large.takes([parts["a"]] * (large.requests_on_experts + 1))
    base = replace(parts["a"], adapter=None)
    assert large.takes([base] * large.requests)


def test_a_bucket_has_room_for_the_most_tiles() -> None:
    for bucket in BUCKETS:
        assert bucket.rows % TILE_ROWS == 0
        sizes = [bucket.rows // bucket.requests] * bucket.requests
        assert sum(-(-size // TILE_ROWS) for size in sizes) <= bucket.lora_tiles
        lengths = [bucket.rows // bucket.sequences] * bucket.sequences
        assert len(tile_table(lengths)) <= bucket.attention_tiles


def test_what_is_not_captured(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    assert trainer.engine.graphs is None, "there are none on a CPU"
    small, many = parts_of(trainer, [8], [64]), parts_of(trainer, [8] * 9, [1] * 9)
    assert all(map(can_be_captured, small))
    assert Bucket(64).takes(small)
    assert not Bucket(64).takes(many)
    assert not Bucket(64).takes(parts_of(trainer, [8], [65]))
    assert not can_be_captured(parts_of(trainer, [256], [4])[0])


@pytest.mark.parametrize(
    ("family", "tokens", "limit"),
    [
        ("qwen3_moe", 6224, 4096),
        ("qwen3_moe", 8192, 4096),
        ("qwen3_moe", 8193, None),
        ("qwen3_moe", 4096, None),
        ("llama", 6224, None),
    ],
)
def test_batches_of_experts_are_as_large_as_captured_passes(family: str, tokens: int, limit: int | None) -> None:
    architecture = tiny_trainer(tiny_model(family)).architecture
    assert most_tokens_of_a_batch(architecture, tokens, 4096) == limit


@pytest.mark.parametrize(
    ("family", "max_tokens", "rows"),
    [
        ("llama", None, 1250),  # an eighth of the memory
        ("qwen3_moe", None, 2000),  # a fifth
        ("llama", 1500, 1536),  # all batches are captured, with less than a fifth
        ("llama", 100, 128),
        ("llama", 2500, 1250),  # they would need more
        ("llama", 5000, 1250),
    ],
)
def test_how_many_rows_are_captured(family: str, max_tokens: int | None, rows: int) -> None:
    architecture = tiny_trainer(tiny_model(family)).architecture
    assert rows_to_capture(architecture, 10_000 * 64, 64, max_tokens) == rows


def test_one_rounding_more_shows_how_much_a_deep_model_magnifies_it() -> None:
    """What changing the embeddings by one rounding changes is about the error of the whole pass in bf16."""
    config = tiny_config("LlamaConfig", num_hidden_layers=24, initializer_range=0.2)  # magnifies what it gets
    found: dict[str, list[torch.Tensor]] = {}
    for kind in ("exact", "bf16", "rounded otherwise"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        dtype = torch.float32 if kind == "exact" else torch.bfloat16
        engine = tiny_trainer(model.to(dtype)).engine
        adapters = probe.probe_adapters(engine.architecture, engine.device, dtype, [8, 4], init=False)
        parts = probe.probe_parts(engine.architecture, adapters, [30, 50])
        with probe.embeddings_rounded_otherwise(engine) if kind == "rounded otherwise" else nullcontext():
            found[kind] = probe.numbers_of_a_pass(engine, parts)
        again = probe.numbers_of_a_pass(engine, parts)
        assert (probe.relative_differences(again, found[kind]) == [0.0] * len(again)) == (kind != "rounded otherwise")
    errors = probe.relative_differences(found["bf16"], found["exact"])
    magnified = probe.relative_differences(found["rounded otherwise"], found["bf16"])
    assert max(errors) > 0.1  # more than is always allowed
    assert all(one / 3 < other < 3 * one for one, other in zip(errors, magnified, strict=True))


@pytest.mark.parametrize(
    ("factor", "agrees"), [(1.0, True), (1.05, True), (0.6, False), (0.0, False), (float("nan"), False)]
)
@pytest.mark.parametrize("deep", [False, True])
def test_captured_passes_with_wrong_numbers_are_found(
    factor: float, agrees: bool, deep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a model in which one more rounding changes numbers by more than a half."""
    config = tiny_config("LlamaConfig", **({"num_hidden_layers": 24, "initializer_range": 0.3} if deep else {}))
    engine = tiny_trainer(AutoModelForCausalLM.from_config(config).bfloat16()).engine
    right = probe.numbers_of_a_pass

    def numbers(engine: object, parts: list[Part]) -> list[torch.Tensor]:
        captured, engine.graphs = engine.graphs, None
        found = right(engine, parts)
        engine.graphs = captured
        return found if captured is None else [factor * each for each in found]

    monkeypatch.setattr(probe, "numbers_of_a_pass", numbers)
    engine.graphs = object()
    difference = probe.compare_captured_passes(engine, torch.bfloat16)
    assert difference.is_small is agrees
    assert difference.allowed <= 0.5


on_hopper = pytest.mark.skipif(
    not runs_own_kernels(torch.device("cuda" if torch.cuda.is_available() else "cpu")), reason="needs a Hopper GPU"
)


@pytest.mark.gpu
@on_hopper
def test_captured_passes_equal_others(make_trainer: MakeTrainer) -> None:
    """Any mix of ranks, targets and lengths gives the numbers of other passes, up to the rounding of bf16."""
    specs = {
        "a": LoraSpec(8, seed=1),
        "b": LoraSpec(32, seed=2),
        "attention": LoraSpec(16, seed=3, train_mlp=False),
        "head": LoraSpec(16, seed=4, train_unembed=True),
        "dropout": LoraSpec(8, seed=5, dropout=0.1),
    }
    batches = (
        {"a": (9,)},
        {"b": (40, 3), "attention": (70,)},
        {name: (5 + number, 30) for number, name in enumerate(specs)},
        {"head": (64,), "a": (100, 1)},
        {"a": (9,)},
    )
    found: dict[bool, list[np.ndarray]] = {}
    for captured in (True, False):
        trainer = make_trainer(wide_llama().to("cuda", torch.bfloat16))
        assert trainer.engine.graphs is not None
        if not captured:
            trainer.engine.graphs = None
        for name, spec in specs.items():
            trainer.create_adapter(name, spec)
            with_random_weights(trainer, name)
        values = found[captured] = []
        for batch in batches:
            items = [
                TrainItem(name, [random_datum(toy_llama(), "cross_entropy", length, seed=length) for length in lengths])
                for name, lengths in batch.items()
            ]
            for results in (trainer.forward_backward(items), trainer.forward(items)):
                for result in results:
                    assert isinstance(result, TrainResult), result
                    values += list(result.logprobs)
        values += [array for name in specs for _, array in sorted(trainer.gradients(name).items())]
    for ours, theirs in zip(found[True], found[False], strict=True):
        assert np.linalg.norm(ours - theirs) <= 0.05 * np.linalg.norm(theirs) + 1e-6


@pytest.mark.gpu
@on_hopper
def test_captured_passes_through_experts_equal_others() -> None:
    """They are as far from the same model in fp32 as other passes in bf16. Rounding sends some tokens elsewhere."""
    specs = {
        "a": LoraSpec(8, seed=1),
        "b": LoraSpec(32, seed=2),
        "attention": LoraSpec(16, seed=3, train_mlp=False),
        "experts": LoraSpec(16, seed=4, train_attn=False),
    }
    batches = ({"a": (9,)}, {"b": (40, 3), "attention": (70,)}, dict.fromkeys(specs, (30, 5)), {"a": (9,)})
    found: dict[str, list[np.ndarray]] = {}
    config = tiny_config("Qwen3MoeConfig", head_dim=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
    for kind in ("fp32", "captured", "bf16"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        trainer = tiny_trainer(model.to("cuda", torch.float32 if kind == "fp32" else torch.bfloat16))
        assert (trainer.engine.graphs is None) == (kind == "fp32")
        if kind == "bf16":
            trainer.engine.graphs = None
        for number, (name, spec) in enumerate(specs.items()):
            trainer.create_adapter(name, spec)
            trainer.restore(name, with_random_weights(trainer, name, seed=number))
        values = found[kind] = []
        for batch in batches:
            items = [
                TrainItem(name, [random_datum(model, "cross_entropy", length, seed=length) for length in lengths])
                for name, lengths in batch.items()
            ]
            for result in trainer.forward_backward(items):
                assert isinstance(result, TrainResult), result
                values += list(result.logprobs)
        values += [array for name in specs for _, array in sorted(trainer.gradients(name).items())]
    exact, ours, theirs = (np.concatenate([each.ravel() for each in found[kind]]) for kind in found)
    assert np.linalg.norm(ours - exact) <= 2 * np.linalg.norm(theirs - exact)
