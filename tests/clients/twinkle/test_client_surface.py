"""The package's public names, and the cost of importing it."""

import importlib
import subprocess
import sys

import pytest

import twinkle_client
from twinkle_client import MissingPackageError, preprocessor, reward, template, tinker_sdk

MODULES = (
    "model sampler dataset dataloader processor template reward preprocessor data_format rollout types errors client "
    "manager http common.serialize utils.patch_tinker remote hub infra advantage compatibility model.downloads"
)


def test_names_are_sorted_and_there():
    assert twinkle_client.__all__ == sorted(twinkle_client.__all__, key=_ruffs_order)
    assert set(twinkle_client.__all__) <= set(dir(twinkle_client))
    for name in twinkle_client.__all__:
        assert getattr(twinkle_client, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = twinkle_client.nothing
    for module in MODULES.split():
        loaded = importlib.import_module(f"twinkle_client.{module}")
        for name in loaded.__all__:
            assert getattr(loaded, name) is not None


def _ruffs_order(name):
    """Sort constants before classes and classes before functions, as ruff does."""
    return not name.isupper(), name[0].islower(), name


def loaded_by(code):
    script = f"{code}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing():
    light = loaded_by("import twinkle_client")
    assert not light & {"httpx", "pydantic", "numpy", "torch", "transformers", "ray", "twinkle"}


def test_all_of_the_client_loads_neither_torch_nor_the_library():
    everything = "\n".join(f"import twinkle_client.{module}" for module in MODULES.split())
    everything += "\nfrom twinkle_client import *\nfrom twinkle_client.model import *"
    heavy = loaded_by(everything)
    assert not heavy & {"torch", "transformers", "ray", "twinkle", "datasets", "peft"}
    assert "httpx" in heavy


@pytest.mark.parametrize(
    ("ours", "librarys"),
    [(preprocessor, "twinkle.preprocessor"), (reward, "twinkle.reward"), (template, "twinkle.template")],
)
def test_remote_objects_are_the_librarys(ours, librarys):
    """Each remote class takes the constructor arguments of the library's class, in the same order."""
    import inspect

    library = importlib.import_module(librarys)
    for name in ours.__all__:
        remote, local = getattr(ours, name), getattr(library, name)
        if not inspect.isabstract(local):
            names = [each for each in inspect.signature(local).parameters if each not in ("args", "kwargs")]
            assert list(remote.parameters) == names, name
    offered = {name for name in library.__all__ if inspect.isclass(getattr(library, name))}
    missing = offered - set(ours.__all__) - {"DataFilter"}
    assert not {name for name in missing if "Parser" not in name and "Registry" not in name}


def test_verbs_are_the_librarys():
    """The client's model has every public method of the local model, with the same arguments."""
    import inspect

    from twinkle.model.library.interface import TwinkleModel
    from twinkle_client.model import MultiLoraTransformersModel

    for name, method in inspect.getmembers(TwinkleModel, inspect.isfunction):
        if name.startswith("_") or name == "set_grad_scaler":  # every model refuses it
            continue
        given = inspect.signature(getattr(MultiLoraTransformersModel, name)).parameters
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in given.values())
        for parameter in inspect.signature(method).parameters:
            if parameter in ("kwargs", "options", "config_or_dir", "checkpoint_dir", "params", "token", "output_dir"):
                continue
            assert parameter in given or takes_any, f"{name}: {parameter}"


def test_every_verb_of_the_table_is_one_of_the_library_and_of_the_client():
    """The server calls the library method with the verb's name, so each verb must be a method of library and client."""
    import inspect
    from dataclasses import fields

    from twinkle.model.multi_lora.verbs import LoraVerbs
    from twinkle_client.model import MultiLoraTransformersModel
    from twinkle_client.protocol.verbs import VERBS

    for name, verb in VERBS.items():
        taken = inspect.signature(getattr(LoraVerbs, name)).parameters
        assert "adapter_name" in taken or name == "apply_patch", name  # apply_patch is refused by the server
        assert callable(getattr(MultiLoraTransformersModel, name)), name
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
        options = () if verb.options is None else fields(verb.options)
        assert takes_any or {option.name for option in options} <= taken.keys(), name


def test_tinker_is_optional(monkeypatch):
    monkeypatch.setattr(tinker_sdk, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="pip install"):
        twinkle_client.init_tinker_client()
