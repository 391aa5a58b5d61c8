"""The cookbook's scripts in two processes, under torchrun and on Ray, compute the same as in one process."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cookbook.modes.script_program import PICTURES, SETTINGS, WITHOUT_RAY
from twinkle import exists

SCRIPTS = list(SETTINGS)
# Scripts in which the same rows go into the same sums, however processes share them; and the files that they save.
WEIGHTS = {
    "sft_lora": ["sft_lora/adapter_model"],
    "sft_full": ["sft_full/model"],
    "multi_lora": ["multi_lora_identity/adapter_model", "multi_lora_pirate/adapter_model"],
    "fsdp2": ["fsdp2/adapter_model"],
    "sp_fsdp_dense": ["sp_fsdp_dense/adapter_model"],
}
STEPS = 3  # 48 rows, 16 a step; the pirate adapter has fewer rows and takes two steps


@pytest.fixture(scope="session")
def alone(run_scripts) -> Path:
    return run_scripts("local", *SCRIPTS)


@pytest.fixture(scope="session")
def torchrun(run_scripts) -> Path:
    return run_scripts("torchrun", *SCRIPTS)


@pytest.fixture(scope="session")
def ray(run_scripts) -> Path:
    if not exists("ray"):
        pytest.skip("Ray is not installed; `make test-ray` does that")
    return run_scripts("ray", *SCRIPTS)


def curve(folder: Path, name: str):
    return json.loads((folder / f"{name}.json").read_text())


def assert_same(one: Path, other: Path, name: str) -> None:
    """Compare losses, which are rounded to four digits, and weights.

    Adam magnifies differences in the order of sums.
    """
    steps = 2 if name == "multi_lora" else STEPS
    losses, expected = curve(one, name), curve(other, name)
    assert len(losses) == len(expected) == steps
    for loss, value in zip(losses, expected, strict=True):
        assert loss == pytest.approx(value, abs=1.5e-4)
    assert losses[0] != losses[-1]
    for file in WEIGHTS[name]:
        found, wanted = (load_file(folder / f"{file}.safetensors") for folder in (one, other))
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            assert (found[key] - tensor).norm() <= 1e-4 * tensor.norm(), key


def assert_runs(folder: Path) -> None:
    """Check scripts whose samples or means depend on how processes share the work.

    They run and write as many numbers as in one process.
    """
    preferences = curve(folder, "dpo")
    assert [len(preferences["train"]), len(preferences["held_out"])] == [2, 1]
    assert preferences["held_out"][0][0] > 0  # the margin of held-out pairs
    rewards = curve(folder, "grpo")
    # one value for each step; a random model is never correct
    assert rewards == {"reward": [0.0, 0.0], "accuracy": [0.0, 0.0]}


@pytest.mark.parallel
@pytest.mark.parametrize("name", WEIGHTS)
def test_torchrun_is_one_process(torchrun, alone, name):
    assert_same(torchrun, alone, name)


@pytest.mark.parallel
@pytest.mark.parametrize("script", ["fsdp2", "sp_fsdp_dense"])
def test_losses_and_gradients_of_two_processes(run_for_gradients, script):
    """The model has fewer key/value heads than processes, and neither rows nor query heads divide evenly."""
    arguments = ["--epochs", "1", "--batch-size", "6", "--precision", "fp32"]
    two, one = (run_for_gradients(way, f"transformers/{script}.py", *arguments) for way in ("torchrun", "local"))
    if script == "fsdp2":  # each of two processes has half of the rows, and returns their loss
        del two["losses"], one["losses"]
    else:
        assert len(two["losses"]) == len(one["losses"]) == 8
        assert two["losses"] == pytest.approx(one["losses"], rel=1e-5, abs=1e-5)
    for gradients, wanted in zip(two["gradients"], one["gradients"], strict=True):
        assert gradients.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parallel
def test_dpo_and_grpo_under_torchrun(torchrun):
    assert_runs(torchrun)


@pytest.mark.parallel
def test_the_other_recipes_of_reinforcement_learning_under_torchrun(run_scripts):
    folder = run_scripts("torchrun", *WITHOUT_RAY)
    for script in WITHOUT_RAY:
        curves = curve(folder, Path(script).stem)
        assert curves["reward"] == curves["accuracy"] == [0.0, 0.0]
    assert len(curve(folder, "ppo")["explained_variance"]) == 2


@pytest.mark.parallel
def test_pictures_on_a_model_in_two_shards(run_scripts):
    """Each process has half of the pictures of a batch, and a shard of the model."""
    two, one = (run_scripts(way, *PICTURES) for way in ("torchrun", "local"))
    found, expected = curve(two, "fsdp2"), curve(one, "fsdp2")
    assert len(expected["loss"]) == 4
    assert found["loss"] == pytest.approx(expected["loss"], abs=1.5e-4)
    assert found["accuracy"] == expected["accuracy"]
    saved, wanted = (load_file(folder / "mm_fsdp2/adapter_model.safetensors") for folder in (two, one))
    assert saved.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert (saved[key] - tensor).norm() <= 1e-4 * tensor.norm(), key


@pytest.mark.ray
@pytest.mark.parametrize("name", WEIGHTS)
def test_ray_is_one_process(ray, alone, name):
    assert_same(ray, alone, name)


@pytest.mark.ray
def test_dpo_and_grpo_on_ray(ray):
    assert_runs(ray)
