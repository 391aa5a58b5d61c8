"""One call from prompts to completions: the same tokens as the engine's loop, and features for a loss."""

import math

import numpy as np
import peft
import pytest
import torch

from tests.support.models.plain_training import LORA, MODEL, PlainLora, plain_model
from twinkle.data_format import SamplingParams
from twinkle.errors import CheckpointError, InvalidInputError, NonFiniteError, UnknownNameError
from twinkle.infra import DeviceMesh
from twinkle.loss import GRPOLoss
from twinkle.metric import GRPOMetric
from twinkle.model import MultiLoraTransformersModel
from twinkle.sampler import Finished, LocalSampler, SampleFailure, SampleRequest
from twinkle.sampler import SamplingParams as EngineParams
from twinkle.sampler.script.in_one_call import own_prompts

A = "a"


@pytest.fixture(scope="module")
def model() -> MultiLoraTransformersModel:
    torch.manual_seed(0)
    model = MultiLoraTransformersModel(model_id=MODEL, mixed_precision="fp32", device="cpu", max_loras=2)
    model.add_adapter_to_model(A, peft.LoraConfig(**LORA))
    model.set_optimizer("AdamW", lr=0.05, adapter_name=A)
    model.set_loss(GRPOLoss, adapter_name=A)
    model.add_metric(GRPOMetric, is_training=True, adapter_name=A)
    return model


@pytest.fixture(scope="module")
def sampler(model) -> LocalSampler:
    return LocalSampler(model)


def trajectory(text: str) -> dict:
    return {"messages": [{"role": "user", "content": text}], "user_data": [("note", '"kept"')]}


def move(model) -> None:
    """Change the adapter by one step."""
    tokens = list(range(40, 60))
    feature = {"input_ids": tokens, "labels": [*tokens[1:], -100]}
    model.forward_backward(inputs=[feature], advantages=[1.0], adapter_name=A)
    model.clip_grad_and_step(adapter_name=A)
    model.calculate_metric(is_training=True, adapter_name=A)


def assert_idle(sampler: LocalSampler) -> None:
    assert not sampler.engine.busy
    assert sampler.engine.version_ids() == []


def test_trajectories_become_completions_in_order(sampler):
    params = SamplingParams(max_tokens=5, seed=1, logprobs=1, num_samples=2)
    prompts = [trajectory("Hello"), trajectory("A longer question?")]
    responses = sampler.sample(prompts, params)
    assert [len(response.sequences) for response in responses] == [2, 2]
    for prompt, response in zip(prompts, responses, strict=True):
        encoded = sampler.template.encode(prompt, add_generation_prompt=True)
        assert response.prompt_token_ids == encoded["input_ids"].tolist()
        assert response.prompt_logprobs is None
        for sequence in response.sequences:
            assert 1 <= len(sequence.tokens) <= 5
            assert [pairs[0][0] for pairs in sequence.logprobs] == sequence.tokens
            assert sequence.decoded == sampler.template.decode(sequence.tokens)
    assert_idle(sampler)


def test_new_feature_learns_the_completion_alone(sampler):
    sequence = sampler.sample(trajectory("Hello"), SamplingParams(max_tokens=4, seed=1))[0].sequences[0]
    feature, prompt = sequence.new_input_feature, sampler.template.encode(trajectory("Hello"), True)["input_ids"]
    expected = [*[-100] * (len(prompt) - 1), *sequence.tokens, -100]
    assert list(feature["input_ids"]) == [*prompt, *sequence.tokens]
    assert list(feature["labels"]) == expected
    assert feature["messages"][-1]["role"] == "assistant"
    assert feature["user_data"] == trajectory("Hello")["user_data"]


def test_features_go_in_as_they_are(sampler):
    feature = sampler.template.encode(trajectory("Hello"), add_generation_prompt=True)
    params = SamplingParams(max_tokens=5, seed=1)
    ours, theirs = sampler.sample([feature], params)[0], sampler.sample([trajectory("Hello")], params)[0]
    assert ours.sequences[0].tokens == theirs.sequences[0].tokens
    bare = sampler.sample({"input_ids": feature["input_ids"].tolist()}, params)[0].sequences[0]
    assert bare.tokens == ours.sequences[0].tokens
    assert sum(label != -100 for label in bare.new_input_feature["labels"]) == len(bare.tokens)


def test_same_tokens_as_the_engine(sampler):
    """Equal inputs have different seeds: the second input has the next number."""
    feature = sampler.template.encode(trajectory("Hello"), add_generation_prompt=True)
    responses = sampler.sample([feature, feature], SamplingParams(max_tokens=6, seed=7, num_samples=2))
    for number, response in enumerate(responses):
        params = EngineParams(max_tokens=6, seed=7 + number)
        sampler.engine.submit(SampleRequest("r", None, feature["input_ids"], params, 2))
        finished = []
        while sampler.engine.busy:
            finished += sampler.engine.step()
        expected = [sequence.tokens.tolist() for sequence in finished[0].outcome.sequences]
        assert [sequence.tokens for sequence in response.sequences] == expected
    assert responses[0].sequences[0].tokens != responses[1].sequences[0].tokens


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_the_trainer(model, sampler, temperature):
    move(model)
    params = SamplingParams(max_tokens=8, seed=3, logprobs=1, temperature=temperature, num_samples=3)
    sequences = sampler.sample([trajectory("Hello"), trajectory("Bye")], params, adapter_name=A)
    sequences = [sequence for response in sequences for sequence in response.sequences]
    old = [[pairs[0][1] for pairs in sequence.logprobs] for sequence in sequences]
    features = [sequence.new_input_feature for sequence in sequences]
    outputs = model.forward_only(inputs=features, temperature=temperature, adapter_name=A)
    for row, feature, values in zip(outputs["logps"], features, old, strict=True):
        ours = row[: len(feature["labels"])][torch.from_numpy(feature["labels"] != -100)]
        np.testing.assert_allclose(ours.numpy(), values, atol=1e-5)


def test_on_policy_ratio_is_one(model, sampler):
    """GRPO needs this: sampler and trainer agree, so nothing is clipped in the first update."""
    responses = sampler.sample([trajectory("Hi")], SamplingParams(max_tokens=6, num_samples=4, logprobs=1), A)
    sequences = responses[0].sequences
    model.forward_backward(
        inputs=[sequence.new_input_feature for sequence in sequences],
        old_logps=[[pairs[0][1] for pairs in sequence.logprobs] for sequence in sequences],
        advantages=[1.0, -1.0, 0.5, -0.5],
        adapter_name=A,
    )
    metrics = model.calculate_metric(is_training=True, adapter_name=A)
    model.zero_grad(adapter_name=A)
    assert metrics["train/token_ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["train/clip_ratio"] == 0


def test_adapter_is_sampled_with_its_weights_of_the_moment(model, sampler):
    """The log-probabilities are those of PEFT with the same weights; each call sees the latest step."""
    params, seen = SamplingParams(max_tokens=6, seed=9, logprobs=1), []
    for _ in range(2):
        move(model)
        response = sampler.sample(trajectory("Hello"), params, adapter_name=A)[0]
        seen.append(_scored(PlainLora(model.get_state_dict(adapter_name=A)).model.eval(), response))
    base = _scored(plain_model(), sampler.sample(trajectory("Hello"), params)[0])
    assert not np.allclose(seen[0][:1], seen[1][:1], atol=1e-4)
    assert not np.allclose(seen[1][:1], base[:1], atol=1e-4)


def _scored(plain, response):
    """Check that the sampler's log-probabilities are those of the plain model."""
    tokens, prompt = response.sequences[0].tokens, response.prompt_token_ids
    with torch.no_grad():
        logps = plain(input_ids=torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
    expected = logps[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()
    np.testing.assert_allclose([pairs[0][1] for pairs in response.sequences[0].logprobs], expected, atol=1e-5)
    return expected


def test_saved_adapter_by_its_path(model, sampler, tmp_path):
    move(model)
    path = model.save("saved", str(tmp_path), adapter_name=A)
    params = SamplingParams(max_tokens=6, seed=5, logprobs=1)
    by_name = sampler.sample(trajectory("Hello"), params, adapter_name=A)[0].sequences[0]
    by_path = sampler.sample(trajectory("Hello"), params, adapter_path=path)[0].sequences[0]
    assert (by_path.tokens, by_path.logprobs) == (by_name.tokens, by_name.logprobs)
    assert_idle(sampler)


def test_nothing_is_generated_when_the_prompt_is_scored(sampler):
    conversation = {"messages": [*trajectory("Hello")["messages"], {"role": "assistant", "content": "Bye"}]}
    response = sampler.sample(conversation, SamplingParams(max_tokens=0, prompt_logprobs=3))[0]
    ids = torch.tensor(response.prompt_token_ids)
    assert response.prompt_token_ids == sampler.template.encode(conversation)["input_ids"].tolist()
    with torch.no_grad():
        plain = plain_model()(input_ids=ids[None]).logits[0].log_softmax(-1)
    expected = plain[:-1].gather(1, ids[1:, None])[:, 0]
    assert response.prompt_logprobs[0] is None
    np.testing.assert_allclose(response.prompt_logprobs[1:], expected.numpy(), atol=1e-5)
    assert response.topk_prompt_logprobs[0] is None
    for ours, row in zip(response.topk_prompt_logprobs[1:], plain, strict=False):
        assert [token for token, _ in ours] == row.topk(3).indices.tolist()
    sequence = response.sequences[0]
    assert (sequence.tokens, sequence.decoded, sequence.logprobs) == ([], "", None)
    assert list(sequence.new_input_feature["input_ids"]) == response.prompt_token_ids


def test_likeliest_tokens_best_first(sampler):
    sequence = sampler.sample(trajectory("Hello"), SamplingParams(max_tokens=3, seed=2, logprobs=4))[0].sequences[0]
    assert [len(pairs) for pairs in sequence.logprobs] == [4] * len(sequence.tokens)
    for pairs in sequence.logprobs:
        values = [value for _, value in pairs]
        assert values == sorted(values, reverse=True)
        assert sum(math.exp(value) for value in values) < 1


def test_stops(sampler):
    free = sampler.sample(trajectory("Hello"), SamplingParams(max_tokens=8, seed=4))[0].sequences[0]
    third = free.tokens[2]
    stopped = sampler.sample(trajectory("Hello"), SamplingParams(max_tokens=8, seed=4, stop=[third]))[0].sequences[0]
    assert stopped.tokens == free.tokens[: free.tokens.index(third) + 1]
    assert stopped.stop_reason == "stop"


# --- refusals, and what they leave behind -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"adapter_name": "b"}, UnknownNameError, "unknown adapter 'b'; known: a"),
        ({"adapter_name": A, "adapter_path": "x"}, InvalidInputError, "adapter_path"),
        ({"sampling_params": SamplingParams(repetition_penalty=1e9)}, InvalidInputError, "repetition_penalty"),
        ({"sampling_params": SamplingParams(max_tokens=10**6)}, InvalidInputError, "max_tokens"),
        ({"sampling_params": {"max_token": 2}}, UnknownNameError, "unknown sampling parameter 'max_token'"),
        ({"sampling_params": 2}, InvalidInputError, "sampling_params: got 2"),
    ],
)
def test_refusals_leave_nothing_behind(sampler, arguments, error, text):
    with pytest.raises(error, match=text):
        sampler.sample([trajectory("Hello")], **arguments)
    assert_idle(sampler)


def test_some_encoded_and_some_not(sampler):
    with pytest.raises(InvalidInputError, match="not both"):
        sampler.sample([trajectory("Hello"), {"input_ids": [1, 2]}])


def test_one_bad_input_cancels_the_others(sampler):
    long = {"input_ids": [65] * 5000}
    with pytest.raises(InvalidInputError, match="prompt"):
        sampler.sample([{"input_ids": [65, 66]}, long], SamplingParams(max_tokens=4), adapter_name=A)
    assert_idle(sampler)


def test_a_failure_is_raised(sampler, monkeypatch):
    failure = SampleFailure(NonFiniteError("the logits are not finite"))
    step = sampler.engine.step
    monkeypatch.setattr(sampler.engine, "step", lambda: [Finished(event.request_id, failure) for event in step()])
    with pytest.raises(NonFiniteError, match="not finite"):
        sampler.sample([trajectory("Hello"), trajectory("Bye")], SamplingParams(max_tokens=4), adapter_name=A)
    assert_idle(sampler)


def test_weights_that_were_received_stay_until_others_come(model):
    sampler, params = LocalSampler(model), SamplingParams(max_tokens=6, seed=4, logprobs=1)

    def hand_over() -> None:
        sampler.receive_weights(A, model.get_state_dict(adapter_name=A), model.get_peft_config_dict(adapter_name=A))

    def drawn(adapter_name: str | None = A) -> list:
        return sampler.sample(trajectory("Hello"), params, adapter_name=adapter_name)[0].sequences[0].logprobs

    live = drawn()
    hand_over()
    assert drawn() == live
    move(model)
    assert drawn() == live
    hand_over()
    assert drawn() != live
    assert drawn() == LocalSampler(model).sample(trajectory("Hello"), params, adapter_name=A)[0].sequences[0].logprobs
    assert len(sampler.engine.version_ids()) == 1
    with pytest.raises(CheckpointError, match="weights does not fit"):
        sampler.receive_weights(A, {}, model.get_peft_config_dict(adapter_name=A))


def test_workers_share_out_inputs_and_their_seeds():
    mesh = DeviceMesh.from_sizes(dp_size=2, device_type="cpu")
    inputs, params = [trajectory(text) for text in "abc"], SamplingParams(seed=7)
    shares = [own_prompts(2, i, (inputs, params), {"adapter_name": A}, device_mesh=mesh)[1] for i in range(2)]
    assert [share["inputs"] for share in shares] == [inputs[:2], inputs[2:]]
    assert [share["sampling_params"].seed for share in shares] == [7, 9]
    assert [share["adapter_name"] for share in shares] == [A, A]
    first, second = (own_prompts(2, i, (inputs[0],), {}, device_mesh=mesh)[1] for i in range(2))
    assert (first["inputs"], second["inputs"], first["sampling_params"]) == ([inputs[0]], [], None)


def test_parameters_as_a_mapping(sampler):
    """A dictionary of parameters is accepted, as by the client."""

    def drawn(params: object) -> list:
        return sampler.sample(trajectory("Hello"), params)[0].sequences[0].logprobs

    expected = drawn(SamplingParams(max_tokens=5, seed=1, logprobs=1))
    assert drawn({"max_tokens": 5, "seed": 1, "logprobs": 1}) == expected
    assert drawn({"max_new_tokens": 5, "seed": 1, "logprobs": 1}) == expected
    mesh = DeviceMesh.from_sizes(dp_size=2, device_type="cpu")
    inputs = [trajectory("a"), trajectory("b")]
    (_, second) = (own_prompts(2, i, (inputs, {"seed": 7}), {}, device_mesh=mesh)[1] for i in range(2))
    assert second["sampling_params"] == SamplingParams(seed=8)
    with pytest.raises(TypeError, match="4 arguments by position, 5 were given"):
        own_prompts(2, 0, (inputs, None, "", None, "one too many"), {}, device_mesh=mesh)


@pytest.mark.parametrize("adapter_name", ["", None])
def test_no_name_is_the_base_model(model, sampler, adapter_name):
    move(model)
    params = SamplingParams(max_tokens=6, seed=9, logprobs=1)
    response = sampler.sample(trajectory("Hello"), params, adapter_name=adapter_name)[0]
    _scored(plain_model(), response)
    assert_idle(sampler)


def test_no_inputs_no_responses(sampler):
    assert sampler.sample([]) == []
