"""The scripts for Ray, all on one cluster, with one CPU process for each device group.

They construct vLLMSampler. ``make test-ray`` runs them with the torch sampler under that name, ``make test-vllm-ray``
with vLLM.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.dropin.support.local_runs import LocalRun
from tests.dropin.support.ray_checks import CHECKS
from tests.dropin.support.ray_runs import TRANSFORMERS, WITH_SAMPLER, run_on_ray

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def torch_runs(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LocalRun]:
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed; `make test-ray` does that")
    return run_on_ray(TRANSFORMERS, tmp_path_factory.mktemp("torch"), model_folder.parents[2], "torch")


@pytest.fixture(scope="module")
def vllm_runs(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LocalRun]:
    if find_spec("ray") is None or find_spec("vllm") is None:
        pytest.skip("Ray or vLLM is not installed; `make test-vllm-ray` does that")
    scripts = {name: TRANSFORMERS[name] for name in WITH_SAMPLER}
    return run_on_ray(scripts, tmp_path_factory.mktemp("vllm"), model_folder.parents[2], "vllm")


@pytest.mark.parametrize("name", CHECKS)
def test_ray_script(name: str, torch_runs: dict[str, LocalRun], model_folder: Path) -> None:
    assert torch_runs[name].calls, torch_runs[name].output[-5000:]
    CHECKS[name](torch_runs[name], model_folder)


@pytest.mark.vllm
@pytest.mark.parametrize("name", WITH_SAMPLER)
def test_ray_script_with_vllm(name: str, vllm_runs: dict[str, LocalRun], model_folder: Path) -> None:
    assert vllm_runs[name].calls, vllm_runs[name].output[-5000:]
    CHECKS[name](vllm_runs[name], model_folder)
