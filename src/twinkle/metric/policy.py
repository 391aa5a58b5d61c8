"""Metrics of reinforcement learning: how far the policy is from the sampling policy, and how often ratios are clipped.

Shapes: B sequences, T positions. For each token with a label:

    d = clamp(lp − old_logps, −20, 20); r = exp(d); k = r − 1 − d, an estimate of KL(old ‖ new) that is never negative
"""

import heapq
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed
from torch import Tensor

from twinkle.errors import InvalidInputError
from twinkle.loss.alignment import TokenValues, align_to_mask, labels_of
from twinkle.loss.interface import IGNORE_INDEX
from twinkle.metric.interface import Inputs, Metric, Outputs

__all__ = ["CISPOMetric", "GRPOMetric", "GSPOMetric", "HighKLRecord", "PPOMetric"]

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, order=True)
class HighKLRecord:
    """One token with a large k (``kl``), and its log-probabilities under the new and the old policy."""

    kl: float
    token_id: int
    new_logp: float
    old_logp: float
    sequence: int  # index in its batch
    position: int


@dataclass
class PolicySums:
    """Sums and maxima over all accumulated tokens. Those of several processes are combined by ``+``."""

    n_tokens: int = 0
    sum_new: float = 0.0
    n_old: int = 0  # tokens with an old log-probability
    sum_old: float = 0.0
    sum_diff: float = 0.0
    sum_kl: float = 0.0
    max_kl: float = 0.0
    max_ratio: float = 0.0
    n_entropy: int = 0
    sum_entropy: float = 0.0
    n_clip: int = 0  # tokens (for GSPO: sequences) of batches with old_logps and advantages
    n_clip_low: int = 0
    n_clip_high: int = 0

    def __add__(self, other: "PolicySums") -> "PolicySums":
        values = {}
        for name, value in vars(self).items():
            combine = max if name.startswith("max_") else sum
            values[name] = combine((value, vars(other)[name]))
        return PolicySums(**values)


@dataclass(frozen=True)
class PolicyBatch:
    """Labels, mask, new and old log-probabilities of a batch, all (B, T)."""

    labels: Tensor
    mask: Tensor
    new: Tensor
    old: Tensor

    @property
    def log_ratio(self) -> Tensor:
        return (self.new - self.old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


class GRPOMetric(Metric):
    """Metrics of GRPO. All names begin with "train/".

    - With "logps" in the outputs: policy_confidence (exp of the mean lp), mean_new_logp.
    - With ``old_logps``: mean_old_logp, logp_diff_mean, approx_kl, token_kl_max, token_ratio_max.
    - If the outputs have "entropies", or "logits" (which are divided by ``temperature``): entropy.
    - With ``old_logps`` and ``advantages``: clip_ratio_low and clip_ratio_high, the shares of tokens without a gradient
      because r < 1 − ε and A < 0, or because r > 1 + ε_high and A > 0; clip_ratio is the sum of the two.

    With ``top_k_kl`` above 0, ``high_kl_records`` holds at most that many tokens of this process, those with the
    largest k, largest first.
    """

    call_arguments: ClassVar[tuple[str, ...]] = ("advantages", "old_logps")

    def __init__(
        self,
        device_mesh: object | None = None,
        process_group: torch.distributed.ProcessGroup | None = None,
        ignore_index: int = IGNORE_INDEX,
        temperature: float = 1.0,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        top_k_kl: int = 0,
    ) -> None:
        if not temperature > 0:
            raise InvalidInputError("temperature", temperature, "above 0")
        self.ignore_index = ignore_index
        self.temperature = temperature
        self.epsilon = epsilon
        self.epsilon_high = epsilon if epsilon_high is None else epsilon_high
        self.top_k_kl = top_k_kl
        super().__init__(device_mesh, process_group)

    def reset(self) -> None:
        self.sums = PolicySums()
        self.high_kl_records: list[HighKLRecord] = []

    @property
    def n_tokens(self) -> int:
        return self.sums.n_tokens

    def accumulate(
        self,
        inputs: Inputs,
        outputs: Outputs,
        *,
        old_logps: TokenValues | None = None,
        advantages: TokenValues | None = None,
        **_: Any,
    ) -> None:
        if outputs.get("logps") is None:
            return
        # Everything but logits is summed up on the host: on a GPU, each sum would wait for the device.
        labels_BT = labels_of(inputs).cpu()
        mask_BT = labels_BT != self.ignore_index
        new_BT = align_to_mask("logps", outputs["logps"], mask_BT, torch.float32)
        self.sums += PolicySums(n_tokens=int(mask_BT.sum()), sum_new=float(new_BT.sum()))
        self._add_entropy(outputs, mask_BT)
        if old_logps is None:
            return
        batch = PolicyBatch(labels_BT, mask_BT, new_BT, align_to_mask("old_logps", old_logps, mask_BT, torch.float32))
        self._add_distance(batch)
        if advantages is not None:
            self._add_clipping(batch, align_to_mask("advantages", advantages, mask_BT, torch.float32))

    def calculate(self) -> dict[str, float]:
        total = sum(self.gather_results([self.sums]), start=PolicySums())
        self.reset()
        if total.n_tokens == 0:
            return {}
        mean_new = total.sum_new / total.n_tokens
        result = {"policy_confidence": math.exp(mean_new), "mean_new_logp": mean_new}
        if total.n_old > 0:
            result["mean_old_logp"] = total.sum_old / total.n_old
            result["logp_diff_mean"] = total.sum_diff / total.n_old
            result["approx_kl"] = total.sum_kl / total.n_old
            result["token_kl_max"] = total.max_kl
            result["token_ratio_max"] = total.max_ratio
        if total.n_entropy > 0:
            result["entropy"] = total.sum_entropy / total.n_entropy
        if total.n_clip > 0:
            result["clip_ratio_low"] = total.n_clip_low / total.n_clip
            result["clip_ratio_high"] = total.n_clip_high / total.n_clip
            result["clip_ratio"] = (total.n_clip_low + total.n_clip_high) / total.n_clip
        return {f"train/{name}": value for name, value in result.items()}

    def clipped(self, batch: PolicyBatch, advantages_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return three masks of one shape: the items that count, those clipped below, and those clipped above."""
        ratio = torch.exp(batch.log_ratio)
        low = (ratio < 1 - self.epsilon) & (advantages_BT < 0)
        high = (ratio > 1 + self.epsilon_high) & (advantages_BT > 0)
        return batch.mask, low, high

    def _add_entropy(self, outputs: Outputs, mask_BT: Tensor) -> None:
        entropies = outputs.get("entropies")
        if entropies is not None:
            entropies_BT = align_to_mask("entropies", entropies, mask_BT, torch.float32)
        elif outputs.get("logits") is not None:
            logps_BTV = torch.log_softmax(
                torch.as_tensor(outputs["logits"]).detach().float() / self.temperature, dim=-1
            )
            entropies_BT = -(logps_BTV.exp() * logps_BTV).sum(-1).cpu()
        else:
            return
        self.sums += PolicySums(n_entropy=int(mask_BT.sum()), sum_entropy=float(entropies_BT[mask_BT].sum()))

    def _add_distance(self, batch: PolicyBatch) -> None:
        difference = batch.log_ratio[batch.mask]
        kl = torch.expm1(difference) - difference
        self.sums += PolicySums(
            n_old=len(difference),
            sum_old=float(batch.old.sum()),
            sum_diff=float(difference.sum()),
            sum_kl=float(kl.sum()),
            max_kl=float(kl.max()) if len(kl) > 0 else 0.0,
            max_ratio=float(difference.max().exp()) if len(kl) > 0 else 0.0,
        )
        if self.top_k_kl > 0 and len(kl) > 0:
            self._keep_highest(batch, kl)

    def _add_clipping(self, batch: PolicyBatch, advantages_BT: Tensor) -> None:
        counted, low, high = self.clipped(batch, advantages_BT)
        self.sums += PolicySums(
            n_clip=int(counted.sum()), n_clip_low=int((counted & low).sum()), n_clip_high=int((counted & high).sum())
        )

    def _keep_highest(self, batch: PolicyBatch, kl: Tensor) -> None:
        where = torch.nonzero(batch.mask)
        for index in kl.topk(min(self.top_k_kl, len(kl))).indices.tolist():
            row, column = where[index].tolist()
            at = (row, column)
            self.high_kl_records.append(
                HighKLRecord(
                    float(kl[index]), int(batch.labels[at]), float(batch.new[at]), float(batch.old[at]), row, column
                )
            )
        self.high_kl_records = heapq.nlargest(self.top_k_kl, self.high_kl_records)


class GSPOMetric(GRPOMetric):
    """GRPO's metrics, but clipping counts sequences: r is exp of the mean of lp − old_logps over a sequence's tokens.

    The mean is clamped to ±20. The sign of A matters as in GRPO; one token of the sequence with that sign is enough.
    """

    def clipped(self, batch: PolicyBatch, advantages_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens_B = batch.mask.sum(-1)
        difference_B = ((batch.new - batch.old) * batch.mask).sum(-1) / tokens_B.clamp(min=1)
        ratio_B = torch.exp(difference_B.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        low_B = (ratio_B < 1 - self.epsilon) & (advantages_BT < 0).any(-1)
        high_B = (ratio_B > 1 + self.epsilon_high) & (advantages_BT > 0).any(-1)
        return tokens_B > 0, low_B, high_B


class CISPOMetric(GRPOMetric):
    """GRPO's metrics, but a ratio outside the bounds counts as clipped whatever the sign of the advantage."""

    def clipped(self, batch: PolicyBatch, advantages_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ratio = torch.exp(batch.log_ratio)
        return batch.mask, ratio < 1 - self.epsilon, ratio > 1 + self.epsilon_high


class PPOMetric(GRPOMetric):
    """The metrics of a policy that is trained with PPO: the same as those of GRPO."""
