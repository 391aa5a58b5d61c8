"""A folder with the base model as vLLM reads it: config and safetensors.

Most models have one. Made-up models have their weights nowhere but in the trainer, which made them from a seed; for
these a folder is written and removed as soon as vLLM is up.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from twinkle import hub
from twinkle.model.decoder.loading import load_model


@contextmanager
def base_folder(model_id: str, dtype: torch.dtype, directory: Path) -> Iterator[Path]:
    """The folder, for as long as the context lasts; one that has to be written goes into ``directory``."""
    local = hub.resolve(model_id)
    if local.random_seed is None:
        yield local.path
        return
    written = directory / "base"
    load_model(local, dtype, torch.device("cpu")).save_pretrained(written)
    try:
        yield written
    finally:
        for path in written.iterdir():
            path.unlink()
        written.rmdir()
