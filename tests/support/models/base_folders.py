"""Folders with tiny base models: one whose head is tied to its input embeddings, and one whose head is not."""

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.support.models.tiny_models import tiny_config
from twinkle.hub import resolve

VOCAB = 300  # the byte tokenizer of random:// models has 261 tokens
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def write_base_folder(folder: Path, *, tied: bool) -> Path:
    """Write config, random weights in float32 and a byte tokenizer, and return the folder."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(tiny_config("LlamaConfig", vocab_size=VOCAB, tie_word_embeddings=tied))
    model.save_pretrained(folder)
    for name in _TOKENIZER:
        source = resolve("random://llama-tiny").path / name
        if source.exists():
            shutil.copyfile(source, folder / name)
    return folder
