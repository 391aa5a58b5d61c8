"""Import paths of the documents: those that work, and those whose error says what to use instead."""

import importlib
import subprocess
import sys

import pytest

import twinkle
from tests.support.paths import ROOT


def assert_explained(module: str, *words: str) -> None:
    """Check that importing an internal module of the existing library says why it is not here."""
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(module)
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value)) > len(f"No module named '{module}'"), "it gives a reason"


def old_path(module: str) -> object:
    """Import a path of the documents, which names its successor in a warning."""
    sys.modules.pop(module, None)
    with pytest.warns(DeprecationWarning, match=module.replace(".", r"\.")):
        return importlib.import_module(module)


def test_row_54_server_common() -> None:
    from twinkle.server.common import datum_to_input_feature, input_feature_to_datum

    assert importlib.import_module("twinkle.server.common.datum").input_feature_to_datum is input_feature_to_datum
    assert callable(datum_to_input_feature)


def test_row_55_server_gateway() -> None:
    """The package has other contents; asking for the builder says what starts all applications."""
    with pytest.raises(ImportError, match=r"twinkle\.server\.launch_server starts all"):
        from twinkle.server.gateway import build_server_app  # noqa: F401


def test_row_56_server_model() -> None:
    assert_explained("twinkle.server.model", "twinkle.server")


def test_row_58_server_processor() -> None:
    assert_explained("twinkle.server.processor", "twinkle.server")


def test_row_59_server_sampler() -> None:
    assert_explained("twinkle.server.sampler", "twinkle.server")


def test_row_63_task_queue() -> None:
    assert_explained("twinkle.server.utils.task_queue")


def test_row_71_server_state_proxy() -> None:
    assert_explained("twinkle.server.utils.state")
    with pytest.raises(ImportError, match="the server's state is a database"):
        from twinkle.server.state import ServerStateProxy  # noqa: F401


def test_row_72_checkpoint_base() -> None:
    assert_explained("twinkle.server.common.checkpoint_base", "twinkle_client.TwinkleClient lists runs and checkpoints")


def test_row_75_ray_helper() -> None:
    assert_explained("twinkle.infra._ray.ray_helper")


def test_row_76_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    from twinkle.hub import HubOperation

    assert old_path("twinkle.hub.hub").HubOperation is HubOperation  # type: ignore[attr-defined]


def test_row_77_flake8() -> None:
    """The rules of style are in pyproject.toml, and ``make check`` applies them."""
    assert not (ROOT / "setup.cfg").exists()
    assert "[tool.ruff.lint]" in (ROOT / "pyproject.toml").read_text()


def test_row_85_utils() -> None:
    from twinkle import Platform

    assert old_path("twinkle.utils.platform").Platform is Platform  # type: ignore[attr-defined]
    assert old_path("twinkle.utils.framework")


def test_row_86_multi_lora() -> None:
    from twinkle.model import MultiLoraTransformersModel

    module = old_path("twinkle.model.multi_lora_transformers")
    assert module.MultiLoraTransformersModel is MultiLoraTransformersModel  # type: ignore[attr-defined]


def test_row_87_vllm_sampler() -> None:
    from twinkle.sampler import vLLMSampler

    assert old_path("twinkle.sampler.vllm_sampler").vLLMSampler is vLLMSampler  # type: ignore[attr-defined]


def test_row_88_server_twinkle() -> None:
    """A newer document removed this package."""
    assert_explained("twinkle.server.twinkle")


def test_row_89_lazy_api() -> None:
    """``import twinkle`` loads no torch, and its packages are there when they are used."""
    program = "import sys, twinkle; assert 'torch' not in sys.modules; print(twinkle.infra.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["twinkle.infra"]
    assert not hasattr(twinkle, "_LazyModule")


def test_row_90_tests_of_infra() -> None:
    """Tests run with pytest; the drawing of a placement is tested in the library's own folder."""
    assert list((ROOT / "tests/library/infra").glob("test_*drawing*.py"))


def test_row_92_multi_adapter() -> None:
    """Adapters live in the Trainer's own stacks, beside a frozen model."""
    with pytest.raises(ImportError, match="the Trainer keeps adapters in its own store"):
        from twinkle.model import MultiAdapter  # noqa: F401


def test_row_93_fsdp_with_many_adapters() -> None:
    """The base model may be sharded: tests/model/parallel trains adapters on shards."""
    from twinkle.server.config import ServerConfig

    mesh = {"fsdp_size": 2, "device_type": "cpu"}
    args = {"model_id": "org/model", "backend": "transformers", "nproc_per_node": 2, "device_mesh": mesh}
    applications = [
        {"name": "server", "import_path": "server"},
        {"name": "model", "import_path": "model", "args": args},
    ]
    config = ServerConfig.model_validate({"runtime": "ray", "applications": applications})
    assert config.applications[1].args.processes == 2


def test_row_94_poetry() -> None:
    """pip installs the extras that poetry's groups named."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {"transformers", "ray"} <= project["project"]["optional-dependencies"].keys()
    assert "poetry" not in project.get("tool", {})


def test_row_96_model_application() -> None:
    """The server's model is a Trainer, which the library's MultiLoraTransformersModel drives too."""
    from twinkle import Trainer
    from twinkle.model import MultiLoraTransformersModel

    model = MultiLoraTransformersModel(model_id="random://llama-tiny", device="cpu", mixed_precision="fp32")
    assert isinstance(model.trainer, Trainer)


def test_row_97_vllm_engine() -> None:
    assert_explained("twinkle.sampler.vllm_engine")
    assert_explained("twinkle.patch.vllm_lora_weights")


def test_row_98_determinism(monkeypatch: pytest.MonkeyPatch) -> None:
    """Determinism sets torch's flags and leaves the variables of the process alone."""
    import os

    import torch

    before = dict(os.environ)
    try:
        twinkle.initialize(mode="local", seed=1, full_determinism=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert dict(os.environ) == before
    finally:
        torch.use_deterministic_algorithms(False)
        twinkle.shutdown()


def test_row_99_sampler_on_trajectories() -> None:
    """Samplers take trajectories and a template. They need no processor: the engine makes its own batches."""
    from twinkle.sampler import LocalSampler, vLLMSampler

    for sampler in (LocalSampler, vLLMSampler):
        assert callable(sampler.set_template)
        assert callable(sampler.sample)
        assert not hasattr(sampler, "set_processor")
