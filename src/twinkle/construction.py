"""Components as users name them: an instance, a class, the name of a built-in class, or a plugin id."""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar, cast

from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.plugin import Plugin

__all__ = ["construct"]

T = TypeVar("T")


def construct(what: object, base: type[T], package: str, init_args: Mapping[str, Any]) -> T | Callable[..., Any]:
    """An instance of ``base``, or a plain function as it is.

    A name is looked up in the public names of ``package``, a class is called with ``init_args``; an instance or a
    function cannot take any.
    """
    if isinstance(what, str):
        what = Plugin.load_plugin(what, base) if Plugin.is_plugin_id(what) else _built_in(what, base, package)
    if inspect.isclass(what):
        _check_options(what, init_args)
        return cast("T", what(**init_args))
    if not isinstance(what, base) and not callable(what):
        raise InvalidInputError(
            base.__name__, what, f"an instance, a class, a function, a name in {package}, or hf://… / ms://…"
        )
    if init_args:
        raise InvalidInputError(
            "init_args", dict(init_args), f"none with a ready {type(what).__name__}: give the class or its name"
        )
    return what


def _check_options(made: type, init_args: Mapping[str, Any]) -> None:
    parameters = inspect.signature(made).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in init_args:
        if name not in parameters:
            raise UnknownNameError(f"option of {made.__name__}", name, parameters)


def _built_in(name: str, base: type[T], package: str) -> type[T]:
    module = import_module(package)
    known = {public: getattr(module, public) for public in module.__all__}
    classes = {public: value for public, value in known.items() if inspect.isclass(value) and issubclass(value, base)}
    if name not in classes:
        raise UnknownNameError(base.__name__, name, classes)
    return classes[name]
