"""Answers that can be used as the values they carry.

The library's model returns plain values: a dict of metrics, a loss, a text. The client returns typed answers. The
classes of this module let a script that was written for the library use an answer in the same way::

    metrics = model.calculate_metric(is_training=True)
    metrics["loss"], metrics.result["loss"], metrics.model_dump()["result"]["loss"]

``to_wire`` is what :func:`twinkle_client.client.json_body.encode` sends for an answer that a script passes to another
request. An answer is no ``dict``, ``float`` or ``str`` for ``isinstance`` and for ``json.dumps``; ``result`` is.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, MutableMapping
from numbers import Real
from typing import Any, TypeVar

from twinkle_client.protocol.base import Wire

ValueT = TypeVar("ValueT")


class DictAnswer(Wire, MutableMapping[str, Any]):
    """An answer whose result is a dict, and which can be used as that dict. ``result`` is the dict itself."""

    result: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.result[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.result[key] = value

    def __delitem__(self, key: str) -> None:
        del self.result[key]

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]  # pydantic's yields the fields
        return iter(self.result)

    def __len__(self) -> int:
        return len(self.result)

    def __eq__(self, other: object) -> bool:
        return self.result == (other.result if isinstance(other, DictAnswer) else other)

    def __or__(self, other: Any) -> dict[str, Any]:
        return self.result | dict(other)

    def __ror__(self, other: Any) -> dict[str, Any]:
        return dict(other) | self.result

    def __str__(self) -> str:
        return str(self.result)

    def copy(self) -> dict[str, Any]:  # type: ignore[override]  # pydantic's is deprecated: model_copy replaces it
        return dict(self.result)

    def to_wire(self) -> dict[str, Any]:
        return self.result


def _of_float(method: Callable[..., ValueT]) -> Callable[..., ValueT]:
    """Return a method of NumberAnswer that calls a method of float; other answers with a number count as numbers."""

    def call(self: "NumberAnswer", *arguments: object) -> ValueT:
        plain = (float(each) if isinstance(each, NumberAnswer) else each for each in arguments)
        return method(float(self), *plain)

    return call


class NumberAnswer(Wire, Real):
    """An answer whose result is a number, or the text of one; it counts, compares and prints like that number."""

    result: float | str | None

    def __float__(self) -> float:
        return float(self.result)  # type: ignore[arg-type]  # None is no number: TypeError, as of float(None)

    def __hash__(self) -> int:  # type: ignore[override]  # Complex has none
        return hash(float(self))

    def __str__(self) -> str:
        return str(self.result)

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else str(self)

    def to_wire(self) -> float:
        return float(self)

    __abs__ = _of_float(float.__abs__)
    __add__ = _of_float(float.__add__)
    __bool__ = _of_float(float.__bool__)
    __ceil__ = _of_float(math.ceil)
    __eq__ = _of_float(float.__eq__)
    __floor__ = _of_float(math.floor)
    __floordiv__ = _of_float(float.__floordiv__)
    __int__ = _of_float(float.__int__)
    __le__ = _of_float(float.__le__)
    __lt__ = _of_float(float.__lt__)
    __ge__ = _of_float(float.__ge__)
    __gt__ = _of_float(float.__gt__)
    __mod__ = _of_float(float.__mod__)
    __mul__ = _of_float(float.__mul__)
    __neg__ = _of_float(float.__neg__)
    __pos__ = _of_float(float.__pos__)
    __pow__ = _of_float(float.__pow__)
    __radd__ = _of_float(float.__radd__)
    __rfloordiv__ = _of_float(float.__rfloordiv__)
    __rmod__ = _of_float(float.__rmod__)
    __rmul__ = _of_float(float.__rmul__)
    __round__ = _of_float(float.__round__)
    __rpow__ = _of_float(float.__rpow__)
    __rsub__ = _of_float(float.__rsub__)
    __rtruediv__ = _of_float(float.__rtruediv__)
    __sub__ = _of_float(float.__sub__)
    __truediv__ = _of_float(float.__truediv__)
    __trunc__ = _of_float(float.__trunc__)


class TextAnswer(Wire):
    """An answer that stands for a text, which is that of ``str``; it has the operations on texts that scripts need."""

    @abstractmethod
    def __str__(self) -> str: ...

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other) if isinstance(other, str | TextAnswer) else NotImplemented

    def __hash__(self) -> int:
        return hash(str(self))

    def __len__(self) -> int:
        return len(str(self))

    def __contains__(self, part: str) -> bool:
        return part in str(self)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)

    def startswith(self, prefix: str | tuple[str, ...]) -> bool:
        return str(self).startswith(prefix)

    def endswith(self, suffix: str | tuple[str, ...]) -> bool:
        return str(self).endswith(suffix)

    def split(self, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        return str(self).split(sep, maxsplit)

    def rsplit(self, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        return str(self).rsplit(sep, maxsplit)

    def splitlines(self) -> list[str]:
        return str(self).splitlines()

    def to_wire(self) -> str:
        return str(self)
