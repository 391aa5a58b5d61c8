"""All parameters of a model trained on one GPU: in one process, and divided over two that share the GPU (gloo).

Pipeline stages on one GPU cannot send each other tensors by gloo: there is no test of pipelines here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.megatron.full_programs import train
from tests.model.megatron.test_full_on_meshes import make_windows
from tests.model.megatron.trainer_programs import make_model
from tests.model.parallel.process_pool import ProcessPool

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

GPU = "cuda:0"
SHARED: Mapping[str, Any] = {"dp_size": 2, "share_optimizer": True}


def relative_error(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """Return the relative error of all tensors together."""
    left, right = (np.concatenate([each[name].ravel() for name in theirs]) for each in (ours, theirs))
    return float(np.linalg.norm(left - right) / np.linalg.norm(right))


@pytest.mark.parametrize("sizes", [{"dp_size": 1}, {"tp_size": 2}, SHARED], ids=["one process", "tp2", "dp2 shared"])
def test_all_parameters_on_one_gpu(two: ProcessPool, tmp_path: Path, sizes: Mapping[str, Any]) -> None:
    model = make_model("wide")
    model.save_pretrained(tmp_path)
    windows = make_windows(model)

    def run(mesh: Mapping[str, Any], dtype: str) -> dict[str, Any]:
        args = (tmp_path, mesh, windows, dtype, None, GPU)
        processes = mesh.get("tp_size", 1) * mesh.get("dp_size", 1)
        return train(*args) if processes == 1 else two.run(train, *args)[0]

    exact, rounded = run({}, "fp32"), run({}, "bf16")
    for kind in ("gradients", "weights"):
        assert relative_error(run(sizes, "fp32")[kind][0], exact[kind][0]) < 1e-4
        theirs = relative_error(rounded[kind][0], exact[kind][0])
        assert relative_error(run(sizes, "bf16")[kind][0], exact[kind][0]) < 2 * theirs + 0.01
