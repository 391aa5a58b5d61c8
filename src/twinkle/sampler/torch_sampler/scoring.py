"""Scoring of a prompt's rows in chunks of the head, so that the logits of all rows are never in memory together.

Shapes: S scored rows, C rows of a chunk, H hidden features, V vocabulary, K targets a row, D draws a row, k likeliest
tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinkle.model.decoder.head import ChunkedHead
from twinkle.model.decoder.lora.segments import BoundLora
from twinkle.model.types import FloatArray, IntArray
from twinkle.sampler.torch_sampler.drawing import divisor, pick, rows_at_once
from twinkle.sampler.types import DrawnTokens, TopLogprobs

_Number = TypeVar("_Number", np.int64, np.float64)
# Five tensors: log-probabilities of the targets; the likeliest tokens and their log-probabilities; the drawn tokens and
# their log-probabilities.
_Columns = list[Tensor]


@dataclass(frozen=True)
class Scoring:
    """The scores to compute for S rows of a piece, from row ``first`` on.

    These are the log-probabilities of ``targets`` (S, K), −1 where there is none; the ``top`` likeliest tokens; and one
    token drawn at ``temperature`` for each of the uniform numbers (S, D). All log-probabilities are raw: temperature 1.
    """

    first: int
    targets: IntArray
    top: int
    temperature: float
    uniforms: NDArray[np.float64]

    @property
    def only_targets(self) -> bool:
        return self.top == 0 and self.uniforms.shape[1] == 0


@dataclass(frozen=True)
class Scores:
    """The scores of S rows: logprobs (S, K), 0 where there was no target; top (S, k); drawn (S, D)."""

    logprobs: FloatArray
    top: TopLogprobs
    drawn: DrawnTokens


def score_rows(
    head: ChunkedHead, hidden_SH: Tensor, lora: Sequence[BoundLora], wanted: Sequence[Scoring], choices: int
) -> list[Scores]:
    """Score the hidden states of ``wanted``, whose rows follow one another. Return one result for each entry.

    choices: token ids from this one on are neither drawn nor reported among the likeliest.
    """
    targets_SK = torch.from_numpy(_stacked([each.targets for each in wanted], -1)).to(hidden_SH.device)
    if all(each.only_targets for each in wanted):
        logprobs_SK = head.logprobs(hidden_SH, targets_SK.clamp(min=0), lora)
        nothing = torch.empty(len(hidden_SH), 0)
        columns = [logprobs_SK, nothing, nothing, nothing, nothing]
    else:
        top = max(each.top for each in wanted)
        uniform_SD = torch.from_numpy(_stacked([each.uniforms for each in wanted], 0.5)).to(hidden_SH.device)
        divisors = [divisor(each.temperature) for each in wanted for _ in each.targets]
        divisor_S1 = torch.tensor(divisors, device=hidden_SH.device)[:, None]
        at_once = rows_at_once(head.chunk_rows, choices, uniform_SD.shape[1])
        chunks: list[_Columns] = []
        for rows, logits_CV in head.logits(hidden_SH, lora):
            logprobs_CV = logits_CV.log_softmax(1)
            likeliest = logprobs_CV[:, :choices].topk(top, sorted=True)
            drawn_CD = _draw(logprobs_CV[:, :choices], divisor_S1[rows], uniform_SD[rows], at_once)
            columns = [logprobs_CV.gather(1, targets_SK[rows].clamp(min=0)), likeliest.indices, likeliest.values]
            chunks.append([*columns, drawn_CD, logprobs_CV.gather(1, drawn_CD)])
        columns = [torch.cat(parts) for parts in zip(*chunks, strict=True)]
    return _by_scoring(wanted, [column.cpu() for column in columns])


def _draw(logprobs_CV: Tensor, divisor_C1: Tensor, uniform_CD: Tensor, at_once: int) -> Tensor:
    """Draw tokens (C, D), ``at_once`` rows at a time to bound the memory."""
    if uniform_CD.shape[1] == 0:
        return torch.empty(uniform_CD.shape, dtype=torch.long, device=uniform_CD.device)
    drawn = []
    for rows in torch.arange(len(logprobs_CV)).split(at_once):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        shifted = logprobs_CV[part] - logprobs_CV[part].amax(1, keepdim=True)
        drawn.append(pick(shifted.div_(divisor_C1[part]).exp_(), uniform_CD[part]))
    return torch.cat(drawn)


def _stacked(arrays: Sequence[NDArray[_Number]], empty: float) -> NDArray[_Number]:
    """Stack arrays below one another, padded with ``empty`` to the widest."""
    widest = max(array.shape[1] for array in arrays)
    return np.concatenate(
        [np.pad(array, ((0, 0), (0, widest - array.shape[1])), constant_values=empty) for array in arrays]
    )


def _by_scoring(wanted: Sequence[Scoring], columns: _Columns) -> list[Scores]:
    results, start = [], 0
    for each in wanted:
        rows = slice(start, start + len(each.targets))
        logprobs, top_ids, top_logprobs, tokens, token_logprobs = (column[rows].numpy() for column in columns)
        count, draws = each.targets.shape[1], each.uniforms.shape[1]
        results.append(
            Scores(
                np.where(each.targets < 0, np.float32(0), logprobs[:, :count]),
                TopLogprobs(top_ids[:, : each.top], top_logprobs[:, : each.top]),
                DrawnTokens(tokens[:, :draws], token_logprobs[:, :draws]),
            )
        )
        start = rows.stop
    return results
