"""Losses that a user writes and the server runs: the unmodified SDK, with custom_loss_server_side on and off."""

from collections.abc import Iterator

import numpy as np
import pytest
import tinker
import torch
import torch.nn.functional as F
from tinker import types
from torch import Tensor

from tests.support.servers.serving import MODEL, SdkServer, logprobs_of, sequences, tinker_data

ADAM = types.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8)
Loss = tuple[Tensor, dict[str, Tensor]]


@pytest.fixture(scope="session")  # for the whole test run: clients of a stopped server would log warnings
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SdkServer]:
    """A server that leaves custom losses to its clients."""
    sections = {"clients": {"custom_loss_server_side": False}}
    running = SdkServer(tmp_path_factory.mktemp("plain"), sections=sections).start()
    yield running
    assert running.stop() == 0


# --- losses as users write them ---------------------------------------------------------------------------------------


def clipped(logprobs: Tensor, q: Tensor, advantages: Tensor, epsilon: Tensor) -> Loss:
    ratio = torch.exp(logprobs - q)
    bounded = torch.clamp(ratio, 1 - epsilon, 1 + epsilon)
    loss = -torch.minimum(ratio * advantages, bounded * advantages).sum() / logprobs.shape[0]
    return loss, {"custom/ratio:mean": ratio.detach().mean(), "custom/tokens:sum": torch.ones_like(logprobs).sum()}


def pairwise(logprobs: Tensor, mask: Tensor, place: Tensor) -> Loss:
    """A loss with a comparison of neighbours, an integer mask, a slice, and a statistic of the whole sequence."""
    chosen = torch.where(mask > 0, logprobs, torch.zeros_like(logprobs))
    margins = chosen[1:] - chosen[:-1]
    loss = F.softplus(-2.0 * margins).mean() + 0.1 * logprobs.std(unbiased=False) + torch.logsumexp(chosen, dim=-1)
    return loss + chosen[place], {"custom/loss:mean": loss, "custom/kept:sum": (mask > 0).float().sum()}


def distilled(logprobs: Tensor, teacher: Tensor) -> Loss:
    """A loss over several targets per token."""
    student = torch.log_softmax(logprobs, dim=-1)
    divergence = (teacher * (torch.log(teacher + 1e-6) - student)).sum(-1)
    return divergence.sum(), {"custom/kl:mean": divergence.mean()}


def flat_data(seed: int) -> list[types.Datum]:
    generator = np.random.default_rng(seed)
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": row[1:].tolist(),
                "q": types.TensorData.from_numpy(generator.normal(-5, 0.3, len(row) - 1).astype(np.float32)),
                "advantages": types.TensorData.from_numpy(generator.normal(0, 1, len(row) - 1).astype(np.float32)),
                "epsilon": types.TensorData(data=[0.2], dtype="float32", shape=[]),
                "mask": types.TensorData.from_numpy(generator.integers(0, 2, len(row) - 1)),
                "place": types.TensorData(data=[3], dtype="int64", shape=[]),
            },
        )
        for row in [*sequences(seed), *sequences(seed + 1, count=2, length=7)]
    ]


def wide_data(seed: int) -> list[types.Datum]:
    generator = np.random.default_rng(seed)
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_numpy(generator.integers(0, 256, (len(row) - 1, width))),
                "teacher": types.TensorData.from_numpy(
                    generator.dirichlet(np.ones(width), len(row) - 1).astype(np.float32)
                ),
            },
        )
        for row, width in zip(sequences(seed), (4, 4, 2), strict=True)
    ]


CASES = {
    "clipped": (clipped, {"logprobs": 1, "q": 1, "advantages": 1, "epsilon": 0}, flat_data),
    "pairwise": (pairwise, {"logprobs": 1, "mask": 1, "place": 0}, flat_data),
    "distilled": (distilled, {"logprobs": 2, "teacher": 2}, wide_data),
}


@pytest.mark.parametrize("case", CASES)
def test_server_and_client_come_to_the_same_weights(server: SdkServer, plain_server: SdkServer, case: str) -> None:
    function, ranks, data = CASES[case]
    found = []
    for running in (server, plain_server):
        service = running.service(f"custom{case}")
        handle = service.create_custom_loss(function, ranks).result()
        assert (handle.loss_id is not None) == (running is server)
        training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=3)
        steps = []
        for step in range(2):
            output = training.forward_backward_custom(data(step), handle).result()
            steps.append((output.metrics, training.optim_step(ADAM).result().metrics, logprobs_of(output)))
        final = training.forward(tinker_data(sequences(9)), "cross_entropy").result()
        found.append((steps, logprobs_of(final)))
    (ours, last), (theirs, expected) = found
    for (metrics, stepped, logprobs), (wanted, wanted_step, wanted_logprobs) in zip(ours, theirs, strict=True):
        named = {name for name in wanted if name.startswith("custom/")} | {"loss:sum"}
        assert named <= set(metrics)
        for name in named:
            assert metrics[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-5)
        norm = "unclipped_grad_l2:mean"
        assert stepped[norm] == pytest.approx(wanted_step[norm], rel=1e-5)
        for found_lp, wanted_lp in zip(logprobs, wanted_logprobs, strict=True):
            np.testing.assert_allclose(found_lp, wanted_lp, rtol=1e-5, atol=1e-5)
    for found_lp, wanted_lp in zip(last, expected, strict=True):
        np.testing.assert_allclose(found_lp, wanted_lp, rtol=1e-5, atol=1e-5)


def test_mistakes_are_the_users(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(base_model=MODEL, rank=4)

    def noisy(logprobs: Tensor) -> Loss:
        return (logprobs + torch.randn_like(logprobs)).sum(), {}

    with pytest.raises(tinker.RequestFailedError, match="unknown operation"):
        service.create_custom_loss(noisy, {"logprobs": 1}).result()

    def undefined(logprobs: Tensor) -> Loss:
        return torch.log(logprobs).sum(), {}

    def constant(logprobs: Tensor, q: Tensor) -> Loss:
        return (q + logprobs.detach()).sum(), {}

    data = flat_data(3)
    for function, ranks, text in (
        (undefined, {"logprobs": 1}, "is nan"),
        (constant, {"logprobs": 1, "q": 1}, "does not depend on logprobs"),
    ):
        handle = service.create_custom_loss(function, ranks).result()
        with pytest.raises(tinker.RequestFailedError, match=text) as error:
            training.forward_backward_custom(data, handle).result()
        assert error.value.category == types.RequestErrorCategory.User
    with pytest.raises(tinker.RequestFailedError, match="was not applied"):
        training.optim_step(ADAM).result()
    handle = service.create_custom_loss(pairwise, {"logprobs": 1, "mask": 1, "place": 0}).result()
    training.forward_backward_custom(data, handle).result()
    assert training.optim_step(ADAM).result().metrics["unclipped_grad_l2:mean"] > 0
