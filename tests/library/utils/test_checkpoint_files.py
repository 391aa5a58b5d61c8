"""Tensors in safetensors files, read one by one and written as they come."""

import json

import pytest
import torch
from safetensors.torch import load_file

from twinkle.errors import InvalidInputError
from twinkle.utils import LazyTensor, SafetensorLazyLoader, StreamingSafetensorSaver, copy_files_by_pattern
from twinkle.utils import safetensors as files

TENSORS = {f"layer.{i}": torch.full((4,), float(i)) for i in range(5)}  # 16 bytes each


def written(folder, **options):
    saver = StreamingSafetensorSaver(folder, **options)
    for name, tensor in TENSORS.items():
        saver.add_tensor(name, tensor)
    saver.finalize()
    return sorted(path.name for path in folder.iterdir())


def read(folder, **options):
    with SafetensorLazyLoader(folder, **options) as loader:
        return {name: lazy.load().tolist() for name, lazy in loader.get_state_dict().items()}


EXPECTED = {name: tensor.tolist() for name, tensor in TENSORS.items()}


def test_a_small_model_is_one_file(tmp_path):
    assert written(tmp_path) == ["model.safetensors"]
    assert read(tmp_path) == EXPECTED


def test_an_adapter_is_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_BYTES_OF_GB", 1)
    assert written(tmp_path, is_peft_format=True) == ["adapter_model.safetensors"]
    assert read(tmp_path, is_peft_format=True) == EXPECTED


def test_a_large_model_is_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_BYTES_OF_GB", 16)
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert written(tmp_path, max_shard_size="2.5GB") == [*names, "model.safetensors.index.json"]  # 40 bytes: two each
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 80}
    assert index["weight_map"] == {f"layer.{i}": names[i // 2] for i in range(5)}
    assert set(load_file(tmp_path / names[2])) == {"layer.4"}
    assert read(tmp_path) == EXPECTED


def test_tensors_are_copied(tmp_path):
    """Views of one tensor, which safetensors refuses, and tensors that the model changes afterwards."""
    saver = StreamingSafetensorSaver(tmp_path)
    both = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    saver.add_tensor("a", both)
    saver.add_tensor("b", both.T)
    both += 1
    saver.finalize()
    assert read(tmp_path) == {"a": [[1.0, 2.0], [3.0, 4.0]], "b": [[1.0, 3.0], [2.0, 4.0]]}


@pytest.mark.parametrize(
    ("rank", "save_rank", "writes"), [("0", "last", False), ("1", "last", True), ("0", "master", True)]
)
def test_one_rank_writes(tmp_path, monkeypatch, rank, save_rank, writes):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert bool(written(tmp_path, save_rank=save_rank)) == writes


def test_mistakes(tmp_path):
    for size in ("5", "GB", "5MB", "-1GB", "0GB"):
        with pytest.raises(InvalidInputError, match="max_shard_size: got"):
            StreamingSafetensorSaver(tmp_path, max_shard_size=size)
    with pytest.raises(InvalidInputError, match="save_rank: got 'first'"):
        StreamingSafetensorSaver(tmp_path, save_rank="first")
    saver = StreamingSafetensorSaver(tmp_path)
    saver.add_tensor("a", torch.ones(1))
    with pytest.raises(InvalidInputError, match="name: got 'a'"):
        saver.add_tensor("a", torch.ones(1))
    with pytest.raises(InvalidInputError, match=r"a directory with model\.safetensors"):
        SafetensorLazyLoader(tmp_path).get_state_dict()
    with pytest.raises(InvalidInputError, match="exactly one of tensor and loader"):
        LazyTensor()


def test_a_lazy_tensor_is_read_each_time():
    made = iter((torch.ones(1), torch.zeros(1)))
    lazy = LazyTensor(loader=lambda: next(made))
    assert (lazy.load().item(), lazy.load().item()) == (1.0, 0.0)
    kept = torch.ones(2)
    assert LazyTensor(kept).load() is kept


def test_files_are_copied_by_pattern(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    target.mkdir()
    (source / "folder.json").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json", "model.safetensors"):
        (source / name).write_text("new")
    (target / "config.json").write_text("old")
    copy_files_by_pattern(source, target, ["*.json", "*.txt"], exclude_patterns="*.index.json")
    assert {path.name: path.read_text() for path in target.iterdir()} == {"config.json": "old", "tokenizer.json": "new"}
