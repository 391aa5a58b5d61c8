"""Patches of images in JSON: they are found and read in a time that grows with the size of the body, not faster."""

import json

import numpy as np
import pytest

from twinkle.errors import InvalidInputError
from twinkle.server.wire import number_arrays
from twinkle.server.wire.number_arrays import NumberArrays, packed, read_patches

WIDE = np.arange(3 * 192, dtype=np.float32).reshape(3, 192) / 8


class Counted(bytes):
    """A body that counts how many of its bytes are searched."""

    searched = 0

    def find(self, sub, start=0, end=None):  # type: ignore[no-untyped-def,override]
        end = len(self) if end is None else end
        found = super().find(sub, start, end)
        self.searched += (found if found >= 0 else end) - start
        return found


def taken(body: bytes) -> tuple[NumberArrays, bytes]:
    arrays = NumberArrays()
    return arrays, arrays.take_from(body)


@pytest.mark.parametrize("inside", ['["a"]', "[1,2", "[1],", "[[1]]"])
def test_a_body_is_searched_once(inside: str) -> None:
    """However many keys it has, and whether or not their values are arrays of numbers."""
    pairs = ",".join([f'"pixel_values":{inside}'] * 2000)
    body = Counted(f'{{"inputs":[{{{pairs}}}]}}'.encode())
    taken(body)
    assert 0 < body.searched < 4 * len(body)


def test_arrays_end_where_the_object_or_the_next_key_begins() -> None:
    rows = [{"pixel_values": WIDE.tolist()}, {"pixel_values": WIDE.tolist(), "image_grid_thw": [[1, 1, 3]]}]
    for body in (json.dumps({"inputs": rows}), json.dumps({"inputs": rows}, indent=1)):
        arrays, left = taken(body.encode())
        fields = json.loads(left)["inputs"]
        assert fields[1]["image_grid_thw"] == [[1, 1, 3]]
        for row in fields:
            assert arrays.has(row["pixel_values"])
            np.testing.assert_array_equal(arrays.read(row["pixel_values"], "x"), WIDE)


@pytest.mark.parametrize(
    "text",
    [
        "[" + "[]," * 50_000 + "[]]",
        "[" + "[0]," * 50_000 + "[0]]",
        "[[" + "0," * 200 + "0]," + "[]," * 50_000 + "[]]",
        "[[" + "0," * 200 + "0]," + "[" * 50_000 + "]" * 50_000 + "]",
        "[" * 50_000 + "]" * 50_000,
        "[]",
        "[1,2]",
    ],
    ids=["empty", "narrow", "narrow after a wide one", "nested after a wide one", "nested", "none", "flat"],
)
def test_patches_that_no_model_has_are_refused_at_the_first_one(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []
    loads = json.loads
    monkeypatch.setattr(number_arrays.json, "loads", lambda given: parsed.append(given) or loads(given))
    arrays, left = taken(f'{{"pixel_values":{text}}}'.encode())
    assert arrays.count == 1
    with pytest.raises(InvalidInputError, match="x: got"):
        arrays.read(loads(left)["pixel_values"], "x")
    assert len(parsed) == 1


def test_patches_of_two_widths_are_refused() -> None:
    arrays, left = taken(json.dumps({"pixel_values": [[0.125] * 200, [0.125] * 201]}).encode())
    with pytest.raises(InvalidInputError, match="x: got"):
        arrays.read(json.loads(left)["pixel_values"], "x")


@pytest.mark.parametrize("shape", [[10**30, 0], [0, 0], [0, 192], [-1, -576], [10**30, 1]])
def test_packed_patches_of_no_size_are_refused(shape: list[int]) -> None:
    with pytest.raises(InvalidInputError, match="x"):
        read_patches({"dtype": "float32", "shape": shape, "data": ""}, "x")
    np.testing.assert_array_equal(read_patches(packed(WIDE), "x"), WIDE)
