"""The largest memory of a process over a while, as Linux counts it, and a model that is large enough to see it."""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from twinkle import hub

BUCKET_MB = 8
# glibc keeps freed blocks below a limit, which it raises to the size of a freed one, and may not find a place for the
# next among them. With a fixed limit they go back to the kernel, so what is measured is what is held.
RETURNING_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}


class PeakMemory:
    """Measures how far the resident memory of a process rises above what it is at the time of construction.

    Two kinds of pages are not counted. Those that it shares with others, such as those of Ray's object store, stay
    resident once they were read, even when the store uses them for something else. Those of files, such as the code of
    libraries, are the kernel's cache: it drops them and reads them again at any time.
    """

    _NOT_COUNTED = ("RssShmem", "RssFile")

    def __init__(self, pid: int | None = None) -> None:
        self._folder = Path("/proc") / str(os.getpid() if pid is None else pid)
        (self._folder / "clear_refs").write_text("5")  # the peak becomes the present size
        self._before, self._apart = self._mib("VmRSS"), self._not_counted()

    def above(self) -> float:
        """Return the rise in MiB so far."""
        return self._mib("VmHWM") - self._before - (self._not_counted() - self._apart)

    def _not_counted(self) -> float:
        return sum(map(self._mib, self._NOT_COUNTED))

    def _mib(self, field: str) -> float:
        lines = (self._folder / "status").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith(f"{field}:")]
        return int(line.split()[1]) / 1024


@contextmanager
def measured(rises: list[float]) -> Iterator[None]:
    """Append the rise of this process's memory during the block, in MiB."""
    # Memory that is free already must not be freed, or used again, during the block.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    peak = PeakMemory()
    yield
    rises.append(peak.above())


def save_100_mib(folder: Path) -> str:
    """Write a model of about 100 MiB in fp32 to a folder. Its embeddings are larger than a bucket."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = LlamaForCausalLM(config)
    assert 98 < sum(each.nbytes for each in model.parameters()) / 2**20 < 110
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(hub.resolve("random://llama-tiny").path).save_pretrained(folder)
    return str(folder)
