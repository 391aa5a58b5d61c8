"""Plugins: templates, losses and similar classes that are loaded from a hub repository.

A plugin's code runs in this process with all its rights, so a plugin is not even downloaded unless remote code is
trusted (TWINKLE_TRUST_REMOTE_CODE=1).
"""

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.hub import HubOperation
from twinkle.utils.unsafe import trust_remote_code

__all__ = ["Plugin"]

T = TypeVar("T")


class Plugin:
    """The loader of plugin classes."""

    @staticmethod
    def load_plugin(plugin_id: str, plugin_base: type[T], token: str | None = None) -> type[T]:
        """Return the first subclass of ``plugin_base`` in the repository's ``__init__.py`` that the plugin defines."""
        if not Plugin.is_plugin_id(plugin_id):
            raise InvalidInputError("plugin id", plugin_id, "hf://org/name or ms://org/name (Unknown plugin id)")
        if not trust_remote_code():
            raise UnsupportedError(
                f"Twinkle does not support plugin in safe mode: {plugin_id} was not downloaded; set "
                "TWINKLE_TRUST_REMOTE_CODE=1 to run its code in this process"
            )
        folder = Path(HubOperation.download_file(plugin_id, token=token))
        module = _load_module(folder, plugin_id)
        for value in vars(module).values():
            # skip classes that the plugin imports from elsewhere, such as the base class
            if inspect.isclass(value) and issubclass(value, plugin_base) and _is_own(value, module, folder):
                return value
        raise InvalidInputError(
            "plugin", plugin_id, f"a repository that defines one (Cannot find any subclass of {plugin_base.__name__})"
        )

    @staticmethod
    def is_plugin_id(text: str) -> bool:
        return text.startswith(("hf://", "ms://"))


def _is_own(value: type, module: ModuleType, folder: Path) -> bool:
    """Return whether a class is defined in the plugin's ``__init__.py`` or in another file of its folder."""
    home = sys.modules.get(value.__module__)
    file = None if home is None else home.__file__
    return home is module or (file is not None and folder in Path(file).parents)


def _load_module(folder: Path, plugin_id: str) -> ModuleType:
    entry = folder / "__init__.py"
    if not entry.is_file():
        raise InvalidInputError("plugin", plugin_id, f"a repository with an __init__.py ({entry} does not exist)")
    # A unique module name, so that two plugins, or a plugin and an installed package, do not collide in sys.modules.
    name = "twinkle_plugin_" + "".join(c if c.isalnum() else "_" for c in plugin_id)
    spec = importlib.util.spec_from_file_location(name, entry, submodule_search_locations=[str(folder)])
    assert spec is not None
    assert spec.loader is not None
    for loaded in [known for known in sys.modules if known == name or known.startswith(f"{name}.")]:
        del sys.modules[loaded]  # loaded from an earlier version of the plugin
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where, for example, pickle looks up the module of a class
    with _import_path(folder):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _import_path(folder: Path) -> Iterator[None]:
    """Put the plugin's folder on ``sys.path`` while it loads, so that it can import its own files by plain names."""
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before
