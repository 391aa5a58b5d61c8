"""Results as the SDK reads them: JSON through its response models, samples through its protobuf decoder."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tinker.proto.response_conv import deserialize_sample_response
from tinker.types.create_model_response import CreateModelResponse
from tinker.types.load_weights_response import LoadWeightsResponse
from tinker.types.optim_step_response import OptimStepResponse
from tinker.types.request_failed_response import RequestFailedResponse
from tinker.types.save_weights_for_sampler_response import SaveWeightsForSamplerResponseInternal
from tinker.types.save_weights_response import SaveWeightsResponse
from tinker.types.topk_logprobs import topk_to_lists
from tinker.types.try_again_response import TryAgainResponse

from twinkle.model.csr import Csr
from twinkle.sampler.types import DrawnTokens, SampledSequence, SampleResult, TopLogprobs
from twinkle.server.types import CheckpointRecord, Encoding, Outcome
from twinkle.server.wire import responses
from twinkle.server.wire import tinker_pb2 as pb
from twinkle.server.wire.sampling import encode_sample_result


def _read(outcome, model):
    assert (outcome.encoding, outcome.failed) == (Encoding.JSON, False)
    content = json.loads(outcome.body, parse_constant=pytest.fail)
    assert "error" not in content
    assert content.get("type") != "try_again"
    return model.model_validate(content)


class TestJson:
    def test_successes(self):
        path = "tinker://s:train:0/weights/a"
        assert _read(responses.created("s:train:0"), CreateModelResponse).model_id == "s:train:0"
        record = CheckpointRecord("s:train:0", "weights", "a", "t", "s:train:0:1", "d", 0.0, 1)
        assert _read(responses.saved(record), SaveWeightsResponse).path == path
        loaded = _read(responses.loaded(path, "m"), LoadWeightsResponse)
        assert (loaded.path, loaded.model_id) == (path, "m")
        saved = responses.saved(replace(record, kind="sampler_weights"))
        named = _read(saved, SaveWeightsForSamplerResponseInternal)
        assert (named.path, named.sampling_session_id) == ("tinker://s:train:0/sampler_weights/a", None)
        unnamed = _read(responses.published("x"), SaveWeightsForSamplerResponseInternal)
        assert (unnamed.path, unnamed.sampling_session_id) == (None, "x")

    def test_metrics_stay_finite(self):
        metrics = {"a:mean": np.float32(0.5), "error": 1, "b": float("nan"), "c": float("-inf")}
        assert _read(responses.stepped(metrics), OptimStepResponse).metrics == {"a:mean": 0.5, "error": 1.0}
        assert _read(responses.stepped({}), OptimStepResponse).metrics == {}

    @pytest.mark.parametrize("category", ["user", "server", "unknown"])
    def test_failures(self, category):
        outcome = Outcome.failure("x \ud800 ≤", category)
        assert outcome.failed
        failure = RequestFailedResponse.model_validate_json(Outcome.failure("x ≤", category).body)
        assert (failure.error, failure.category) == ("x ≤", category)
        assert set(json.loads(outcome.body)) == {"error", "category"}

    def test_pending(self):
        waiting = TryAgainResponse.model_validate_json(responses.pending("r:1"))
        assert (waiting.request_id, waiting.queue_state) == ("r:1", "active")
        queued = TryAgainResponse.model_validate_json(responses.pending("r:1", "queued for 3 s"))
        assert (queued.request_id, queued.queue_state) == ("r:1", "paused_capacity")
        assert json.loads(responses.pending("r:1", "queued for 3 s"))["queue_state_reason"] == "queued for 3 s"


class TestSamples:
    def test_sequences(self):
        sequences = [
            SampledSequence(np.array([3, 4]), np.array([-0.5, -1.5], np.float32), "stop"),
            SampledSequence(np.array([2**31 - 1]), np.array([-2.0], np.float32), "length"),
        ]
        outcome = encode_sample_result(SampleResult(sequences))
        assert (outcome.encoding, outcome.failed) == (Encoding.PROTOBUF, False)
        response = deserialize_sample_response(outcome.body)
        assert [sequence.stop_reason for sequence in response.sequences] == ["stop", "length"]
        for given, returned in zip(sequences, response.sequences, strict=True):
            assert list(returned.tokens) == given.tokens.tolist()
            assert list(returned.logprobs) == given.logprobs.tolist()
        assert response.prompt_logprobs is None
        assert response.topk_prompt_logprobs is None
        assert response.prompt_cache_hit_tokens == 0

    def test_prompt(self):
        sequence = SampledSequence(np.array([1]), np.array([-1.0], np.float32), "length")
        top = TopLogprobs(
            np.array([[9, 9, 9], [5, 0, 6], [7, 8, 4]]),
            np.array([[np.nan] * 3, [-0.25, -1, -2], [-0.5, -3, -np.inf]], np.float32),
        )
        response = deserialize_sample_response(
            encode_sample_result(SampleResult([sequence], np.array([np.nan, -1, -2], np.float32), top)).body
        )
        assert list(response.prompt_logprobs) == [None, -1.0, -2.0]
        assert topk_to_lists(response.topk_prompt_logprobs_np) == [
            None,
            [(5, -0.25), (0, -1.0), (6, -2.0)],
            [(7, -0.5), (8, -3.0)],
        ]

    def test_options(self):
        """Top-k of sampled tokens, dense and sparse targets, drawn tokens, and the number of cached tokens."""
        top = TopLogprobs(np.array([[4, 0], [5, 6]]), np.array([[-0.5, -np.inf], [-1, -2]], np.float32))
        sequence = SampledSequence(np.array([4, 6]), np.array([-0.5, -2], np.float32), "length", top)
        targets = np.array([[-1.5, 0], [-2.5, -3.5]], np.float32)
        drawn = DrawnTokens(np.array([[7, 8, 7], [9, 9, 0]]), np.full((2, 3), -0.25, np.float32))
        result = SampleResult(
            [sequence], target_prompt_logprobs=targets, prompt_alt_tokens=drawn, cached_prompt_tokens=3
        )
        response = deserialize_sample_response(encode_sample_result(result).body)
        assert response.sequences[0].topk_logprobs == [[(4, -0.5)], [(5, -1.0), (6, -2.0)]]
        assert response.target_prompt_logprobs.sparse_crow_indices is None
        torch.testing.assert_close(response.target_prompt_logprobs.to_torch(), torch.tensor(targets))
        assert response.prompt_alt_tokens.tokens.to_torch().dtype == torch.int64
        assert response.prompt_alt_tokens.tokens.to_torch().tolist() == drawn.tokens.tolist()
        assert response.prompt_alt_tokens.logprobs.to_torch().tolist() == drawn.logprobs.tolist()
        assert response.prompt_cache_hit_tokens == 3
        # The same numbers for a request whose second row lists the cells 1 and 4 of 5.
        asked = Csr((2, 5), np.array([0, 1, 3]), np.array([2, 1, 4]), np.array([7, 8, 9]))
        sparse = deserialize_sample_response(encode_sample_result(result, asked).body).target_prompt_logprobs
        assert (sparse.shape, sparse.data) == ([2, 5], [-1.5, -2.5, -3.5])
        assert (sparse.sparse_crow_indices, sparse.sparse_col_indices) == ([0, 1, 3], [2, 1, 4])

    def test_a_sequence_without_tokens_keeps_its_place(self):
        empty = SampledSequence(np.array([], np.int64), np.array([], np.float32), "stop")
        message = pb.SampleResponse.FromString(encode_sample_result(SampleResult([empty])).body)
        assert message.sequences[0].HasField("logprobs")
