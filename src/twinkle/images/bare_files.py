"""Makes bare image files: only the parts that say the pixels, and no more of them than a decoder reads quickly.

Pillow walks the parts of a file one by one in Python, and unpacks profiles, previews and notes that nobody here reads.
A small file with very many parts, or with profiles that unpack to very much, would keep it busy for seconds. libjpeg
goes over all pixels again for each scan of a progressive JPEG, and a scan may have 10 bytes.
"""

import re
import struct
import zlib

from twinkle.errors import InvalidInputError

PNG_CHUNKS = 10_000  # 20 MiB in chunks of 8 KiB, what most encoders write, are 2,560
JPEG_SEGMENTS = 1_000  # before the pixels; 20 MiB of notes in segments of 64 KiB are 320
JPEG_FILL_BYTES = 2**12  # between two segments, where real files have none or a few
JPEG_TABLE_BYTES = 2**18  # before the pixels; real files have about 1 KiB, and 64 KiB more with a preview
JPEG_SCANS = 32  # libjpeg writes 10 for a colour image, and 18 for one with four components

_PNG_BEGINS = b"\x89PNG\r\n\x1a\n"
_JPEG_BEGINS = b"\xff\xd8"
_MARKER = re.compile(rb"\xff[\x01-\xfe]")  # also finds the marker after fill bytes (ff ff ff c0), in one pass
_START_OF_SCAN, _END = b"\xff\xda", b"\xff\xd9"
_ALONE = {0x01, *range(0xD0, 0xDA)}  # markers without a length and data
# Sizes, Huffman and quantisation tables, restart interval, and what JFIF and Adobe say about the colours.
_TABLES = {*range(0xC0, 0xD0), 0xDB, 0xDD, 0xE0, 0xEE} - {0xC8}


def bare_png(data: bytes, field: str) -> bytes:
    """Return a PNG with its header, its palette and one chunk of pixels; what is no PNG becomes an empty file."""
    if not data.startswith(_PNG_BEGINS):
        return b""
    header: dict[bytes, memoryview] = {}
    pixels: list[memoryview] = []
    view, at, checksum = memoryview(data), 8, zlib.crc32(b"IDAT")
    for _ in range(PNG_CHUNKS):
        if at + 8 > len(data):
            break
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IEND":
            break
        if kind == b"IDAT":
            pixels.append(view[at + 8 : at + 8 + length])
            checksum = zlib.crc32(pixels[-1], checksum)
        elif kind in (b"IHDR", b"PLTE") and not pixels:
            header[kind] = view[at : at + 12 + length]
        at += 12 + length
    else:
        raise InvalidInputError(f"{field}.data", f"more than {PNG_CHUNKS} chunks", f"at most {PNG_CHUNKS} chunks")
    size = sum(map(len, pixels))
    begins, ends = struct.pack(">I4s", size, b"IDAT"), struct.pack(">II4sI", checksum, 0, b"IEND", zlib.crc32(b"IEND"))
    return b"".join([_PNG_BEGINS, *header.values(), begins, *pixels, ends])


def bare_jpeg(data: bytes, field: str) -> bytes:
    """Return a JPEG with its tables and its scans; what is no JPEG becomes an empty file."""
    if not data.startswith(_JPEG_BEGINS):
        return b""
    tables: list[memoryview] = []
    view, at, size = memoryview(data), 2, 0
    for _ in range(JPEG_SEGMENTS):
        found = _MARKER.search(data, at, at + JPEG_FILL_BYTES)
        if found is None and at + JPEG_FILL_BYTES < len(data):
            given = f"more than {JPEG_FILL_BYTES} bytes between two segments"
            raise InvalidInputError(f"{field}.data", given, f"at most {JPEG_FILL_BYTES} bytes")
        if found is None or found.end() + 2 > len(data):
            break
        marker = data[found.start() + 1]
        if found[0] == _START_OF_SCAN:
            return b"".join([_JPEG_BEGINS, *tables, _scans(data, found.start(), field)])
        if marker in _ALONE:
            at = found.end()
            continue
        (length,) = struct.unpack_from(">H", data, found.end())
        if length < 2:  # not even room for itself
            break
        at = found.end() + length
        if marker in _TABLES:
            tables.append(view[found.start() : at])
            size += len(tables[-1])
            if size > JPEG_TABLE_BYTES:
                given = f"more than {JPEG_TABLE_BYTES} bytes of tables"
                raise InvalidInputError(f"{field}.data", given, f"at most {JPEG_TABLE_BYTES} bytes of tables")
    else:
        given = f"more than {JPEG_SEGMENTS} segments before the pixels"
        raise InvalidInputError(f"{field}.data", given, f"at most {JPEG_SEGMENTS} segments")
    return b"".join([_JPEG_BEGINS, *tables])


def _scans(data: bytes, start: int, field: str) -> memoryview:
    """Return the scans, which begin at ``start``, without what follows the image: previews, films.

    Among pixels 0xff is always followed by 0 or by a real marker, so that two bytes are enough to find one.
    """
    end = data.find(_END, start)
    end = len(data) if end < 0 else end + 2
    scans = data.count(_START_OF_SCAN, start, end)
    if scans > JPEG_SCANS:
        raise InvalidInputError(f"{field}.data", f"{scans} scans", f"at most {JPEG_SCANS} scans")
    return memoryview(data)[start:end]
