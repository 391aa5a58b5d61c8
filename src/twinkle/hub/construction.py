"""Construct components from what users pass: an instance, a class, the name of a built-in class, or a plugin id."""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar

from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.hub.plugin import Plugin

__all__ = ["check_options", "construct", "construct_class", "construct_instance", "find_class"]

T = TypeVar("T")


def construct(what: object, base: type[T], package: str, init_args: Mapping[str, Any]) -> T | Callable[..., Any]:
    """Return an instance of ``base``, or ``what`` itself if it is a function or another callable object.

    A name is looked up in the public names of ``package``; an id ``hf://…`` or ``ms://…`` names a plugin. A class is
    called with ``init_args``; with an instance or a function, ``init_args`` must be empty.
    """
    found = find_class(what, base, package)
    if found is not None:
        check_options(found, init_args)
        return found(**init_args)
    if inspect.isclass(what) or not (isinstance(what, base) or callable(what)):
        raise InvalidInputError(
            base.__name__, what, f"an instance, a subclass, a function, a name in {package}, or hf://… / ms://…"
        )
    if init_args:
        raise InvalidInputError(
            "init_args", dict(init_args), f"none with a ready {type(what).__name__}: give the class or its name"
        )
    return what


def find_class(what: object, base: type[T], package: str) -> type[T] | None:
    """Return the class that a class, a name in ``package`` or a plugin id stands for; None for anything else."""
    if isinstance(what, str):
        return Plugin.load_plugin(what, base) if Plugin.is_plugin_id(what) else _built_in(what, base, package)
    return what if inspect.isclass(what) and issubclass(what, base) else None


def construct_instance(what: object, base: type[T], package: str, init_args: Mapping[str, Any]) -> T:
    """Do what :func:`construct` does, but refuse plain functions: the result is an instance of ``base``."""
    built = construct(what, base, package, init_args)
    if not isinstance(built, base):
        raise InvalidInputError(
            base.__name__, what, f"an instance, a subclass, a name in {package}, or hf://… / ms://…"
        )
    return built


def construct_class(func: object, class_T: type, module_T: object, **init_args: Any) -> Any:
    """Construct a component as scripts do that were written for the existing library.

    A subclass of ``class_T`` is constructed. A text is the name of a class in the module, or in one of the modules,
    ``module_T``, or the id of a plugin. Everything else, such as an instance or a function, is returned as it is.
    """
    if isinstance(func, str):
        modules = module_T if isinstance(module_T, list | tuple) else [module_T]
        known = {name: vars(module)[name] for module in reversed(modules) for name in vars(module)}
        classes = {name: one for name, one in known.items() if inspect.isclass(one) and issubclass(one, class_T)}
        if not Plugin.is_plugin_id(func) and func not in classes:
            raise UnknownNameError(class_T.__name__, func, classes or ("none",))
        func = Plugin.load_plugin(func, class_T) if Plugin.is_plugin_id(func) else classes[func]
    if inspect.isclass(func) and issubclass(func, class_T):
        check_options(func, init_args)
        return func(**init_args)
    return func


def check_options(made: type, options: Mapping[str, Any], given: int = 0) -> None:
    """Raise if ``options`` has a name that the constructor of ``made`` does not take, or lacks a required parameter.

    The first ``given`` parameters are passed by the caller and are not options.
    """
    parameters = dict(list(inspect.signature(made).parameters.items())[given:])
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    known = {
        name: each for name, each in parameters.items() if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    }
    for name in options:
        if name not in known and not takes_any:
            raise UnknownNameError(f"option of {made.__name__}", name, known or ("none",))
    missing = [name for name, each in known.items() if each.default is each.empty and name not in options]
    if missing:
        raise InvalidInputError(f"options of {made.__name__}", dict(options), f"also {', '.join(missing)}")


def _built_in(name: str, base: type[T], package: str) -> type[T]:
    module = import_module(package)
    public = {public: getattr(module, public) for public in module.__all__}
    classes = {
        known: value
        for known, value in public.items()
        if inspect.isclass(value) and issubclass(value, base) and not inspect.isabstract(value)
    }
    if name not in classes:
        raise UnknownNameError(base.__name__, name, classes or ("none",))
    return classes[name]
