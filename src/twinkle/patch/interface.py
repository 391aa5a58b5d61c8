"""The interface of patches, and how they are applied: for good, or inside a ``with`` block."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.hub.construction import construct_instance

__all__ = ["NoSplitModulesPatch", "Patch", "apply_context", "apply_patch", "make_patch"]


class Patch:
    """A change of a model or of another object. Subclasses change it in ``__call__`` and change it back in ``unpatch``.

    A patch that cannot be undone has no ``unpatch``, and :func:`apply_context` raises an error when its block ends.
    """

    # True if it takes the output head out of a model; such a model has no log-probabilities
    removes_head: ClassVar[bool] = False

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(f"{type(self).__name__}: a patch defines __call__(module)")

    def unpatch(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(f"{type(self).__name__}: this patch cannot be undone")


def make_patch(patch: object) -> Patch:
    """Return a patch that is given as an instance, a class, the name of a class in ``twinkle.patch``, or a plugin."""
    return construct_instance(patch, Patch, "twinkle.patch", {})


def apply_patch(module: Any, patch: object, *args: Any, **kwargs: Any) -> Any:
    """Apply a patch to an object and return what the patch returns. Further arguments are the patch's own.

    patch: an instance, a class, the name of a class in ``twinkle.patch``, or the id of a plugin.
    """
    return make_patch(patch)(module, *args, **kwargs)


@contextmanager
def apply_context(module: Any, patch: object, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Apply a patch inside a ``with`` block, and undo it at the end, also after an error. The block gets its result."""
    made = make_patch(patch)
    result = made(module, *args, **kwargs)
    try:
        yield result
    finally:
        made.unpatch(module, *args, **kwargs)


class NoSplitModulesPatch(Patch):
    """Sets ``_no_split_modules``, the classes of layers that transformers and accelerate keep on one device.

    The library shards a model by its decoder layers and does not read it.
    """

    def __init__(self, module_names: Iterable[str] | None = None) -> None:
        self._names = None if module_names is None else list(module_names)
        self._before: dict[int, Any] = {}  # by the model's id

    def __call__(self, module: Any, module_names: Iterable[str] | None = None, **kwargs: Any) -> None:
        names = self._names if module_names is None else list(module_names)
        if not names:
            raise InvalidInputError("module_names", module_names, "names of classes, such as ['Qwen3DecoderLayer']")
        self._before.setdefault(id(module), getattr(module, "_no_split_modules", None))
        module._no_split_modules = names

    def unpatch(self, module: Any, *args: Any, **kwargs: Any) -> None:
        module._no_split_modules = self._before.pop(id(module))
