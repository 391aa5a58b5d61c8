"""Programs that compute the output head with its vocabulary divided over all ranks, or whole in one process."""

from dataclasses import dataclass, replace

import torch
import torch.distributed
from torch import Tensor

from tests.model.parallel.lora_programs import rank_and_size
from twinkle.model.decoder.head import ChunkedHead, HeadQuery, HeadSpec
from twinkle.model.decoder.lora.grouped import Groups
from twinkle.model.decoder.lora.segments import BoundLora, Segment
from twinkle.model.megatron.head import VocabParallelHead
from twinkle.model.parallel import ProcessRanks

ROWS, HIDDEN = 23, 16
PADDING = 3.0  # the numbers of padded rows: if they were not masked, results would be wrong


@dataclass(frozen=True)
class HeadCase:
    """One call of a head. ``padded_as_tokens`` is wrong on purpose: padding counts as tokens."""

    vocabulary: int
    width: int = 1
    lora: bool = True
    shaped: bool = False  # bias, scale and soft cap
    statistics: bool = False
    tempered: bool = False
    logits: bool = False
    chunk_rows: int = 7
    nan_row: int | None = None
    padded_as_tokens: bool = False


@dataclass(frozen=True)
class HeadNumbers:
    """``scored``, ``values``: without and with gradients. ``da``, ``db``: of head LoRA, whole.

    ``padding``: the gradient of the padding of B.
    """

    scored: Tensor
    values: Tensor
    dhidden: Tensor
    da: list[Tensor]
    db: list[Tensor]
    padding: list[Tensor]
    logits: Tensor


def run_heads(cases: list[HeadCase]) -> list[HeadNumbers]:
    return [run_head(case) for case in cases]


@torch.no_grad()
def run_head(case: HeadCase) -> HeadNumbers:
    generator = torch.Generator().manual_seed(case.vocabulary)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rank, size = rank_and_size()
    own_rows = -(-case.vocabulary // size)
    start = min(rank * own_rows, case.vocabulary)
    real = min(own_rows, case.vocabulary - start)

    def own(whole_V: Tensor, padding: float) -> Tensor:
        part = torch.full((own_rows, *whole_V.shape[1:]), padding)
        part[:real] = whole_V[start : start + real]
        return part

    weight_VH, bias_V = normal(case.vocabulary, HIDDEN) * 0.7, normal(case.vocabulary)
    hidden_TH = normal(ROWS, HIDDEN)
    targets_TK = torch.randint(0, case.vocabulary, (ROWS, case.width), generator=generator)
    segments = [(2, (1, 9)), (14, (4, 3, 2))] if case.lora else []
    factors = [(normal(len(sizes), 8, HIDDEN), normal(len(sizes), case.vocabulary, 8) * 0.2) for _, sizes in segments]
    count = case.width + (2 if case.statistics else 0) + (case.vocabulary if case.logits else 0)
    slopes_TM = normal(ROWS, count)
    sharpness_T1 = normal(ROWS, 1).abs() + 0.3
    if case.nan_row is not None:
        hidden_TH[case.nan_row] = float("nan")
    lora = []
    for (first, sizes), (a_GRI, b_GVR) in zip(segments, factors, strict=True):
        b_GOR = torch.stack([own(b_VR, 0.0) for b_VR in b_GVR])
        segment = Segment(first, first + sum(sizes), Groups(sizes))
        lora.append(BoundLora(segment, a_GRI, b_GOR, torch.zeros_like(a_GRI), torch.zeros_like(b_GOR)))
    spec = HeadSpec(own(weight_VH, PADDING))
    if case.shaped:
        spec = replace(spec, bias_V=own(bias_V, PADDING), scale=0.7, softcap=5.0)
    head = ChunkedHead(spec, case.chunk_rows)
    if size > 1:
        world = torch.distributed.group.WORLD
        assert world is not None
        vocabulary = own_rows * size if case.padded_as_tokens else case.vocabulary
        head = VocabParallelHead(spec, case.chunk_rows, ProcessRanks(world), vocabulary)
    query = HeadQuery(case.statistics, sharpness_T1 if case.tempered else None, case.logits)

    def coefficients(first: int, stop: int, values_CM: Tensor) -> Tensor:
        return slopes_TM[first:stop] * (1 + values_CM.clamp(-20, 20).sigmoid())

    scored_TM = head.logprobs(hidden_TH, targets_TK, lora, query)
    values_TM, dhidden_TH = head.logprobs_and_gradient(hidden_TH, targets_TK, coefficients, lora, query)
    logits_TV = torch.cat([logits_CV for _, logits_CV in head.logits(hidden_TH, lora)])
    da, db = [_summed(part.da_GRI) for part in lora], [_joined(part.db_GOR) for part in lora]
    padding = [each[:, case.vocabulary :] for each in db]
    db = [each[:, : case.vocabulary] for each in db]
    return HeadNumbers(scored_TM, values_TM, dhidden_TH, da, db, padding, logits_TV)


def _summed(part: Tensor | None) -> Tensor:
    """Return the gradient of a whole factor: every rank has a part of the sum."""
    assert part is not None
    if rank_and_size()[1] > 1:
        torch.distributed.all_reduce(part)
    return part


def _joined(part_GOR: Tensor | None) -> Tensor:
    """Return the gradient of a factor whose rows are divided over the ranks, with its padding."""
    assert part_GOR is not None
    _, size = rank_and_size()
    parts = [part_GOR]
    if size > 1:
        parts = [torch.empty_like(part_GOR) for _ in range(size)]
        torch.distributed.all_gather(parts, part_GOR)
    return torch.cat(parts, 1)
