"""The library's preprocessors, run on the server: for :meth:`Dataset.map`, or called with columns.

A class of the script that inherits from :class:`Preprocessor` or :class:`DataFilter` runs on the client.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from twinkle_client.data_format import columns_to_rows, rows_to_columns
from twinkle_client.remote import RemoteObject

__all__ = [
    "AlpacaProcessor",
    "CLEVRProcessor",
    "CompetitionMathGRPOProcessor",
    "CompetitionMathProcessor",
    "CountdownProcessor",
    "DataFilter",
    "EmojiDPOProcessor",
    "GSM8KProcessor",
    "OlympiadBenchProcessor",
    "Preprocessor",
    "SelfCognitionProcessor",
]


class Preprocessor(RemoteObject):
    """A preprocessor: it turns a batch of columns into a batch of new columns."""

    processor_type: ClassVar[str] = "preprocessor"

    map_col_to_row = staticmethod(columns_to_rows)
    map_row_to_col = staticmethod(rows_to_columns)

    def __call__(self, columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        new: dict[str, list[Any]] = self.call("__call__", columns=columns)
        return new


class DataFilter(ABC):
    """The base class of a script's filters, for :meth:`Dataset.filter`. They run on the client."""

    @abstractmethod
    def __call__(self, row: dict[str, Any]) -> bool:
        """Return True to keep the row."""


class AlpacaProcessor(Preprocessor):
    pass


class CLEVRProcessor(Preprocessor):
    parameters: ClassVar[tuple[str, ...]] = ("system",)


class CompetitionMathGRPOProcessor(Preprocessor):
    pass


class CompetitionMathProcessor(Preprocessor):
    pass


class CountdownProcessor(Preprocessor):
    pass


class EmojiDPOProcessor(Preprocessor):
    parameters: ClassVar[tuple[str, ...]] = ("system", "chosen_key", "rejected_key", "prompt_key")


class GSM8KProcessor(Preprocessor):
    parameters: ClassVar[tuple[str, ...]] = ("system", "add_assistant")


class OlympiadBenchProcessor(Preprocessor):
    parameters: ClassVar[tuple[str, ...]] = ("system", "language")


class SelfCognitionProcessor(Preprocessor):
    parameters: ClassVar[tuple[str, ...]] = ("model_name", "model_author")
