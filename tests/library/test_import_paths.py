"""Import paths of other versions: each line of the tables leads somewhere, and docs/compatibility.md lists it."""

import importlib
import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import twinkle
import twinkle_client
from tests.library.test_library_surface import ABSENT
from tests.support.paths import ROOT, SOURCE
from twinkle import compatibility
from twinkle.errors import MissingDependencyError, UnsupportedError
from twinkle_client.compatibility import PATHS as CLIENT_PATHS
from twinkle_client.compatibility import Absent, Moved, NotYet

PATHS = {**compatibility.PATHS, **CLIENT_PATHS}
MOVED = {path: one for path, one in PATHS.items() if isinstance(one, Moved)}
ABSENT_MODULES = {path: one.why for path, one in PATHS.items() if isinstance(one, Absent) and ":" not in path}
NOT_YET = {
    f"{path.partition(':')[0]}:{name}": entry.why
    for path, entry in PATHS.items()
    if isinstance(entry, NotYet)
    for name in (entry.names.split() or [path.partition(":")[2]])
}
ABSENT_NAMES = {path: one.why for path, one in PATHS.items() if isinstance(one, Absent) and ":" in path}

# What documents of other versions import: one example for each path that works.
EXAMPLES = {
    "twinkle.checkpoint_engine.base": "CheckpointEngine",
    "twinkle.cli.cli": "ConfigRegistry",
    "twinkle.dataset.base": "DatasetMeta",
    "twinkle.hub.hub": "HubOperation",
    "twinkle.kernel.core": "kernelize",
    "twinkle.model.multi_lora_transformers": "MultiLoraTransformersModel",
    "twinkle.model.transformers.moe.expert_parallel": "ExpertParallelConfig",
    "twinkle.model.transformers.moe.router_replay": "RouterReplayAction",
    "twinkle.model.transformers.multi_lora_transformers": "MultiLoraTransformersModel",
    "twinkle.notifier.base": "notify_exception",
    "twinkle.patch.no_split_modules": "NoSplitModulesPatch",
    "twinkle.patch.transformers_emb": "get_lm_head_model",
    "twinkle.patch.transformers_fused_ce": "TransformersFusedCEPatch",
    "twinkle.preprocessor.base": "Preprocessor",
    "twinkle.preprocessor.olympiad_bench": "OlympiadBenchProcessor",
    "twinkle.processor.base": "PackedSeqParams",
    "twinkle.reward.olympiad_bench": "OlympiadBenchQualityReward",
    "twinkle.sampler.vllm_sampler": "vLLMSampler",
    "twinkle.sampler.vllm_sampler.vllm_sampler": "vLLMSampler",
    "twinkle.server.common.datum": "input_feature_to_datum",
    "twinkle.server.common.serialize": "serialize_object",
    "twinkle.utils.device_mesh": "Platform",
    "twinkle.utils.framework": "Torch",
    "twinkle.utils.loader": "construct_class",
    "twinkle.utils.platform": "Platform",
    "twinkle.utils.platforms": "MPS",
    "twinkle.utils.seed": "stable_seed",
    "twinkle.utils.transformers_utils": "align_logps_to_mask",
    "twinkle.utils.utils": "signature_info",
    "twinkle.version": "__version__",
    "twinkle_client.http.heartbeat": "Heartbeat",
    "twinkle_client.http.http_utils": "http_post",
    "twinkle_client.http.utils": "get_session_id",
    "twinkle_client.processor.base": "InputProcessor",
    "twinkle_client.skills.base": "SkillProvider",
    "twinkle_client.skills.local_provider": "LocalSkillProvider",
    "twinkle_client.skills.modelscope_provider": "ModelScopeSkillProvider",
    "twinkle_client.types.checkpoint": "ResolvedLoadPath",
    "twinkle_client.types.server": "CheckpointPathResponse",
}


@pytest.fixture(autouse=True)
def forget_older_paths() -> None:
    """Remove the modules of the tables, so that each test imports them for the first time."""
    for path in PATHS:
        sys.modules.pop(path, None)


def import_quietly(path: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(path)


def run(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("path", MOVED)
def test_a_moved_path_has_the_names_of_the_new_one(path: str) -> None:
    old, new = import_quietly(path), importlib.import_module(MOVED[path].to)
    assert set(new.__all__) <= set(old.__all__)
    assert path in EXAMPLES
    for name in set(old.__all__) - set(MOVED[path].more):
        assert getattr(old, name) is getattr(new, name)
    assert dir(old) == sorted(old.__all__)


@pytest.mark.parametrize("path", MOVED)
def test_a_moved_path_names_the_new_one(path: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        importlib.import_module(path)
    told = [str(one.message) for one in caught if issubclass(one.category, DeprecationWarning) and path in str(one)]
    parent = MOVED.get(path.rpartition(".")[0])  # is imported too, and warns too
    wanted = [f"{path} is an older import path, use {MOVED[path].to}"] if MOVED[path].warns else []
    assert [text for text in told if text.startswith(f"{path} ")] == wanted
    assert parent is None or len(caught) == 2


def test_documented_imports_work() -> None:
    """In a fresh process, in every form of the import statement; a script may also import a backend that it lacks."""
    lines = ["import warnings", "warnings.simplefilter('ignore')"]
    for path, name in EXAMPLES.items():
        package, _, last = path.rpartition(".")
        lines += [f"from {path} import {name} as one", f"from {package} import {last} as module", f"import {path}"]
        lines += [f"assert one is module.{name} is {path}.{name}, '{path}'"]
    lines += ["from twinkle.checkpoint_engine import CheckpointEngineManager"]
    lines += ["from twinkle.model import MegatronModel, TransformersModel"]
    lines += ["import twinkle.model.megatron as megatron", "assert megatron.MegatronModel is MegatronModel"]
    lines += ["chosen = MegatronModel if CheckpointEngineManager is None else TransformersModel"]
    lines += ["print(chosen.__name__)"]
    assert run("\n".join(lines)) == "TransformersModel\n"


@pytest.mark.skipif(importlib.util.find_spec("megatron") is not None, reason="needs an environment without Megatron")
def test_a_backend_whose_package_is_missing_can_be_imported_and_not_used() -> None:
    from twinkle.model import MegatronModel, MultiLoraMegatronModel

    for name, kind in (("MegatronModel", MegatronModel), ("MultiLoraMegatronModel", MultiLoraMegatronModel)):
        assert pickle.loads(pickle.dumps(kind)) is kind
        assert not isinstance(twinkle, kind)
        with pytest.raises(MissingDependencyError) as caught:
            kind("a model")
        wanted = f"{name} needs the package 'megatron-core' (our extra 'megatron'): pip install"
        assert str(caught.value) == f"{wanted} 'twinkle-posttrain[megatron]'"
    with pytest.raises(MissingDependencyError, match="the Megatron backend needs the package 'megatron-core'"):
        exec("from twinkle.model.megatron import MegatronStrategy")


def test_a_warning_points_at_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import twinkle\n\nfrom twinkle.hub.hub import HubOperation\n")
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True)
    assert f"{script}:3: DeprecationWarning: twinkle.hub.hub is an older import path, use twinkle.hub" in done.stderr


def test_objects_of_older_paths_are_pickled_by_their_real_module() -> None:
    kind = import_quietly("twinkle_client.types.checkpoint").ResolvedLoadPath
    assert b"checkpoint\n" not in pickle.dumps(kind, 0)
    assert pickle.loads(pickle.dumps(kind)) is kind
    assert kind.__module__ == "twinkle_client.protocol.runs"


def test_a_name_that_the_new_path_lacks() -> None:
    module = import_quietly("twinkle.hub.hub")
    with pytest.raises(AttributeError, match=r"'twinkle\.hub\.hub' has no attribute 'Hub'; see twinkle\.hub"):
        _ = module.Hub
    with pytest.raises(ImportError, match="cannot import name 'Hub'"):
        exec("from twinkle.hub.hub import Hub")


def test_modules_and_packages_can_be_reloaded() -> None:
    hub = import_quietly("twinkle.hub.hub")
    with pytest.warns(DeprecationWarning, match="older import path"):
        assert importlib.reload(hub) is hub
    assert hub.HubOperation is twinkle.hub.HubOperation
    code = (
        "import importlib, sys, twinkle, twinkle_client; before = len(sys.meta_path); importlib.reload(twinkle); "
        "importlib.reload(twinkle_client); print(len(sys.meta_path) - before); import twinkle.hub.hub"
    )
    assert run(code) == "0\n"


@pytest.mark.parametrize("path", ABSENT_MODULES)
def test_an_absent_module_says_why(path: str) -> None:
    import_quietly(path.rpartition(".")[0])
    package, _, last = path.rpartition(".")
    for statement in (
        f"import {path}",
        f"import {path}.below",
        f"from {path} import name",
        f"from {package} import {last}",
    ):
        with pytest.raises(ModuleNotFoundError) as caught:
            exec(statement)
        assert str(caught.value) == f"{path}: {ABSENT_MODULES[path]}"


@pytest.mark.parametrize("path", ABSENT_NAMES)
def test_an_absent_name_says_why(path: str) -> None:
    module, _, name = path.partition(":")
    with pytest.raises(ImportError) as caught:
        exec(f"from {module} import {name}")
    assert str(caught.value) == f"{module}.{name}: {ABSENT_NAMES[path]}"


@pytest.mark.parametrize("path", NOT_YET)
def test_a_name_that_is_not_there_yet_can_be_imported(path: str) -> None:
    """A script that offers it as one of several choices runs; using it is an error with the reason."""
    module, _, name = path.partition(":")
    namespace: dict[str, Any] = {}
    exec(f"from {module} import {name} as first\nfrom {module} import {name} as second", namespace)
    placeholder = namespace["first"]
    assert placeholder is namespace["second"]
    assert repr(placeholder) == f"<{module}.{name}: {NOT_YET[path]}>"
    assert not isinstance(twinkle, placeholder)
    assert pickle.loads(pickle.dumps(placeholder)) is placeholder
    for use in (lambda: placeholder("model", device_mesh=None), type("Own", (placeholder,), {})):
        with pytest.raises(UnsupportedError) as caught:
            use()
        assert str(caught.value) == f"{module}.{name}: {NOT_YET[path]}"
    with pytest.raises(AttributeError, match=f"RECORD: {module}.{name}: "):
        _ = placeholder.RECORD


def test_other_names_are_missing_as_usual() -> None:
    for module in ("twinkle", "twinkle.infra", "twinkle.model", "twinkle.server.gateway", "twinkle.utils"):
        assert not hasattr(importlib.import_module(module), "nothing")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'twinkle\.nothing'"):
        importlib.import_module("twinkle.nothing")
    assert importlib.util.find_spec("twinkle.nothing") is None


def test_no_path_of_the_tables_is_a_module() -> None:
    """A real module is found first, so its line would have no effect."""
    for path in (path for path in PATHS if ":" not in path):
        place = SOURCE.joinpath(*path.split("."))
        assert not place.exists(), path
        assert not place.with_suffix(".py").exists(), path


def test_tables_are_sorted() -> None:
    library = [path for path in compatibility.PATHS if not path.startswith("twinkle.server")]
    server = [path for path in compatibility.PATHS if path.startswith("twinkle.server")]
    assert list(compatibility.PATHS) == sorted(library) + sorted(server)
    modules = [path for path in CLIENT_PATHS if ":" not in path]
    owners = [path.partition(":")[0] for path in CLIENT_PATHS if ":" in path]
    assert [path.partition(":")[0] for path in CLIENT_PATHS] == modules + owners  # modules first, then names
    assert modules == sorted(modules)
    # Python's order of "twinkle_client.infra:" and "twinkle_client:"; the names of a module are grouped by reason
    assert owners == sorted(owners, key=lambda owner: f"{owner}:")


def test_modules_of_the_library_are_attributes() -> None:
    folders = {path.parent.name for path in (SOURCE / "twinkle").glob("*/__init__.py")}
    assert folders | {"framework_util", "torch_util"} == set(twinkle._MODULES)
    assert run("import twinkle; print(twinkle.infra.DeviceMesh.__name__, twinkle.model.__name__)") == (
        "DeviceMesh twinkle.model\n"
    )


def test_importing_the_packages_stays_light() -> None:
    modules = json.loads(run("import twinkle, json, sys; print(json.dumps(sorted(sys.modules)))"))
    assert {"httpx", "numpy", "pydantic", "torch", "transformers"}.isdisjoint(modules)
    modules = json.loads(run("import twinkle_client, json, sys; print(json.dumps(sorted(sys.modules)))"))
    assert {"httpx", "numpy", "torch", "twinkle"}.isdisjoint(modules)
    assert twinkle_client.__name__ in modules


def shown(entry: Moved | Absent | NotYet) -> str:
    if isinstance(entry, Moved):
        return f"`{entry.to}`"
    if isinstance(entry, Absent):
        return entry.why
    names = ", ".join(f"`{name}`" for name in entry.names.split())
    return f"*not yet*{' (' + names + ')' if names else ''}: {entry.why}"


def test_users_are_told() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    section = page.split("\n## Import paths\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", section, re.MULTILINE)
    listed = {path: one for path, one in PATHS.items() if not (path in CLIENT_PATHS and ":" in path)}
    assert dict(rows) == {path: shown(one) for path, one in listed.items()}
    (example,) = re.findall(r"such as `(twinkle_client\.\w+:\w+)`, which are not listed here", section)
    assert example in ABSENT_NAMES


def test_reasons_are_the_same_in_both_tables() -> None:
    reasons = {(owner, name): why for owner, names, why in ABSENT for name in names.split()}
    for path, why in ABSENT_NAMES.items():
        owner, _, name = path.partition(":")
        assert reasons.get((owner, name), why) == why
    for (owner, _), why in reasons.items():
        assert ABSENT_MODULES.get(owner, why) == why
