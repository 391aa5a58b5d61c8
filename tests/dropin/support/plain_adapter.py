"""Plain computations to compare with the scripts: Transformers and PEFT, and the losses' formulas in torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

IGNORE = -100
Rows = Sequence[dict[str, Any]]


def base_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class PlainAdapter:
    """A PEFT adapter with the weights of a checkpoint, trained by torch alone."""

    def __init__(self, base: Path, checkpoint: Path) -> None:
        self.model = peft.PeftModel.from_pretrained(base_model(base), checkpoint, is_trainable=True)
        self.parameters = [each for each in self.model.parameters() if each.requires_grad]

    def row_logps(self, rows: Rows) -> list[Tensor]:
        """Return log p(label) of each position whose label counts, for each row."""
        return batch_logps(self.model, rows)

    def clip(self, norm: float | None) -> float:
        """Clip the gradient and return its norm from before."""
        limit = float("inf") if norm is None else norm
        return float(torch.nn.utils.clip_grad_norm_(self.parameters, limit))


def batch_logps(model: Any, rows: Rows) -> list[Tensor]:
    """Return log p(label) of each position whose label counts, in one batch padded on the right.

    Labels are shifted already.
    """
    ids = pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    mask = pad_sequence([torch.ones(len(row["input_ids"])) for row in rows], batch_first=True)
    labels = pad_sequence([torch.tensor(row["labels"]) for row in rows], batch_first=True, padding_value=IGNORE)
    logits = model(input_ids=ids, attention_mask=mask).logits.float()
    every = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return [row[wanted != IGNORE] for row, wanted in zip(every, labels, strict=True)]


def counted(row: dict[str, Any], values: Sequence[float]) -> Tensor:
    """Return a row's values at the positions whose label counts; the row of values may be padded."""
    labels = torch.tensor(row["labels"])
    return torch.tensor(values)[: len(labels)][labels != IGNORE]


def cross_entropy(rows: Sequence[Tensor]) -> Tensor:
    """Return the mean over all tokens."""
    return -torch.cat(list(rows)).mean()


def dpo(rows: Sequence[Tensor], reference: Sequence[Tensor], beta: float, sft_weight: float) -> tuple[Tensor, Tensor]:
    """Return the sigmoid DPO loss with its SFT part, and the mean margin. Chosen and rejected rows alternate."""
    sums, base = (torch.stack([row.sum() for row in each]) for each in (rows, reference))
    margins = beta * ((sums - base)[0::2] - (sums - base)[1::2])
    chosen = torch.cat(list(rows[0::2]))
    return -F.logsigmoid(margins).mean() - sft_weight * chosen.mean(), margins.mean()


def grpo(rows: Sequence[Tensor], old: Sequence[Tensor], advantages: Sequence[float], epsilon: float) -> Tensor:
    """Return the clipped surrogate: the mean over the tokens of a row, then over rows."""
    losses = []
    for row, before, advantage in zip(rows, old, advantages, strict=True):
        ratio = (row - before).exp()
        losses.append(-torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage).mean())
    return torch.stack(losses).mean()


def infonce(embeddings: Tensor, temperature: float) -> Tensor:
    """Return the cross entropy of anchors among all documents. Rows alternate: anchor, its positive."""
    anchors, documents = embeddings[0::2], embeddings[1::2]
    return F.cross_entropy(anchors @ documents.T / temperature, torch.arange(len(anchors)))


def embeddings(model: Any, rows: Rows) -> Tensor:
    """Return the last token's hidden state of each row, of length 1."""
    last = []
    for row in rows:
        hidden = model(input_ids=torch.tensor(row["input_ids"])[None], output_hidden_states=True).hidden_states[-1]
        last.append(hidden[0, -1])
    return F.normalize(torch.stack(last), dim=-1)
