"""Rows of tokens as clients send them: lists of numbers, and much that training does not read."""

from collections.abc import Mapping, Sequence

from twinkle.errors import InvalidInputError, UnsupportedError

MAX_ROWS = 4096
_TOKENS = "input_ids"
# What training reads; everything else of a row (messages, length, the columns of its dataset) stays behind.
FIELDS = (_TOKENS, "labels", "attention_mask", "position_ids", "completion_mask")
_UNSUPPORTED = (
    "pixel_values",
    "image_grid_thw",
    "pixel_values_videos",
    "video_grid_thw",
    "input_features",
    "inputs_embeds",
    "routed_experts",
)
_LIMIT = 2**31

Row = Mapping[str, list[int]]


def as_rows(inputs: object) -> list[Mapping[str, object]]:
    """One feature or trajectory, or several."""
    rows = [inputs] if isinstance(inputs, Mapping) else inputs
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not all(isinstance(row, Mapping) for row in rows):
        raise InvalidInputError("inputs", type(inputs).__name__, "InputFeatures or Trajectories, one or a list")
    if not 1 <= len(rows) <= MAX_ROWS:
        raise InvalidInputError("inputs", f"{len(rows)} rows", f"1 to {MAX_ROWS}")
    return list(rows)


def are_encoded(rows: Sequence[Mapping[str, object]]) -> bool:
    """Whether they are features; trajectories have no tokens yet."""
    encoded = {_TOKENS in row for row in rows}
    if len(encoded) > 1:
        raise InvalidInputError("inputs", "some encoded and some not", "InputFeatures or Trajectories, not both")
    return encoded == {True}


def checked_rows(rows: Sequence[Mapping[str, object]], max_tokens: int) -> tuple[Row, ...]:
    """What is to be trained on, with one number a token in every field."""
    checked = tuple(_row(row, f"inputs[{index}]") for index, row in enumerate(rows))
    tokens = sum(len(row[_TOKENS]) for row in checked)
    if tokens > max_tokens:
        raise InvalidInputError("inputs", f"{tokens} tokens", f"at most {max_tokens} in one request")
    return checked


def _row(row: Mapping[str, object], where: str) -> Row:
    for name in _UNSUPPORTED:
        if row.get(name) is not None:
            raise UnsupportedError(f"{where}.{name}: the models served here read text only")
    fields = {name: _numbers(row[name], f"{where}.{name}") for name in FIELDS if row.get(name) is not None}
    if not fields.get(_TOKENS):
        raise InvalidInputError(f"{where}.{_TOKENS}", row.get(_TOKENS), "at least one token id")
    for name, values in fields.items():
        if len(values) != len(fields[_TOKENS]):
            allowed = f"{len(fields[_TOKENS])}, as {_TOKENS}"
            raise InvalidInputError(f"{where}.{name}", f"{len(values)} numbers", allowed)
    return fields


def _numbers(value: object, where: str) -> list[int]:
    """A flat list; of a nested one (a batch of one, rope axes) the first row, which is that of the text."""
    while isinstance(value, list) and len(value) > 0 and isinstance(value[0], list):
        value = value[0]
    if isinstance(value, list) and all(type(number) is int and -_LIMIT <= number < _LIMIT for number in value):
        return value
    if isinstance(value, list) and all(type(number) in (int, bool, float) for number in value):
        whole = [int(number) for number in value if abs(number) < _LIMIT]  # NaN and infinity are not
        if len(whole) == len(value) and all(a == b for a, b in zip(whole, value, strict=True)):
            return whole
    raise InvalidInputError(where, str(value)[:80], "a list of whole numbers")
