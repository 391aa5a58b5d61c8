"""Chunks of a sequence in JSON and protobuf: where images stand between tokens, and what is refused."""

import base64
import json
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types as sdk
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from twinkle.errors import UserError
from twinkle.images import EncodedImage, SentImage, SentImages
from twinkle.server.types import OpKind, Refused, TrainPass
from twinkle.server.wire import tinker_pb2 as pb
from twinkle.server.wire.errors import BodyTooLargeError
from twinkle.server.wire.image_files import ImageAllowance
from twinkle.server.wire.model_input import ModelInput, read_json, read_protobuf
from twinkle.server.wire.sampling import parse_sample
from twinkle.server.wire.training import Allowance, decode_forward_backward
from twinkle.server.wire.training_json import decode_json_pass

FIRST, SECOND = EncodedImage(b"\x89PNG first", "png"), EncodedImage(b"\xff\xd8 second", "jpeg")
CHUNKS = [
    sdk.EncodedTextChunk(tokens=[1, 2]),
    sdk.ImageChunk(data=FIRST.data, format="png", expected_tokens=3),
    sdk.ImageChunk(data=SECOND.data, format="jpeg"),
    sdk.EncodedTextChunk(tokens=[3]),
]


def sent(where: str) -> SentImages:
    return SentImages((SentImage(2, FIRST, 3, f"{where}[1]"), SentImage(2, SECOND, None, f"{where}[2]")))


def read(chunks: list[dict[str, Any]], **left: int) -> tuple[np.ndarray, SentImages]:
    return read_json(ModelInput.model_validate({"chunks": chunks}), "chunks", ImageAllowance(**left))


def image(**changes: object) -> dict[str, Any]:
    return {"type": "image", "data": base64.b64encode(FIRST.data).decode(), "format": "png", **changes}


def test_both_forms_of_the_sdk() -> None:
    """What the SDK writes as JSON and as protobuf is the same: two images in a row, after two tokens."""
    given = tinker.ModelInput(chunks=CHUNKS)
    in_json = ModelInput.model_validate_json(given.model_dump_json(exclude_none=True))
    tokens, images = read_json(in_json, "chunks", ImageAllowance())
    assert (tokens.tolist(), images) == ([1, 2, 3], sent("chunks"))
    # The SDK's protobuf wants to know how long an image is; `expected_tokens` is optional in the protocol.
    packed = [
        pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.array([1, 2], "<i4").tobytes())),
        pb.Chunk(image=pb.ImageChunk(data=FIRST.data, format="png", expected_tokens=3)),
        pb.Chunk(image=pb.ImageChunk(data=SECOND.data, format="jpeg")),
        pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.array([3], "<i4").tobytes())),
    ]
    tokens, images = read_protobuf(packed, "chunks", ImageAllowance())
    assert (tokens.tolist(), images) == ([1, 2, 3], sent("chunks"))


def test_older_sdks_leave_the_type_out() -> None:
    given = ModelInput.model_validate_json(tinker.ModelInput(chunks=CHUNKS).model_dump_json(exclude_unset=True))
    assert [chunk.type for chunk in given.chunks] == [None] * 4
    tokens, images = read_json(given, "chunks", ImageAllowance())
    assert (tokens.tolist(), images) == ([1, 2, 3], sent("chunks"))
    with pytest.raises(UserError, match="got 'image_asset_pointer'"):
        read([{"location": "/etc/passwd", "format": "png"}])


REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a location": (
        [{"type": "image_asset_pointer", "location": "https://example.org/a.png", "format": "png"}],
        r"chunks\[0\]\.type: got 'image_asset_pointer', allowed: encoded_text or image \(this server stores no images",
    ),
    "sound": ([{"type": "dmel"}], r"chunks\[0\]\.type: got 'dmel', allowed: encoded_text or image"),
    "another size": ([image(override_dimensions={"width": 5})], r"chunks\[0\]\.override_dimensions: got .*'width'"),
    "no data": ([image(data=None)], r"chunks\[0\]\.data: got None, allowed: an image file as base64"),
    "no base64": ([image(data="%%%")], r"chunks\[0\]\.data: got '%%%'"),
    "letters beyond ASCII": ([image(data="äöü=")], r"chunks\[0\]\.data: got"),
    "no tokens": ([{"type": "encoded_text"}], r"chunks\[0\]\.tokens: got None"),
    "too many images": ([image(), image(), image()], r"chunks\[2\]: .*\(max_images_per_request\)"),
    "too many bytes": ([image(data="A" * 400)], r"chunks\[0\]\.data: got '29\d bytes'.*\(max_image_bytes\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    chunks, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        read(chunks, images=2, file_bytes=200)


def test_protobuf_refuses_another_size() -> None:
    resized = pb.ImageChunk(data=b"x", format="png", override_dimensions=pb.ImageDimensions(width=5, height=6))
    with pytest.raises(UserError, match=r"chunks\[0\]\.override_dimensions: got '5 × 6'"):
        read_protobuf([pb.Chunk(image=resized)], "chunks", ImageAllowance())


def test_a_sequence_has_at_most_4096_chunks() -> None:
    """In both forms."""
    chunk = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.array([1], "<i4").tobytes()))
    assert len(read_protobuf([chunk] * 4096, "data[0].model_input", ImageAllowance())[0]) == 4096
    with pytest.raises(UserError, match=r"data\[0\].model_input: got '4097 chunks', allowed: at most 4096 chunks"):
        read_protobuf([chunk] * 4097, "data[0].model_input", ImageAllowance())
    text = {"type": "encoded_text", "tokens": [1]}
    assert len(read([text] * 4096)[0]) == 4096
    with pytest.raises(ValueError, match="at most 4096 items"):
        read([text] * 4097)


def test_a_body_of_numbers_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(BodyTooLargeError, match="larger than 2097152 commas"):
        parse_sample(b"," * (2**21 + 1))


# --- images as patches ------------------------------------------------------------------------------------------------


def passes(most_images: int = 2, **inputs: np.ndarray) -> list[TrainPass | Refused]:
    """Return a pass with these inputs as it is decoded from protobuf and from JSON."""
    arrays = {"target_tokens": np.array([2, 3]), **inputs}
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2]), loss_fn_inputs=arrays)
    asked = ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    message = forward_backward_request_to_proto(ForwardBackwardRequest(asked, "m", 1))
    tensors = {
        name: {"data": array.ravel().tolist(), "dtype": str(array.dtype), "shape": list(array.shape)}
        for name, array in arrays.items()
    }
    data = [{"model_input": {"chunks": [{"tokens": [1, 2]}]}, "loss_fn_inputs": tensors}]
    body = {"model_id": "m", "seq_id": 1, "forward_backward_input": {"data": data, "loss_fn": "cross_entropy"}}

    def limits() -> Allowance:
        """Return limits for tokens and images. Patches have more numbers than the targets of a token may have."""
        return Allowance(width=8, images=ImageAllowance(most_images))

    ops = [
        decode_forward_backward(message.SerializeToString(), limits()),
        decode_json_pass(json.dumps(body).encode(), OpKind.FORWARD_BACKWARD, limits()),
    ]
    return [op.payload for op in ops]  # type: ignore[misc]


PATCHES, GRIDS = np.ones((4, 1176), np.float32), np.array([[1, 2, 2]])


def test_patches() -> None:
    for payload in passes(pixel_values=PATCHES, image_grid_thw=GRIDS):
        assert isinstance(payload, TrainPass), payload
        assert set(payload.data[0].extras) == set()
        (images,) = payload.images
        assert images.patches is not None
        np.testing.assert_array_equal(images.patches.patches, PATCHES)
        np.testing.assert_array_equal(images.patches.grids, GRIDS)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"pixel_values": PATCHES}, "loss_fn_inputs['image_grid_thw']: got None"),
        ({"image_grid_thw": GRIDS}, "loss_fn_inputs['pixel_values']: got None"),
        (
            {"pixel_values": PATCHES[0], "image_grid_thw": GRIDS},
            "loss_fn_inputs['pixel_values']: got 'float32 (1176,)'",
        ),
        ({"pixel_values": PATCHES, "image_grid_thw": GRIDS[0]}, "loss_fn_inputs['image_grid_thw']: got 'int64 (3,)'"),
    ],
)
def test_wrong_patches(inputs: dict[str, np.ndarray], message: str) -> None:
    for payload in passes(**inputs):
        assert isinstance(payload, Refused)
        assert message in payload.message


def test_patches_must_be_finite() -> None:
    protobuf, as_json = passes(pixel_values=PATCHES * np.float32(np.inf), image_grid_thw=GRIDS)
    assert isinstance(protobuf, Refused)
    assert "data[0].loss_fn_inputs['pixel_values']: got 'NaN or infinity', allowed: finite" in protobuf.message
    assert isinstance(as_json, Refused)
    assert "data[0].loss_fn_inputs.pixel_values.data[0]: got inf" in as_json.message


def test_patches_count_as_images() -> None:
    for most_images, allowed in ((2, True), (1, False)):
        for payload in passes(most_images, pixel_values=PATCHES, image_grid_thw=GRIDS.repeat(2, axis=0)):
            assert isinstance(payload, TrainPass) == allowed
            if isinstance(payload, Refused):
                assert "data[0].loss_fn_inputs['image_grid_thw']: got '2 images', allowed: 1: what" in payload.message
                assert payload.limit == "max_images_per_request"
