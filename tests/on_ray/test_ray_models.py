"""The library's classes on two workers compute the same as in one process."""

import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch

from twinkle.data_format import SamplingParams
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.infra import DeviceMesh, LazyResult
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.sampler import LocalSampler

pytestmark = pytest.mark.ray

MODEL = "random://llama-tiny"
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
A = "a"


def row(length: int, seed: int) -> dict:
    tokens = np.random.default_rng(seed).integers(0, 500, length).tolist()
    return {"input_ids": tokens, "labels": [*tokens[1:], -100]}


# Lengths differ, so that the two workers pad their rows to different widths. The second batch has a row for only one.
BATCHES = [[row(length, length) for length in (5, 9, 4, 17, 12)], [row(7, 1)], [row(6, 2), row(11, 3)]]


def lora_model(**where) -> MultiLoraTransformersModel:
    model = MultiLoraTransformersModel(model_id=MODEL, mixed_precision="fp32", device="cpu", max_loras=4, **where)
    return with_adapter(model, A)


def with_adapter(model: MultiLoraTransformersModel, name: str) -> MultiLoraTransformersModel:
    model.add_adapter_to_model(name, peft.LoraConfig(**LORA), seed=3)
    model.set_optimizer("AdamW", lr=1e-3, adapter_name=name)
    model.set_lr_scheduler("LinearWarmupScheduler", num_warmup_steps=2, num_training_steps=9, adapter_name=name)
    return model


@pytest.fixture(scope="module")
def remote(program) -> MultiLoraTransformersModel:
    return lora_model(remote_group="work")


@pytest.fixture
def local() -> MultiLoraTransformersModel:
    return lora_model()


def result(outputs):
    return outputs() if isinstance(outputs, LazyResult) else outputs


def close(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


def trained(model, **adapter: str) -> list[float]:
    """Train on each batch and return its loss per token."""
    losses = []
    for batch in BATCHES:
        outputs = result(model.forward_backward(inputs=batch, **adapter))
        model.clip_grad_and_step(**adapter)
        losses.append(outputs["loss"] / outputs["num_tokens"])
        told = model.calculate_metric(is_training=True, **adapter)
        assert float(told["loss"]) == pytest.approx(losses[-1], abs=1e-4)  # over both workers
    return losses


def test_an_adapter_on_two_workers_learns_what_it_learns_in_one_process(remote, local):
    losses, expected = trained(remote, adapter_name=A), trained(local, adapter_name=A)
    assert losses == pytest.approx(expected, rel=1e-5)
    close(remote.get_state_dict(adapter_name=A)(), local.get_state_dict(adapter_name=A))
    assert remote.get_peft_config_dict(adapter_name=A) == local.get_peft_config_dict(adapter_name=A)
    assert remote.get_train_configs(adapter_name=A) == local.get_train_configs(adapter_name=A)


def test_the_verbs_one_by_one(remote):
    """Outputs are in the order of the rows, and a gradient is that of all rows."""
    with_adapter(remote, "steps")
    with_adapter(local := lora_model(), "steps")
    for model in (remote, local):
        outputs = result(model.forward(inputs=BATCHES[0], adapter_name="steps"))
        model.calculate_loss(adapter_name="steps")
        model.backward(adapter_name="steps")
        norm = model.clip_grad_norm(adapter_name="steps")
        model.step(adapter_name="steps")
        model.zero_grad(adapter_name="steps")
        model.lr_step(adapter_name="steps")
        if model is remote:
            found, found_norm = outputs["logps"], norm()
    for index, each in enumerate(BATCHES[0]):
        length = len(each["input_ids"])
        torch.testing.assert_close(found[index, :length], outputs["logps"][index, :length], rtol=1e-5, atol=1e-5)
    assert found_norm == pytest.approx(norm, rel=1e-5)
    close(remote.get_state_dict(adapter_name="steps")(), local.get_state_dict(adapter_name="steps"))
    remote.remove_adapter("steps")


def test_a_checkpoint_of_workers_goes_on_in_one_process_and_back(remote, tmp_path):
    with_adapter(remote, "kept")
    trained(remote, adapter_name="kept")
    saved = remote.save("kept", str(tmp_path), adapter_name="kept", save_optimizer=True, consumed_train_samples=8)
    assert saved == str(tmp_path / "kept")
    with_adapter(local := lora_model(), "kept")
    progress = {"cur_step": 3, "consumed_train_samples": 8, "gradient_accumulation_steps": 1}
    for model in (remote, local):
        assert model.resume_from_checkpoint(saved, adapter_name="kept") == progress
    assert trained(remote, adapter_name="kept") == pytest.approx(trained(local, adapter_name="kept"), rel=1e-5)
    remote.remove_adapter("kept")


def test_a_promised_pass_is_the_reference_of_another(remote):
    """The result stays a promise that is never fetched: the workers split it like the rows."""
    pairs = BATCHES[0][:4]
    with_adapter(remote, "dpo")
    with_adapter(local := lora_model(), "dpo")
    for model in (remote, local):
        model.set_loss("DPOLoss", beta=0.1, adapter_name="dpo")
        reference = model.forward_only(inputs=pairs, disable_lora=True, adapter_name="dpo")
        outputs = model.forward_backward(inputs=pairs, ref_outputs=reference, adapter_name="dpo")
        if model is remote:
            assert "not collected yet" in repr(reference)
            found = outputs()
    assert found["loss"] == pytest.approx(outputs["loss"], rel=1e-5)  # a mean over pairs; each worker has two
    assert found["num_tokens"] == 0
    remote.remove_adapter("dpo")


def test_what_one_worker_refuses_nobody_keeps(remote, local):
    before = remote.get_state_dict(adapter_name=A)()
    wrong = [BATCHES[0][0], {"input_ids": [1, 2], "labels": [2, 10**6]}]  # the row of the second worker
    with pytest.raises(InvalidInputError, match="1000000"):
        remote.forward_backward(inputs=wrong, adapter_name=A)()
    with pytest.raises(UnknownNameError, match="unknown adapter 'b'"):
        remote.set_loss("CrossEntropyLoss", adapter_name="b")
    remote.zero_grad(adapter_name=A)
    close(remote.get_state_dict(adapter_name=A)(), before)
    assert result(remote.forward_only(inputs=BATCHES[2], adapter_name=A))["logps"].shape == (2, 11)


def test_a_sampler_on_workers_samples_with_weights_that_the_driver_never_saw(remote, local):
    sampler = LocalSampler(remote, remote_group="work")
    weights = remote.get_state_dict(adapter_name=A)
    sampler.receive_weights(A, weights, remote.get_peft_config_dict(adapter_name=A))
    assert "not collected yet" in repr(weights)
    here = LocalSampler(local)
    here.receive_weights(A, weights(), local.get_peft_config_dict(adapter_name=A))
    prompts = [{"messages": [{"role": "user", "content": text}]} for text in ("Hello", "Hello", "A longer question?")]
    params = SamplingParams(max_tokens=6, seed=5, num_samples=2, logprobs=1)
    for name in (A, None):
        found, wanted = (each.sample(prompts, params, adapter_name=name) for each in (sampler, here))
        for one, other in zip(found, wanted, strict=True):
            assert [each.tokens for each in one.sequences] == [each.tokens for each in other.sequences]
    assert len(sampler.sample(prompts[0], params, adapter_name=A)) == 1  # a single prompt, for one worker
    with pytest.raises(UnknownNameError, match="unknown adapter 'b'"):
        sampler.sample(prompts, params, adapter_name="b")


def load_rows(file: str) -> Dataset:
    """Make a dataset, on the worker that has the loader."""
    dataset = Dataset(DatasetMeta(file))
    dataset.set_template("Template", model_id=MODEL, max_length=64)
    dataset.encode()
    return dataset


def test_shards_of_all_parameters_fed_by_a_loader_on_a_worker(program, tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    turns = [("Who?", "Me."), ("Why?", "Because."), ("When?", "Now, and later."), ("Where?", "Here.")]
    rows = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in turns]
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    mesh = DeviceMesh.from_sizes(fsdp_size=2, device_type="cpu")
    losses, weights = [], []
    for where in ({"remote_group": "work", "device_mesh": mesh}, {}):
        model = TransformersModel(model_id=MODEL, mixed_precision="no", device="cpu", **where)
        model.set_optimizer("AdamW", lr=1e-3)
        group = {"remote_group": "data"} if where else {}
        loader = DataLoader(lambda: load_rows(str(file)), batch_size=3, shuffle=True, seed=1, **group)
        assert len(loader) == 2
        for batch in loader:
            assert isinstance(batch, LazyResult if where else list)
            outputs = result(model.forward_backward(inputs=batch))
            model.clip_grad_and_step()
            losses.append(outputs["loss"] / outputs["num_tokens"])
        weights.append(result(model.get_state_dict()))
        assert loader.get_state() == {"consumed_train_samples": 4}
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-5)
    close(*weights)
