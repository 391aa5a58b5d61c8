"""A template applied to columns of rows, as ``datasets.map`` calls it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinkle.template import Template

__all__ = ["ROW_NUMBER", "Columns", "EncodeColumns", "column_length"]

Columns = dict[str, list[Any]]

# A column that travels through the template, so that we know which rows are left: a template may drop or split some.
ROW_NUMBER = "_row_number"


class EncodeColumns:
    """Encodes the rows of a batch and drops those without tokens; columns the template does not return are kept."""

    def __init__(self, template: "Template", add_generation_prompt: bool, removed: list[str]) -> None:
        self._template = template
        self._add_generation_prompt = add_generation_prompt
        self._removed = frozenset(removed)

    def __call__(self, batch: Mapping[str, list[Any]]) -> Columns:
        columns = {name: batch[name] for name in batch}
        count = column_length(columns)
        numbered = {**columns, ROW_NUMBER: list(range(count))}
        encoded = self._template.batch_encode(numbered, add_generation_prompt=self._add_generation_prompt)
        numbers = encoded.pop(ROW_NUMBER, [])
        kept = [place for place, _ in enumerate(numbers) if _has_tokens(encoded, place)]
        if len(kept) != len(numbers):
            encoded = {name: [values[place] for place in kept] for name, values in encoded.items()}
        for name in columns.keys() - encoded.keys():
            encoded[name] = [columns[name][numbers[place]] for place in kept]
        return {name: values for name, values in encoded.items() if name not in self._removed}


def column_length(columns: Mapping[str, list[Any]]) -> int:
    return len(next(iter(columns.values()), []))


def _has_tokens(encoded: Columns, place: int) -> bool:
    """Rows of nested trajectories (positive, negative) have no ``input_ids`` of their own and stay."""
    return "input_ids" not in encoded or len(encoded["input_ids"][place]) > 0
