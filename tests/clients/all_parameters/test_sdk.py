"""All parameters through the unmodified SDK, after ``init_tinker_client()``: the numbers are those of a plain loop."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

from tests.clients.all_parameters.conftest import NO_SETS, TOLERANCE, PlainLoop, files_of, rows_of
from tests.support.servers.running import Server

Sdk = Callable[[str], tinker.ServiceClient]

MODEL = "tiny-full"
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6}
STEP = types.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-6)
PROMPT = [5, 6, 7, 8, 9]


def data(rows: list[list[int]]) -> list[types.Datum]:
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
        )
        for row in rows
    ]


def trained(training: tinker.TrainingClient, rows: list[list[int]]) -> float:
    """Train one step; return the loss before it."""
    passed, stepped = training.forward_backward(data(rows), "cross_entropy"), training.optim_step(STEP)
    stepped.result()
    return float(passed.result().metrics["loss:sum"])


def assert_close(found: float, expected: float) -> None:
    assert abs(found - expected) <= TOLERANCE * max(1.0, abs(expected))


def logprobs(sampler: tinker.SamplingClient) -> np.ndarray:
    return np.array(sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result()[1:])


def plain_logprobs(plain: PlainLoop) -> np.ndarray:
    with torch.no_grad():
        return plain.logprobs(PROMPT).numpy()


@pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state:FutureWarning")
def test_a_run_is_a_plain_loop(server: Server, sdk: Sdk, folder: Path) -> None:
    """Losses, weights, two passes before a step, saving, loading with and without the optimizer's state."""
    plain = PlainLoop(folder, torch.optim.Adam, **ADAM)
    training = sdk("numbers").create_full_training_client(MODEL, seed=3, user_metadata={"a": "b"})
    info = training.get_info()
    assert (info.is_lora, info.lora_rank) == (False, None)
    losses = [trained(training, rows_of(seed)) for seed in range(5)]
    for seed, loss in enumerate(losses):
        assert_close(loss, plain.train(rows_of(seed)))
    # Two passes before a step: their gradients add up.
    passes = [training.forward_backward(data(rows_of(seed)), "cross_entropy") for seed in (10, 11)]
    training.optim_step(STEP).result()
    for seed, passed in zip((10, 11), passes, strict=True):
        assert_close(passed.result().metrics["loss:sum"], plain.add_gradient(rows_of(seed)))
    plain.step()
    saved = training.save_state("middle").result().path
    plain.assert_same_weights(files_of(server, saved))
    assert AutoModelForCausalLM.from_pretrained(files_of(server, saved)).dtype == torch.float32
    middle = {name: tensor.clone() for name, tensor in plain.model.state_dict().items()}

    expected = [plain.train(rows_of(seed)) for seed in (20, 21)]
    for seed, loss in zip((20, 21), expected, strict=True):
        assert_close(trained(training, rows_of(seed)), loss)
    training.load_state_with_optimizer(saved).result()  # the same steps again, exactly
    for seed, loss in zip((20, 21), expected, strict=True):
        assert_close(trained(training, rows_of(seed)), loss)
    plain.assert_same_weights(files_of(server, training.save_state("end").result().path))

    training.load_state(saved).result()  # the weights only: a new Adam
    plain.model.load_state_dict(middle)
    plain.optimizer = torch.optim.Adam(plain.model.parameters(), **ADAM)
    for seed in (20, 21):
        assert_close(trained(training, rows_of(seed)), plain.train(rows_of(seed)))
    plain.assert_same_weights(files_of(server, training.save_state("again").result().path))


def test_a_new_run_begins_with_a_checkpoint(server: Server, sdk: Sdk, folder: Path) -> None:
    plain = PlainLoop(folder, torch.optim.Adam, **ADAM)
    service = sdk("resumed")
    training = asyncio.run(create_async(service))
    for seed in range(3):
        assert_close(trained(training, rows_of(seed)), plain.train(rows_of(seed)))
    saved = training.save_state("state").result().path
    service.close("success").result()
    again = sdk("resumed").create_training_client_from_state_with_optimizer(saved)
    for seed in (3, 4):
        assert_close(trained(again, rows_of(seed)), plain.train(rows_of(seed)))


async def create_async(service: tinker.ServiceClient) -> tinker.TrainingClient:
    training: tinker.TrainingClient = await service.create_full_training_client_async(MODEL)
    return training


def test_sampling_never_changes_the_base_model(sdk: Sdk, folder: Path) -> None:
    """The base model's numbers before, during and after sampling from a run's weights, for another tenant."""
    plain, others = PlainLoop(folder, torch.optim.Adam, **ADAM), sdk("others")
    base = others.create_sampling_client(base_model=MODEL)
    expected = plain_logprobs(plain)
    np.testing.assert_allclose(logprobs(base), expected, atol=TOLERANCE)
    service = sdk("sampled")
    training = service.create_full_training_client(MODEL)
    versions = []
    for seed in range(4):  # more versions than have a place in memory
        trained(training, rows_of(seed))
        plain.train(rows_of(seed))
        versions.append((training.save_weights_and_get_sampling_client(), plain_logprobs(plain)))
        trained(training, rows_of(100))  # a version never changes
        plain.train(rows_of(100))
    named = service.create_sampling_client(model_path=training.save_weights_for_sampler("named").result().path)
    versions.append((named, plain_logprobs(plain)))
    prompt = types.ModelInput.from_ints(PROMPT)
    under_way = [
        (sampler.compute_logprobs(prompt), wanted)
        for _ in range(3)
        for sampler, wanted in [*versions, (base, expected)]
    ]
    for future, wanted in under_way:
        np.testing.assert_allclose(np.array(future.result()[1:]), wanted, atol=2 * TOLERANCE)
    assert np.abs(versions[-1][1] - expected).max() > 0.01
    service.close("success").result()
    np.testing.assert_allclose(logprobs(base), expected, atol=TOLERANCE)


def test_a_second_set_of_weights_is_refused_with_its_price(sdk: Sdk, folder: Path) -> None:
    training = sdk("priced").create_full_training_client(NO_SETS)
    trained(training, rows_of(0))
    needed = 4 * sum(tensor.numel() for tensor in AutoModelForCausalLM.from_pretrained(folder).parameters())
    with pytest.raises(tinker.TinkerError, match=rf"a second set of weights, and needs {needed} bytes"):
        training.save_weights_and_get_sampling_client()
    trained(training, rows_of(1))  # training goes on


def test_two_tenants_one_after_another(sdk: Sdk, folder: Path) -> None:
    first = sdk("first")
    training = first.create_full_training_client(MODEL)
    started = trained(training, rows_of(0))
    later = trained(training, rows_of(0))
    second = sdk("second")
    with pytest.raises(tinker.RequestFailedError) as caught:
        second.create_full_training_client(MODEL)
    text = str(caught.value)
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
    assert re.search(rf"it has been held since {time}\. It is free when its holder unloads it, or after {time}", text)
    assert "first" not in text
    assert first.holder.get_session_id() not in text
    with pytest.raises(tinker.RequestFailedError, match="lora_config: got a LoRA configuration, allowed: null"):
        second.create_lora_training_client(MODEL, rank=4)
    first.close("success").result()
    theirs = second.create_full_training_client(MODEL)
    assert_close(trained(theirs, rows_of(0)), started)
    assert_close(trained(theirs, rows_of(0)), later)  # a new Adam, too


@pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state:FutureWarning")
def test_gone_weights_are_not_the_next_tenants(sdk: Sdk) -> None:
    """Another tenant can neither load nor sample a checkpoint, nor guess whether it exists."""
    service = sdk("owner")
    training = service.create_full_training_client(MODEL)
    trained(training, rows_of(0))
    saved = training.save_state("mine").result().path
    service.close("success").result()
    other = sdk("curious")
    theirs = other.create_full_training_client(MODEL)
    answers = []
    for path in (saved, saved.replace("mine", "none")):
        with pytest.raises(tinker.TinkerError) as caught:
            theirs.load_state(path).result()
        answers.append(str(caught.value).replace("mine", "none"))
    without_ids = [re.sub(r"request[_ ]\S+|[0-9a-f]{8,}:train:\d+:\d+", "", answer) for answer in answers]
    assert without_ids[0] == without_ids[1]
