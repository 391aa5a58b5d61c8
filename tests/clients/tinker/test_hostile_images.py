"""Images of strangers, sent with the SDK: the right pixels, or a clear error for their own request alone."""

import re

import pytest
import tinker
from tinker import types

from tests.model.vision.test_decoding import BAD, GOOD, PIXELS, RGB, png_header, saved
from tests.support.models.reference import assert_logprobs_close
from tests.support.models.sdk_images import SEES
from tests.support.servers.running import BACKEND
from tests.support.servers.serving import SAMPLER, SdkServer, logprobs_of
from twinkle.images import EncodedImage

pytestmark = pytest.mark.skipif(
    BACKEND == "megatron" or SAMPLER != "torch", reason="images are for Transformers' models and the torch sampler"
)

MORE = {"sides of 1 and 5000": (png_header(5000, 1, bytes(5001)), "5000 × 1 pixels.*ratio")}
HOSTILE = {**BAD, **MORE}


@pytest.fixture
def server(seeing_server: SdkServer) -> SdkServer:
    return seeing_server


def datum(image: EncodedImage) -> types.Datum:
    """Return a datum with an image, which has one token if it is one; the SDK itself would refuse other formats."""
    sent = types.ImageChunk.model_construct(data=image.data, format=image.format, expected_tokens=1, type="image")
    chunks = [types.EncodedTextChunk(tokens=[1, 2]), sent, types.EncodedTextChunk(tokens=[3])]
    return types.Datum(
        model_input=types.ModelInput.model_construct(chunks=chunks), loss_fn_inputs={"target_tokens": [0, 0, 0, 5]}
    )


def test_hostile_images_fail_alone(service: tinker.ServiceClient) -> None:
    assert len(HOSTILE) + len(GOOD) > 20
    training = service.create_lora_training_client(base_model=SEES, rank=4)
    futures = {name: training.forward([datum(image)], "cross_entropy") for name, (image, _) in HOSTILE.items()}
    for name, future in futures.items():
        with pytest.raises(tinker.RequestFailedError) as caught:
            future.result()
        said = str(caught.value)
        assert "data[0].model_input[1]" in said, name
        assert re.search(HOSTILE[name][1].removeprefix(r"image\."), said), (name, said)
        assert len(said) < 1000
    training.forward([datum(saved(RGB, "PNG"))], "cross_entropy").result()


def test_odd_images_have_the_right_pixels(service: tinker.ServiceClient) -> None:
    """Each is as good as a plain image with its pixels; an image is neither turned nor animated."""
    training = service.create_lora_training_client(base_model=SEES, rank=4)
    same = {name: image for name, (image, pixels) in GOOD.items() if pixels is PIXELS}
    assert {"with EXIF that asks to turn it", "animated", "with transparency"} <= set(same)
    passed = training.forward([datum(image) for image, _ in GOOD.values()], "cross_entropy").result()
    found = dict(zip(GOOD, logprobs_of(passed), strict=True))
    for name in same:
        assert_logprobs_close([found[name]], [found["png"]])
    grey = training.forward([datum(saved(RGB.convert("CMYK"), "JPEG"))], "cross_entropy").result()
    assert len(logprobs_of(grey)[0]) == 4
