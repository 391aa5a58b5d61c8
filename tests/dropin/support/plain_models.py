"""Plain computations to compare with the scripts: Transformers and PEFT, and the losses' formulas in torch."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

IGNORE = -100
# The files of a checkpoint: of an adapter, and of a model whose parameters are all trained.
ADAPTER = "adapter_model.safetensors"
FULL = "model.safetensors"
Rows = Sequence[dict[str, Any]]


def base_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class PlainModel:
    """A model whose parameters are all trained, by torch alone."""

    def __init__(self, base: Path) -> None:
        self.folder = base
        self.model: Any = base_model(base)

    @property
    def trained(self) -> dict[str, Tensor]:
        """Return the trained parameters by the names that they have in a checkpoint."""
        named = self.model.named_parameters()
        return {name.replace(".default.", "."): value for name, value in named if value.requires_grad}

    @property
    def parameters(self) -> list[Tensor]:
        return list(self.trained.values())

    def row_logps(self, rows: Rows) -> list[Tensor]:
        """Return log p(label) of each position whose label counts, for each row."""
        return batch_logps(self.model, rows)

    def clip(self, norm: float | None) -> float:
        """Clip the gradient and return its norm from before."""
        limit = float("inf") if norm is None else norm
        return float(torch.nn.utils.clip_grad_norm_(self.parameters, limit))

    def assert_saved(self, file: Path, tolerance: float = 1e-4) -> None:
        """Compare with the weights in a file. Adam magnifies differences in the order of sums."""
        saved, trained = load_file(file), self.trained
        assert saved.keys() == trained.keys()
        for name, value in trained.items():
            assert (saved[name] - value.detach()).norm() <= tolerance * value.norm(), name


class PlainAdapter(PlainModel):
    """A PEFT adapter with the weights of a checkpoint, trained by torch alone."""

    def __init__(self, base: Path, checkpoint: Path) -> None:
        self.folder = base
        self.model = peft.PeftModel.from_pretrained(base_model(base), checkpoint, is_trainable=True)


class PlainCritic(PlainModel):
    """A model with a linear head of one output, which begins with zeros, in the place of its own head."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        head = torch.nn.Linear(self.model.config.hidden_size, 1)
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
        self.model.lm_head = head

    def row_values(self, rows: Rows) -> list[Tensor]:
        """Return the values at the positions whose label counts, for each row."""
        ids, mask, labels = padded_rows(rows)
        values = self.model(input_ids=ids, attention_mask=mask).logits[..., 0].float()
        return [row[wanted != IGNORE] for row, wanted in zip(values, labels, strict=True)]


class Steps:
    """AdamW with a cosine schedule, for a plain model."""

    def __init__(self, plain: PlainModel, rate: float, weight_decay: float, steps: int, last: float = 0.0) -> None:
        self._plain = plain
        decayed = [value for name, value in plain.trained.items() if not re.search(r"norm|bias", name)]
        others = [value for name, value in plain.trained.items() if re.search(r"norm|bias", name)]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=weight_decay)
        self._schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, T_max=steps, eta_min=last)

    def take(self, loss: Tensor) -> None:
        loss.backward()
        self._plain.clip(1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._schedule.step()


def padded_rows(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, attention mask and labels, padded on the right."""
    ids = pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    mask = pad_sequence([torch.ones(len(row["input_ids"])) for row in rows], batch_first=True)
    labels = pad_sequence([torch.tensor(row["labels"]) for row in rows], batch_first=True, padding_value=IGNORE)
    return ids, mask, labels


def batch_logps(model: Any, rows: Rows) -> list[Tensor]:
    """Return log p(label) of each position whose label counts, in one batch padded on the right.

    Labels are shifted already.
    """
    ids, mask, labels = padded_rows(rows)
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


def ppo(rows: Sequence[Tensor], old: Sequence[Tensor], advantages: Sequence[Tensor], epsilon: float) -> Tensor:
    """Return the clipped surrogate with an advantage for each token: the mean over all tokens."""
    ratio, advantage = (torch.cat(list(rows)) - torch.cat(list(old))).exp(), torch.cat(list(advantages))
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage).mean()


def value_loss(rows: Sequence[Tensor], old: Sequence[Tensor], returns: Sequence[Tensor], epsilon: float) -> Tensor:
    """Return half the larger squared error of the values and of the clipped values: the mean over all tokens."""
    value, before, wanted = (torch.cat(list(each)) for each in (rows, old, returns))
    clipped = before + (value - before).clamp(-epsilon, epsilon)
    return 0.5 * torch.maximum((value - wanted) ** 2, (clipped - wanted) ** 2).mean()


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lambda_: float) -> Tensor:
    """Return a row's advantages by the definition: A_t = Σ_k (γλ)^k δ_{t+k}, with δ_t = r_t + γ V_{t+1} − V_t."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * later - value for r, value, later in zip(rewards, values, after, strict=True)]
    sums = [sum((gamma * lambda_) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]
    return torch.tensor(sums)


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
