"""Checkpoints, runs and sessions with the unmodified SDK."""

import time
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from tests.support.servers.serving import ALIAS, MODEL, SdkServer, logprobs_of, sequences, tinker_data

ADAM = types.AdamParams(learning_rate=1e-2, eps=1e-8)


def step(training: tinker.TrainingClient, seed: int) -> None:
    training.forward_backward(tinker_data(sequences(seed)), "cross_entropy")
    training.optim_step(ADAM).result()


def look(training: tinker.TrainingClient) -> list[np.ndarray]:
    return logprobs_of(training.forward(tinker_data(sequences(50)), "cross_entropy").result())


def same(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))


def test_resuming_goes_on_as_if_nothing_had_happened(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(base_model=ALIAS, rank=8, seed=2, user_metadata={"renderer": "x"})
    step(training, 1)
    path = training.save_state("here").result().path
    step(training, 2)
    resumed = service.create_training_client_from_state_with_optimizer(path)
    assert resumed.get_info().lora_rank == 8
    step(resumed, 2)
    assert same(look(training), look(resumed))
    weights_only = service.create_training_client_from_state(path)
    step(weights_only, 2)
    assert not same(look(training), look(weights_only))


@pytest.mark.complaint("load_state*() is deprecated")
def test_loading_into_a_model_that_has_trained(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(base_model=MODEL, rank=4)
    before = look(training)
    path = training.save_state("start").result().path
    training.forward_backward(tinker_data(sequences(3)), "cross_entropy")
    training.load_state_with_optimizer(path).result()
    assert same(look(training), before)
    training.optim_step(ADAM).result()  # loading discarded the earlier gradient
    assert same(look(training), before)


@pytest.mark.complaint("load_state*() is deprecated")
def test_names_are_taken_once(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(base_model=MODEL, rank=4)
    training.save_state("one").result()
    with pytest.raises(tinker.RequestFailedError, match="exists"):
        training.save_state("one").result()
    training.save_state("one", overwrite=True).result()
    with pytest.raises(tinker.RequestFailedError, match="allowed"):
        training.save_state("../elsewhere").result()
    with pytest.raises(tinker.RequestFailedError, match="unknown checkpoint"):
        training.load_state(f"tinker://{training.model_id}/weights/none").result()


def test_a_sampler_keeps_its_weights_when_its_checkpoint_is_overwritten(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(base_model=MODEL, rank=4)
    step(training, 1)
    expected = training.save_weights_and_get_sampling_client()
    path = training.save_state("again").result().path
    sampler = service.create_sampling_client(model_path=path)
    step(training, 2)
    training.save_state("again", overwrite=True).result()
    prompt = types.ModelInput.from_ints([1, 2, 3, 4])
    found = sampler.compute_logprobs(prompt).result()[1:]
    np.testing.assert_allclose(found, expected.compute_logprobs(prompt).result()[1:], atol=2e-5)


def test_listing_and_deleting(server: SdkServer, service: tinker.ServiceClient, request: pytest.FixtureRequest) -> None:
    rest = server.rest(request.node.name)
    training = service.create_lora_training_client(base_model=ALIAS, rank=4, user_metadata={"renderer_name": "r"})
    state = training.save_state("a", ttl_seconds=3600, user_metadata={"k": "v"}).result().path
    sampler = training.save_weights_for_sampler("b").result().path
    run = rest.get_training_run(training.model_id).result()
    assert (run.base_model, run.lora_rank, run.is_lora) == (ALIAS, 4, True)
    assert run.user_metadata == {"renderer_name": "r"}
    assert run.last_checkpoint.tinker_path == state
    assert run.last_sampler_checkpoint.tinker_path == sampler
    assert rest.get_training_run_by_tinker_path(state).result().training_run_id == training.model_id
    runs = rest.list_training_runs(limit=5).result()
    assert [r.training_run_id for r in runs.training_runs] == [training.model_id]
    assert runs.cursor.total_count == 1
    info = rest.get_weights_info_by_tinker_path(state).result()
    assert (info.base_model, info.lora_rank, info.train_unembed) == (ALIAS, 4, True)
    listed = {c.tinker_path: c for c in rest.list_checkpoints(training.model_id).result().checkpoints}
    assert set(listed) == {state, sampler}
    assert listed[state].checkpoint_type == "training"
    assert listed[state].user_metadata == {"k": "v"}
    assert listed[state].size_bytes > 0
    assert 3500 < listed[state].expires_at.timestamp() - time.time() < 3700
    assert {c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints} == {state, sampler}
    rest.delete_checkpoint_from_tinker_path(state).result()
    assert [c.tinker_path for c in rest.list_checkpoints(training.model_id).result().checkpoints] == [sampler]
    with pytest.raises(tinker.NotFoundError):
        rest.get_weights_info_by_tinker_path(state).result()


def test_files_are_pefts(server: SdkServer, service: tinker.ServiceClient, files: Path) -> None:
    training = service.create_lora_training_client(base_model=MODEL, rank=4)
    training.save_state("peft").result()
    (found,) = (server.directory / "data" / "checkpoints").glob(f"{training.model_id.replace(':', '-')}/weights/peft/*")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in found.iterdir()}


def test_a_finished_session_says_how_to_go_on(server: SdkServer, request: pytest.FixtureRequest) -> None:
    service = server.service(request.node.name)
    training = service.create_lora_training_client(base_model=MODEL, rank=4)
    step(training, 1)
    before = look(training)
    service.close("success").result()
    again = server.service(request.node.name)
    resumed = again.create_training_client_from_state_with_optimizer(f"tinker://{training.model_id}/weights/parked")
    assert same(look(resumed), before)
