"""What a notifier is."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from twinkle.errors import InvalidInputError, UnknownNameError

__all__ = ["Notifier"]

_CLASSES: dict[str, type["Notifier"]] = {}


class Notifier(ABC):
    """Sends a text (Markdown) to people. Subclasses are known by their class's name, so that one can be written down
    with :meth:`to_dict` and made again with :meth:`from_dict`."""

    def __init_subclass__(cls) -> None:
        _CLASSES[cls.__name__] = cls

    @abstractmethod
    def __call__(self, message: str) -> Any:
        """Send ``message``; failing to is an exception."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """``class``, the class's name, and what :meth:`_from_dict_impl` needs. Secrets are in it."""

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
