"""RouterSampler and ModelCondenser on a sampler of the library, with a small random model."""

import peft
import pytest

from tests.support.agents.chat_endpoint import ChatEndpoint
from tests.support.models.plain_training import LORA, MODEL
from twinkle.data_format import SamplingParams
from twinkle.errors import InvalidInputError
from twinkle.model import MultiLoraTransformersModel
from twinkle.sampler import LocalSampler
from twinkle_agentic.condenser import ModelCondenser
from twinkle_agentic.data_format import Chunks
from twinkle_agentic.sampler import RoutedSequence, RouterSampler

ASK = {"messages": [{"role": "user", "content": "go"}]}


@pytest.fixture(scope="module")
def model():
    model = MultiLoraTransformersModel(model_id=MODEL, mixed_precision="fp32", device="cpu", max_loras=1)
    model.add_adapter_to_model("a", peft.LoraConfig(**LORA))
    return model


@pytest.fixture(scope="module")
def sampler(model):
    return LocalSampler(model)


@pytest.fixture(scope="module")
def endpoint():
    with ChatEndpoint({"content": "remote"}) as stub:
        yield stub


@pytest.mark.parametrize("method", ["entropy", "logp"])
def test_both_ways_to_the_uncertainty_agree(sampler, endpoint, method):
    """From the likeliest tokens of the call itself, and from a second pass over the tokens that were drawn."""
    always = {"entropy": -1.0, "logp": 1.0}[method]
    router = RouterSampler(sampler, endpoint.url, method=method, threshold=always, top_k_logprobs=5)
    found = []
    for logprobs in (None, 1, 5):
        (response,) = router.sample([ASK], SamplingParams(max_tokens=6, seed=3, logprobs=logprobs), "a")
        (routed,) = response.sequences
        assert isinstance(routed, RoutedSequence)
        found.append(routed.uncertainty)
    assert found == pytest.approx([found[0]] * 3, abs=1e-4)


def test_local_answers_are_the_samplers_own(sampler, endpoint):
    params = SamplingParams(max_tokens=6, seed=3, logprobs=1)
    router = RouterSampler(sampler, endpoint.url, threshold=99.0)
    (alone,), (routed,) = sampler.sample([ASK], params), router.sample(ASK, params)
    expected, found = alone.sequences[0], routed.sequences[0]
    assert found.tokens == expected.tokens
    assert [token for ((token, _),) in found.logprobs] == found.tokens
    assert [logp for ((_, logp),) in found.logprobs] == pytest.approx([logp for ((_, logp),) in expected.logprobs])


def test_routed_answers_cannot_be_trained_on(model):
    routed = RoutedSequence("stop", [], decoded="remote")
    with pytest.raises(InvalidInputError, match="None is the feature of an answer without tokens"):
        model.forward_backward(inputs=[routed.new_input_feature], adapter_name="a")


def test_a_library_sampler_condenses(sampler):
    """The random model's text is of no use, but it is shorter than the chunk; the chunk's own text stays beside it."""
    text = "One two three. " * 40
    chunk = {"type": "text", "content": text, "role": "user", "round": 1}
    condenser = ModelCondenser(sampler, sampling_params=SamplingParams(max_tokens=8, seed=1))
    (found,) = condenser(Chunks([chunk]))
    assert found["raw"] == {"condensed": True, "original": text}
    assert 0 < len(found["content"]) < len(text)
