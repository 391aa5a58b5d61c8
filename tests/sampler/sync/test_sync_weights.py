"""``sync_weights`` in one process: the sampler draws with the model's weights, or says why it cannot."""

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import LlamaConfig

from tests.support.models.plain_training import LORA, MODEL, features
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import SampleResponse, SamplingParams
from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError, UserError
from twinkle.model import MultiLoraTransformersModel, TransformersModel, TransformersValueModel
from twinkle.sampler import LocalSampler, hand_over

A = "tenant"
STEPS = 10
KV = 1 << 20
PROMPTS = [{"input_ids": [5, 17, 40, 8], "labels": [-100] * 4}, {"input_ids": [90, 3], "labels": [-100] * 2}]
PARAMS = SamplingParams(max_tokens=5, seed=1, logprobs=1)


def full_model(model_id: str = MODEL, device: str = "cpu") -> TransformersModel:
    model = TransformersModel(model_id=model_id, mixed_precision="no", device=device)
    model.set_optimizer("AdamW", lr=3e-3)
    return model


def lora_model(**config: Any) -> TransformersModel:
    """Return a model with an adapter that is not zero, as that of a policy that is trained further."""
    torch.manual_seed(0)
    model = TransformersModel(model_id=MODEL, mixed_precision="no", device="cpu")
    model.add_adapter_to_model(A, peft.LoraConfig(**LORA, init_lora_weights=False, **config))
    model.set_optimizer("AdamW", lr=1e-2)
    return model


def multi_lora_model() -> MultiLoraTransformersModel:
    model = MultiLoraTransformersModel(model_id=MODEL, mixed_precision="fp32", device="cpu", max_loras=2)
    model.add_adapter_to_model(A, peft.LoraConfig(**LORA), seed=1)
    model.set_optimizer("AdamW", lr=1e-2, adapter_name=A)
    return model


def own_sampler(**options: Any) -> LocalSampler:
    return LocalSampler(MODEL, kv_budget_bytes=KV, dtype="fp32", **options)


def sampler_of(model: Any) -> LocalSampler:
    return LocalSampler(model, kv_budget_bytes=KV)


def step(model: Any, seed: int = 0, **names: str) -> None:
    model.forward_backward(inputs=features(9, 14, seed=seed), **names)
    model.clip_grad_and_step(**names)


def logprobs(responses: list[SampleResponse]) -> list[list[float]]:
    return [[pairs[0][1] for pairs in each.logprobs] for response in responses for each in response.sequences]


def assert_draws_as_trained(model: Any, sampler: LocalSampler, version: str, **names: str) -> None:
    """Compare log-probabilities of samples with those that the trained model computes for the same sequences."""
    responses = sampler.sample(PROMPTS, PARAMS)
    assert {response.weights_version for response in responses} == {version}
    rows = [sequence.new_input_feature for response in responses for sequence in response.sequences]
    computed = model.forward_only(inputs=rows, **names)["logps"]
    for row, feature, drawn in zip(computed, rows, logprobs(responses), strict=True):
        mask = torch.from_numpy(np.asarray(feature["labels"]) != -100)
        np.testing.assert_allclose(row[: len(mask)][mask].detach().numpy(), drawn, atol=1e-5)


@pytest.mark.parametrize("make_sampler", [sampler_of, lambda _: own_sampler()], ids=["of the model", "its own"])
@pytest.mark.parametrize(
    ("make_model", "merge"),
    [(lora_model, False), (lora_model, True), (full_model, True)],
    ids=["lora", "merged lora", "full"],
)
def test_the_sampler_draws_with_the_trained_weights(
    make_model: Callable[[], Any], merge: bool, make_sampler: Callable[[Any], LocalSampler]
) -> None:
    """From the first synchronisation on, which carries the adapter too, and after each step."""
    model = make_model()
    sampler = make_sampler(model)
    manager = CheckpointEngineManager(model, sampler, bucket_size_mb=0.01)
    for number in range(STEPS):
        version = manager.sync_weights(merge_and_sync=merge)
        assert version == f"sync-{number + 1}"
        assert_draws_as_trained(model, sampler, version)
        step(model, number)


@pytest.mark.parametrize(
    ("make_sampler", "merge"),
    [(sampler_of, False), (lambda _: own_sampler(), False), (lambda _: own_sampler(), True)],
)
def test_adapters_of_a_multi_lora_model(make_sampler: Callable[[Any], LocalSampler], merge: bool) -> None:
    model = multi_lora_model()
    sampler = make_sampler(model)
    manager = CheckpointEngineManager(model, sampler)
    for number in range(STEPS):
        version = manager.sync_weights(merge_and_sync=merge, adapter_name=A if number else None)
        assert_draws_as_trained(model, sampler, version, adapter_name=A)
        step(model, number, adapter_name=A)


def test_random_weights_are_sent_once() -> None:
    """The sampler may have drawn others from the same seed: on a GPU, a model on a CPU beside it."""
    model, sampler = multi_lora_model(), own_sampler()
    with torch.no_grad():
        for weight in sampler.engine._trainer.base.parameters():
            weight.mul_(1.5)
    manager = CheckpointEngineManager(model, sampler)
    assert_draws_as_trained(model, sampler, manager.sync_weights(merge_and_sync=False), adapter_name=A)
    offer = model.offer_weights(adapter_name=A, merge_and_sync=False)
    assert sampler.prepare_weights(offer) == offer.adapter


def test_base_weights_that_many_adapters_share_are_not_replaced() -> None:
    model = multi_lora_model()
    sampler = sampler_of(model)
    with pytest.raises(UnsupportedError, match="merge_and_sync"):
        CheckpointEngineManager(model, sampler).sync_weights()
    with pytest.raises(UnsupportedError, match="merge_and_sync"):
        CheckpointEngineManager(full_model(), sampler).sync_weights()
    assert sampler.sample(PROMPTS[:1], PARAMS)[0].weights_version == "base"


def test_merging_changes_nothing_in_the_model_that_is_trained() -> None:
    model = lora_model()
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    CheckpointEngineManager(model, sampler_of(model)).sync_weights()
    after = model.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_full_parameters_are_shared_and_not_copied(device: str) -> None:
    """The same device may be named with or without a number: the tensors of "cuda" are on "cuda:0"."""
    model = full_model(device=device)
    sampler = sampler_of(model)
    CheckpointEngineManager(model, sampler).sync_weights()
    own = {each.data_ptr() for each in sampler.engine._trainer.base.parameters()}
    assert own == {each.data_ptr() for each in model.model.parameters()}
    assert sampler._base.own_bytes == 0


def test_a_step_after_the_synchronisation_makes_shared_weights_an_error() -> None:
    model = full_model()
    sampler = sampler_of(model)
    manager = CheckpointEngineManager(model, sampler)
    sampler.sample(PROMPTS, PARAMS)
    manager.sync_weights()
    sampler.sample(PROMPTS, PARAMS)
    step(model)
    with pytest.raises(UserError, match="trained after the last sync_weights; call sync_weights before sample"):
        sampler.sample(PROMPTS, PARAMS)
    manager.sync_weights()
    assert sampler.sample(PROMPTS, PARAMS)[0].weights_version == "sync-2"


@pytest.mark.parametrize(("make_model", "merge"), [(lora_model, False), (lora_model, True), (full_model, True)])
def test_copies_stay_as_they_were_sent(make_model: Callable[[], Any], merge: bool) -> None:
    """A sampler that has copies may draw with older weights, and says which."""
    model = make_model()
    sampler = own_sampler()
    manager = CheckpointEngineManager(model, sampler)
    manager.sync_weights(merge_and_sync=merge)
    before = sampler.sample(PROMPTS, PARAMS)
    step(model)
    after = sampler.sample(PROMPTS, PARAMS)
    assert logprobs(after) == logprobs(before)
    assert after[0].weights_version == "sync-1"


def test_which_adapter_a_call_uses() -> None:
    model = lora_model()
    sampler = sampler_of(model)
    manager = CheckpointEngineManager(model, sampler)
    base = sampler.sample(PROMPTS, PARAMS)
    assert base[0].weights_version == "base"
    manager.sync_weights(merge_and_sync=False)
    synced = sampler.sample(PROMPTS, PARAMS)
    assert logprobs(synced) != logprobs(base)
    plain = sampler.sample(PROMPTS, PARAMS, use_base_model=True)
    assert (logprobs(plain), plain[0].weights_version) == (logprobs(base), "base")
    step(model)
    present = sampler.sample(PROMPTS, PARAMS, A)
    assert present[0].weights_version == A
    assert logprobs(present) != logprobs(synced)
    hand_over(model, sampler, A)
    assert sampler.sample(PROMPTS, PARAMS, A)[0].weights_version == f"{A}-1"
    assert sampler.sample(PROMPTS, PARAMS)[0].weights_version == "sync-1"
    manager.sync_weights(merge_and_sync=True)
    merged = sampler.sample(PROMPTS, PARAMS)
    np.testing.assert_allclose(merged[0].sequences[0].logprobs[0][0][1], present[0].sequences[0].logprobs[0][0][1])
    assert sampler.engine.version_ids() == [f"{A}-1"]
    assert merged[0].weights_version == "sync-2"
    with pytest.raises(UserError, match="merged an adapter into the base model, and a second adapter cannot be added"):
        sampler.sample(PROMPTS, PARAMS, A)
    assert sampler.sample(PROMPTS, PARAMS, A, use_base_model=True)[0].weights_version == "sync-2"
    manager.sync_weights(merge_and_sync=False)
    assert logprobs(sampler.sample(PROMPTS, PARAMS, A)) == logprobs(present)


# --- failures ---------------------------------------------------------------------------------------------------------


class _Stops:
    """Passes calls on to a model or a sampler, and raises at the n-th call of one of its methods."""

    def __init__(self, inner: Any, method: str, calls: int) -> None:
        self._inner, self._method, self._left = inner, method, calls

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._inner, name)
        if name != self._method:
            return inner

        def call(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                raise ConnectionError("cut")
            return inner(*args, **kwargs)

        return call


def broken(model: Any, sampler: LocalSampler, method: str, calls: int) -> CheckpointEngineManager:
    sender = _Stops(model, method, calls) if method in ("offer_weights", "send_weights") else model
    receiver = sampler if sender is not model else _Stops(sampler, method, calls)
    return CheckpointEngineManager(sender, receiver, bucket_size_mb=0.02)


@pytest.mark.parametrize("make_sampler", [sampler_of, lambda _: own_sampler()], ids=["of the model", "its own"])
def test_a_failed_synchronisation_leaves_whole_weights_or_none(make_sampler: Callable[[Any], LocalSampler]) -> None:
    model = lora_model()
    sampler = make_sampler(model)
    for method, calls, whole in (
        ("offer_weights", 0, True),
        ("prepare_weights", 0, True),
        ("send_weights", 0, True),
        ("send_weights", 4, False),
        ("receive_bucket", 4, False),
        ("finish_weights", 0, False),
    ):
        CheckpointEngineManager(model, sampler).sync_weights()
        before = logprobs(sampler.sample(PROMPTS, PARAMS))
        step(model)
        with pytest.raises(ConnectionError, match="cut"):
            broken(model, sampler, method, calls).sync_weights()
        if whole:
            assert logprobs(sampler.sample(PROMPTS, PARAMS)) == before
        else:
            with pytest.raises(UserError, match=r"sync_weights failed \(ConnectionError: cut\).*call sync_weights"):
                sampler.sample(PROMPTS, PARAMS)
        version = CheckpointEngineManager(model, sampler).sync_weights(merge_and_sync=whole)
        assert_draws_as_trained(model, sampler, version)


@pytest.mark.parametrize(("make_model", "names"), [(lora_model, {}), (multi_lora_model, {"adapter_name": A})])
def test_a_failed_adapter_leaves_the_old_one(make_model: Callable[[], Any], names: dict[str, str]) -> None:
    model = make_model()
    sampler = sampler_of(model)
    CheckpointEngineManager(model, sampler).sync_weights(merge_and_sync=False)
    before = logprobs(sampler.sample(PROMPTS, PARAMS))
    step(model, **names)
    for method in ("send_weights", "receive_bucket", "finish_weights"):
        with pytest.raises(ConnectionError):
            broken(model, sampler, method, 0).sync_weights(merge_and_sync=False)
        assert logprobs(sampler.sample(PROMPTS, PARAMS)) == before
        assert sampler.engine.version_ids() == ["sync-1"]


@pytest.mark.parametrize(
    ("make_model", "names", "merge"),
    [(lora_model, {}, True), (lora_model, {}, False), (multi_lora_model, {"adapter_name": A}, False)],
)
def test_a_sampler_refuses_if_another_process_failed_to_finish(
    make_model: Callable[[], Any], names: dict[str, str], merge: bool
) -> None:
    model = make_model()
    sampler = sampler_of(model)
    manager = CheckpointEngineManager(model, sampler)
    manager.sync_weights(merge_and_sync=merge)
    sampler.abandon_weights("TwinkleError: process 1 failed", finishing=True)
    with pytest.raises(UserError, match="process 1 failed"):
        sampler.sample(PROMPTS, PARAMS)
    version = manager.sync_weights(merge_and_sync=merge)
    assert version == "sync-2"
    assert_draws_as_trained(model, sampler, version, **names)


def test_weights_of_another_model_are_refused_before_anything_changes() -> None:
    sampler = own_sampler()
    before = logprobs(sampler.sample(PROMPTS, PARAMS))
    for sizes, match in (({"hidden_size": 32}, "shape"), ({"num_hidden_layers": 3}, "unknown weight")):
        config = LlamaConfig(**{**full_model().hf_config.to_dict(), **sizes})
        other = TransformersModel(config=config, mixed_precision="no", device="cpu")
        with pytest.raises((InvalidInputError, UnknownNameError), match=match):
            CheckpointEngineManager(other, sampler).sync_weights()
    assert logprobs(sampler.sample(PROMPTS, PARAMS)) == before


def test_nothing_is_sampled_from_a_critic() -> None:
    critic = TransformersValueModel(model_id=MODEL, mixed_precision="no", device="cpu")
    with pytest.raises(UnsupportedError, match="a value model has no distribution over tokens"):
        LocalSampler(critic)
    with pytest.raises(UnsupportedError, match="a value model has no distribution over tokens"):
        CheckpointEngineManager(critic, sampler_of(full_model())).sync_weights()


def test_several_models_take_turns_with_one_sampler() -> None:
    """Weights that the sampler shares with one model are replaced by copies of those of another, never written to."""
    trained, other, adapter = full_model(), full_model(), lora_model()
    step(other)
    sampler = sampler_of(trained)
    before = [parameter.detach().clone() for parameter in trained.model.parameters()]
    for model, merge in (
        (trained, True),
        (other, True),
        (adapter, False),
        (other, True),
        (adapter, True),
        (trained, True),
    ):
        version = CheckpointEngineManager(model, sampler).sync_weights(merge)
        assert_draws_as_trained(model, sampler, version)
    assert all(map(torch.equal, before, trained.model.parameters()))


def test_a_synchronisation_within_a_window_of_gradients_changes_no_step() -> None:
    weights = []
    for synchronises in (False, True):
        model = full_model()
        model.forward_backward(inputs=features(9, 14, seed=0))
        if synchronises:
            sampler = sampler_of(model)
            CheckpointEngineManager(model, sampler).sync_weights()
            sampler.sample(PROMPTS, PARAMS)
        step(model, 1)
        weights.append([parameter.detach().clone() for parameter in model.model.parameters()])
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize(
    ("config", "merge", "match"),
    [({"use_dora": True}, True, "DoRA"), ({"bias": "all"}, False, "biases")],
)
def test_adapters_that_cannot_be_sent_so_are_refused(config: dict[str, Any], merge: bool, match: str) -> None:
    model = lora_model(**config)
    sampler = sampler_of(model)
    with pytest.raises(UnsupportedError, match=match):
        CheckpointEngineManager(model, sampler).sync_weights(merge_and_sync=merge)
    assert sampler.sample(PROMPTS, PARAMS)[0].weights_version == "base"


def test_options_are_checked() -> None:
    model = full_model()
    sampler = sampler_of(model)
    with pytest.raises(UnknownNameError, match="platform"):
        CheckpointEngineManager(model, sampler, platform="TPU")
    with pytest.raises(UnsupportedError, match="NPU"):
        CheckpointEngineManager(model, sampler, platform="NPU")
    for pair, match in (
        ((sampler, model), "model: got"),
        ((None, sampler), "model: got"),
        ((model, None), "sampler: got"),
    ):
        with pytest.raises(InvalidInputError, match=match):
            CheckpointEngineManager(*pair)
    with pytest.raises(InvalidInputError, match="bucket_size_mb"):
        CheckpointEngineManager(model, sampler, bucket_size_mb=0)
    with pytest.raises(InvalidInputError, match="dtype"):
        LocalSampler(model, dtype="fp32")
    with pytest.raises(InvalidInputError, match="model"):
        LocalSampler(7)
    with pytest.raises(UnknownNameError, match="adapter"):
        CheckpointEngineManager(model, sampler).sync_weights(adapter_name="x")


# --- other threads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_sampler", [sampler_of, lambda _: own_sampler()], ids=["shared", "copied"])
def test_a_thread_that_samples_never_gets_a_mixture(make_sampler: Callable[[Any], LocalSampler]) -> None:
    """Equal seeds and weights draw equal tokens. Between step and synchronisation, and within it, sampling may fail."""
    model = full_model()
    sampler = make_sampler(model)
    manager = CheckpointEngineManager(model, sampler, bucket_size_mb=0.01)
    manager.sync_weights()
    drawn: dict[str, set[tuple[float, ...]]] = {}
    refusals: list[UserError] = []
    ended = threading.Event()

    def draw() -> None:
        while not ended.is_set() or not drawn:  # the last weights can be sampled with, at least
            try:
                (response,) = sampler.sample(PROMPTS[:1], PARAMS)
            except UserError as error:
                refusals.append(error)
                ended.wait(0.01)
            else:
                assert response.weights_version is not None
                drawn.setdefault(response.weights_version, set()).add(tuple(logprobs([response])[0]))

    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(draw)
        try:
            for number in range(5):
                step(model, number)
                assert manager.sync_weights() == f"sync-{number + 2}"
        finally:
            ended.set()
        thread.result()
    assert drawn
    assert {name: len(results) for name, results in drawn.items()} == dict.fromkeys(drawn, 1)
    assert all(re.match("sample: (the model was trained|sync_weights is replacing)", str(each)) for each in refusals)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_resetting_the_prefix_cache_forgets_its_blocks() -> None:
    sampler = own_sampler()
    prompt = [{"input_ids": list(range(3, 43))}]
    sampler.sample(prompt, PARAMS)
    assert sampler.engine.cached_prefixes > 0
    sampler.reset_prefix_cache()
    assert sampler.engine.cached_prefixes == 0
    sampler.reset_encoder_cache()
    sampler.reset_mm_cache()


def test_a_sampler_that_sleeps_holds_no_cache_and_no_weights_of_its_own() -> None:
    model = full_model()
    sampler = own_sampler()
    manager = CheckpointEngineManager(model, sampler)
    manager.sync_weights()
    before = logprobs(sampler.sample(PROMPTS, PARAMS))
    weights = sum(each.nbytes for each in model.model.parameters())
    assert (sampler.engine.cache_bytes > KV // 2, sampler._base.own_bytes) == (True, weights)
    sampler.sleep()
    on_host = sampler.weights_device.type == "cpu"  # then there is nowhere to move the weights to
    assert (sampler.engine.cache_bytes, sampler._base.own_bytes) == (0, weights if on_host else 0)
    with pytest.raises(UserError, match="wake_up"):
        sampler.sample(PROMPTS, PARAMS)
    sampler.wake_up()
    assert logprobs(sampler.sample(PROMPTS, PARAMS)) == before
    sampler.sleep(level=2)
    assert (sampler.engine.cache_bytes, sampler._base.own_bytes) == (0, 0)
    with pytest.raises(UserError, match="wake_up"):
        manager.sync_weights()
    sampler.wake_up(["weights"])
    assert sampler._base.own_bytes == weights
    manager.sync_weights()
    with pytest.raises(UserError, match="wake_up"):
        sampler.sample(PROMPTS, PARAMS)
    sampler.wake_up()
    assert logprobs(sampler.sample(PROMPTS, PARAMS)) == before


@pytest.mark.parametrize("levels", [(2,), (1, 2), (2, 1)])
def test_weights_that_sleep_discarded_must_be_synchronised(levels: tuple[int, ...]) -> None:
    model = full_model()
    sampler = own_sampler()
    for level in levels:
        sampler.sleep(level)
    sampler.wake_up()
    with pytest.raises(UserError, match=r"discarded.*sync_weights"):
        sampler.sample(PROMPTS, PARAMS)
    CheckpointEngineManager(model, sampler).sync_weights()
    assert_draws_as_trained(model, sampler, "sync-1")
    with pytest.raises(InvalidInputError, match="level"):
        sampler.sleep(level=3)


def test_shared_weights_stay_while_the_sampler_sleeps() -> None:
    model = full_model()
    sampler = sampler_of(model)
    before = logprobs(sampler.sample(PROMPTS, PARAMS))
    sampler.sleep(level=2)
    sampler.wake_up()
    assert logprobs(sampler.sample(PROMPTS, PARAMS)) == before
