"""The two losses of PPO: that of the policy, and that of the critic, which learns to predict returns.

Shapes: B sequences, T positions. m = (labels ≠ ignore_index), (B, T). A token outside m adds exactly 0 to loss and
gradient, whatever values it has.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.loss.alignment import TokenValues, align_to_mask
from twinkle.loss.interface import IGNORE_INDEX, Inputs, Loss, LossOutput, Outputs
from twinkle.loss.policy import EPSILON, GRPOLoss, checked_epsilon
from twinkle.loss.token_logps import label_mask, masked, required

__all__ = ["PPOLoss", "PPOValueLoss"]

_MODES = ("seq-mean-token-mean", "token-mean")


class PPOLoss(GRPOLoss):
    """GRPO's clipped terms and arguments, with an advantage for each token (:class:`twinkle.advantage.GAEAdvantage`).

    loss_agg_mode: how terms are averaged. "token-mean": over all tokens of the call. "seq-mean-token-mean": over the
    tokens of each sequence, then over sequences, as GRPO does. It is the first argument; ``epsilon`` is the second.
    """

    def __init__(
        self,
        loss_agg_mode: str = "token-mean",
        epsilon: float = EPSILON,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        ignore_index: int = IGNORE_INDEX,
        *,
        clip_range: float | None = None,
    ) -> None:
        given: object = loss_agg_mode
        if isinstance(given, int | float):  # epsilon is the first argument of the other losses
            allowed = f"one of {', '.join(_MODES)}; give the clipping range by its name: epsilon={loss_agg_mode}"
            raise InvalidInputError("loss_agg_mode", loss_agg_mode, allowed)
        if loss_agg_mode not in _MODES:
            raise UnknownNameError("loss_agg_mode", loss_agg_mode, _MODES)
        super().__init__(epsilon, epsilon_high, beta, entropy_coef, ignore_index, clip_range=clip_range)
        self.loss_agg_mode = loss_agg_mode

    def aggregate(self, per_token_BT: Tensor, mask_BT: Tensor) -> Tensor:
        if self.loss_agg_mode == "token-mean":
            return per_token_BT.sum() / mask_BT.sum().clamp(min=1)
        return super().aggregate(per_token_BT, mask_BT)


class PPOValueLoss(Loss):
    """Half the squared error of the critic's values V, clipped near ``old_values``, its values before the updates.

    For each token of m, with R = returns: Vc = old_values + clamp(V − old_values, −ε, ε), and the term is
    0.5·max((V − R)², (Vc − R)²). The loss is the mean of the terms over all tokens of the call.

    ``old_values`` and ``returns`` have the shapes that old_logps of GRPO may have. The loss needs a
    :class:`twinkle.model.TransformersValueModel`, whose output "values" has one value for each position.
    """

    require_logps = False
    require_values = True
    call_arguments: ClassVar[tuple[str, ...]] = ("old_values", "returns")

    def __init__(self, epsilon: float = EPSILON, ignore_index: int = IGNORE_INDEX) -> None:
        self.epsilon = checked_epsilon("epsilon", epsilon)
        self.ignore_index = ignore_index

    def __call__(
        self,
        inputs: Inputs,
        outputs: Outputs,
        *,
        old_values: TokenValues | None = None,
        returns: TokenValues | None = None,
        **_: Any,
    ) -> LossOutput:
        if old_values is None or returns is None:
            name = "old_values" if old_values is None else "returns"
            raise InvalidInputError(name, None, "one number for each label: PPOValueLoss needs old_values and returns")
        mask_BT = label_mask(inputs, self.ignore_index)
        values = required(outputs, "values")
        if values.shape == (*mask_BT.shape, 1):
            values = values.squeeze(-1)
        values_BT = masked(values, mask_BT)
        old_BT = align_to_mask("old_values", old_values, mask_BT, values_BT.dtype)
        returns_BT = align_to_mask("returns", returns, mask_BT, values_BT.dtype)
        clipped_BT = old_BT + (values_BT - old_BT).clamp(-self.epsilon, self.epsilon)
        error_BT = torch.maximum((values_BT - returns_BT).square(), (clipped_BT - returns_BT).square())
        per_token_BT = torch.where(mask_BT, 0.5 * error_BT, 0.0)
        return {"loss": per_token_BT.sum() / mask_BT.sum().clamp(min=1), "num_tokens": 0}
