"""Safetensors files of many arrays."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import save_file

from twinkle.model.weights import tensor_files
from twinkle.model.weights.tensor_files import write_arrays, write_at_once


@pytest.mark.parametrize("most", [None, 1, 7, 100], ids=lambda most: f"{most or 'all'} bytes at once")
@pytest.mark.parametrize("buffers", [512, 3])
def test_arrays_are_written_as_safetensors_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int | None, buffers: int
) -> None:
    """Also if the operating system writes only a part of what it is given."""
    random = np.random.default_rng(0)
    arrays = {f"layer.{number}.ä": random.standard_normal((number, 3), np.float32) for number in range(12)}
    arrays["column"] = random.standard_normal((5, 8), np.float32)[:, :2]
    arrays["one"] = np.float32([1.5])
    system = os.writev

    def write_some(descriptor: int, parts: Sequence[memoryview]) -> int:
        assert len(parts) <= buffers
        if most is None:
            return system(descriptor, parts)
        whole = b"".join(parts)
        return os.write(descriptor, whole[:most])

    monkeypatch.setattr(tensor_files, "_MOST_BUFFERS", buffers)
    monkeypatch.setattr(os, "writev", write_some)
    write_arrays(tmp_path / "ours", arrays)
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    save_file(contiguous, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_tensors_are_written_as_safetensors_writes_them(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = {f"layer.{number}.ä": torch.randn(number, 3).to(dtype) for number in range(600)}
    tensors["turned"] = torch.randn(5, 8).to(dtype).T
    tensors["number"] = torch.tensor(1.5, dtype=dtype)
    write_at_once(tmp_path / "ours", dtype, tensors)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(contiguous, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
