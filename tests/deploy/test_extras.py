"""Without an extra, the message says which one to install; the table of extras knows every package that we import."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.bare_environment import dependencies_of, link_packages, run_bare
from tests.support.paths import ROOT, SOURCE
from twinkle import extras
from twinkle.errors import MissingDependencyError

PROJECTS = ROOT / "pyproject.toml", ROOT / "client" / "pyproject.toml"
EXTRAS: dict[str, list[str]] = tomllib.loads(PROJECTS[0].read_text())["project"]["optional-dependencies"]
# statement → the extra that its error names, in an environment without any extra
STATEMENTS = {
    "from twinkle import Trainer": "transformers",
    "from twinkle.model import TransformersModel": "transformers",
    "from twinkle.loss import GRPOLoss": "transformers",
    "from twinkle.metric import Accuracy": "transformers",
    "from twinkle.advantage import GRPOAdvantage": "transformers",
    "from twinkle.processor import InputProcessor": "transformers",
    "from twinkle.sampler import LocalSampler": "transformers",
    "from twinkle.infra import collect_tensor_dict": "transformers",
    "from twinkle.dataset import Dataset, DatasetMeta; Dataset(DatasetMeta(data=[{'a': 1}]))": "transformers",
    "from twinkle.hub import load_tokenizer; load_tokenizer('random://llama-tiny')": "transformers",
    "from twinkle.hub import resolve; resolve('hf://org/name')": "transformers",
    "from twinkle.hub import resolve; resolve('ms://org/name')": "modelscope",
    "from twinkle.data_format import SamplingParams; SamplingParams().to_vllm()": "vllm",
    "from twinkle_agentic.preprocessor import FixUnicodeFilter; FixUnicodeFilter()": "datajuicer",
    "from twinkle_agentic.preprocessor import PIIPresidioFilter; PIIPresidioFilter()": "pii",
    "import twinkle; twinkle.initialize('ray', groups=[twinkle.DeviceGroup('g', 1, 'CPU')])": "ray",
}
PROGRAM = """
import json, sys
found = {}
for statement in json.loads(sys.argv[1]):
    try:
        exec(statement, {})
        found[statement] = "no error"
    except Exception as error:
        found[statement] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link_packages(tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def errors(bare: Path) -> dict[str, str]:
    done = run_bare(bare, "-c", PROGRAM, json.dumps(list(STATEMENTS)))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("statement", STATEMENTS)
def test_the_error_names_the_extra(errors: dict[str, str], statement: str) -> None:
    assert errors[statement].startswith("MissingDependencyError: ")
    assert f"pip install 'twinkle-posttrain[{STATEMENTS[statement]}]'" in errors[statement]


@pytest.mark.parametrize("arguments", [["--help"], ["launch"], []], ids=" ".join)
def test_the_command_names_the_extra(bare: Path, arguments: list[str]) -> None:
    done = run_bare(bare, "-c", "import sys; from twinkle.server.cli import main; sys.exit(main())", *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    line = done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert line.startswith("twinkle-server: the server needs the package ")
    assert line.endswith(": pip install 'twinkle-posttrain[server]'")


def test_python_m_names_the_extra_too(bare: Path) -> None:
    done = run_bare(bare, "-m", "twinkle.server", "--help")
    assert done.returncode == 1
    assert "pip install 'twinkle-posttrain[server]'" in done.stderr
    assert "Traceback" not in done.stderr


def packages_of(extra: str) -> set[str]:
    """Return the names of the packages that an extra installs, also through another extra of ours."""
    found = set()
    for required in map(Requirement, EXTRAS[extra]):
        if required.name == "twinkle-posttrain":
            found |= {name for inner in required.extras for name in packages_of(inner)}
        else:
            found.add(canonicalize_name(required.name))
    return found


def found_in_source(pattern: str) -> set[str]:
    """Return what the group of ``pattern`` matches in the library, the server and the agents."""
    files = [*(SOURCE / "twinkle").rglob("*.py"), *(SOURCE / "twinkle_agentic").rglob("*.py")]
    return {name for file in files for name in re.findall(pattern, file.read_text(), re.MULTILINE)}


def imported_modules() -> set[str]:
    """Return the modules of other projects that are imported anywhere, also inside functions."""
    names = found_in_source(r"^ *from ([\w.]+) import ") | found_in_source(r"^ *import ([\w.]+)(?: as \w+)?$")
    own = {"twinkle", "twinkle_agentic", "twinkle_client"}
    return {name for name in names if name.split(".")[0] not in sys.stdlib_module_names | own}


def test_every_imported_package_is_a_dependency_or_in_the_table() -> None:
    core = {name.replace("-", "_") for name in dependencies_of(*PROJECTS)} | {"pydantic_core"}
    unknown = {name for name in imported_modules() if name.split(".")[0] not in core and not extras.extra_of(name)}
    assert unknown == set()


@pytest.mark.parametrize("module", sorted(extras._HOMES))
def test_the_extra_installs_the_package(module: str) -> None:
    package, extra = extras._HOMES[module]
    assert canonicalize_name(Requirement(package).name) in packages_of(extra)


def test_calls_name_modules_of_the_table() -> None:
    """A module that the table does not have would be named without its extra."""
    named = found_in_source(r"(?<![.\w])(?:missing|require)\(\s*\"([\w.]+)\", ")
    assert {"liger_kernel", "opentelemetry.sdk", "psycopg", "ray", "vllm"} <= named <= extras._HOMES.keys()


def test_the_server_has_all_that_a_launch_needs() -> None:
    assert packages_of("transformers") < packages_of("server")
    assert {"torch", "transformers", "gguf", "safetensors", "uvicorn"} <= packages_of("server")


def test_a_submodule_belongs_to_the_most_specific_line() -> None:
    assert extras.extra_of("opentelemetry.sdk.trace") == ("opentelemetry-sdk", "telemetry")
    assert extras.extra_of("opentelemetry.trace") == ("opentelemetry-api", "server")
    assert extras.extra_of("nowhere") is None


def test_a_package_without_an_extra_is_named_alone() -> None:
    assert str(extras.missing("some_env", "OpenEnv")) == "OpenEnv needs the package 'some_env': pip install 'some_env'"


def test_an_error_of_our_own_is_not_blamed_on_an_extra() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'twinkle\.nowhere'") as raised:
        extras.load("twinkle.nowhere", "name")
    assert not isinstance(raised.value, MissingDependencyError)
