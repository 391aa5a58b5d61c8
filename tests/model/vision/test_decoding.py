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


def segment(marker: int, data: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data


def with_segments(segments: bytes) -> EncodedImage:
    """Return a JPEG with these bytes before all other segments."""
    return EncodedImage(JPEG[:2] + segments + JPEG[2:], "jpeg")


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
JPEG = saved(RGB, "JPEG").data
PROGRESSIVE = saved(RGB, "JPEG", progressive=True).data
EMPTY_SCAN = b"\xff\xda\x00\x08\x01\x01\x00\x01\x3f\x10"
TABLE = segment(0xDB, (b"\0" + b"\1" * 64) * 1000)
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
    "many chunks": (
        EncodedImage(WHOLE[:33] + chunk(b"noTe", b"") * 10_000 + WHOLE[33:], "png"),
        "more than 10000 chunks.*at most 10000 chunks",
    ),
    "many chunks of no pixels": (
        EncodedImage(WHOLE[:33] + chunk(b"IDAT", b"") * 10_000 + WHOLE[33:], "png"),
        "more than 10000 chunks.*at most 10000 chunks",
    ),
    "many scans": (
        EncodedImage(PROGRESSIVE[:-2] + EMPTY_SCAN * 30 + PROGRESSIVE[-2:], "jpeg"),
        "40 scans.*at most 32 scans",
    ),
    "many segments": (with_segments(segment(0xFE, b"") * 1000), "more than 1000 segments.*at most 1000 segments"),
    "many markers": (with_segments(b"\xff\x01" * 1000), "more than 1000 segments.*at most 1000 segments"),
    "much fill": (with_segments(b"\xff" * 5000), "more than 4096 bytes between two segments.*at most 4096 bytes"),
    "much between segments": (with_segments(b"\xff\0" * 2500), "more than 4096 bytes between.*at most 4096 bytes"),
    "many tables": (with_segments(TABLE * 5), "more than 262144 bytes of tables.*at most 262144 bytes"),
    "a segment that is too short": (with_segments(b"\xff\xdb\0\0"), "a whole jpeg file"),
    "no scan": (EncodedImage(JPEG[: JPEG.index(b"\xff\xda")] + b"\xff" * 1000, "jpeg"), "a whole jpeg file"),
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


def test_profiles_and_notes_are_not_read() -> None:
    """Pillow itself would fail for each of these."""
    for note in chunk(b"iCCP", b"name\0\7"), chunk(b"zTXt", b"k\0\0" + TEXT), chunk(b"tEXt", b"a\0b")[:-1] + b"?":
        assert (pixels_of(EncodedImage(WHOLE[:33] + note + WHOLE[33:], "png")) == PIXELS).all()


def test_pixels_in_thousands_of_chunks() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)
    written = saved(Pillow.fromarray(noise), "PNG").data
    first = written.index(b"IDAT") - 4
    at, stream = first, b""
    while written[at + 4 : at + 8] == b"IDAT":
        (length,) = struct.unpack_from(">I", written, at)
        stream += written[at + 8 : at + 8 + length]
        at += 12 + length
    parts = [chunk(b"IDAT", stream[start : start + 64]) for start in range(0, len(stream), 64)]
    assert len(parts) > 5000
    assert (pixels_of(EncodedImage(written[:first] + b"".join(parts) + written[at:], "png")) == noise).all()


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpegs_of_cameras(mode: str) -> None:
    """Scans, profiles, notes, fill bytes and a film behind the image do not change the pixels."""
    plain = saved(RGB.convert(mode), "JPEG", progressive=True).data
    assert plain.count(b"\xff\xda") == {"RGB": 10, "L": 6, "CMYK": 18}[mode]
    expected = np.asarray(Pillow.open(io.BytesIO(plain)).convert("RGB"))
    notes = segment(0xE1, b"Exif\0\0" + bytes(60_000)) * 300 + segment(0xE2, b"ICC_PROFILE\0\1\1") + segment(0xFE, b"!")
    film = b"\xff\xda\xff\xd8" * 1000
    assert (pixels_of(EncodedImage(plain[:2] + notes + b"\xff" * 100 + plain[2:] + film, "jpeg")) == expected).all()


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
    assert size.tokens == processor.get_number_of_image_patches(height, width, {}) // 4
    made = processor(images=[Pillow.fromarray(picture(height, width))], return_tensors="np")
    assert made["image_grid_thw"].tolist() == [[1, 2 * size.rows, 2 * size.columns]]
