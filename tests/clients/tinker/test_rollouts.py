"""Conversations with tools over the unmodified SDK."""

import numpy as np
import pytest
import tinker

from tests.support.servers.serving import MODEL, SAMPLER
from tests.support.texts import counting_rollout
from twinkle.data_format import SamplingParams
from twinkle.template import Template
from twinkle_agentic.rollout import MultiTurnRollout, TinkerSampler


@pytest.mark.skipif(SAMPLER == "mock", reason="the mock's numbers are made up")
def test_a_conversation_with_an_environment(service: tinker.ServiceClient) -> None:
    template = counting_rollout.calls_every_turn(Template(MODEL))
    client = service.create_sampling_client(base_model=MODEL)
    tool, tools = counting_rollout.environment_tool()
    params = counting_rollout.until_an_even_token()
    rollout = MultiTurnRollout(TinkerSampler(client, template), template, tools, params, max_turns=3)
    (done,) = rollout([counting_rollout.QUESTION])
    counting_rollout.check(done, tool)
    scores = client.compute_logprobs(tinker.ModelInput.from_ints(list(done["input_ids"]))).result()
    places = [place + 1 for place, label in enumerate(done["labels"]) if label != -100]
    sampled = [pairs[0][1] for pairs in done["logprobs"]]
    np.testing.assert_allclose([scores[place] for place in places], sampled, atol=1e-5)


def test_parameters_that_the_sdk_does_not_have() -> None:
    sampler = TinkerSampler(None, None)
    penalties = [{"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}]
    for wrong in (*penalties, {"min_p": 0.1}, {"ignore_eos": True}, {"prompt_logprobs": 1}, {"logprobs": 5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            sampler.sample([], SamplingParams(**wrong))
