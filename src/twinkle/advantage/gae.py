"""Generalized advantage estimation (GAE): an advantage for each token, from rewards and a critic's values.

Shapes: B completions, T positions.
"""

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from twinkle.advantage.group_relative import Advantage
from twinkle.errors import InvalidInputError

__all__ = ["GAEAdvantage"]

EPSILON = 1e-8  # added to the standard deviation, which is 0 if all advantages are equal

TokenNumbers = Tensor | Sequence[float] | Sequence[Sequence[float]]


class GAEAdvantage(Advantage):
    """GAE with the discount γ (``gamma``) and with λ (``gae_lambda``), both from 0 to 1.

    Over the valid positions of a row, one after another: δ_t = r_t + γ·V_{t+1} − V_t and A_t = δ_t + γλ·A_{t+1}. After
    the last valid position A is 0, and V is 0 or the row's entry in ``bootstrap_values``. The returns, which a critic
    learns to predict, are A + V.

    normalize: whiten the advantages, A := (A − mean) / (standard deviation + 1e-8), over all valid positions of one
    call. So call it once with all completions of a step: the advantages of several smaller calls would be whitened
    apart, and be other numbers. Returns are not whitened.
    """

    def __init__(self, gamma: float = 1.0, gae_lambda: float = 0.95, normalize: bool = True) -> None:
        for name, value in (("gamma", gamma), ("gae_lambda", gae_lambda)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise InvalidInputError(name, value, "a number from 0 to 1")
        if not isinstance(normalize, bool):
            raise InvalidInputError("normalize", normalize, "True or False")
        self.gamma = gamma
        self.gae_lambda = gae_lambda
        self.normalize = normalize

    @staticmethod
    def build_token_rewards(
        rewards: Tensor | Sequence[float],
        lengths: Tensor | Sequence[int],
        *,
        old_logps: Sequence[Sequence[float] | Tensor] | None = None,
        ref_logps: Sequence[Sequence[float] | Tensor] | None = None,
        kl_coef: float = 0.0,
    ) -> list[list[float]]:
        """Return a reward for each token, one row per completion.

        Each token costs kl_coef · (old_logp − ref_logp), if these are given; the last token gets the completion's
        reward in addition.

        lengths: the number of tokens of each completion. old_logps, ref_logps: a row of that length for each.
        """
        given = _floats("rewards", rewards)
        counts: Any = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        if isinstance(counts, str) or not hasattr(counts, "__len__"):
            raise InvalidInputError("lengths", lengths, "one integer for each reward")
        if len(counts) != len(given):
            raise InvalidInputError("lengths", f"{len(counts)} entries", f"one for each of the {len(given)} rewards")
        for index, count in enumerate(counts):
            if isinstance(count, bool) or not isinstance(count, Integral) or count <= 0:
                raise InvalidInputError(f"lengths[{index}]", count, "an integer ≥ 1")
        if (old_logps is None) != (ref_logps is None):
            missing = "ref_logps" if ref_logps is None else "old_logps"
            raise InvalidInputError(missing, None, "log-probabilities: old_logps and ref_logps go together")
        if not isinstance(kl_coef, int | float) or not math.isfinite(kl_coef):
            raise InvalidInputError("kl_coef", kl_coef, "a finite number")
        if old_logps is None or ref_logps is None:
            if kl_coef != 0:
                raise InvalidInputError("kl_coef", kl_coef, "0 without old_logps and ref_logps")
            rows = [[0.0] * count for count in counts]
        else:
            old, ref = _rows("old_logps", old_logps, counts), _rows("ref_logps", ref_logps, counts)
            pairs = zip(old, ref, strict=True)
            rows = [[-kl_coef * (o - r) for o, r in zip(*pair, strict=True)] for pair in pairs]
        for row, reward in zip(rows, given, strict=True):
            row[-1] += reward
        return rows

    def __call__(
        self,
        rewards: TokenNumbers,
        values: TokenNumbers,
        *,
        masks: Tensor | Sequence[Sequence[bool]] | None = None,
        normalize: bool | None = None,
        bootstrap_values: Tensor | Sequence[float] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return advantages and returns, both (B, T) in fp32 and 0 where ``masks`` is false.

        rewards, values: (B, T), or (T,) for one completion. masks: the valid positions, by default all.
        normalize: overrides the constructor's.
        bootstrap_values: (B,), the critic's value of the state after the last valid position. Give it for a completion
        that was cut at the maximum number of tokens, and 0 for one that ended by itself. By default 0 for all.
        """
        rewards_BT, values_BT = _table("rewards", rewards), _table("values", values)
        mask_BT = torch.ones_like(rewards_BT).bool() if masks is None else _mask(masks)
        for name, table in (("values", values_BT), ("masks", mask_BT)):
            if table.shape != rewards_BT.shape:
                allowed = f"the shape of rewards, {tuple(rewards_BT.shape)}"
                raise InvalidInputError(name, f"shape {tuple(table.shape)}", allowed)
        values_BT, mask_BT = values_BT.to(rewards_BT.device), mask_BT.to(rewards_BT.device)
        rewards_BT, values_BT = (torch.where(mask_BT, table, 0.0) for table in (rewards_BT, values_BT))
        next_value_B = _bootstrap(bootstrap_values, rewards_BT)
        for name, table in (("rewards", rewards_BT), ("values", values_BT), ("bootstrap_values", next_value_B)):
            if not bool(torch.isfinite(table).all()):
                raise InvalidInputError(name, "a number that is not finite", "finite numbers at all valid positions")
        advantages_BT = self._advantages(rewards_BT, values_BT, mask_BT, next_value_B)
        returns_BT = advantages_BT + values_BT
        if not bool(torch.isfinite(returns_BT).all()):
            raise InvalidInputError("rewards", "numbers whose sum overflows", "smaller numbers: returns are in fp32")
        if self.normalize if normalize is None else normalize:
            advantages_BT = _whitened(advantages_BT, mask_BT)
        return advantages_BT, returns_BT

    def _advantages(self, rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, next_value_B: Tensor) -> Tensor:
        """Run the recursion from the last position to the first. A masked position hands on what follows it."""
        next_advantage_B = torch.zeros_like(next_value_B)
        columns: list[Tensor] = []
        for t in reversed(range(rewards_BT.shape[1])):
            valid_B, value_B = mask_BT[:, t], values_BT[:, t]
            delta_B = rewards_BT[:, t] + self.gamma * next_value_B - value_B
            advantage_B = delta_B + self.gamma * self.gae_lambda * next_advantage_B
            columns.append(torch.where(valid_B, advantage_B, 0.0))
            next_advantage_B = torch.where(valid_B, advantage_B, next_advantage_B)
            next_value_B = torch.where(valid_B, value_B, next_value_B)
        return torch.stack(columns[::-1], 1) if columns else torch.zeros_like(rewards_BT)


def _whitened(advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    valid = advantages_BT[mask_BT]
    if len(valid) < 2:  # a single advantage has no deviation
        return advantages_BT
    whitened_BT = (advantages_BT - valid.mean()) / (valid.std(correction=0) + EPSILON)
    return torch.where(mask_BT, whitened_BT, 0.0)


def _bootstrap(values: Tensor | Sequence[float] | None, rewards_BT: Tensor) -> Tensor:
    if values is None:
        return rewards_BT.new_zeros(len(rewards_BT))
    allowed = f"one number for each of the {len(rewards_BT)} completions"
    try:
        values_B = torch.as_tensor(values, dtype=torch.float32, device=rewards_BT.device).detach()
    except (TypeError, ValueError):  # raised by torch for None and text
        raise InvalidInputError("bootstrap_values", values, allowed) from None
    if values_B.shape != rewards_BT.shape[:1]:
        raise InvalidInputError("bootstrap_values", f"shape {tuple(values_B.shape)}", allowed)
    return values_B


def _mask(masks: Any) -> Tensor:
    table = _table("masks", masks)
    if not bool(((table == 0) | (table == 1)).all()):
        raise InvalidInputError("masks", "a number other than 0 and 1", "1 or True at valid positions, else 0 or False")
    return table != 0


def _table(field: str, numbers: Any) -> Tensor:
    """Return a (B, T) tensor in fp32; one row gets a batch dimension."""
    try:
        table = torch.as_tensor(numbers, dtype=torch.float32)
    except (TypeError, ValueError):  # raised by torch for None, text and ragged rows
        allowed = "numbers of shape (completions, positions); pad shorter rows and mask the padding"
        raise InvalidInputError(field, numbers, allowed) from None
    table = table.detach()
    if table.dim() == 1:
        table = table[None]
    if table.dim() != 2:
        raise InvalidInputError(field, f"shape {tuple(table.shape)}", "(completions, positions) or (positions,)")
    return table


def _rows(field: str, rows: Sequence[Sequence[float] | Tensor], counts: Sequence[int]) -> list[list[float]]:
    given: object = rows
    if not hasattr(given, "__len__"):
        raise InvalidInputError(field, rows, f"one row for each of the {len(counts)} completions")
    if len(rows) != len(counts):
        raise InvalidInputError(field, f"{len(rows)} rows", f"one for each of the {len(counts)} completions")
    found = [_floats(f"{field}[{index}]", row) for index, row in enumerate(rows)]
    for index, (row, count) in enumerate(zip(found, counts, strict=True)):
        if len(row) != count:
            raise InvalidInputError(f"{field}[{index}]", f"{len(row)} values", f"{count}, as lengths[{index}] says")
    return found


def _floats(field: str, numbers: Tensor | Sequence[float]) -> list[float]:
    try:
        found = torch.as_tensor(numbers, dtype=torch.float64).tolist()
    except (TypeError, ValueError):
        found = None
    if not isinstance(found, list) or not all(isinstance(number, float) and math.isfinite(number) for number in found):
        raise InvalidInputError(field, numbers, "a row of finite numbers")
    return found
