"""Reading single fields of a protobuf message, without decoding or copying the rest of it."""

from collections.abc import Iterator

from twinkle.server.wire.errors import MalformedRequestError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def scan(body: bytes | memoryview, position: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (number, wire type, start, end) of each field of the message between ``position`` and ``stop``, in order.

    MalformedRequestError for bytes that are not protobuf, and for groups, which proto3 does not have.
    """
    while position < stop:
        tag, position = _varint(body, position, stop)
        wire_type = tag & 7
        if wire_type == _BYTES:
            size, position = _varint(body, position, stop)
            end = position + size
        elif wire_type == _VARINT:
            _, end = _varint(body, position, stop)
        elif wire_type in (_FIXED64, _FIXED32):
            end = position + (8 if wire_type == _FIXED64 else 4)
        else:
            raise MalformedRequestError(f"body: byte {position} is not protobuf (wire type {wire_type})")
        if end > stop:
            raise MalformedRequestError(f"body: it ends inside the field of {end - position} bytes at byte {position}")
        yield tag >> 3, wire_type, position, end
        position = end


def text_field(body: bytes, number: int) -> str | None:
    """Return the last top-level text field with this number; None if there is none or the bytes cannot be read."""
    found = None
    try:
        for field, wire_type, start, end in scan(body, 0, len(body)):
            if field == number and wire_type == _BYTES:
                found = body[start:end]
        return None if found is None else found.decode()
    except (MalformedRequestError, UnicodeDecodeError):
        return None


def message_fields(body: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield (number, value) of every field of a message that this server wrote, in order.

    The value is an integer for varint fields, and a view of the field's bytes for all others.
    """
    for number, wire_type, start, end in scan(body, 0, len(body)):
        yield number, _varint(body, start, end)[0] if wire_type == _VARINT else body[start:end]


def varints(body: memoryview) -> list[int]:
    """Return the integers of a packed repeated field."""
    values, place = [], 0
    while place < len(body):
        value, place = _varint(body, place, len(body))
        values.append(value)
    return values


def _varint(body: bytes | memoryview, position: int, stop: int) -> tuple[int, int]:
    """Return the varint at ``position`` and the position after it. A varint has at most ten bytes."""
    if position < stop and body[position] < 0x80:  # most varints have one byte
        return body[position], position + 1
    value = 0
    for shift in range(0, 70, 7):
        if position >= stop:
            break
        byte = body[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise MalformedRequestError(f"body: no protobuf number at byte {position}")
