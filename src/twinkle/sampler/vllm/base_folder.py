"""The folder of the base model as vLLM reads it. This module does not import vLLM."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from twinkle import hub
from twinkle.errors import UnsupportedError
from twinkle.model.decoder.base_weights import as_in_files, named_constants, named_weights
from twinkle.model.trainer.trainer import Trainer

_FILE_BYTES = 2**30  # weights in one file
_SPARE_BYTES = 2**28
_LAYER = re.compile(r".*?\.\d+\.")  # what the names of a layer's weights begin with


def require_served(trainer: Trainer, *, adapters: bool) -> None:
    """Raise UnsupportedError for a model that vLLM does not serve here. ``adapters``: whether it has to apply any."""
    if trainer.architecture.family == "gpt_oss":
        _require_gpt_oss(trainer, adapters=adapters)
    if adapters and trainer.device.type == "cuda" and trainer.dtype == torch.float32:
        raise UnsupportedError(
            "dtype: got fp32 for sampler_type vllm on a GPU, allowed: bf16; vLLM's kernels for LoRA compute in 16 bits"
        )


def _require_gpt_oss(trainer: Trainer, *, adapters: bool) -> None:
    if trainer.device.type == "cpu":
        raise UnsupportedError(
            "sampler_type: got 'vllm' for gpt_oss on a CPU, allowed: 'torch'; vLLM's attention sinks need a GPU"
        )
    config = json.loads((hub.resolve(trainer.model_id).path / "config.json").read_text())
    if adapters and (config.get("quantization_config") or {}).get("quant_method") == "mxfp4":
        raise UnsupportedError(
            "model_id: got a checkpoint of gpt_oss in mxfp4, allowed: one in bf16; vLLM has no LoRA on mxfp4 weights. "
            "Use sampler_type torch, or a copy of the model in bf16"
        )


@contextmanager
def base_folder(trainer: Trainer, directory: Path) -> Iterator[Path]:
    """Yield a folder with the trainer's base model as vLLM reads it.

    A model with random weights exists only in memory. The trainer's own weights are written, because a CPU and a GPU,
    or two versions of torch, draw different numbers from one seed. They are in ``directory``, or in the system's
    temporary directory if that has too little room, and are removed at the end. The folder stays in ``directory``:
    vLLM reads the processor of images from it when the first image comes.
    """
    local = hub.resolve(trainer.model_id)
    if local.random_seed is None:
        yield local.path
        return
    parameters = {name: parameter.detach() for name, parameter in named_weights(trainer.base).items()}
    weights = parameters | named_constants(trainer.base)
    size = sum(tensor.nbytes for tensor in weights.values())
    fits = shutil.disk_usage(directory).free > size + _SPARE_BYTES
    folder = directory / "base"
    shutil.copytree(local.path, folder)
    with tempfile.TemporaryDirectory(prefix="base-weights-", dir=directory if fits else None) as name:
        written = Path(name)
        write_weights(trainer.base, weights, written)
        links = [folder / file.name for file in written.iterdir()]
        for link in links:
            link.symlink_to(written / link.name)
        try:
            yield folder
        finally:
            for link in links:
                link.unlink()


def write_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write the weights in files of about 1 GiB, and the index that says which file has which.

    A layer is in one file: what is one tensor in a checkpoint may be several in memory.
    """
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights.items():
        found = _LAYER.match(name)
        layers.setdefault(found.group() if found else name, {})[name] = tensor
    files: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for layer in layers.values():
        more = sum(tensor.nbytes for tensor in layer.values())
        if files[-1] and size + more > _FILE_BYTES:
            files.append({})
            size = 0
        files[-1] |= layer
        size += more
    places: dict[str, str] = {}
    for number, tensors in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        written = {name: tensor.cpu().contiguous() for name, tensor in as_in_files(model, tensors).items()}
        save_file(written, folder / file, {"format": "pt"})
        places |= dict.fromkeys(written, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
