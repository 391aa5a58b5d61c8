"""forward_backward on the wire, compared with the SDK's encoder and decoder."""

import gzip

import numpy as np
import pytest
import tinker
import torch
import zstandard
from tinker import types as sdk
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from twinkle.loss import TOKEN_LOSSES
from twinkle.model.types import TrainResult
from twinkle.server.types import Encoding, OpKind, Refused, TrainPass
from twinkle.server.wire import tinker_pb2 as pb
from twinkle.server.wire.errors import BodyTooLargeError, MalformedRequestError
from twinkle.server.wire.training import (
    EXTRAS,
    WEIGHTS,
    Allowance,
    decode_forward_backward,
    decompress,
    encode_training_result,
)


def _body(data, loss="cross_entropy", config=None, model_id="s:train:0", seq=1, forward_only=False):
    request = ForwardBackwardRequest(ForwardBackwardInput(data, loss, config), model_id, seq)
    message = forward_backward_request_to_proto(request)
    message.forward_only = forward_only
    return message.SerializeToString()


def _datum(tokens, **inputs):
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def _decoded(body, **limits):
    op = decode_forward_backward(body, Allowance(**limits))
    assert isinstance(op.payload, TrainPass), op.payload
    return op


def _refusal(body, **limits):
    op = decode_forward_backward(body, Allowance(**limits))
    assert isinstance(op.payload, Refused), op.payload
    assert (op.adapter_id, op.seq) == ("s:train:0", 1)
    return op.payload.message


def _message(**fields):
    return pb.ForwardBackwardRequest(model_id="s:train:0", seq_id=1, loss_fn="cross_entropy", **fields)


def _tensor(shape, dense=b"", dtype=pb.DTYPE_INT64):
    return pb.Tensor(dense=dense, dtype=dtype, shape=shape)


def _csr(shape, values, crow, col, dtype=pb.DTYPE_INT64, value_type=np.int64):
    csr = pb.SparseCsr(
        values=np.array(values, value_type).tobytes(),
        crow_indices=np.array(crow, np.int64).tobytes(),
        col_indices=np.array(col, np.int64).tobytes(),
    )
    return pb.Tensor(sparse_csr=csr, dtype=dtype, shape=shape)


def _one(targets, tokens=(1, 2, 3), **inputs):
    chunk = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.array(tokens, np.int32).tobytes()))
    datum = pb.Datum(model_input=[chunk], loss_fn_inputs={"target_tokens": targets, **inputs})
    return _message(data=[datum]).SerializeToString()


class TestRequestsOfTheSdk:
    def test_dense_lists(self):
        body = _body([_datum([5, 6, 7], target_tokens=[6, 7, 8], weights=[0.0, 1.0, -0.5])], seq=7)
        op = _decoded(body)
        assert (op.adapter_id, op.seq, op.kind, op.body) == ("s:train:0", 7, OpKind.FORWARD_BACKWARD, body)
        (datum,) = op.payload.data
        assert op.payload.loss == "cross_entropy"
        assert op.payload.tokens == 3
        np.testing.assert_array_equal(datum.tokens, [5, 6, 7])
        np.testing.assert_array_equal(datum.targets, [6, 7, 8])
        np.testing.assert_array_equal(datum.weights, np.array([0, 1, -0.5], np.float32))
        assert (datum.tokens.dtype, datum.targets.dtype, datum.weights.dtype) == (np.int64, np.int64, np.float32)
        assert datum.extras == {}

    def test_forward_only(self):
        assert _decoded(_body([_datum([5], target_tokens=[6])], forward_only=True)).kind is OpKind.FORWARD

    def test_policy_inputs_are_extras(self):
        inputs = {name: np.full(2, index, np.float32) for index, name in enumerate(EXTRAS)}
        (datum,) = _decoded(_body([_datum([1, 2], target_tokens=[2, 3], **inputs)], "gspo")).payload.data
        assert datum.weights is None
        assert set(datum.extras) == set(EXTRAS)
        for name, values in inputs.items():
            np.testing.assert_array_equal(datum.extras[name], values)

    @pytest.mark.parametrize("dense", ["both", "targets", "weights", "neither"])
    def test_two_dimensions_sparse_and_dense(self, dense):
        targets = torch.zeros(13, 20, dtype=torch.int64)
        targets[3, 4], targets[3, 7], targets[12, 19] = 11, 12, 13
        weights = torch.zeros(13, 20)
        weights[3, 4], weights[0, 0] = 0.25, -2.0
        if dense in ("both", "targets"):
            targets += 1
        if dense in ("both", "weights"):
            weights += 1
        body = _body([_datum(list(range(13)), target_tokens=targets, weights=weights)])
        layouts = {
            name: tensor.WhichOneof("encoding")
            for name, tensor in pb.ForwardBackwardRequest.FromString(body).data[0].loss_fn_inputs.items()
        }
        assert layouts == {
            "target_tokens": "dense" if dense in ("both", "targets") else "sparse_csr",
            "weights": "dense" if dense in ("both", "weights") else "sparse_csr",
        }
        (datum,) = _decoded(body).payload.data
        np.testing.assert_array_equal(datum.targets, targets.numpy())
        np.testing.assert_array_equal(datum.weights, weights.numpy())
        assert (datum.targets.dtype, datum.weights.dtype) == (np.int64, np.float32)

    def test_integer_weights_become_floats(self):
        (datum,) = _decoded(_body([_datum([1, 2], target_tokens=[2, 3], weights=torch.tensor([0, 1]))])).payload.data
        np.testing.assert_array_equal(datum.weights, np.array([0, 1], np.float32))
        assert datum.weights.dtype == np.float32

    def test_text_chunks_are_joined(self):
        chunks = [
            sdk.EncodedTextChunk(tokens=[1, 2]),
            sdk.EncodedTextChunk(tokens=[]),
            sdk.EncodedTextChunk(tokens=[3]),
        ]
        datum = tinker.Datum(tinker.ModelInput(chunks=chunks), {"target_tokens": [2, 3, 4]})
        np.testing.assert_array_equal(_decoded(_body([datum])).payload.data[0].tokens, [1, 2, 3])

    def test_provenance_is_ignored(self):
        span = sdk.PromptProvenanceSpan(sequence_id="x", offset=0, length=1)
        datum = _datum([1], target_tokens=[2]).with_provenance([span], [span])
        assert len(_decoded(_body([datum])).payload.data) == 1

    def test_loss_config(self):
        config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.25}
        assert _decoded(_body([_datum([1], target_tokens=[2])], "ppo", config)).payload.loss_config == config

    def test_newer_config_wins(self):
        message = _message(loss_fn_config={"beta": 1.0}, loss_fn_config_v2={"beta": pb.LossConfigValue(number=2.0)})
        assert _decoded(message.SerializeToString()).payload.loss_config == {"beta": 2.0}
        assert _decoded(_message(loss_fn_config={"beta": 1.0}).SerializeToString()).payload.loss_config == {"beta": 1.0}

    def test_text_in_the_config_is_refused(self):
        message = _refusal(_body([_datum([1], target_tokens=[2])], "ppo", {"mode": "NaN"}))
        assert "loss_fn_config['mode']: got 'NaN'" in message
        assert "takes no text" in message

    def test_unknown_input_is_refused(self):
        data = [_datum([1], target_tokens=[2]), _datum([1], target_tokens=[2], mask=np.ones(1, np.float32))]
        message = _refusal(_body(data))
        assert "unknown key in data[1].loss_fn_inputs 'mask'" in message
        assert "weights" in message

    def test_targets_are_needed(self):
        assert "data[0].loss_fn_inputs['target_tokens']" in _refusal(_body([_datum([1], weights=[1.0])]))

    def test_targets_are_integers(self):
        message = _refusal(_body([_datum([1], target_tokens=np.ones(1, np.float32))]))
        assert "data[0].loss_fn_inputs['target_tokens'].dtype: got 'float32'" in message

    def test_limits(self):
        data = [_datum([1, 2], target_tokens=[2, 3])] * 3
        assert len(_decoded(_body(data), datums=3, tokens=6).payload.data) == 3
        assert "3 datums" in _refusal(_body(data), datums=2)
        assert "data[2].model_input" in _refusal(_body(data), tokens=5)


def test_every_loss_input_is_known():
    names = {name for loss in TOKEN_LOSSES.values() for name in (*loss.inputs, *loss.optional_inputs)}
    assert names == {WEIGHTS, *EXTRAS}


class TestTensors:
    def test_other_types(self):
        bits = np.array([0x3F80, 0xC000, 0x0000], np.uint16)  # 1, −2, 0
        body = _one(
            _tensor([3], np.array([4, 5, 6], np.int32).tobytes(), pb.DTYPE_INT32),
            weights=_tensor([3], bits.tobytes(), pb.DTYPE_BFLOAT16),
        )
        (datum,) = _decoded(body).payload.data
        np.testing.assert_array_equal(datum.targets, [4, 5, 6])
        np.testing.assert_array_equal(datum.weights, [1, -2, 0])
        assert (datum.targets.dtype, datum.weights.dtype) == (np.int64, np.float32)

    def test_no_shape_is_one_dimension(self):
        (datum,) = _decoded(_one(_tensor([], np.arange(3).tobytes()))).payload.data
        assert datum.targets.shape == (3,)

    def test_empty_sparse_tensor(self):
        (datum,) = _decoded(_one(_csr([3, 4], [], [0, 0, 0, 0], []))).payload.data
        np.testing.assert_array_equal(datum.targets, np.zeros((3, 4)))

    def test_dense_tensors_are_views(self):
        (datum,) = _decoded(_one(_tensor([3], np.arange(3).tobytes()))).payload.data
        assert not datum.targets.flags.owndata

    @pytest.mark.parametrize(
        ("tensor", "complaint"),
        [
            (_tensor([4], np.arange(3).tobytes()), "3 values for shape (4,)"),
            (_tensor([3], b"1234567"), "7 bytes"),
            (_tensor([-3], np.arange(3).tobytes()), ".shape: got (-3,)"),
            (_tensor([-1, -3], np.arange(3).tobytes()), ".shape: got (-1, -3)"),
            (_tensor([2**62, 4], b""), ".shape: got (4611686018427387904, 4)"),
            (_tensor([2**33, 0], b""), ".shape: got (8589934592, 0)"),
            (_tensor([2**31 - 1, 2**31 - 1], b""), "0 values for shape"),
            (_tensor([1, 1, 3], np.arange(3).tobytes()), "3 dimensions"),
            (_tensor([1] * 1000, np.arange(1).tobytes()), "1000 dimensions"),
            (_tensor([3], np.arange(3).tobytes(), 0), ".dtype: got 0"),
            (_tensor([3], np.arange(3).tobytes(), 99), ".dtype: got 99"),
            (pb.Tensor(dtype=pb.DTYPE_INT64, shape=[3]), "a tensor without data"),
            (_csr([3], [1], [0, 1], [0]), "2 dimensions for a sparse tensor"),
            (_csr([3, 2**31 - 1], [1], [0, 1, 1, 1], [0]), "sparse tensors of at most"),
            (_csr([3, 4], [1], [0, 1], [0]), "crow_indices: got '2 entries'"),
            (_csr([3, 4], [1, 2], [0, 2, 2, 2], [0]), "col_indices: got '1 entries'"),
            (_csr([3, 4], [1, 2], [0, 2, 1, 2], [0, 1]), "never decrease"),
            (_csr([3, 4], [1], [1, 1, 1, 1], [0]), "numbers from 0"),
            (_csr([3, 4], [1], [0, 0, 0, 7], [0]), "numbers from 0 to 1"),
            (_csr([3, 4], [1], [0, -(2**63), 2**63 - 1, 1], [0]), "never decrease"),
            (_csr([3, 4], [1], [0, 1, 1, 1], [4]), "columns in [0, 4)"),
            (_csr([3, 4], [1], [0, 1, 1, 1], [-1]), "columns in [0, 4)"),
            (_csr([3, 4], [1, 2], [0, 2, 2, 2], [1, 1]), "increasing within a row"),
            (_csr([0, 0], [], [], []), "crow_indices: got '0 entries'"),
        ],
    )
    def test_lies_are_refused(self, tensor, complaint):
        message = _refusal(_one(tensor))
        assert "data[0].loss_fn_inputs['target_tokens']" in message
        assert complaint in message

    def test_the_targets_of_a_request_share_one_allowance(self):
        """Each of them alone would be accepted."""
        data = [_message().data.add() for _ in range(3)]
        for datum in data:
            datum.loss_fn_inputs["target_tokens"].CopyFrom(_csr([1, 2**23], [1], [0, 1], [5]))
        assert "max_targets_per_request" in _refusal(_message(data=data).SerializeToString())
        _decoded(_message(data=data[:1]).SerializeToString())


class TestDecompression:
    def test_round_trips(self):
        body = b"x" * 100_000
        for packed, encoding in (
            (body, None),
            (body, "identity"),
            (gzip.compress(body), "gzip"),
            (zstandard.ZstdCompressor().compress(body), "zstd"),
            (zstandard.ZstdCompressor(write_content_size=False).compress(body), " ZSTD "),
        ):
            assert decompress(packed, encoding, len(body)) == body

    @pytest.mark.parametrize("encoding", ["identity", "gzip", "zstd"])
    def test_bombs(self, encoding):
        bomb = b"\0" * 2**26
        packed = {"gzip": gzip.compress, "zstd": zstandard.ZstdCompressor().compress}.get(encoding, bytes)(bomb)
        with pytest.raises(BodyTooLargeError):
            decompress(packed, encoding, 2**20)

    def test_bomb_that_hides_its_size(self):
        packed = zstandard.ZstdCompressor(write_content_size=False).compress(b"\0" * 2**26)
        with pytest.raises(MalformedRequestError, match="1048576"):
            decompress(packed, "zstd", 2**20)

    def test_frame_that_claims_more_than_it_holds(self):
        packed = bytearray(zstandard.ZstdCompressor(write_checksum=False).compress(b"\0" * 70_000))
        packed[5:9] = (2**20).to_bytes(4, "little")
        with pytest.raises(MalformedRequestError):
            decompress(bytes(packed), "zstd", 2**21)

    @pytest.mark.parametrize("encoding", ["gzip", "zstd"])
    def test_damage(self, encoding):
        whole = {"gzip": gzip.compress, "zstd": zstandard.ZstdCompressor().compress}[encoding](bytes(range(256)) * 50)
        for packed in (b"", b"x", whole[:-5], whole[: len(whole) // 2], whole + b"more", b"\0" + whole):
            with pytest.raises(MalformedRequestError):
                decompress(packed, encoding, 2**20)

    def test_other_encodings(self):
        with pytest.raises(MalformedRequestError, match="allowed: zstd, gzip, identity"):
            decompress(b"", "br", 10)


class TestResults:
    def test_ragged(self):
        """Different lengths share a record; a different K starts another one, in the order of the datums."""
        shapes = [(3,), (5,), (2, 4), (1, 4), (2, 7), (4,)]
        logprobs = [np.random.default_rng(i).normal(size=shape).astype(np.float32) for i, shape in enumerate(shapes)]
        outcome = encode_training_result(TrainResult(logprobs, {"loss:sum": 1.5, "ratio:mean": -2.0}))
        assert (outcome.encoding, outcome.failed) == (Encoding.PROTOBUF, False)
        assert [record.num_datums for record in pb.ForwardBackwardOutput.FromString(outcome.body).loss_fn_outputs] == [
            2,
            2,
            1,
            1,
        ]
        output = deserialize_forward_backward_output(outcome.body)
        assert output.loss_fn_output_type == "ArrayRecord"
        assert output.metrics == {"loss:sum": 1.5, "ratio:mean": -2.0}
        assert len(output.loss_fn_outputs) == len(shapes)
        for given, returned in zip(logprobs, output.loss_fn_outputs, strict=True):
            assert tuple(returned["logprobs"].shape) == given.shape
            np.testing.assert_array_equal(returned["logprobs"].to_numpy(), given)

    def test_strided_and_double(self):
        """The values of a view across a larger array, and of an array of another type, arrive unchanged."""
        wide = np.arange(12, dtype=np.float64).reshape(3, 4)
        output = deserialize_forward_backward_output(
            encode_training_result(TrainResult([wide[:, ::2]], {"loss:sum": 0.0})).body
        )
        np.testing.assert_array_equal(output.loss_fn_outputs[0]["logprobs"].to_numpy(), wide[:, ::2])

    @pytest.mark.parametrize("metrics", [{}, {"loss:sum": float("nan")}, {"loss:sum": 0.0, "a:b:c": 1.0}])
    def test_our_mistakes_raise(self, metrics):
        with pytest.raises(ValueError, match=r"metric|loss:sum"):
            encode_training_result(TrainResult([np.zeros(1, np.float32)], metrics))
