"""Metrics of DPO: log-probabilities, implicit rewards, and how often the chosen answer has the higher reward."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed

from twinkle.loss.alignment import TokenValues, align_to_mask, labels_of
from twinkle.loss.interface import IGNORE_INDEX
from twinkle.loss.preference import ReferenceArguments, pairs_of
from twinkle.metric.interface import Inputs, Metric, Outputs

__all__ = ["DPOMetric"]


class DPOMetric(Metric):
    """Means over pairs of the log-probabilities of chosen and rejected answers.

    With a reference, given by the keywords of :class:`~twinkle.loss.DPOLoss`, also of the rewards β·(log-probability
    minus the reference's).
    """

    call_arguments: ClassVar[tuple[str, ...]] = ("ref_chosen_logps", "ref_logps", "ref_outputs", "ref_rejected_logps")

    def __init__(
        self,
        device_mesh: object | None = None,
        process_group: torch.distributed.ProcessGroup | None = None,
        ignore_index: int = IGNORE_INDEX,
        beta: float = 0.1,
    ) -> None:
        self.ignore_index = ignore_index
        self.beta = beta
        super().__init__(device_mesh, process_group)

    def reset(self) -> None:
        self._pairs: list[tuple[float, float]] = []  # chosen and rejected
        # chosen and rejected, then the reference's chosen and rejected
        self._with_reference: list[tuple[float, float, float, float]] = []

    def accumulate(
        self,
        inputs: Inputs,
        outputs: Outputs,
        *,
        ref_outputs: Mapping[str, Any] | None = None,
        ref_logps: TokenValues | None = None,
        ref_chosen_logps: Any = None,
        ref_rejected_logps: Any = None,
        **_: Any,
    ) -> None:
        if outputs.get("logps") is None:
            return
        mask_BT = labels_of(inputs) != self.ignore_index
        pairs = pairs_of(align_to_mask("logps", outputs["logps"], mask_BT, torch.float32), mask_BT)
        chosen, rejected = pairs.chosen.tolist(), pairs.rejected.tolist()
        self._pairs += zip(chosen, rejected, strict=True)
        given = ReferenceArguments(ref_outputs, ref_logps, ref_chosen_logps, ref_rejected_logps)
        reference = given.sums(mask_BT, torch.float32)
        if reference is not None:
            columns = (chosen, rejected, reference[0].tolist(), reference[1].tolist())
            self._with_reference += zip(*columns, strict=True)

    def calculate(self) -> dict[str, str]:
        pairs = self.gather_results(self._pairs)
        compared = self.gather_results(self._with_reference)
        self.reset()
        result: dict[str, str] = {}
        if pairs:
            result["logps/chosen"] = f"{_mean([chosen for chosen, _ in pairs]):.2f}"
            result["logps/rejected"] = f"{_mean([rejected for _, rejected in pairs]):.2f}"
        if compared:
            result |= self._reward_texts(compared)
        return result

    def _reward_texts(self, compared: list[tuple[float, float, float, float]]) -> dict[str, str]:
        chosen = [self.beta * (policy - reference) for policy, _, reference, _ in compared]
        rejected = [self.beta * (policy - reference) for _, policy, _, reference in compared]
        margins = [high - low for high, low in zip(chosen, rejected, strict=True)]
        return {
            "logps/ref_chosen": f"{_mean([row[2] for row in compared]):.2f}",
            "logps/ref_rejected": f"{_mean([row[3] for row in compared]):.2f}",
            "rewards/chosen": f"{_mean(chosen):.4f}",
            "rewards/rejected": f"{_mean(rejected):.4f}",
            "rewards/margins": f"{_mean(margins):.4f}",
            "rewards/accuracies": f"{100 * _mean([float(margin > 0) for margin in margins]):.1f}%",
        }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
