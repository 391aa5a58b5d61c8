"""Requests for samples, as the SDK writes them and as no client should."""

import json

import numpy as np
import pytest
import tinker
import torch
from pydantic import ValidationError
from tinker import types as sdk
from tinker.proto.response_conv import deserialize_sample_response
from tinker.types.futures_retrieve_request import FuturesRetrieveRequest as SdkRetrieveFutures
from tinker.types.futures_retrieve_request import SamplingSessionFuturesTarget as SdkTarget
from tinker.types.sample_request import SampleRequest as SdkSample

from twinkle.errors import UserError
from twinkle.sampler.types import SampledSequence, SampleResult, SamplingParams, TopLogprobs
from twinkle.server.wire.fields import parse
from twinkle.server.wire.sampling import (
    AsampleRequest,
    JoinSamplingSessionRequest,
    RetrieveFuturesRequest,
    to_sample_request,
)


def _dump(request):
    """Return the request as the SDK puts it on the wire."""
    return json.dumps(request.model_dump(exclude_unset=False, exclude_none=True, mode="json")).encode()


def _sample(params=None, **content):
    return json.dumps(
        {
            "sampling_session_id": "s:sample:0",
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "sampling_params": params or {},
            **content,
        }
    ).encode()


class TestSampling:
    def test_what_the_sdk_sends(self):
        sent = SdkSample(
            num_samples=2,
            prompt=tinker.ModelInput(chunks=[sdk.EncodedTextChunk(tokens=t) for t in ([1, 2], [], [3])]),
            sampling_params=tinker.SamplingParams(max_tokens=8, seed=1, stop=[5], temperature=0.7, top_k=5, top_p=0.9),
            sampling_session_id="s:sample:0",
            seq_id=10**18,
            prompt_logprobs=True,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=3,
            prompt_logprobs_last_n=1,
            record_stability_info=True,
        )
        request, images, _ = to_sample_request(parse(AsampleRequest, _dump(sent)), "v1")
        assert not images
        assert (request.request_id, request.version_id) == ("s:sample:0:1000000000000000000", "v1")
        np.testing.assert_array_equal(request.prompt, [1, 2, 3])
        assert request.prompt.dtype == np.int64
        assert (request.num_samples, request.prompt_logprobs, request.topk_prompt_logprobs) == (2, True, 2)
        assert (request.topk_sample_logprobs, request.prompt_alt_tokens, request.prompt_logprobs_last_n) == (3, 0, 1)
        assert (request.target_prompt_logprobs, request.stream) == (None, False)
        assert request.params == SamplingParams(8, 0.7, 5, 0.9, 1, (5,), (), True)

    @pytest.mark.parametrize(
        ("stop", "tokens", "texts", "at_eos"),
        [
            (None, (), (), True),
            ([], (), (), False),
            ("\n\nUser:", (), ("\n\nUser:",), True),
            (["a", "b"], (), ("a", "b"), True),
            ([7, 8], (7, 8), (), True),
        ],
    )
    def test_stop(self, stop, tokens, texts, at_eos):
        for params in (tinker.SamplingParams(stop=stop), tinker.SamplingParams(stop=stop, max_tokens=1)):
            sent = SdkSample(
                prompt=tinker.ModelInput.from_ints([1]),
                sampling_params=params,
                sampling_session_id="s:sample:0",
                seq_id=0,
            )
            found = to_sample_request(parse(AsampleRequest, _dump(sent)), None)[0].params
            assert (found.stop_tokens, found.stop_strings, found.stop_at_eos) == (tokens, texts, at_eos)

    def test_defaults(self):
        request, _, _ = to_sample_request(parse(AsampleRequest, _sample({"stop": None, "seed": None})), None)
        assert request.params == SamplingParams()
        assert (request.num_samples, request.prompt_logprobs, request.topk_prompt_logprobs) == (1, False, 0)

    def test_what_was_not_scored_is_empty(self):
        content = {"prompt_logprobs": True, "prompt_logprobs_last_n": 1, "prompt_alt_tokens_k": 4}
        request, _, encode = to_sample_request(parse(AsampleRequest, _sample(**content)), None)
        assert (request.prompt_alt_tokens, request.prompt_logprobs_last_n) == (4, 1)
        top = TopLogprobs(np.array([[0], [0], [3]]), np.array([[-np.inf], [-np.inf], [-2]], np.float32))
        sequence = SampledSequence(np.array([1]), np.array([-1.0], np.float32), "length")
        result = SampleResult([sequence], np.array([np.nan, np.nan, -2], np.float32), top)
        found = deserialize_sample_response(encode(result).body)
        assert found.prompt_logprobs == [None, None, -2.0]
        assert found.topk_prompt_logprobs == [None, None, [(3, -2.0)]]

    @pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, -(2**63)])
    def test_seeds_of_64_bits(self, seed):
        assert to_sample_request(parse(AsampleRequest, _sample({"seed": seed})), None)[0].params.seed == seed

    @pytest.mark.parametrize(
        ("params", "complaint"),
        [
            ({"max_tokens": 0}, "sampling_params.max_tokens: got 0"),
            ({"max_tokens": "8"}, "sampling_params.max_tokens: got '8'"),
            ({"temperature": -1}, "sampling_params.temperature: got -1"),
            ({"temperature": float("nan")}, "sampling_params.temperature: got nan"),
            ({"top_p": 0}, "sampling_params.top_p: got 0"),
            ({"top_p": 1.1}, "sampling_params.top_p: got 1.1"),
            ({"top_k": 0}, "sampling_params.top_k: got 0"),
            ({"top_k": -2}, "sampling_params.top_k: got -2"),
            ({"seed": 2**64}, "sampling_params.seed"),
            ({"stop": [1, "a"]}, "sampling_params.stop: got [1, 'a']"),
            ({"stop": [-1]}, "sampling_params.stop: got [-1]"),
            ({"stop": [True]}, "sampling_params.stop: got [True]"),
            ({"stop": ""}, "sampling_params.stop: got ''"),
            ({"stop": 5}, "sampling_params.stop: got 5"),
            ({"stop": ["a"] * 257}, "at most 256"),
            ({"min_p": 0.1}, "unknown key 'min_p'; known: max_tokens"),
        ],
    )
    def test_bad_params(self, params, complaint):
        with pytest.raises(UserError) as caught:
            to_sample_request(parse(AsampleRequest, _sample(params)), None)
        assert complaint in str(caught.value)

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            ({"topk_sample_logprobs": -1}, "topk_sample_logprobs: got -1"),
            ({"prompt_alt_tokens_k": 1.5}, "prompt_alt_tokens_k: got 1.5"),
            ({"prompt_logprobs_last_n": 0, "prompt_logprobs": True}, "prompt_logprobs_last_n: got 0"),
            ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n: got 1, allowed: null without prompt_logprobs"),
            (
                {"prompt_logprobs_last_n": 2, "prompt_logprobs": True},
                "prompt_logprobs_last_n: got 2, allowed: at most 1",
            ),
            ({"record_stability_info": "yes"}, "record_stability_info: got 'yes'"),
            ({"base_model": "b"}, "base_model: got 'b'"),
            ({"model_path": "tinker://x"}, "model_path: got 'tinker://x'"),
            ({"num_samples": 0}, "num_samples: got 0"),
            ({"num_samples": 10**6}, "num_samples: got 1000000"),
            ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs: got -1"),
            ({"seq_id": -1}, "seq_id: got -1"),
            ({"seq_id": 2**63}, "seq_id: got"),
            ({"sampling_session_id": None}, "sampling_session_id: got None"),
            ({"prompt": {"chunks": [{"tokens": [-1]}]}}, "prompt.chunks[0].tokens[0]: got -1"),
            ({"prompt": {"chunks": [{"tokens": [2**31]}]}}, "prompt.chunks[0].tokens[0]: got 2147483648"),
            ({"prompt": {"chunks": [{"tokens": [1.0]}]}}, "prompt.chunks[0].tokens[0]: got 1.0"),
            ({"prompt": [1, 2]}, "prompt: got [1, 2]"),
            ({"prompt": {"chunks": [{"type": "dmel", "dmel": ""}]}}, "prompt.chunks[0].type: got 'dmel'"),
            (
                {"prompt": {"chunks": [{"tokens": [1]}, {"type": "image", "data": "?", "format": "png"}]}},
                "prompt.chunks[1].data: got '?'",
            ),
            ({"prompt": {"chunks": [{"type": "image_asset_pointer"}]}}, "got 'image_asset_pointer'"),
        ],
    )
    def test_refusals_name_the_field(self, content, complaint):
        with pytest.raises(UserError) as caught:
            to_sample_request(parse(AsampleRequest, _sample(**content)), None)
        assert complaint in str(caught.value)

    def test_options_at_their_defaults_are_fine(self):
        content = {"topk_sample_logprobs": 0, "prompt_alt_tokens_k": 0, "record_stability_info": False}
        nulls = {"target_prompt_logprobs": None, "prompt_logprobs_last_n": None, "base_model": None}
        to_sample_request(parse(AsampleRequest, _sample(**content, **nulls)), None)


def _tensor(**changes):
    return {"data": [1, 2, 3, 4], "dtype": "int64", "shape": [2, 2], **changes}


def _targets(content, prompt=(1, 2, 3)):
    chunks = {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]}
    request = parse(AsampleRequest, _sample(prompt=chunks, target_prompt_logprobs=content))
    return to_sample_request(request, None)[0].target_prompt_logprobs


class TestTargets:
    def test_dense(self):
        found = _targets(_tensor(data=[1, -1, 3, 4]))
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, [[1, -1], [3, 4]])

    @pytest.mark.parametrize("columns", [3, 150_000])
    def test_sparse_takes_room_for_what_it_lists(self, columns):
        """However wide the tensor claims to be."""
        crow, col = [0, 2, 2, 3], [0, columns - 1, 1]
        content = {"data": [7, 0, 9], "shape": [3, columns], "sparse_crow_indices": crow, "sparse_col_indices": col}
        found = _targets(_tensor(**content), (1, 2, 3, 4))
        np.testing.assert_array_equal(found, [[7, 0], [-1, -1], [9, -1]])

    def test_as_the_sdk_makes_it_sparse(self):
        ids = torch.full((30, 5), -1)
        ids[3, 1], ids[3, 4], ids[29, 0] = 0, 7, 8
        made = tinker.TensorData.from_torch_sparse(ids, pad_value=-1)
        assert made.sparse_crow_indices is not None
        content = {
            "data": made.data,
            "dtype": made.dtype,
            "shape": made.shape,
            "sparse_crow_indices": made.sparse_crow_indices,
            "sparse_col_indices": made.sparse_col_indices,
        }
        found = _targets(content, range(31))
        assert found.shape == (30, 2)
        assert (found[3].tolist(), found[29].tolist()) == ([0, 7], [8, -1])
        assert (np.delete(found, [3, 29], axis=0) == -1).all()

    @pytest.mark.parametrize(
        ("changes", "complaint"),
        [
            ({"dtype": "float32"}, "target_prompt_logprobs.dtype: got 'float32'"),
            ({"shape": [4]}, "target_prompt_logprobs.shape: got [4]"),
            ({"shape": None}, "target_prompt_logprobs.shape: got None"),
            ({"shape": [2, 3]}, "target_prompt_logprobs.data: got '4 values', allowed: 6"),
            ({"data": [-1] * 4}, "target_prompt_logprobs: got 'no token'"),
            ({"data": [1, 2, 3, -2]}, "target_prompt_logprobs.data[3]: got -2"),
            ({"data": [1, 2, 3, 2**31]}, "target_prompt_logprobs.data[3]: got 2147483648"),
            ({"shape": [2**30, 2**30]}, "cells"),
            ({"sparse_crow_indices": [0, 2, 4]}, "target_prompt_logprobs.col_indices: got '0 entries'"),
            ({"sparse_col_indices": [0, 1, 0, 1]}, "target_prompt_logprobs.crow_indices: got '0 entries'"),
            ({"sparse_crow_indices": [0, 4, 3], "sparse_col_indices": [0, 1, 0, 1]}, "never decrease"),
            ({"sparse_crow_indices": [0, 2, 4], "sparse_col_indices": [0, 2, 0, 1]}, "columns in [0, 2)"),
            ({"sparse_crow_indices": [0, 2, 4], "sparse_col_indices": [1, 0, 0, 1]}, "increasing within a row"),
            ({"sparse_crow_indices": [0, 2, 2**70], "sparse_col_indices": []}, "sparse_crow_indices[2]: got"),
        ],
    )
    def test_refusals(self, changes, complaint):
        with pytest.raises(UserError) as caught:
            _targets(_tensor(**changes))
        assert complaint in str(caught.value)

    def test_a_few_listed_cells_must_not_take_gigabytes(self):
        """One long row would make every other row as long."""
        rows, long = 100_000, 1000
        crow = [0, *[long] * rows]
        content = _tensor(
            data=[1] * long, shape=[rows, long], sparse_crow_indices=crow, sparse_col_indices=list(range(long))
        )
        with pytest.raises(UserError, match="cells"):
            _targets(content)


class TestFutures:
    def test_what_the_sdk_sends(self):
        target = SdkTarget(sampling_session_id="s:sample:0", cloned_sampler_id=10**9)
        sent = SdkRetrieveFutures(target=target, prev_cursor=2**60, retrieved_request_ids=["s:sample:0:1"])
        found = parse(RetrieveFuturesRequest, _dump(sent))
        assert (found.target.sampling_session_id, found.target.cloned_sampler_id) == ("s:sample:0", 10**9)
        assert (found.prev_cursor, found.timeout, found.retrieved_request_ids) == (2**60, None, ["s:sample:0:1"])
        join = sdk.JoinSamplingSessionRequest(sampling_session_id="s:sample:0")
        assert parse(JoinSamplingSessionRequest, _dump(join)).sampling_session_id == "s:sample:0"

    @pytest.mark.parametrize(
        ("changes", "complaint"),
        [
            ({"target": {"type": "session", "sampling_session_id": "s"}}, "target.type: got 'session'"),
            ({"target": {"sampling_session_id": "s", "cloned_sampler_id": -1}}, "cloned_sampler_id: got -1"),
            ({"prev_cursor": -1}, "prev_cursor: got -1"),
            ({"timeout": -1.0}, "timeout: got -1.0"),
            ({"retrieved_request_ids": [1]}, "retrieved_request_ids[0]: got 1"),
        ],
    )
    def test_refusals(self, changes, complaint):
        body = {"target": {"sampling_session_id": "s"}, **changes}
        with pytest.raises(UserError) as caught:
            parse(RetrieveFuturesRequest, json.dumps(body).encode())
        assert complaint in str(caught.value)


class TestManyMistakes:
    """Describing every mistake would take seconds and gigabytes, so only the first is described."""

    @pytest.mark.parametrize(
        "content",
        [
            {"prompt": {"chunks": [{"tokens": [-1] * 1000}]}},
            {"prompt": {"chunks": [5] * 1000}},
            {"target_prompt_logprobs": {"data": ["x"] * 1000, "dtype": "int64", "shape": [1, 1000]}},
        ],
        ids=["tokens", "chunks", "targets"],
    )
    def test_one_is_found(self, content):
        with pytest.raises(ValidationError) as caught:
            AsampleRequest.model_validate_json(_sample(**content))
        assert caught.value.error_count() == 1

    def test_chunks_have_a_limit(self):
        with pytest.raises(UserError, match=r"prompt\.chunks: .*at most 4096"):
            parse(AsampleRequest, _sample(prompt={"chunks": [{}] * 5000}))

    def test_stop_strings_have_a_limit(self):
        parse(AsampleRequest, _sample({"stop": ["x" * 1024]}))
        with pytest.raises(UserError, match=r"sampling_params\.stop: .*1 to 1024 characters"):
            parse(AsampleRequest, _sample({"stop": ["x" * 1025]}))
