"""Rows of numbers in native requests and results are arrays, without a Python loop over tokens."""

import asyncio
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from twinkle.errors import InvalidInputError
from twinkle.server.backends.mock import mock_model
from twinkle.server.backends.text_codec import max_characters, text_groups
from twinkle.server.services.training.recovery import Replay, decode
from twinkle.server.tenancy.tenants import Tenants
from twinkle.server.types import BlobRef, Ending, NativePass, Op, OpRecord, Outcome, digest
from twinkle.server.verbs import codec
from twinkle.server.verbs.codec import SentVerb, finite, read_op, succeeded
from twinkle.server.verbs.features import checked_rows, image_characters, numbers
from twinkle.server.verbs.runs import NativeRuns
from twinkle.server.wire.errors import BodyTooLargeError, MalformedRequestError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([1, 2, -100], [1, 2, -100]),
        ([1.0, 2.0], [1, 2]),
        ([True, False], [1, 0]),
        ([1, True, 2.0], [1, 1, 2]),
        ([[1, 2], [3, 4]], [1, 2]),
        ([[[5]]], [5]),
        ([], []),
        ([2**31 - 1, -(2**31)], [2**31 - 1, -(2**31)]),
    ],
)
def test_whole_numbers(given, expected):
    column = numbers(given, "x")
    assert column.dtype == np.int64
    assert column.tolist() == expected


@pytest.mark.parametrize(
    "given",
    [[0.5], [2**31], [-(2**31) - 1], [2**70], [math.nan], [math.inf], ["1"], [1, "1"], [None], [1, [2]], "12", 3, None],
)
def test_no_whole_numbers(given):
    with pytest.raises(InvalidInputError, match="a list of whole numbers"):
        numbers(given, "x")


def test_what_is_refused_is_shown_in_short():
    with pytest.raises(InvalidInputError) as refusal:
        numbers([0.5] * 1_000_000, "x")
    assert len(str(refusal.value)) < 200


def test_logits_are_written_row_by_row():
    """A thread that writes JSON lets others run only between two pieces."""
    logits = np.arange(600.0).reshape(30, 20)
    pieces = list(codec._json({"logits": [logits, logits[:0]]}))
    assert max(map(len, pieces)) < 200
    assert json.loads(b"".join(pieces)) == {"logits": [logits.tolist(), []]}


RUN = type("Run", (), {"run_id": "r"})
SENT = b'{ "adapter_name":"a", "seq_id":3, "temperature":0.5,\n "inputs":[{"input_ids":[1,2.0,3],"labels":[-100,2,3],'
SENT += b'"messages":"\xe2\x80\xa6"}, {"input_ids":[[7]]}] }'


def understood() -> SentVerb:
    """Return the request, with its rows checked as the route does."""
    sent = SentVerb.read("forward_backward", SENT)
    return replace(sent, fields={**sent.fields, "inputs": checked_rows(sent.fields["inputs"], 10)})


def assert_same(before: Op, after: Op) -> None:
    assert isinstance(before.payload, NativePass)
    assert isinstance(after.payload, NativePass)
    assert before.payload.tokens == after.payload.tokens == 4
    for one, other in zip(before.payload.rows, after.payload.rows, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)
    assert after.payload.options == before.payload.options == {"temperature": 0.5}
    assert after.payload.loss_arguments == before.payload.loss_arguments


def test_rows_in_the_journal():
    """The request is in the journal byte for byte, and is read from there as it was understood at first."""
    op = understood().op("r", 3)
    assert op.body == b"\x00forward_backward\n" + SENT
    assert op.digest == understood().digest
    again = read_op(RUN, 3, op.body)
    assert again.body == op.body
    assert_same(op, again)


def test_rows_in_the_journal_that_came_from_elsewhere():
    """If a request names a batch, the journal has the batch's rows. Earlier versions wrote all requests like this."""
    op = replace(understood(), text=None).op("r", 3)
    assert json.loads(op.body.removeprefix(b"\x00forward_backward\n")) == {
        "adapter_name": "a",
        "inputs": [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [7]}],
        "seq_id": 3,
        "temperature": 0.5,
    }
    assert op.digest == understood().digest
    assert_same(op, read_op(RUN, 3, op.body))


def test_rows_in_the_journal_may_be_larger_than_a_request(monkeypatch):
    """Rows that replace a conversation or a batch, and requests accepted under another limit, are read all the same."""
    op = replace(understood(), text=None).op("r", 3)
    monkeypatch.setattr(codec, "ROWS_BYTES", 16)
    with pytest.raises(BodyTooLargeError, match="commas"):
        SentVerb.received("forward_backward", SENT)
    monkeypatch.setattr(codec, "ROWS_BYTES", 64)
    with pytest.raises(BodyTooLargeError, match="without its images"):
        SentVerb.received("forward_backward", SENT)
    assert_same(op, read_op(RUN, 3, op.body))


def test_values_in_values_are_refused_before_anything_goes_through_them():
    """Where code calls itself for each, it would go too deep; a row of tokens is one level, and a tool a few."""
    for depth, begins, ends in ((98, '{"a":', "}"), (98, "[", "]"), (300, '{"a":', "}"), (300, "[", "]")):
        value = begins * depth + "1" + ends * depth
        text = f'{{"adapter_name":"a","inputs":[{{"input_ids":[1,2],"images":{value}}}]}}'.encode()
        if depth < 100:
            assert SentVerb.received("forward_backward", text).fields["adapter_name"] == "a"
        else:
            with pytest.raises(MalformedRequestError, match=r"^inputs: objects and arrays .* allowed: 100 levels"):
                SentVerb.received("forward_backward", text)
        assert SentVerb.read("forward_backward", text).fields  # the journal is read as it was written


def test_an_image_counts_once_in_the_size_of_a_request():
    said = [{"role": "user", "content": "x", "images": ["abcd"]}]
    for row, characters in (
        ({"multi_modal_data": {"image": ["abc"]}}, 3),
        ({"multi_modal_data": {"image": "abc"}, "messages": said}, 3 + 4),
        ({"multi_modal_data": {"image": ["abc"]}, "images": ["ab"], "pixel_values": {"data": "AAAA"}}, 3 + 2 + 4),
        ({"multi_modal_data": "abc"}, 0),
    ):
        assert image_characters([row]) == characters


def test_a_request_is_known_by_its_verb_and_its_body():
    sent, other = SentVerb.read("step", SENT), SentVerb.read("zero_grad", SENT)
    assert sent.digest == SentVerb.read("step", SENT).digest
    assert sent.digest != other.digest
    assert sent.text_digest == other.text_digest == digest(SENT), "by which earlier versions wrote it down"


def from_journal(body: bytes, op: Op) -> Op:
    async def read(_record: OpRecord) -> bytes:
        return body

    record = OpRecord("r", 3, op.kind, op.digest, BlobRef(0, 0, 1), 0.0)
    native, store = NativeRuns(mock_model(), None, Tenants()), SimpleNamespace(ops=SimpleNamespace(body=read))
    again, _ = asyncio.run(decode(store, RUN, native, Replay(record)))
    return again


def test_a_refusal_in_the_journal():
    """Services write a refusal in the same form for every protocol.

    Earlier versions had another form for native requests.
    """
    op = understood().refused("r", 3, "its batch is gone")
    earlier = b'\x00forward_backward\n{"\\u0000refused":"its batch is gone"}'
    for body in (op.body, earlier):
        again = from_journal(body, op)
        assert (again.seq, again.kind, again.payload, again.digest) == (op.seq, op.kind, op.payload, op.digest)


def test_a_step_that_was_refused_closes_its_window_once_more_after_a_restart():
    """It does not run again, but only its body tells that it is a step, and its record what was sent."""
    sent = SentVerb.read("step", b'{"adapter_name": "a"}')
    op, outcome = sent.op("r", 3), Outcome.failure("refused", "user", Ending.DROPPED)

    class Ops:
        async def body(self, _record: OpRecord) -> bytes:
            return op.body

        async def outcome(self, _run_id: str, _seq: int) -> Outcome:
            return outcome

    ref = BlobRef(0, 0, 1)
    record = OpRecord("r", 3, op.kind, op.digest, ref, 0.0, ref, outcome.encoding, failed=True, ending=outcome.ending)
    native = NativeRuns(mock_model(), None, Tenants())
    store = SimpleNamespace(ops=Ops())
    again, replay = asyncio.run(decode(store, RUN, native, Replay(record)))
    assert replay.repeated is outcome
    assert again.is_step
    assert again.digest == op.digest


def test_results_are_json():
    values = np.array([0.5, -np.inf, np.nan, 2.0], np.float32)
    content = {"result": {"loss": math.nan, "n": 3, "logps": [values, np.ones(2)], "empty": {}, "list": [1, {"a": 2}]}}
    assert json.loads(succeeded(content).body) == {
        "result": {
            "loss": None,
            "n": 3,
            "logps": [[0.5, None, None, 2.0], [1.0, 1.0]],
            "empty": {},
            "list": [1, {"a": 2}],
        }
    }
    assert succeeded(None).body == b"null"
    assert finite(np.array([[1.0, np.nan]])) == [[1.0, None]]


def test_text_is_tokenised_in_groups():
    rows = [{"messages": [{"role": "user", "content": "x" * 400_000}]} for _ in range(5)]
    assert [len(group) for group in text_groups(rows, max_characters(8))] == [2, 2, 1]
    with pytest.raises(InvalidInputError, match=r"inputs\[0\].*characters of text.*at most 1048576"):
        list(text_groups([{"messages": [{"role": "user", "content": "x" * 2**21}]}], max_characters(8)))
