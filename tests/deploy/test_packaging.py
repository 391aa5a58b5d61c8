"""The package itself: importing it is light, and its public names exist."""

import importlib
import json
import os
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

import twinkle
import twinkle_client
from tests.support.paths import SOURCE

SRC = SOURCE
HEAVY = ("httpx", "numpy", "pydantic", "ray", "torch", "transformers", "vllm")
PROBE = """
import json, sys, time
start = time.perf_counter()
import {package}
seconds = time.perf_counter() - start
print(json.dumps([seconds, sorted(sys.modules)]))
"""


def import_in_fresh_process(package: str) -> tuple[float, set[str]]:
    """Return the seconds that the import took, and all modules loaded after it."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(package=package)],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, modules = json.loads(done.stdout)
    return seconds, set(modules)


@pytest.mark.parametrize("package", ["twinkle", "twinkle_agentic", "twinkle_client"])
def test_import_is_light_and_fast(package):
    runs = [import_in_fresh_process(package) for _ in range(3)]
    assert runs[0][1].isdisjoint(HEAVY)
    assert min(seconds for seconds, _ in runs) < 0.3


def test_client_import_does_not_load_the_library():
    _, modules = import_in_fresh_process("twinkle_client")
    assert "twinkle" not in modules


@pytest.mark.parametrize("module", [twinkle, twinkle_client])
def test_all_is_sorted_without_duplicates(module):
    assert module.__all__ == sorted(set(module.__all__), key=lambda name: (not name.isupper(), name))  # ruff's order


def test_all_holds_every_error_and_every_lazy_name():
    errors = importlib.import_module("twinkle.errors")
    assert set(twinkle.__all__) == {*errors.__all__, *twinkle._LAZY}


@pytest.mark.parametrize("name", twinkle.__all__)
def test_public_name_resolves(name):
    if name in twinkle._LAZY:
        pytest.importorskip("torch")
    value = getattr(twinkle, name)
    assert value.__name__ == name
    assert vars(twinkle)[name] is value  # cached: the second access costs nothing


def test_unknown_attribute_raises():
    with pytest.raises(AttributeError, match=r"module 'twinkle' has no attribute 'Trainr'"):
        twinkle.Trainr  # noqa: B018


def test_dir_lists_public_names():
    assert set(twinkle.__all__) <= set(dir(twinkle))
    assert "__version__" in dir(twinkle)


def test_both_packages_carry_one_version():
    assert twinkle.__version__ == twinkle_client.__version__


@pytest.mark.parametrize("package", ["twinkle", "twinkle_client"])
def test_types_are_shipped(package):
    assert (SRC / package / "py.typed").is_file()


def test_ray_is_of_a_version_that_asks_for_a_token():
    """Earlier versions admit everybody who reaches the cluster's ports, unless configured otherwise."""
    extras = tomllib.loads((SRC.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (ray,) = [each for text in extras["ray"] if (each := Requirement(text)).name == "ray"]
    assert not ray.specifier.contains("2.59.9")
    assert ray.specifier.contains("2.60.0")
