"""Training with the unmodified SDK: every call that trains, with the same numbers as a Trainer in this process."""

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.support.servers.running import BACKEND
from tests.support.servers.serving import (
    ALIAS,
    MODEL,
    SdkServer,
    agree,
    agreeing,
    logprobs_of,
    sequences,
    tinker_data,
    trainer_data,
)
from twinkle import hub
from twinkle.model import AdamParams, Datum, LoraSpec, Trainer, TrainItem, TrainResult
from twinkle.model.decoder.loading import load_model

# Adam divides a gradient by its own size: one that is nothing but rounding becomes a whole step, unless eps is larger.
# Only equal bits are still equal after that.
EPS = 1e-3 if BACKEND == "megatron" else 1e-8
ADAM = types.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=EPS, weight_decay=0.01, grad_clip_norm=1.0)


def ours(params: types.AdamParams) -> AdamParams:
    return AdamParams(
        params.learning_rate, params.beta1, params.beta2, params.eps, params.weight_decay, params.grad_clip_norm
    )


def passed(results: list) -> TrainResult:
    assert isinstance(results[0], TrainResult), results[0]
    return results[0]


def test_capabilities_and_info(service: tinker.ServiceClient) -> None:
    names = {model.model_name for model in service.get_server_capabilities().supported_models}
    assert {MODEL, ALIAS} <= names
    training = service.create_lora_training_client(base_model=f"{ALIAS}:peft:4096", rank=4)
    info = training.get_info()
    assert info.is_lora
    assert info.lora_rank == 4
    assert info.model_data.model_name == f"{ALIAS}:peft:4096"
    assert training.get_tokenizer().decode(training.get_tokenizer().encode("hello")) == "hello"


def test_losses_of_a_fresh_adapter_are_the_base_models(service: tinker.ServiceClient) -> None:
    rows = sequences(0)
    model = load_model(hub.resolve(MODEL), torch.float32, torch.device("cpu"))
    model.set_attn_implementation("sdpa")
    output = (
        service.create_lora_training_client(base_model=MODEL, rank=8)
        .forward(tinker_data(rows), "cross_entropy")
        .result()
    )
    for row, found in zip(rows, logprobs_of(output), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor(row[None, :-1])).logits[0].float()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(row[1:, None]))[:, 0].numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    assert output.metrics["loss:sum"] == pytest.approx(-sum(lp.sum() for lp in logprobs_of(output)), rel=1e-5)


def test_one_tenant_gets_the_trainers_bits(service: tinker.ServiceClient, trainer: Trainer) -> None:
    """Same batches, same bits: five steps with accumulated gradients and all Adam fields, then a forward pass."""
    spec = LoraSpec(8, seed=7, train_unembed=True)
    trainer.create_adapter("alone", spec)
    training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=7)
    for step in range(5):
        batches = [sequences(10 * step), sequences(10 * step + 1, count=1, length=30)]
        futures = [training.forward_backward(tinker_data(rows), "cross_entropy") for rows in batches]
        stepped = training.optim_step(ADAM)
        for rows, future in zip(batches, futures, strict=True):
            result = passed(trainer.forward_backward([TrainItem("alone", trainer_data(rows))]))
            for mine, theirs in zip(result.logprobs, logprobs_of(future.result()), strict=True):
                assert agree(mine, theirs)
        assert stepped.result().metrics == agreeing(trainer.optim_step("alone", ours(ADAM)))
    rows = sequences(99)
    final = passed(trainer.forward([TrainItem("alone", trainer_data(rows))]))
    seen = logprobs_of(training.forward(tinker_data(rows), "cross_entropy").result())
    assert all(agree(mine, theirs) for mine, theirs in zip(final.logprobs, seen, strict=True))


def test_seeds_and_targets(service: tinker.ServiceClient) -> None:
    """The same seed gives the same adapter; modules that are not trained have no gradient."""
    rows = tinker_data(sequences(1))
    after = []
    for seed, options in ((5, {}), (5, {}), (6, {}), (5, {"train_unembed": False, "train_mlp": False})):
        training = service.create_lora_training_client(base_model=MODEL, rank=4, seed=seed, **options)
        training.forward_backward(rows, "cross_entropy")
        norm = training.optim_step(ADAM).result().metrics["unclipped_grad_l2:mean"]
        after.append((norm, training.forward(rows, "cross_entropy").result().metrics["loss:sum"]))
    assert after[0] == after[1]
    assert after[0] != after[2]
    assert after[3][0] < after[0][0]


def test_forward_leaves_gradients_alone_and_sums_add_up(service: tinker.ServiceClient) -> None:
    rows = sequences(2, count=2)
    losses = []
    for calls in ([rows], [rows[:1], rows[1:]]):
        training = service.create_lora_training_client(base_model=MODEL, rank=4, seed=1)
        training.forward(tinker_data(sequences(3)), "cross_entropy").result()
        for call in calls:
            training.forward_backward(tinker_data(call), "cross_entropy")
        training.optim_step(ADAM).result()
        losses.append(training.forward(tinker_data(rows), "cross_entropy").result().metrics["loss:sum"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    idle = service.create_lora_training_client(base_model=MODEL, rank=4, seed=1)
    before = idle.forward(tinker_data(rows), "cross_entropy").result().metrics
    assert idle.optim_step(ADAM).result().metrics["unclipped_grad_l2:mean"] == 0.0
    assert idle.forward(tinker_data(rows), "cross_entropy").result().metrics == before


def test_2500_datums_come_in_chunks(service: tinker.ServiceClient) -> None:
    """The SDK sends three requests, the first one last; the order and the sums are those of one request."""
    rows = sequences(4, count=2500, length=3)
    training = service.create_lora_training_client(base_model=MODEL, rank=4, seed=1, train_unembed=False)
    output = training.forward_backward(tinker_data(rows), "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 2500
    single = training.forward(tinker_data(rows[1500:1501]), "cross_entropy").result()
    np.testing.assert_allclose(logprobs_of(output)[1500], logprobs_of(single)[0], atol=1e-5)
    assert output.metrics["loss:sum"] == pytest.approx(-sum(float(lp.sum()) for lp in logprobs_of(output)), rel=1e-4)


def test_several_targets_a_token(service: tinker.ServiceClient, trainer: Trainer) -> None:
    """2-D targets, dense and sparse, with different K in one request."""
    generator = np.random.default_rng(5)
    wanted, mine = [], []
    for width in (2, 20, 20):
        tokens = generator.integers(0, 256, 9)
        targets = generator.integers(0, 256, (9, width))
        weights = generator.random((9, width)).astype(np.float32)
        weights[generator.random((9, width)) < 0.9] = 0.0  # mostly zeros, so the SDK sends a sparse tensor
        wanted.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens.tolist()),
                loss_fn_inputs={"target_tokens": torch.tensor(targets), "weights": torch.tensor(weights)},
            )
        )
        mine.append(Datum(tokens, targets, weights))
    training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=11)
    output = training.forward_backward(wanted, "cross_entropy").result()
    trainer.create_adapter("wide", LoraSpec(8, seed=11, train_unembed=True))
    expected = passed(trainer.forward_backward([TrainItem("wide", mine)]))
    for theirs, result in zip(output.loss_fn_outputs, expected.logprobs, strict=True):
        assert tuple(theirs["logprobs"].shape) == result.shape
        assert agree(result, np.array(theirs["logprobs"].data, np.float32).reshape(result.shape))


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("importance_sampling", None),
        ("ppo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}),
        ("cispo", None),
        ("dro", {"beta": 0.1}),
    ],
)
def test_losses_of_reinforcement_learning(
    service: tinker.ServiceClient, trainer: Trainer, loss: str, config: dict[str, float] | None
) -> None:
    generator = np.random.default_rng(6)
    rows = sequences(6)
    old = [generator.normal(-5, 0.5, len(row) - 1).astype(np.float32) for row in rows]
    advantages = [generator.normal(0, 1, len(row) - 1).astype(np.float32) for row in rows]
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={"target_tokens": row[1:].tolist(), "logprobs": q.tolist(), "advantages": a.tolist()},
        )
        for row, q, a in zip(rows, old, advantages, strict=True)
    ]
    mine = [
        Datum(row[:-1], row[1:], extras={"logprobs": q, "advantages": a})
        for row, q, a in zip(rows, old, advantages, strict=True)
    ]
    training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=12)
    future = training.forward_backward(data, loss, loss_fn_config=config)
    stepped = training.optim_step(ADAM)
    trainer.create_adapter(loss, LoraSpec(8, seed=12, train_unembed=True))
    expected = passed(trainer.forward_backward([TrainItem(loss, mine, loss, config or {})]))
    assert agreeing({"loss:sum": future.result().metrics["loss:sum"]}) == {"loss:sum": expected.metrics["loss:sum"]}
    assert stepped.result().metrics == agreeing(trainer.optim_step(loss, ours(ADAM)))


def test_custom_loss_in_the_client(service: tinker.ServiceClient) -> None:
    """The user's loss is Σ logprob²; its gradient must equal that of the same loss expressed as weights."""
    rows = sequences(7)

    def squares(_data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        loss = torch.stack([(lp**2).sum() for lp in logprobs]).sum()
        return loss, {"squares": loss.item()}

    norms = []
    for custom in (True, False):
        training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=13)
        if custom:
            output = training.forward_backward_custom(tinker_data(rows), squares).result()
            assert output.metrics["squares"] == pytest.approx(output.metrics["loss:sum"])
        else:
            first = training.forward(tinker_data(rows), "cross_entropy").result()
            data = tinker_data(rows)
            weighted = [
                types.Datum(
                    model_input=datum.model_input,
                    loss_fn_inputs={
                        "target_tokens": datum.loss_fn_inputs["target_tokens"],
                        "weights": (-2 * logprobs).tolist(),
                    },
                )
                for datum, logprobs in zip(data, logprobs_of(first), strict=True)
            ]
            training.forward_backward(weighted, "cross_entropy").result()
        norms.append(training.optim_step(ADAM).result().metrics["unclipped_grad_l2:mean"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_mistake_is_the_users_and_the_model_goes_on(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(base_model=MODEL, rank=4)
    good = tinker_data(sequences(8))
    for bad, text in (
        (lambda: training.optim_step(types.AdamParams(learning_rate=-1.0)), "learning_rate"),
        (lambda: training.forward_backward(good, "no_such_loss"), "unknown loss"),
        (lambda: training.forward_backward(tinker_data([np.array([1, 2, 10**6])]), "cross_entropy"), "token ids"),
        (lambda: training.forward_backward(good, "ppo"), "logprobs"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=text) as error:
            bad().result()
        assert error.value.category == types.RequestErrorCategory.User
    with pytest.raises(tinker.RequestFailedError, match="was not applied"):
        training.optim_step(ADAM).result()
    training.forward_backward(good, "cross_entropy").result()
    assert training.optim_step(ADAM).result().metrics["unclipped_grad_l2:mean"] > 0


def test_unknown_models_and_bad_shapes_of_adapters(service: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.BadRequestError, match="unknown base_model"):
        service.create_lora_training_client(base_model="org/none")
    with pytest.raises(tinker.BadRequestError, match="rank"):
        service.create_lora_training_client(base_model=MODEL, rank=100_000)


def test_eight_tenants_share_batches_and_get_the_trainers_bits(
    server: SdkServer, trainer: Trainer, request: pytest.FixtureRequest
) -> None:
    """Eight tenants pipeline requests; a Trainer that runs the server's batches gets the same bits."""
    clients = [
        server.service(f"{request.node.name}{i}").create_lora_training_client(
            base_model=MODEL, rank=4 + 4 * (i % 2), seed=i
        )
        for i in range(8)
    ]
    names = {client.model_id: i for i, client in enumerate(clients)}
    rows = {(i, step): sequences(100 * i + step, count=2) for i in range(8) for step in range(6)}
    seen = len(server.batches())
    futures = {}
    for step in range(6):
        for i, client in enumerate(clients):
            futures[i, step] = client.forward_backward(tinker_data(rows[i, step]), "cross_entropy")
            client.optim_step(ADAM)
    found = {key: logprobs_of(future.result()) for key, future in futures.items()}
    for client in clients:
        client.forward(tinker_data(sequences(0)), "cross_entropy").result()  # waits until all optim_steps are done

    for i in range(8):
        trainer.create_adapter(f"tenant{i}", LoraSpec(4 + 4 * (i % 2), seed=i, train_unembed=True))
    merged = 0
    for batch in server.batches()[seen:]:
        ops = [(names[request_id.rpartition(":")[0]], int(request_id.rpartition(":")[2])) for request_id in batch]
        if ops[0][1] % 2 == 0:  # optim_steps have even numbers here
            for i, _ in ops:
                trainer.optim_step(f"tenant{i}", ours(ADAM))
        elif ops[0][1] < 13:
            merged = max(merged, len(ops))
            items = [TrainItem(f"tenant{i}", trainer_data(rows[i, seq // 2])) for i, seq in ops]
            for (i, seq), result in zip(ops, trainer.forward_backward(items), strict=True):
                assert isinstance(result, TrainResult)
                for mine, theirs in zip(result.logprobs, found[i, seq // 2], strict=True):
                    assert agree(mine, theirs)
    assert merged > 1
