"""LoRA's options in the trainer: equal to PEFT's, alone and in company, and exported so that PEFT computes the same.

PEFT gets the masks of our dropout: its dropout modules are replaced by ones that apply them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.support.models.reference import (
    Reference,
    assert_logprobs_close,
    assert_numbers_close,
    assert_tensors_close,
    random_datum,
    target_logprobs,
    toy_llama,
)
from tests.support.models.sampling import run, toy_tokenizer
from tests.support.models.tiny_models import tiny_model, tiny_trainer
from twinkle.errors import CheckpointError
from twinkle.model import AdamParams, Datum, LoraSpec, Trainer, TrainItem, TrainResult
from twinkle.model.adapters.checkpoint import with_one_rank
from twinkle.model.adapters.peft_config import spec_from_peft
from twinkle.model.decoder.lora.dropout import DropoutDraw, RowDropout
from twinkle.model.trainer.shard_requests import RequestShards
from twinkle.model.types import ObjectiveValue, TokenValues
from twinkle.sampler import SampleRequest, SamplingParams, TorchSampler
from twinkle.sampler.received_weights import as_tensors

BASE = toy_llama()
STEPS = 3
Arrays = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Tenant:
    config: peft.LoraConfig
    loss: str = "cross_entropy"
    lengths: tuple[int, ...] = (9, 14)


def tenant(loss: str = "cross_entropy", lengths: tuple[int, ...] = (9, 14), **fields: object) -> Tenant:
    fields = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **fields}
    return Tenant(peft.LoraConfig(**fields), loss, lengths)


# Some share a stack: with and without dropout, with two probabilities.
TENANTS: Mapping[str, Tenant] = {
    "plain": tenant(),
    "dropout": tenant("gspo", (13, 5), lora_dropout=0.05),
    "more dropout": tenant(lora_dropout=0.5, init_lora_weights="gaussian"),
    "rslora": tenant(r=5, lora_alpha=3, use_rslora=True, lora_dropout=0.2, init_lora_weights=False),
    "rank pattern": tenant(
        "ppo", (7, 7), rank_pattern={r"layers.1.*q_proj": 17, "mlp.up_proj": 2, "q_proj": 4}, lora_dropout=0.3
    ),
    "alpha pattern": tenant(
        alpha_pattern={"k_proj": 4.5, "down_proj": 30}, use_rslora=True, exclude_modules=["o_proj"]
    ),
    "head": tenant(
        "importance_sampling",
        (31,),
        r=6,
        target_modules=r".*v_proj|lm_head",
        lora_dropout=0.4,
        rank_pattern={"lm_head": 20},
        alpha_pattern={"lm_head": 5},
    ),
    "one layer": tenant(
        target_modules=["q_proj", "gate_proj"],
        layers_to_transform=[1],
        exclude_modules=r".*\.gate_proj_of_another_model",
        init_lora_weights="orthogonal",
    ),
}
ALL = list(TENANTS)


def spec(name: str) -> LoraSpec:
    return replace(spec_from_peft(TENANTS[name].config.to_dict()), seed=100 + ALL.index(name))


def request(name: str, step: int) -> TrainItem:
    own, number = TENANTS[name], ALL.index(name)
    data = [random_datum(BASE, own.loss, length, 1000 * step + 10 * number + n) for n, length in enumerate(own.lengths)]
    return TrainItem(name, data, own.loss)


def make(*names: str, **options: object) -> Trainer:
    trainer = tiny_trainer(toy_llama(), **options)
    for name in names:
        trainer.create_adapter(name, spec(name))
    return trainer


@dataclass(frozen=True)
class Step:
    logprobs: list[NDArray[np.float32]]
    loss: float
    gradients: Arrays
    weights: Arrays  # after the step


def adam(name: str) -> AdamParams:
    return AdamParams(learning_rate=2e-3 * (1 + ALL.index(name)), eps=0.1)  # see test_numerics.py on eps


def train(trainer: Trainer, *names: str, steps: range = range(STEPS)) -> dict[str, list[Step]]:
    history: dict[str, list[Step]] = {name: [] for name in names}
    for step in steps:
        results = trainer.forward_backward([request(name, step) for name in names])
        for name, result in zip(names, results, strict=True):
            assert isinstance(result, TrainResult), result
            gradients = trainer.gradients(name)
            trainer.optim_step(name, adam(name))
            history[name].append(Step(result.logprobs, result.metrics["loss:sum"], gradients, trainer.weights(name)))
    return history


# Making a trainer takes longer than a step, so two of them serve most tests.


@cache
def trained_together() -> tuple[Trainer, dict[str, list[Step]]]:
    trainer = make(*ALL)
    return trainer, train(trainer, *ALL)


def in_company() -> dict[str, list[Step]]:
    return trained_together()[1]


@cache
def quiet_trainer() -> Trainer:
    return make(*ALL)


@cache
def initial_weights(name: str) -> Arrays:
    assert quiet_trainer().step_count(name) == 0
    return quiet_trainer().weights(name)


@cache
def alone(name: str) -> list[Step]:
    """Train an adapter of the quiet trainer, in calls that hold no other."""
    initial_weights(name)
    return train(quiet_trainer(), name)[name]


def assert_same(ours: list[Step], theirs: list[Step]) -> None:
    for left, right in zip(ours, theirs, strict=True):
        assert_logprobs_close(left.logprobs, right.logprobs)
        assert_numbers_close(left.loss, right.loss)
        assert_tensors_close(left.gradients, right.gradients)
        assert_tensors_close(left.weights, right.weights)


class OurDropout(nn.Module):
    """Applies our mask of one module to the sequence and the pass that ``draw`` names."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self.module = module
        self.draw: tuple[DropoutDraw, int] | None = None

    def forward(self, x_1TI: Tensor) -> Tensor:
        if self.draw is None:
            return x_1TI
        draw, place = self.draw
        rows = RowDropout.from_keys([(draw.probability, draw.keys(place, x_1TI.shape[1]))], x_1TI.device)
        return x_1TI * rows.apply(torch.ones_like(x_1TI[0]), self.module)


def reference(name: str, weights: Arrays) -> tuple[Reference, list[OurDropout]]:
    theirs = Reference(BASE, spec(name), weights, TENANTS[name].config)
    dropouts = []
    for path, module in theirs.model.named_modules():
        if isinstance(module, peft.tuners.lora.LoraLayer) and spec(name).dropout:
            assert module.lora_dropout["default"].p == spec(name).dropout
            module.lora_dropout["default"] = OurDropout(path.removeprefix("base_model.model."))
            dropouts.append(module.lora_dropout["default"])
    return theirs, dropouts


def train_peft(name: str) -> list[Step]:
    theirs, dropouts = reference(name, initial_weights(name))
    own, steps = spec(name), []
    assert own.seed is not None
    for step in range(STEPS):
        item, logprobs, loss = request(name, step), [], 0.0
        for place, datum in enumerate(item.data):
            for each in dropouts:
                each.draw = DropoutDraw(own.dropout, own.seed, step, range(len(item.data))), place
            result = theirs.forward_backward(replace(item, data=[datum]))
            logprobs += result.logprobs
            loss += result.loss
        gradients = theirs.gradients()
        theirs.optim_step(adam(name))
        steps.append(Step(logprobs, loss, gradients, theirs.weights()))
    return steps


# --- alone, in company, and PEFT --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_in_company_of_seven_equals_alone_and_peft(name: str) -> None:
    ours = in_company()[name]
    assert_same(ours, alone(name))
    assert_same(ours, train_peft(name))


@pytest.mark.parametrize("name", ["dropout", "more dropout", "rank pattern", "head"])
def test_dropout_changes_the_result_and_every_pass_drops_something_else(name: str) -> None:
    trainer = quiet_trainer()
    trainer.create_adapter("drops", spec(name))
    trainer.create_adapter("none", replace(spec(name), dropout=0.0))
    items = [replace(request(name, 0), adapter_id=each) for each in ("drops", "none")]
    trainer.forward_backward(items)
    once, never = trainer.gradients("drops"), trainer.gradients("none")
    trainer.zero_grad("drops")
    trainer.forward_backward(items)
    again = trainer.gradients("drops")
    for each in ("drops", "none"):
        trainer.remove_adapter(each)
    changed = [key for key in once if ".lora_B" in key and np.abs(once[key] - never[key]).max() > 1e-4]
    assert changed == [key for key in once if ".lora_B" in key]
    assert all(np.abs(once[key] - again[key]).max() > 1e-4 for key in changed)


def test_micro_batches_and_recomputed_layers_drop_the_same() -> None:
    """Sequences longer than 12 tokens are recomputed."""
    names = ["dropout", "more dropout", "rank pattern", "head"]
    trainer = make(*names, max_tokens_per_batch=12)
    history = train(trainer, *names, steps=range(2))
    for name in names:
        assert_same(history[name], in_company()[name][:2])
    # An objective sees what the backward passes drop, although its request is computed in several batches.
    gradients = []
    for each in (trainer, quiet_trainer()):
        each.create_adapter("objective", spec("more dropout"))
        item = replace(request("more dropout", 0), adapter_id="objective", objective=squares)
        assert isinstance(each.forward_backward([item])[0], TrainResult)
        gradients.append(each.gradients("objective"))
    assert_tensors_close(*gradients)


def test_an_interrupted_pass_drops_the_same() -> None:
    names, trainer = ["dropout", "head", "plain"], quiet_trainer()
    for name in (*names, "more dropout"):
        trainer.create_adapter(f"{name} again", spec(name))
    calls: list[bool] = []

    def others_compute() -> None:
        calls.append(True)
        if len(calls) % 4 == 0:
            item = replace(request("more dropout", 0), adapter_id="more dropout again")
            assert isinstance(trainer.forward_backward([item])[0], TrainResult)

    items = [replace(request(name, 0), adapter_id=f"{name} again") for name in names]
    for _ in trainer.in_steps(items, train=True, limit=lambda: 20, give_way=others_compute):
        others_compute()
    assert len(calls) > 8
    for name in names:
        assert_tensors_close(trainer.gradients(f"{name} again"), in_company()[name][0].gradients)


def squares(values: list[TokenValues]) -> ObjectiveValue:
    """Depend on all log-probabilities together, so that the trainer needs them before the first backward pass."""
    total = sum(float(each.logprobs.sum()) for each in values)
    return ObjectiveValue(total**2 / 2, [np.full_like(each.logprobs, total) for each in values])


def test_a_model_with_padded_batches() -> None:
    """Rows of padding lie between the sequences, and the head sees rows without them."""
    trainer = tiny_trainer(tiny_model("lfm2"))
    fields = {"r": 4, "target_modules": ["q_proj", "w1", "lm_head"], "lora_dropout": 0.3}
    trainer.create_adapter("a", replace(spec_from_peft(fields), seed=1, init_weights=False))
    trainer.create_adapter("b", LoraSpec(8, seed=2))
    data = [random_datum(BASE, "cross_entropy", length, length) for length in (5, 12)]
    trainer.forward_backward([TrainItem("b", data), TrainItem("a", data)])
    together = trainer.gradients("a")
    trainer.zero_grad("a")
    for number, datum in enumerate(data):
        trainer.restore("a", replace(trainer.snapshot("a"), passes=0))
        trainer.forward_backward([TrainItem("a", [datum], numbers=[number])])
    assert_tensors_close(trainer.gradients("a"), together)


def test_ranks_drop_what_one_process_drops() -> None:
    data = [random_datum(BASE, "cross_entropy", length, length) for length in (4, 9, 6)]
    adapters = [("whole", quiet_trainer()), ("first", quiet_trainer()), ("second", quiet_trainer())]
    gradients = []
    for rank, (name, trainer) in enumerate(adapters, -1):
        trainer.create_adapter(name, spec("more dropout"))
        item = TrainItem(name, data)
        trainer.forward_backward([item] if rank < 0 else RequestShards.by_tokens([item], 2).share(rank))
        gradients.append(trainer.gradients(name))
    whole, first, second = gradients
    assert_tensors_close({key: first[key] + second[key] for key in whole}, whole)


# --- passes that do not train -----------------------------------------------------------------------------------------


def test_forward_drops_nothing_unless_it_belongs_to_training() -> None:
    trainer, name = quiet_trainer(), "drops in training"
    trainer.create_adapter(name, replace(spec("more dropout"), init_weights=False))
    trainer.create_adapter("never", replace(spec("more dropout"), init_weights=False, dropout=0.0))
    item = replace(request("more dropout", 0), adapter_id=name)
    items = [item, replace(item, adapter_id="never"), replace(item, training=True)]
    evaluated, without, training = trainer.forward(items)
    assert isinstance(evaluated, TrainResult)
    assert isinstance(without, TrainResult)
    assert isinstance(training, TrainResult)
    assert_logprobs_close(evaluated.logprobs, without.logprobs)
    assert np.abs(training.logprobs[0] - evaluated.logprobs[0]).max() > 1e-3
    trained = trainer.forward_backward([item])[0]
    assert isinstance(trained, TrainResult)
    assert_logprobs_close(trained.logprobs, training.logprobs)


# --- state ------------------------------------------------------------------------------------------------------------


def test_a_snapshot_goes_on_to_the_last_bit() -> None:
    names, trainer = ["dropout", "rank pattern", "head"], trained_together()[0]
    before = {name: trainer.snapshot(name) for name in names}
    train(trainer, *names, steps=range(3, 5))
    after = {name: trainer.weights(name) for name in names}
    for name in names:
        trainer.restore(name, before[name])
    again = train(trainer, *names, steps=range(3, 5))
    for name in names:
        for key, weights in again[name][-1].weights.items():
            np.testing.assert_array_equal(weights, after[name][key])
        trainer.restore(name, before[name])


@pytest.mark.parametrize("name", ALL)
def test_peft_loads_what_is_saved_with_the_same_logits(name: str, tmp_path: Path) -> None:
    trainer, again = trained_together()[0], quiet_trainer()
    trainer.save(name, tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    own = TENANTS[name].config
    assert (written["r"], written["lora_dropout"], written["use_rslora"]) == (own.r, own.lora_dropout, own.use_rslora)
    theirs = peft.PeftModel.from_pretrained(toy_llama(), tmp_path / "saved").eval()
    item = replace(request(name, 5), loss="cross_entropy", data=[random_datum(BASE, "cross_entropy", 17, 3)])
    ours = trainer.forward([item])[0]
    assert isinstance(ours, TrainResult)
    with torch.no_grad():
        assert_logprobs_close(ours.logprobs, [target_logprobs(theirs, item.data[0]).numpy()])
    loaded = again.create_adapter_from_checkpoint("again", tmp_path / "saved")
    assert (loaded.dropout, loaded.use_rslora) == (own.lora_dropout, own.use_rslora)
    assert_tensors_close(again.weights("again"), trainer.weights(name), tolerance=0.0)
    assert_same_results(again.forward([replace(item, adapter_id="again")])[0], ours)
    assert again.snapshot("again").passes == trainer.snapshot(name).passes == STEPS
    again.remove_adapter("again")


def test_a_sampler_reads_what_is_saved(tmp_path: Path) -> None:
    trainer, tokens = trained_together()[0], random_datum(BASE, "cross_entropy", 17, 3).tokens
    sampler = TorchSampler(trainer, toy_tokenizer())
    requests, expected = [], {}
    for name in ("rslora", "rank pattern", "alpha pattern", "head"):
        trainer.save(name, tmp_path / name)
        sampler.load_version(name, str(tmp_path / name))
        requests.append(SampleRequest(name, name, tokens, SamplingParams(max_tokens=1), prompt_logprobs=True))
        shifted = Datum(tokens[:-1], tokens[1:])
        result = trainer.forward([TrainItem(name, [shifted])])[0]
        assert isinstance(result, TrainResult)
        expected[name] = result.logprobs[0]
    for name, outcome in run(sampler, requests).items():  # all in one pass
        assert_numbers_close(outcome.prompt_logprobs[1:], expected[name])


def assert_same_results(left: object, right: TrainResult) -> None:
    assert isinstance(left, TrainResult)
    assert_logprobs_close(left.logprobs, right.logprobs)


def test_an_adapter_for_programs_that_know_no_patterns() -> None:
    trainer, tokens = trained_together()[0], random_datum(BASE, "cross_entropy", 17, 3).tokens
    sampler, requests = TorchSampler(trainer, toy_tokenizer()), []
    for name in ("rank pattern", "alpha pattern"):
        config, weights = with_one_rank(trainer.peft_config(name), as_tensors(trainer.weights(name)))
        shapes = {tuple(tensor.shape)[0 if "lora_A" in key else 1] for key, tensor in weights.items()}
        assert (shapes, config["rank_pattern"], config["alpha_pattern"]) == ({config["r"]}, {}, {})
        sampler.publish(name, name)
        sampler.receive_version(f"{name} as one", config, weights)
        requests += [
            SampleRequest(each, each, tokens, SamplingParams(max_tokens=1), prompt_logprobs=True)
            for each in (name, f"{name} as one")
        ]
    results = run(sampler, requests)
    for name in ("rank pattern", "alpha pattern"):
        assert_numbers_close(results[name].prompt_logprobs[1:], results[f"{name} as one"].prompt_logprobs[1:])


def test_patterns_whose_order_matters_are_written_so_that_it_does_not(tmp_path: Path) -> None:
    """The file is sorted JSON; PEFT takes the first pattern that matches."""
    trainer = quiet_trainer()
    fields = {"r": 4, "target_modules": ["q_proj"], "rank_pattern": {"self_attn.q_proj": 3, "1.self_attn.q_proj": 5}}
    trainer.create_adapter_from_peft("ordered", fields)
    assert {array.shape[0] for name, array in trainer.weights("ordered").items() if "lora_A" in name} == {3}
    trainer.save("ordered", tmp_path / "a")
    trainer.create_adapter_from_checkpoint("read", tmp_path / "a")
    assert_tensors_close(trainer.weights("read"), trainer.weights("ordered"), tolerance=0.0)
    peft.PeftModel.from_pretrained(toy_llama(), tmp_path / "a")


def test_weights_of_other_ranks_or_scalings_are_refused_by_module(tmp_path: Path) -> None:
    trainer = quiet_trainer()
    trainer.save("rank pattern", tmp_path / "ranks")
    trainer.save("rslora", tmp_path / "rslora")
    trainer.create_adapter("uniform", LoraSpec(8, alpha=16, target_modules="all-linear"))
    with pytest.raises(
        CheckpointError, match=r"holds rank 4, scaling 4 for model.layers.0.self_attn.q_proj; .* rank 8"
    ):
        trainer.load("uniform", tmp_path / "ranks")
    trainer.create_adapter("five", LoraSpec(5, alpha=3, target_modules="all-linear"))
    with pytest.raises(
        CheckpointError, match=r"scaling 1\.34164 for .*; adapter 'five' has rank 5, scaling 0\.6 there"
    ):
        trainer.load("five", tmp_path / "rslora")


def test_a_rank_pattern_takes_only_the_memory_of_its_ranks() -> None:
    trainer = quiet_trainer()
    uniform, large = (LoraSpec(r, target_modules="all-linear") for r in (8, 128))
    one = replace(uniform, rank_pattern={"0.self_attn.q_proj": 128})
    more = (128 - 8) * (64 + 64)  # the rows of A and the columns of B of one module
    assert trainer.host_bytes_of(one) - trainer.host_bytes_of(uniform) == 20 * more
    assert trainer.host_bytes_of(one) < trainer.host_bytes_of(large) / 5


# --- the masks --------------------------------------------------------------------------------------------------------


def mask(draw: DropoutDraw, place: int = 0, module: str = "m", shape: tuple[int, int] = (400, 500)) -> Tensor:
    rows = RowDropout.from_keys([(draw.probability, draw.keys(place, shape[0]))], torch.device("cpu"))
    return rows.apply(torch.ones(shape), module)


def test_the_share_of_dropped_elements() -> None:
    for probability in (0.05, 0.5, 0.9):
        dropped = mask(DropoutDraw(probability, 1, 0, [0]))
        assert abs((dropped == 0).double().mean() - probability) < 0.005  # ten standard deviations at most
        assert set(dropped.unique().tolist()) == {0.0, np.float32(1 / (1 - probability)).item()}
        for axis in (0, 1):  # no row and no column stands out
            share = (dropped == 0).double().mean(axis)
            assert (share - probability).abs().max() < 6 * (probability * (1 - probability) / 400) ** 0.5


def test_a_part_of_the_features_has_its_part_of_the_mask() -> None:
    draw = DropoutDraw(0.5, 1, 0, [0])
    rows = RowDropout.from_keys([(draw.probability, draw.keys(0, 7))], torch.device("cpu"))
    whole, part = rows.apply(torch.ones(7, 300), "m"), rows.apply(torch.ones(7, 100), "m", 200)
    assert torch.equal(part, whole[:, 200:])
    added = torch.ones(7, 100)
    rows.add(added, torch.ones(7, 100), "m", 200)
    assert torch.equal(added, 1 + part)


def test_masks_of_different_things_are_independent() -> None:
    draw = DropoutDraw(0.5, 1, 0, [0, 1])
    others = [
        mask(replace(draw, seed=2)),
        mask(replace(draw, number=1)),
        mask(draw, place=1),
        mask(draw, module="n"),
        mask(draw).roll(1, 0),
        mask(draw).roll(1, 1),
    ]
    for other in others:
        assert abs((mask(draw) == other).double().mean() - 0.5) < 0.01


def test_masks_stay_the_same_in_later_versions() -> None:
    """A server that is updated replays steps of the version before."""
    dropped = mask(DropoutDraw(0.5, 7, 3, [2]), module="model.layers.0.mlp.up_proj", shape=(4, 16)) == 0
    rows = ["".join("01"[int(each)] for each in row) for row in dropped]
    assert rows == ["1100111101010100", "0101001100011110", "1011000001111000", "1001100001011001"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_drops_the_same_elements(dtype: torch.dtype) -> None:
    """The CUDA kernel equals the CPU's code to the last bit, in rows of several requests and odd sizes."""
    drawn = [(p, DropoutDraw(p, seed, 5, [0]).keys(0, n)) for seed, (p, n) in enumerate([(0.05, 37), (0.5, 61)])]
    x, y = torch.randn(2, 98, 1041, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = []
    for device in ("cpu", "cuda"):
        rows, out = RowDropout.from_keys(drawn, torch.device(device)), y.to(device, copy=True)
        rows.add(out, x.to(device), "model.layers.1.mlp.down_proj")
        found.append((rows.apply(x.to(device), "model.layers.0.mlp.up_proj").cpu(), out.cpu()))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
