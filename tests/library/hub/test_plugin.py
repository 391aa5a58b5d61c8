"""Plugins: disabled by default, which is checked before anything is downloaded; and components by name."""

import sys

import pytest

import twinkle.hub.plugin
from twinkle import Plugin
from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError
from twinkle.hub.construction import construct


class Base:
    def __init__(self, value=0):
        self.value = value


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository, and the list of ids that were downloaded from it."""
    fetched = []

    class Hub:
        @classmethod
        def download_file(cls, repo_id, token=None):
            fetched.append(repo_id)
            return str(tmp_path)

    monkeypatch.setattr(twinkle.hub.plugin, "HubOperation", Hub)
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", "1")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path, fetched


def write_plugin(folder):
    (folder / "parts.py").write_text(
        "from tests.library.hub.test_plugin import Base\nclass Mine(Base):\n    answer = 42\n"
    )
    (folder / "__init__.py").write_text("from tests.library.hub.test_plugin import Base\nfrom .parts import Mine\n")


def test_nothing_is_fetched_unless_trusted(repository, monkeypatch):
    folder, fetched = repository
    write_plugin(folder)
    for value in ("0", ""):
        monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", value)
        with pytest.raises(UnsupportedError, match="does not support plugin in safe mode"):
            Plugin.load_plugin("ms://org/name", Base)
    assert fetched == []


def test_first_own_subclass_is_loaded(repository):
    folder, fetched = repository
    write_plugin(folder)
    path = list(sys.path)
    found = Plugin.load_plugin("ms://org/name", Base)
    assert found.answer == 42
    assert issubclass(found, Base)
    assert found is not Base
    assert fetched == ["ms://org/name"]
    assert sys.path == path


def test_what_is_wrong_with_a_plugin(repository):
    folder, _ = repository
    with pytest.raises(InvalidInputError, match="Unknown plugin id"):
        Plugin.load_plugin("org/name", Base)
    with pytest.raises(InvalidInputError, match="does not exist"):
        Plugin.load_plugin("hf://org/name", Base)
    (folder / "__init__.py").write_text("from tests.library.hub.test_plugin import Base\nclass Other: pass\n")
    with pytest.raises(InvalidInputError, match="Cannot find any subclass of Base"):
        Plugin.load_plugin("hf://org/name", Base)


def test_construct(repository, monkeypatch):
    folder, _ = repository
    write_plugin(folder)
    package = type(sys)("components")
    package.__all__ = ["Base", "other"]
    package.Base, package.other = Base, len
    monkeypatch.setitem(sys.modules, "components", package)
    ready = Base(1)
    assert construct(ready, Base, "components", {}) is ready
    assert construct(len, Base, "components", {}) is len
    assert construct(Base, Base, "components", {"value": 2}).value == 2
    assert construct("Base", Base, "components", {"value": 3}).value == 3
    assert construct("ms://org/name", Base, "components", {"value": 4}).answer == 42
    with pytest.raises(UnknownNameError, match="unknown Base 'other'; known: Base"):
        construct("other", Base, "components", {})
    with pytest.raises(InvalidInputError, match="init_args"):
        construct(ready, Base, "components", {"value": 5})
    with pytest.raises(UnknownNameError, match="unknown option of Base 'valu'; known: value"):
        construct("Base", Base, "components", {"valu": 5})
    with pytest.raises(InvalidInputError, match="Base: got 3"):
        construct(3, Base, "components", {})
