"""Images of strangers: the right pixels, or an error that names what is wrong. Nothing is opened or fetched."""

import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL import PngImagePlugin

from tests.support.models.seeing_models import image_processor, picture
from twinkle.errors import InvalidInputError
from twinkle.images import EncodedImage, ImageLimits, ImageProcessing, read_image

PIXELS = picture(20, 30)


def saved(image: Pillow.Image, kind: str, **options: object) -> EncodedImage:
    written = io.BytesIO()
    image.save(written, kind, **options)
    return EncodedImage(written.getvalue(), kind.lower())


def pixels_of(encoded: EncodedImage) -> np.ndarray:
    image = read_image(encoded)
    assert image.mode == "RGB"
    return np.asarray(image)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_header(width: int, height: int, rows: bytes = b"") -> EncodedImage:
    """Return a PNG whose header has this size, with these rows of grey."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return EncodedImage(b"\x89PNG\r\n\x1a\n" + body, "png")


RGB = Pillow.fromarray(PIXELS)
GREY16 = np.arange(600, dtype=np.uint16).reshape(20, 30) * 109
EXIF = Pillow.Exif()
EXIF[0x0112] = 6  # "turn by 90 degrees"

GOOD = {
    "png": (saved(RGB, "PNG"), PIXELS),
    "with EXIF that asks to turn it": (saved(RGB, "PNG", exif=EXIF), PIXELS),
    "grey": (saved(RGB.convert("L"), "PNG"), np.asarray(RGB.convert("L").convert("RGB"))),
    "black and white": (saved(RGB.convert("1"), "PNG"), np.asarray(RGB.convert("1").convert("RGB"))),
    "palette": (saved(RGB.quantize(16), "PNG"), np.asarray(RGB.quantize(16).convert("RGB"))),
    "16 bits of grey": (saved(Pillow.fromarray(GREY16), "PNG"), np.repeat((GREY16 // 257)[..., None], 3, 2)),
    "with transparency": (saved(RGB.convert("RGBA"), "PNG"), PIXELS),
    "animated": (saved(RGB, "PNG", save_all=True, append_images=[Pillow.new("RGB", (30, 20))]), PIXELS),
}


@pytest.mark.parametrize("name", GOOD)
def test_right_pixels(name: str) -> None:
    encoded, pixels = GOOD[name]
    difference = np.abs(pixels_of(encoded).astype(int) - pixels.astype(int))
    assert difference.max() <= (1 if name == "16 bits of grey" else 0)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg(mode: str) -> None:
    smooth = Pillow.fromarray(np.tile(np.linspace(0, 255, 30, dtype=np.uint8)[None, :, None], (20, 1, 3)))
    encoded = saved(smooth.convert(mode), "JPEG", quality=95)
    assert np.abs(pixels_of(encoded).astype(int) - np.asarray(smooth).astype(int)).mean() < 6


TEXT = zlib.compress(bytes(2**24))
WHOLE = GOOD["png"][0].data
BAD = {
    "nothing": (EncodedImage(b"", "png"), r"image\.data: got b''"),
    "no image": (EncodedImage(b"GET / HTTP/1.1", "png"), "a whole png file"),
    "a path": (EncodedImage(b"/etc/passwd", "png"), "a whole png file"),
    "half": (EncodedImage(WHOLE[: len(WHOLE) // 2], "png"), "a whole png file"),
    "half a jpeg": (EncodedImage(saved(RGB, "JPEG").data[:400], "jpeg"), "a whole jpeg file"),
    "a png that says jpeg": (EncodedImage(WHOLE, "jpeg"), "a whole jpeg file"),
    "a gif that says png": (EncodedImage(saved(RGB, "GIF").data, "png"), "a whole png file"),
    "another format": (EncodedImage(saved(RGB, "GIF").data, "gif"), r"image\.format: got 'gif', allowed: png or jpeg"),
    "a wrong checksum": (EncodedImage(WHOLE[:40] + b"\0" + WHOLE[41:], "png"), "a whole png file"),
    "huge": (png_header(100_000, 100_000), "10000000000 pixels.*at most 33554432 pixels"),
    "a width of 2**31": (png_header(2**31, 1), "pixels|a whole png file"),
    "no pixels": (png_header(0, 5), "a whole png file"),
    "a bomb": (png_header(8192, 8192, bytes(8193) * 8192), "8192 × 8192 pixels.*at most 33554432 pixels"),
    "an endless text": (
        EncodedImage(WHOLE[:33] + chunk(b"zTXt", b"k\0\0" + TEXT), "png"),
        "png",
    ),
    "a file of 21 MiB": (EncodedImage(bytes(21 * 2**20), "png"), "at most 20971520 bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_clear_errors(name: str) -> None:
    encoded, message = BAD[name]
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError, match=message) as caught:
            read_image(encoded)
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 400


def test_limits_are_those_that_are_given() -> None:
    with pytest.raises(InvalidInputError, match=r"30 × 20 pixels.*at most 500 pixels"):
        read_image(GOOD["png"][0], limits=ImageLimits(pixels=500))
    with pytest.raises(InvalidInputError, match=r"data\[3\]\.data: got '\d+ bytes', allowed: at most 10 bytes"):
        read_image(GOOD["png"][0], "data[3]", ImageLimits(file_bytes=10))


def test_text_in_a_png_is_not_kept() -> None:
    text = PngImagePlugin.PngInfo()
    text.add_text("note", "hello")
    assert read_image(saved(RGB, "PNG", pnginfo=text)).size == (30, 20)


def test_tokens_without_decoding() -> None:
    """The size comes from the header, also of a file whose pixels are missing."""
    processing = ImageProcessing(image_processor())
    assert processing.size(png_header(70, 100)).tokens == processing.size_of(100, 70).tokens == 6
    patches, size = processing.patches(saved(Pillow.fromarray(picture(100, 70)), "PNG"))
    assert (patches.shape, size.tokens) == ((24, 1536), 6)
    with pytest.raises(InvalidInputError, match=r"20001 × 100 pixels.*ratio"):
        processing.size_of(100, 20001)


@pytest.mark.parametrize("seed", range(20))
def test_tokens_are_those_of_the_processor(seed: int) -> None:
    height, width = np.random.default_rng(seed).integers(20, 400, 2).tolist()
    processor = image_processor()
    size = ImageProcessing(processor).size_of(height, width)
    assert size.tokens == processor.get_number_of_image_patches(height, width) // 4
    made = processor(images=[Pillow.fromarray(picture(height, width))], return_tensors="np")
    assert made["image_grid_thw"].tolist() == [[1, 2 * size.rows, 2 * size.columns]]
