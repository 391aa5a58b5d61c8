"""The folder of the base model as vLLM reads it. This module does not import vLLM."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from twinkle import hub
from twinkle.model.decoder.loading import load_model


@contextmanager
def base_folder(model_id: str, dtype: torch.dtype, device: torch.device, directory: Path) -> Iterator[Path]:
    """Yield a folder with the base model as vLLM reads it.

    A model with random weights exists only in memory: it is written into ``directory``, and removed at the end. Its
    weights are drawn on ``device``, the trainer's, because a CPU and a GPU draw different numbers from one seed.
    """
    local = hub.resolve(model_id)
    if local.random_seed is None:
        yield local.path
        return
    written = directory / "base"
    load_model(local, dtype, device).save_pretrained(written)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the engine's process needs the memory of this copy
    try:
        yield written
    finally:
        for path in written.iterdir():
            path.unlink()
        written.rmdir()
