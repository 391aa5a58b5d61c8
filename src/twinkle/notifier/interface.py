"""The interface of notifiers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from twinkle.errors import InvalidInputError, UnknownNameError

__all__ = ["Notifier"]

_CLASSES: dict[str, type["Notifier"]] = {}


class Notifier(ABC):
    """Sends a text (Markdown) to people.

    Subclasses are registered by the name of their class, so that a notifier can be converted with :meth:`to_dict` and
    restored with :meth:`from_dict`.
    """

    def __init_subclass__(cls) -> None:
        _CLASSES[cls.__name__] = cls

    @abstractmethod
    def __call__(self, message: str) -> Any:
        """Send ``message``. Raise an exception if that fails."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the name of the class as ``class``, and all values for :meth:`_from_dict_impl`, including secrets."""

    @classmethod
    @abstractmethod
    def _from_dict_impl(cls, data: Mapping[str, Any]) -> "Notifier": ...

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Notifier":
        if "class" not in data:
            raise InvalidInputError("notifier", sorted(data), "a dict with the key 'class'")
        if data["class"] not in _CLASSES:
            raise UnknownNameError("notifier", data["class"], _CLASSES)
        return _CLASSES[data["class"]]._from_dict_impl(data)
