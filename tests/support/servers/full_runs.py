"""Training of all parameters through the SDK, and the same training in plain Transformers and torch."""

from pathlib import Path

import numpy as np
import tinker
import torch
from tinker import types
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.support.servers.serving import tinker_data
from twinkle import hub

ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6}
STEP = types.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-6)


def write_small_model(folder: Path) -> Path:
    """Write a Llama with random weights and the byte tokenizer, and return the folder."""
    shape = hub.resolve("random://llama-tiny").path
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(shape)
    config.update({"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(shape).save_pretrained(folder)
    return folder


class Plain:
    """The same training in plain Transformers and torch."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = torch.optim.Adam(self.model.parameters(), **ADAM)

    def logprobs(self, row: np.ndarray) -> torch.Tensor:
        logits_TV = self.model(torch.tensor(row[None, :-1])).logits[0]
        return logits_TV.log_softmax(-1).gather(-1, torch.tensor(row[1:])[:, None])[:, 0]

    def train(self, rows: list[np.ndarray]) -> float:
        loss = -sum(self.logprobs(row).sum() for row in rows)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def trained(training: tinker.TrainingClient, rows: list[np.ndarray]) -> float:
    passed, stepped = training.forward_backward(tinker_data(rows), "cross_entropy"), training.optim_step(STEP)
    stepped.result()
    return float(passed.result().metrics["loss:sum"])
