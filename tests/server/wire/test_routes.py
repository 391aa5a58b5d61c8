"""Routes to experts on the wire, and what they cost."""

import json

import numpy as np
import pytest

from twinkle.errors import InvalidInputError
from twinkle.sampler.types import SampleRequest, SamplingParams
from twinkle.server.services.sampling.jobs import price_of
from twinkle.server.types import ROUTE_BYTES, NativePass
from twinkle.server.verbs.features import checked_rows, image_characters
from twinkle.server.wire.number_arrays import packed_routes, read_routes


@pytest.mark.parametrize(("most", "dtype"), [(255, "uint8"), (256, "int16"), (32767, "int16")])
def test_packed_and_read_again(most: int, dtype: str) -> None:
    routes = np.random.default_rng(0).integers(0, most + 1, (5, 3, 2)).astype(np.int16)
    routes[0, 0, 0] = most
    packed = json.loads(json.dumps(packed_routes(routes)))
    assert packed["dtype"] == dtype
    for sent in (packed, routes.tolist(), routes):
        read = read_routes(sent, "routed_experts", 6)
        assert read.dtype == np.int16
        np.testing.assert_array_equal(read, routes)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ([1, 2], r"got 'int64 \(2,\)'"),
        ([[[1.5]]], "got 'float64"),
        ([[[1], [2, 3]]], "integers"),
        ("no", "integers"),
        ([[[-1]]], "numbers of experts, 0 to 32767"),
        ([[[2**40]]], "numbers of experts"),
        ([[[]]], "integers"),
        ([[[1]]] * 4, r"got '4 tokens', allowed: 1 to 3"),
        ({"dtype": "uint8", "shape": [1, 2], "data": "AAA="}, "integers"),
        ({"dtype": "float32", "shape": [1, 1, 1], "data": "AA=="}, "integers"),
        ({"dtype": "uint8", "shape": [1, 1, 2], "data": "AA=="}, r"f.shape: got .*1, 1, 2.*product is 1"),
        ({"dtype": "uint8", "shape": [1, 1, -1], "data": "AA=="}, "integers"),
        ({"dtype": "uint8", "shape": [1, 1, 1], "data": "é"}, "f.data"),
        ({"dtype": ["uint8"], "shape": [1, 1, 1], "data": "AA=="}, "integers"),
    ],
)
def test_what_is_refused(sent: object, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_routes(sent, "f", 3)


def test_rows_and_prices() -> None:
    packed = packed_routes(np.ones((2, 3, 4), np.int16))
    (row,) = checked_rows([{"input_ids": [1, 2, 3], "routed_experts": packed}], 10)
    assert row["routed_experts"].shape == (2, 3, 4)
    assert image_characters([{"routed_experts": packed}]) == len(packed["data"])
    plain, recorded = (
        NativePass("forward_only", (row,), options, {}).price for options in ({}, {"router_replay_action": "record"})
    )
    assert recorded.result_bytes - plain.result_bytes == 3 * ROUTE_BYTES
    assert plain.held_bytes > row["routed_experts"].nbytes
    without, with_routes = (
        price_of(
            SampleRequest("r", None, np.arange(5), SamplingParams(max_tokens=7), num_samples=2, routed_experts=asked),
            context=100,
        )
        for asked in (False, True)
    )
    assert with_routes.result_bytes - without.result_bytes == ROUTE_BYTES * 2 * (5 + 7)
