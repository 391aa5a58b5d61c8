"""The scripts with models of Megatron, each in two CPU processes: under torchrun, and on one Ray cluster.

The scripts for Ray construct vLLMSampler; they get the torch sampler under that name, and vLLM where it is installed.
"""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.dropin.support.hub_folder import EXPERTS, MODEL
from tests.dropin.support.local_runs import RATE, LocalRun, run_local
from tests.dropin.support.megatron_checks import MEGATRON_CHECKS
from tests.dropin.support.plain_models import ADAPTER, PlainAdapter, Steps, base_model, batch_logps, cross_entropy
from tests.dropin.support.plain_rows import batches, encoded
from tests.dropin.support.ray_runs import MEGATRON, MEGATRON_WITH_SAMPLER, run_on_ray
from twinkle.preprocessor import SelfCognitionProcessor

pytestmark = pytest.mark.megatron


def _hub(model_folder: Path) -> Path:
    return model_folder.parents[2]


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    if find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed; `make test-megatron` does that")


@pytest.fixture(scope="module")
def torch_runs(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LocalRun]:
    return run_on_ray(MEGATRON, tmp_path_factory.mktemp("torch"), _hub(model_folder), "torch")


@pytest.fixture(scope="module")
def vllm_runs(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LocalRun]:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed beside megatron-core")
    scripts = {name: MEGATRON[name] for name in MEGATRON_WITH_SAMPLER}
    return run_on_ray(scripts, tmp_path_factory.mktemp("vllm"), _hub(model_folder), "vllm")


def _check_training(run: LocalRun, plain: PlainAdapter, template: str) -> None:
    """Train the same adapter with PEFT on the same rows; evaluations and losses are equal."""
    processor = SelfCognitionProcessor("twinkle model", "ModelScope team")
    rows = encoded(plain.folder, "swift/self-cognition", processor, template=template)
    steps = Steps(plain, RATE, 0.01, 3)
    losses, evaluations = [], []
    for number, batch in enumerate(batches(rows, 24, 8), 1):
        loss = cross_entropy(plain.row_logps(batch))
        losses.append(float(loss.detach()))
        steps.take(loss)
        if number % 2 == 0:
            with torch.no_grad():
                evaluations.append(float(cross_entropy(plain.row_logps(rows[:8]))))
    assert run.losses == pytest.approx(losses, abs=1.5e-4)
    assert losses[-1] < losses[0] - 0.1
    shown = [float(value) for value in re.findall(r"Eval loss: ([\d.]+)", run.output)]
    assert sorted(set(shown)) == pytest.approx(evaluations, abs=1.5e-4)
    assert (run.folder / "output/checkpoint-2" / ADAPTER).exists()


def test_tp(model_folder: Path, tmp_path: Path) -> None:
    run = run_local("tp", tmp_path, _hub(model_folder))
    plain = PlainAdapter(model_folder, run.folder / "initial")
    _check_training(run, plain, "Qwen3_5Template")
    plain.assert_saved(run.folder / "output/last-checkpoint" / ADAPTER, tolerance=RATE)
    state = json.loads((run.folder / "output/last-checkpoint/trainer_state.json").read_text())
    assert (state["cur_step"], state["consumed_train_samples"]) == (3, 24)


def test_tp_moe(model_folder: Path, tmp_path: Path) -> None:
    """Experts are frozen and divided between both processes; the last checkpoint is a whole model."""
    run = run_local("tp_moe", tmp_path, _hub(model_folder))
    plain = PlainAdapter(Path(str(model_folder).replace(MODEL, EXPERTS)), run.folder / "initial")
    _check_training(run, plain, "Template")
    assert not any("experts" in name for name in plain.trained)
    rows = encoded(plain.folder, "swift/self-cognition", SelfCognitionProcessor("twinkle", "team"), template="Template")
    with torch.no_grad():
        merged = torch.cat(batch_logps(base_model(run.folder / "output/last-checkpoint"), rows[:4]))
        torch.testing.assert_close(merged, torch.cat(plain.row_logps(rows[:4])), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", MEGATRON_CHECKS)
def test_ray_script(name: str, torch_runs: dict[str, LocalRun], model_folder: Path) -> None:
    assert torch_runs[name].calls, torch_runs[name].output[-5000:]
    MEGATRON_CHECKS[name](torch_runs[name], model_folder)


@pytest.mark.vllm
@pytest.mark.parametrize("name", MEGATRON_WITH_SAMPLER)
def test_ray_script_with_vllm(name: str, vllm_runs: dict[str, LocalRun], model_folder: Path) -> None:
    assert vllm_runs[name].calls, vllm_runs[name].output[-5000:]
    MEGATRON_CHECKS[name](vllm_runs[name], model_folder)
