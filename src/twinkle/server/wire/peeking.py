"""Fields of a protobuf message, without decoding or copying the rest of it."""

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def text_field(body: bytes, number: int) -> str | None:
    """The last text field of this number at the top of a message; None if there is none or the message is damaged."""
    found, place = None, 0
    try:
        while place < len(body):
            tag, place = _varint(body, place)
            kind = tag & 7
            if kind == _VARINT:
                _, place = _varint(body, place)
            elif kind == _BYTES:
                length, place = _varint(body, place)
                if tag >> 3 == number:
                    found = body[place : place + length]
                place += length
            elif kind in (_FIXED64, _FIXED32):
                place += 8 if kind == _FIXED64 else 4
            else:
                return None
        return None if found is None or place > len(body) else found.decode()
    except (IndexError, UnicodeDecodeError):
        return None


def message_fields(body: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield (number, value) of every field of a message that we wrote ourselves, in order.

    A value is an integer, or a view of the bytes of anything that is not written as one.
    """
    place = 0
    while place < len(body):
        tag, place = _varint(body, place)
        kind = tag & 7
        if kind == _VARINT:
            value, place = _varint(body, place)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            length, place = _varint(body, place)
        else:
            length = 8 if kind == _FIXED64 else 4
        yield tag >> 3, body[place : place + length]
        place += length


def varints(body: memoryview) -> list[int]:
    """Return the integers of a packed field."""
    values, place = [], 0
    while place < len(body):
        value, place = _varint(body, place)
        values.append(value)
    return values


def _varint(body: bytes | memoryview, place: int) -> tuple[int, int]:
    """(value, place behind it). Ten bytes are the longest there are."""
    value = 0
    for shift in range(0, 70, 7):
        byte = body[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise IndexError
