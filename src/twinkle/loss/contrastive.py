"""InfoNCE: trains an anchor's embedding to be nearer to its positive than to any negative.

Shapes: N texts, D width, Q anchors, P documents (positives and negatives). A batch is a list of groups. Each group is
an anchor, its positive, and any number of negatives; labels (N,) are 1 at each anchor and 0 elsewhere.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor

from twinkle.errors import InvalidInputError
from twinkle.loss.alignment import compute_dtype
from twinkle.loss.interface import Inputs, Loss, LossOutput, Outputs
from twinkle.loss.token_logps import zero_of

__all__ = ["InfonceLoss"]


@dataclass(frozen=True)
class Groups:
    """Row numbers of the anchors (Q,) and of all documents (P,) in a batch.

    ``positive`` (Q,) is the index of each anchor's positive among the documents. ``own`` (Q, P) is True where a
    document belongs to the anchor's group.
    """

    anchors: Tensor
    documents: Tensor
    positive: Tensor
    own: Tensor


def groups_of(labels: Tensor, hard_negatives: int | None = None) -> Groups:
    """Read the groups from ``labels``. At most the first ``hard_negatives`` negatives of each group are used."""
    flags = labels.reshape(-1).tolist()
    anchors = [row for row, flag in enumerate(flags) if flag == 1]
    if flags and (not anchors or anchors[0] != 0):
        if not anchors:
            return _no_groups(labels.device)
        raise InvalidInputError("labels", flags, "1 at each anchor, the first text among them")
    documents: list[int] = []
    positive: list[int] = []
    owner: list[int] = []
    for number, (start, end) in enumerate(zip(anchors, [*anchors[1:], len(flags)], strict=True)):
        if end - start < 2:
            raise InvalidInputError("labels", flags, f"a positive, that is a 0, after the anchor at {start}")
        rows = list(range(start + 1, end if hard_negatives is None else min(end, start + 2 + hard_negatives)))
        positive.append(len(documents))
        documents += rows
        owner += [number] * len(rows)
    device = labels.device
    own = torch.tensor(owner, device=device)[None, :] == torch.arange(len(anchors), device=device)[:, None]
    return Groups(
        torch.tensor(anchors, device=device),
        torch.tensor(documents, device=device),
        torch.tensor(positive, device=device),
        own,
    )


def embeddings_of(outputs: Outputs) -> Tensor:
    """Return outputs["embeddings"] (N, D) or, if missing, outputs["logits"]; of (N, T, D) the first token's row."""
    embeddings = outputs.get("embeddings")
    if embeddings is None:
        embeddings = outputs.get("logits")
    if embeddings is None:
        raise InvalidInputError("outputs", sorted(outputs), "must hold 'embeddings': run with task='embedding'")
    embeddings = embeddings[:, 0] if embeddings.dim() == 3 else embeddings
    return embeddings.to(compute_dtype(embeddings))


class InfonceLoss(Loss):
    """Cross entropy of an anchor's similarities (dot products) / temperature, with its positive as the target.

    Candidates are the documents of the anchor's group; with ``use_batch``, the documents of all groups, including those
    of the other processes of ``process_group`` if it is given. With ``use_batch``, ``include_qq`` adds the other
    anchors as negatives, and ``include_dd`` adds the similarities of the positive to all other documents.
    ``mask_fake_negative`` drops negatives that are more similar than the positive by more than ``fake_neg_margin``,
    because they are probably correct answers. ``hard_negatives`` limits how many negatives of each group are used.
    Without any anchor the loss is 0.

    With ``use_batch`` and a process group, every process returns the mean over the anchors of all processes. The
    gradient of a process reaches only its own embeddings, and is multiplied by the number of processes, because models
    average gradients over processes.
    """

    require_logps = False
    require_embeddings = True

    def __init__(
        self,
        temperature: float = 0.1,
        use_batch: bool = True,
        hard_negatives: int | None = None,
        mask_fake_negative: bool = False,
        fake_neg_margin: float = 0.1,
        include_qq: bool = False,
        include_dd: bool = False,
        process_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        for name, value in (("temperature", temperature), ("fake_neg_margin", fake_neg_margin)):
            if not (math.isfinite(value) and value > 0):
                raise InvalidInputError(name, value, "a finite number above 0")
        if hard_negatives is not None and hard_negatives < 0:
            raise InvalidInputError("hard_negatives", hard_negatives, "0 or more, or None for all")
        for name, wanted in (("include_qq", include_qq), ("include_dd", include_dd)):
            if wanted and not use_batch:
                raise InvalidInputError(name, wanted, "False without use_batch: it compares across groups")
        self.temperature = temperature
        self.use_batch = use_batch
        self.hard_negatives = hard_negatives
        self.mask_fake_negative = mask_fake_negative
        self.fake_neg_margin = fake_neg_margin
        self.include_qq = include_qq
        self.include_dd = include_dd
        self.process_group = process_group

    def __call__(self, inputs: Inputs, outputs: Outputs, **_: Any) -> LossOutput:
        if "labels" not in inputs:
            raise InvalidInputError("labels", None, "one for each text: 1 at an anchor, 0 at texts of its group")
        embeddings_ND, labels_N = embeddings_of(outputs), inputs["labels"].reshape(-1)
        if len(embeddings_ND) != len(labels_N):
            raise InvalidInputError(
                "labels", f"{len(labels_N)} texts", f"one for each of {len(embeddings_ND)} embeddings"
            )
        groups_of(labels_N)  # raise for wrong labels before the other processes wait for this one
        processes = 1
        if self.use_batch and self.process_group is not None:
            processes = torch.distributed.get_world_size(self.process_group)
            embeddings_ND, labels_N = _gathered(embeddings_ND, labels_N, self.process_group)
        groups = groups_of(labels_N, self.hard_negatives)
        if len(groups.anchors) == 0:
            return {"loss": zero_of(embeddings_ND), "num_tokens": 0}
        loss = self._mean_over_anchors(embeddings_ND, groups)
        return {"loss": loss * processes - (loss * (processes - 1)).detach(), "num_tokens": 0}

    def _mean_over_anchors(self, embeddings_ND: Tensor, groups: Groups) -> Tensor:
        anchors_QD, documents_PD = embeddings_ND[groups.anchors], embeddings_ND[groups.documents]
        similarity_QP = anchors_QD @ documents_PD.T
        excluded_QP = torch.zeros_like(groups.own) if self.use_batch else ~groups.own
        blocks, excluded = [similarity_QP], [excluded_QP]
        if self.include_qq:
            blocks.append(anchors_QD @ anchors_QD.T)
            excluded.append(torch.eye(len(anchors_QD), dtype=torch.bool, device=similarity_QP.device))
        if self.include_dd:
            blocks.append(documents_PD[groups.positive] @ documents_PD.T)
            excluded.append(F.one_hot(groups.positive, len(documents_PD)).bool())
        similarity, mask = torch.cat(blocks, dim=1), torch.cat(excluded, dim=1)
        if self.mask_fake_negative:
            positive_Q1 = similarity_QP.gather(1, groups.positive[:, None])
            mask = mask | (similarity.detach() > positive_Q1.detach() + self.fake_neg_margin)
        logits = (similarity / self.temperature).masked_fill(mask, -math.inf)
        return F.cross_entropy(logits, groups.positive)


def _no_groups(device: torch.device) -> Groups:
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return Groups(nothing, nothing, nothing, torch.zeros((0, 0), dtype=torch.bool, device=device))


def _gathered(
    embeddings_ND: Tensor, labels_N: Tensor, process_group: torch.distributed.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return embeddings and labels of all processes, by rank. Only this process's own embeddings have a gradient."""
    size, rank = torch.distributed.get_world_size(process_group), torch.distributed.get_rank(process_group)
    length = torch.tensor([len(labels_N)], device=embeddings_ND.device)
    lengths = [torch.zeros_like(length) for _ in range(size)]
    torch.distributed.all_gather(lengths, length, group=process_group)
    longest = int(torch.cat(lengths).max())
    padded = F.pad(embeddings_ND.detach(), (0, 0, 0, longest - len(embeddings_ND))).contiguous()
    flags = F.pad(labels_N.to(torch.int64), (0, longest - len(labels_N))).contiguous()
    all_embeddings = [torch.zeros_like(padded) for _ in range(size)]
    all_flags = [torch.zeros_like(flags) for _ in range(size)]
    torch.distributed.all_gather(all_embeddings, padded, group=process_group)
    torch.distributed.all_gather(all_flags, flags, group=process_group)
    parts = [part[: int(n)] for part, n in zip(all_embeddings, lengths, strict=True)]
    parts[rank] = embeddings_ND
    return torch.cat(parts), torch.cat([part[: int(n)] for part, n in zip(all_flags, lengths, strict=True)])
