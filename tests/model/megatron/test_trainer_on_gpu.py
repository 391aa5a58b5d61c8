"""The same tenants on one GPU: in one process, and cut over two processes that share the GPU (gloo).

Two processes on one GPU can exchange tensors by gloo's collectives, but pipeline stages cannot send them: there is no
test of pipelines on a GPU here.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.megatron import trainer_programs
from tests.model.megatron.trainer_programs import train
from tests.model.parallel.process_pool import ProcessPool

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

GPU = "cuda:0"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[trainer_programs.Request]]]:
    """Returns the folder of a model and the requests of its tenants."""
    folder, model = tmp_path_factory.mktemp("wide"), trainer_programs.make_model("wide")
    model.save_pretrained(folder)
    return folder, trainer_programs.make_calls(model, "wide")


def run(pool: ProcessPool, wide: tuple[Path, Any], sizes: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Train on a GPU. Without sizes: with the trainer of Transformers."""
    folder, calls = wide
    if sizes.get("tp_size", 1) == 1:
        return train(folder, "wide", sizes, calls, 60, None, GPU, dtype)
    return pool.on({"tp_size": 2}).run(train, folder, "wide", sizes, calls, 60, None, GPU, dtype)[0]


def gradient_errors(ours: dict[str, Any], exact: dict[str, Any]) -> dict[str, float]:
    """Return for each tenant the relative error of its first gradient, all tensors together."""
    errors = {}
    for name, wanted in exact["gradients"][1].items():
        left = np.concatenate([ours["gradients"][1][name][key].ravel() for key in wanted])
        right = np.concatenate([array.ravel() for array in wanted.values()])
        errors[name] = float(np.linalg.norm(left - right) / np.linalg.norm(right))
    return errors


@pytest.mark.parametrize("sizes", [{"dp_size": 1}, {"tp_size": 2}], ids=["one process", "tp2"])
def test_eight_tenants_on_one_gpu(two: ProcessPool, wide: tuple[Path, Any], sizes: dict[str, Any]) -> None:
    exact = run(two, wide, {}, "fp32")
    assert max(gradient_errors(run(two, wide, sizes, "fp32"), exact).values()) < 1e-4
    rounded, ours = run(two, wide, {}, "bf16"), run(two, wide, sizes, "bf16")
    theirs = gradient_errors(rounded, exact)
    for name, error in gradient_errors(ours, exact).items():
        assert error < 2 * theirs[name] + 0.01, f"{name}: {error} where one process has {theirs[name]}"
    for key, loss in exact["losses"].items():
        assert abs(ours["losses"][key] - loss) < 0.03 * max(1.0, abs(loss)), key
