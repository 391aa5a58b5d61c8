"""Bodies that no real client sends: decoding ends quickly, with an op or a typed error, and takes little memory."""

import contextlib
import json
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twinkle.errors import InvalidInputError, UserError
from twinkle.server.state.files.export import check_recipients
from twinkle.server.types import UNNUMBERED, Op, Refused, TrainPass
from twinkle.server.wire import tinker_pb2 as pb
from twinkle.server.wire.errors import MalformedRequestError
from twinkle.server.wire.fields import parse
from twinkle.server.wire.requests import (
    CopyWeightsRequest,
    CreateFromRequest,
    CreateModelRequest,
    CreateSessionRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    SearchSessionsRequest,
    SetTtlRequest,
    to_op,
)
from twinkle.server.wire.sampling import AsampleRequest, to_sample_request
from twinkle.server.wire.training import decode_forward_backward, decompress


def _varint(number):
    out = b""
    while number > 0x7F:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def _field(number, content):
    return _varint(number << 3 | 2) + _varint(len(content)) + content


PLACE = _field(1, b"s:train:0") + b"\x10\x01"  # model_id and seq_id=1
TARGETS = _field(1, b"target_tokens")

MALFORMED = {
    "empty": b"",
    "json": b'{"model_id": "s:train:0", "seq_id": 1}',
    "zeros": b"\0" * 1000,
    "ones": b"\xff" * 1000,
    "seq_id alone": b"\x10\x01",
    "seq_id -1": _field(1, b"m") + b"\x10" + _varint(2**64 - 1),
    "empty model_id": _field(1, b"") + b"\x10\x01",
    "endless model_id": _field(1, b"m" * 100_000) + b"\x10\x01",
    "model_id not UTF-8": _field(1, b"\xff\xfe") + b"\x10\x01",
    "loss_fn not UTF-8": PLACE + _field(4, b"\xff"),
    "cut off": (PLACE + _field(3, b"\x0a\x00"))[:-1],
    "length beyond the end": PLACE + b"\x1a\x7f",
    "length of 2^63": PLACE + b"\x1a" + _varint(2**63 - 1),
    "length of 2^70": PLACE + b"\x1a" + _varint(2**70),
    "varint without end": PLACE + b"\x28" + b"\xff" * 50,
    "end of a group": PLACE + b"\x1c",
    "wire type 7": PLACE + b"\x1f",
    "field number 0": PLACE + b"\x02\x00",
    "datum that is no message": PLACE + _field(3, b"\xff\xff\xff"),
    "a million datums": PLACE + _field(3, b"") * 1_000_000,
    "a million chunks": PLACE + _field(3, _field(1, b"") * 1_000_000),
    "a million spans": PLACE + _field(3, _field(3, b"") * 1_000_000),
    "a million config keys": PLACE + _field(7, b"") * 1_000_000,
}
REFUSED = {
    "empty datum": PLACE + _field(3, b""),
    "empty chunk": PLACE + _field(3, _field(1, b"")),
    "tokens cut off": PLACE + _field(3, _field(1, _field(1, _field(1, b"12345")))),
    "empty map entry": PLACE + _field(3, _field(2, b"")),
    "tensor without anything": PLACE + _field(3, _field(2, TARGETS + _field(2, b""))),
    "a million dimensions": PLACE
    + _field(3, _field(2, TARGETS + _field(2, _field(1, b"") + b"\x18\x02" + _field(4, b"\x01" * 1_000_000)))),
    "dimensions that wrap around": PLACE
    + _field(3, _field(2, TARGETS + _field(2, _field(1, b"") + b"\x18\x02" + _field(4, _varint(2**32) * 2)))),
    "sparse without indices": PLACE
    + _field(3, _field(2, TARGETS + _field(2, _field(2, b"") + b"\x18\x02" + _field(4, b"\x05\x05")))),
    "unknown key of a megabyte": PLACE + _field(3, _field(2, _field(1, b"k" * 1_000_000) + _field(2, b""))),
    "loss of a megabyte": PLACE + _field(4, b"l" * 1_000_000),
    "config without a value": PLACE + _field(7, _field(1, b"beta")),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_bodies(name):
    start = time.process_time()
    with pytest.raises(MalformedRequestError) as caught:
        decode_forward_backward(MALFORMED[name])
    assert time.process_time() - start < 2
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", REFUSED)
def test_refused_bodies(name):
    start = time.process_time()
    op = decode_forward_backward(REFUSED[name])
    assert time.process_time() - start < 2
    assert isinstance(op.payload, Refused)
    assert (op.adapter_id, op.seq) == ("s:train:0", 1)
    assert len(op.payload.message) < 1000


_MEMORY = """
import resource, sys
sys.path.insert(0, ".")
from tests.server.wire import test_wire_hostile as hostile
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
hostile.decode_everything()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def decode_everything():
    """Decode all of the above, and sparse tensors that are small only on the wire."""
    crow = np.zeros(1025, np.int64)
    csr = pb.Tensor(sparse_csr=pb.SparseCsr(crow_indices=crow.tobytes()), dtype=pb.DTYPE_INT64, shape=[1024, 2**31 - 1])
    sparse = pb.ForwardBackwardRequest(
        model_id="m", seq_id=1, data=[pb.Datum(loss_fn_inputs={"target_tokens": csr}) for _ in range(64)]
    )
    for body in (*MALFORMED.values(), *REFUSED.values(), sparse.SerializeToString()):
        with contextlib.suppress(MalformedRequestError):
            decode_forward_backward(body)


def test_memory_stays_small():
    """Runs in a separate process, because Python does not count the parser's memory."""
    run = subprocess.run([sys.executable, "-c", _MEMORY], capture_output=True, text=True, check=True)
    kilobytes = int(run.stdout)
    assert kilobytes < 150 * 1024, f"{kilobytes} kB"


# --- mutations --------------------------------------------------------------------------------------------------------


def _valid():
    def tensor(values, dtype, shape):
        return pb.Tensor(dense=values.tobytes(), dtype=dtype, shape=shape)

    csr = pb.SparseCsr(
        values=np.array([7, 8], np.int64).tobytes(),
        crow_indices=np.array([0, 1, 1, 2], np.int64).tobytes(),
        col_indices=np.array([1, 3], np.int64).tobytes(),
    )
    chunk = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.arange(3, dtype=np.int32).tobytes()))
    dense = {
        "target_tokens": tensor(np.arange(3), pb.DTYPE_INT64, [3]),
        "logprobs": tensor(np.zeros(3, np.float32), pb.DTYPE_FLOAT32, [3]),
        "advantages": tensor(np.ones(3, np.uint16), pb.DTYPE_BFLOAT16, []),
    }
    sparse = {"target_tokens": pb.Tensor(sparse_csr=csr, dtype=pb.DTYPE_INT64, shape=[3, 4])}
    return pb.ForwardBackwardRequest(
        model_id="s:train:0",
        seq_id=1,
        data=[pb.Datum(model_input=[chunk, chunk], loss_fn_inputs=inputs) for inputs in (dense, sparse)],
        loss_fn="ppo",
        loss_fn_config={"beta": 1.0},
        loss_fn_config_v2={"beta": pb.LossConfigValue(number=1.0), "name": pb.LossConfigValue(text="x")},
    ).SerializeToString()


VALID = _valid()
_BYTES = st.tuples(st.integers(0, len(VALID) - 1), st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
_RELAXED = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def _decodes_or_complains(body):
    try:
        op = decode_forward_backward(body)
    except MalformedRequestError:
        return
    assert isinstance(op, Op)
    assert isinstance(op.payload, TrainPass | Refused)
    assert op.seq >= UNNUMBERED
    if isinstance(op.payload, TrainPass):
        for datum in op.payload.data:
            assert datum.tokens.dtype == datum.targets.dtype == np.int64
            assert all(array.dtype == np.float32 for array in datum.extras.values())


@_RELAXED
@given(st.lists(_BYTES, min_size=1, max_size=8))
def test_changed_bytes(changes):
    body = bytearray(VALID)
    for position, value in changes:
        body[position] = value
    _decodes_or_complains(bytes(body))


@_RELAXED
@given(st.integers(0, len(VALID)), st.integers(0, len(VALID)), st.binary(max_size=40))
def test_spliced_bytes(start, stop, inserted):
    _decodes_or_complains(VALID[:start] + inserted + VALID[stop:])


@_RELAXED
@given(st.binary(max_size=300), st.sampled_from(["zstd", "gzip", "identity"]))
def test_random_bytes(body, encoding):
    _decodes_or_complains(body)
    _decodes_or_complains(PLACE + _field(3, body))
    _decodes_or_complains(PLACE + _field(3, _field(2, TARGETS + _field(2, body))))
    with contextlib.suppress(UserError):
        assert len(decompress(body, encoding, 1000)) <= 1000


# --- JSON -------------------------------------------------------------------------------------------------------------

_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=10)
    | st.sampled_from([10**400, -1, 0, 2**63, 2**64, "adamw", "dimuon", "encoded_text", "tinker://x"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["type", "tokens", "chunks", "rank", "stop", "seed", "beta1"]), inner)
    ),
    max_leaves=8,
)
_SEQUENCED = (
    OptimStepRequest,
    SaveWeightsRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsExternalRequest,
    LoadWeightsRequest,
)
_OTHERS = (
    AsampleRequest,
    CreateModelRequest,
    CreateSessionRequest,
    CreateFromRequest,
    CopyWeightsRequest,
    SetTtlRequest,
    SearchSessionsRequest,
)


@_RELAXED
@given(st.data())
def test_json_requests(data):
    """Any JSON in any field of a sequenced call becomes an op, if its model_id and seq_id can be read."""
    request_type = data.draw(st.sampled_from(_SEQUENCED))
    names = [name for name in request_type.model_fields if name not in ("model_id", "seq_id")]
    content = data.draw(st.dictionaries(st.sampled_from(names), _JSON))
    op = to_op(request_type, _json({**content, "model_id": "s:train:0", "seq_id": 3}))
    assert (op.adapter_id, op.seq, op.kind) == ("s:train:0", 3, request_type.kind)


@_RELAXED
@given(st.data())
def test_other_json_requests(data):
    request_type = data.draw(st.sampled_from([*_OTHERS, *_SEQUENCED]))
    content = data.draw(st.dictionaries(st.sampled_from(list(request_type.model_fields)), _JSON))
    with contextlib.suppress(UserError):
        request = parse(request_type, _json(content))
        if isinstance(request, AsampleRequest):
            to_sample_request(request, None)
        if isinstance(request, CreateModelRequest):
            request.spec()
        if isinstance(request, CreateFromRequest):
            request.check()


_SSH = "AAAAC3NzaC1lZDI1NTE5AAAA"


@_RELAXED
@given(st.sampled_from(["", "age1", "AGE1", "ssh-ed25519 ", "ssh-rsa ", f"ssh-ed25519 {_SSH}"]), st.text(max_size=80))
def test_recipients(beginning, rest):
    """Anything else than a recipient is named in a typed error."""
    with pytest.raises(InvalidInputError, match=r"recipients\[0\]"):
        check_recipients([beginning + rest], "recipients")


@_RELAXED
@given(st.binary(max_size=200))
def test_json_that_is_none(body):
    for request_type in _SEQUENCED:
        with contextlib.suppress(UserError):
            to_op(request_type, body)


def _json(content):
    return json.dumps(content).encode(errors="surrogatepass")
