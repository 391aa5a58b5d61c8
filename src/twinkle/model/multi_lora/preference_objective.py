"""DPO as the objective of a Trainer's request: answers in pairs, compared with a reference model's probabilities."""

from collections.abc import Sequence

import numpy as np
import torch

from twinkle.errors import NonFiniteError
from twinkle.loss import DPOLoss
from twinkle.loss.interface import IGNORE_INDEX
from twinkle.model.csr import dense
from twinkle.model.library.sequences import SequenceBatch
from twinkle.model.multi_lora.library_objective import LibraryObjective
from twinkle.model.types import Datum, FloatArray, IntArray, ObjectiveValue, Preference, TokenValues


class PreferenceObjective:
    """The library's DPO loss, a mean over pairs, with metrics of the rewards β·(log p − log p_ref)."""

    def __init__(self, data: Sequence[Datum], asked: Preference) -> None:
        """``data``: chosen and rejected answers in turn. Tokens with weight 0 do not count as part of an answer."""
        labels = [_labels(datum) for datum in data]
        rows = [
            {"input_ids": torch.from_numpy(datum.tokens.copy()), "labels": torch.from_numpy(own)}
            for datum, own in zip(data, labels, strict=True)
        ]
        batch = SequenceBatch(tuple(rows))
        reference = batch.padded([np.array(each, np.float32) for each in asked.ref_logps])
        loss = DPOLoss(beta=asked.beta, sft_weight=asked.sft_weight)
        self._objective = LibraryObjective(loss, batch, {"ref_logps": reference})
        self._masks = [own != IGNORE_INDEX for own in labels]
        self._asked = asked

    def __call__(self, values: Sequence[TokenValues]) -> ObjectiveValue:
        value = self._objective(values)
        rewards = self._rewards([each.logprobs for each in values])
        chosen, rejected = rewards[0::2], rewards[1::2]
        metrics = {
            "loss:mean": value.loss,
            "rewards/chosen:mean": float(chosen.mean()),
            "rewards/rejected:mean": float(rejected.mean()),
            "rewards/margins:mean": float((chosen - rejected).mean()),
            "rewards/accuracies:mean": float((chosen > rejected).mean()),
        }
        return ObjectiveValue(value.loss, value.logprobs, metrics=metrics)

    def _rewards(self, logprobs: Sequence[FloatArray]) -> FloatArray:
        """Return the reward of each answer, (B,)."""
        parts = zip(logprobs, self._asked.ref_logps, self._masks, strict=True)
        sums = [lp[mask].sum(dtype=np.float64) - ref[mask].sum(dtype=np.float64) for lp, ref, mask in parts]
        with np.errstate(over="ignore"):
            rewards = (self._asked.beta * np.array(sums)).astype(np.float32)
        if not np.isfinite(rewards).all():
            raise NonFiniteError("the rewards β·(log p − log p_ref) hold NaN or infinity: no gradient was kept")
        return rewards


def _labels(datum: Datum) -> IntArray:
    targets = dense(datum.targets)
    if datum.weights is None:
        return targets.copy()  # torch needs an array that is writable
    return np.where(dense(datum.weights) == 0, IGNORE_INDEX, targets)
