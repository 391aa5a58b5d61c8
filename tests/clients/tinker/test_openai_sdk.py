"""The ``openai`` package on a real model: the same weights, samples and log-probabilities as with the tinker SDK."""

from typing import Any

import anthropic
import numpy as np
import openai
import pytest
import tinker
from tinker import types

from tests.support.servers.serving import ALIAS, MODEL, SdkServer, key_of, sequences, tinker_data
from twinkle import hub

PROMPT = [10, 20, 30, 40]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
ADAM = types.AdamParams(learning_rate=3e-2, eps=1e-8)


@pytest.fixture
def client(server: SdkServer, request: pytest.FixtureRequest) -> openai.OpenAI:
    """A client for the same tenant as ``service``."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key_of(request.node.name), max_retries=0)


@pytest.fixture
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    client = service.create_lora_training_client(base_model=ALIAS, rank=8, seed=3)
    train(client)
    return client


def train(client: tinker.TrainingClient, seed: int = 1) -> None:
    client.forward_backward(tinker_data(sequences(seed)), "cross_entropy")
    client.optim_step(ADAM).result()


def asked(client: openai.OpenAI, model: str, **more: Any) -> Any:
    return client.completions.create(
        **{"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "logprobs": 0, **more}
    )


def logprobs(client: openai.OpenAI, model: str, **more: Any) -> list[list[float]]:
    return [choice.logprobs.token_logprobs for choice in asked(client, model, **more).choices]


def sampled(sampler: tinker.SamplingClient, count: int = 1, **params: Any) -> list[types.SampledSequence]:
    params = {"max_tokens": 24, "temperature": 0.0, **params}
    prompt = types.ModelInput.from_ints(PROMPT)
    return sampler.sample(prompt, count, types.SamplingParams(**params)).result().sequences


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.7, "seed": 6, "top_p": 0.8}])
def test_the_same_samples_as_through_tinker(
    client: openai.OpenAI, training: tinker.TrainingClient, params: dict[str, Any]
) -> None:
    tokenizer = hub.load_tokenizer(MODEL)
    path = training.save_weights_for_sampler("named").result().path
    expected = sampled(training.save_weights_and_get_sampling_client(), 3, **params)
    run = training.model_id
    for model in (run, path, path.replace("tinker://", "twinkle://")):
        answer = asked(client, model, n=3, **params)
        assert answer.model == model
        for choice, sequence in zip(answer.choices, expected, strict=True):
            np.testing.assert_allclose(choice.logprobs.token_logprobs, sequence.logprobs, atol=2e-5)
            assert choice.text == tokenizer.decode(sequence.tokens, skip_special_tokens=True)
            assert choice.finish_reason == sequence.stop_reason
        assert answer.usage.completion_tokens == sum(len(sequence.tokens) for sequence in expected)


def test_base_run_and_checkpoint_differ(client: openai.OpenAI, training: tinker.TrainingClient) -> None:
    base = logprobs(client, MODEL)
    assert base == logprobs(client, ALIAS)
    run = training.model_id
    first = logprobs(client, run)
    path = training.save_state("first").result().path
    train(training, 2)
    assert base != first != logprobs(client, run)
    np.testing.assert_allclose(logprobs(client, path)[0], first[0], atol=2e-5)


def test_an_answer_keeps_its_weights_while_the_run_trains_on(
    client: openai.OpenAI, training: tinker.TrainingClient
) -> None:
    run = training.model_id
    more = {"max_tokens": 400, "temperature": 1.0, "seed": 1, "n": 4}
    expected = logprobs(client, run, **more)
    chunks = iter(asked(client, run, stream=True, **more))
    found: list[list[float]] = [[] for _ in expected]
    steps = 0
    for chunk in chunks:
        found[chunk.choices[0].index] += chunk.choices[0].logprobs.token_logprobs
        if steps < 3:
            train(training, steps + 2)
            steps += 1
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    assert logprobs(client, run) != logprobs(client, MODEL)


def test_chat_is_the_rendered_prompt(client: openai.OpenAI) -> None:
    tokens = hub.load_tokenizer(MODEL).apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    plain = asked(client, MODEL, prompt=tokens, max_tokens=16)
    chat = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_tokens=16, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].message.content == plain.choices[0].text
    assert chat.usage.prompt_tokens == len(tokens)
    content = chat.choices[0].logprobs.content
    np.testing.assert_allclose([e.logprob for e in content], plain.choices[0].logprobs.token_logprobs, atol=2e-5)
    for entry in content:
        likeliest, second = entry.top_logprobs
        assert likeliest.token == entry.token
        assert likeliest.logprob == entry.logprob >= second.logprob


def test_the_same_answer_through_anthropics_package(
    server: SdkServer, client: openai.OpenAI, training: tinker.TrainingClient
) -> None:
    run, limit = training.model_id, 24
    expected = client.chat.completions.create(model=run, messages=CHAT, temperature=0, max_tokens=limit)
    other = anthropic.Anthropic(base_url=f"{server.url}/anthropic/api", api_key=client.api_key, max_retries=0)
    asked = {"model": run, "system": CHAT[0]["content"], "messages": CHAT[1:], "max_tokens": limit}
    asked["extra_body"] = {"temperature": 0}
    answer = other.messages.create(**asked)
    with other.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (answer, streamed):
        assert message.content[0].text == expected.choices[0].message.content
        assert message.usage.input_tokens == expected.usage.prompt_tokens
        assert message.usage.output_tokens == expected.usage.completion_tokens
        assert message.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[expected.choices[0].finish_reason]


@pytest.mark.parametrize("stop", [None, "stop"])
def test_a_stream_is_the_same_answer(client: openai.OpenAI, stop: str | None) -> None:
    """The model samples random bytes, so broken characters and tokens without text are frequent."""
    more = {"max_tokens": 200, "temperature": 1.0, "seed": 11, "n": 2}
    if stop is not None:
        text = asked(client, MODEL, **more).choices[0].text
        more["stop"] = text[len(text) // 2 : len(text) // 2 + 3]
    whole = asked(client, MODEL, **more)
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for chunk in asked(client, MODEL, stream=True, **more):
        (choice,) = chunk.choices
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        if choice.finish_reason is not None:
            reasons[choice.index] = choice.finish_reason
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert reasons[choice.index] == choice.finish_reason
    if stop is not None:
        assert whole.choices[0].finish_reason == "stop"
        assert more["stop"] not in whole.choices[0].text
        assert whole.choices[0].text == text[: text.index(more["stop"])]


def test_prompts_are_found_in_the_cache(client: openai.OpenAI) -> None:
    prompt = [int(token) for token in sequences(77, count=1, length=600)[0]]
    first, again = (asked(client, MODEL, prompt=prompt, max_tokens=2).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens == 0
    assert 0 < again.prompt_tokens_details.cached_tokens < len(prompt)
    assert first.total_tokens == again.total_tokens == len(prompt) + 2


def test_another_tenants_run(server: SdkServer, training: tinker.TrainingClient) -> None:
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key_of("a stranger"), max_retries=0)
    path = training.save_weights_for_sampler("mine").result().path
    for model in (training.model_id, path, "org/other"):
        with pytest.raises(openai.NotFoundError, match="unknown model"):
            asked(stranger, model)
    listed = {model.id for model in stranger.models.list()}
    assert {MODEL, ALIAS} <= listed
    assert not listed & {training.model_id, path}


def test_refusals(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(openai.BadRequestError, match="the chat template of this model does not know tools"):
        client.chat.completions.create(model=MODEL, messages=CHAT, tools=[tool])
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 4000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="prompt: got 600"):
        asked(client, MODEL, prompt=[600])
