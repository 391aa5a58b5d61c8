"""Sequence parallelism (Ulysses): the ranks of a sequence group have the same rows, and each computes a slice of them.

The sequences of a batch form one packed row, and the row is cut into slices of equal length, one for each rank. What
works token by token (embeddings, norms, projections, feed-forward blocks, the head) runs on the slice. Attention needs
whole sequences, but its heads are independent: before it, an all-to-all gives each rank the whole row for some of the
heads, and after it another one gives the heads back to the slices. At the end the values of all tokens are gathered,
so every rank of the group computes the loss of the whole rows.

If the row does not divide, tokens are added at its end, as a sequence of their own: no other token sees them, and their
values are dropped before the loss.

The backward pass exchanges gradients the same way. Every rank starts it with the gradient of the values of its own
slice, so the gradients of weights are those of one slice: their sum over the ranks of the group is that of the rows.

Shapes: T tokens of the row, P the same with the added tokens, S tokens of a slice, H query heads, J key/value heads,
D head dimension, B sequences.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.model.decoder.architecture import TESTED_FAMILIES, fixed_rope_length, mixes_by_attention_alone
from twinkle.model.decoder.attention import Packing, packed_attention
from twinkle.model.library.sequences import SequenceBatch
from twinkle.model.parallel import Parallelism, Ranks

SLICED = "twinkle_sliced"

ADDED_TOKEN = 0  # any valid token id: nothing depends on it


@dataclass(frozen=True)
class RowSlice:
    """The slice of a packed row that this rank computes, and what it exchanges with the other ranks of its group."""

    ranks: Ranks
    packing: Packing  # of the row with the added tokens
    tokens: int  # T
    size: int  # S

    @classmethod
    def cut(cls, lengths: tuple[int, ...], ranks: Ranks, device: torch.device) -> "RowSlice":
        """Return this rank's slice of a row of sequences with the given lengths; the whole row for a group of one."""
        tokens = sum(lengths)
        size = -(-tokens // ranks.size)
        added = size * ranks.size - tokens
        return cls(ranks, Packing.from_lengths((*lengths, added) if added else lengths, device), tokens, size)

    @property
    def start(self) -> int:
        return self.ranks.number * self.size

    def positions(self) -> Tensor:
        """Return the positions (S,) of the slice's tokens in their sequences."""
        return self.take_slice(torch.cat([torch.arange(length) for length in self.packing.lengths]), 0)

    def take_slice(self, values_T: Tensor, added: int) -> Tensor:
        """Return the slice's part (S,) of a value per token; ``added`` is the value of added tokens."""
        part = values_T[self.start : self.start + self.size]
        return torch.cat([part, part.new_full((self.size - len(part),), added)])

    def gather(self, values_S: Tensor) -> Tensor:
        """Return the values (T, …) of all tokens of the row. All ranks of the group must call this."""
        if self.ranks.size == 1:
            return values_S
        gathered_P: Tensor = _Gathered.apply(values_S, self.ranks)
        return gathered_P[: self.tokens]

    def gather_tokens(self, values_S: Tensor, places_B: Tensor) -> Tensor:
        """Return the values (B, …) of the tokens with these numbers in the row. All ranks of the group must call this.

        Unlike ``gather(values)[places]``, no rank holds the values of all tokens.
        """
        if self.ranks.size == 1:
            return values_S[places_B]
        own_B = places_B - self.start
        is_own_B1 = ((own_B >= 0) & (own_B < self.size))[:, None]
        found: Tensor = _Sum.apply(values_S[own_B.clamp(0, self.size - 1)].where(is_own_B1, 0.0), self.ranks)
        return found


# --- attention --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Heads:
    """The heads that a rank computes: queries, and the keys and values that these need.

    ``expanded`` has, for each query head, the number of its key/value head; None if each of these serves the same
    number of query heads, as attention expects.
    """

    queries: slice
    keys: slice
    expanded: tuple[int, ...] | None

    @property
    def query_count(self) -> int:
        return self.queries.stop - self.queries.start

    @property
    def key_count(self) -> int:
        return self.keys.stop - self.keys.start


@functools.cache
def divide_heads(query_heads: int, key_heads: int, ranks: int) -> tuple[_Heads, ...]:
    """Divide query heads over ranks; the first ranks get one more each if they do not divide evenly.

    A key/value head goes to every rank that has one of its query heads, so it may go to several; in the backward pass
    its gradients from these are added up.
    """
    size, extra = divmod(query_heads, ranks)
    shared = query_heads // key_heads  # query heads of one key/value head
    divided, start = [], 0
    for rank in range(ranks):
        stop = start + size + (rank < extra)
        keys = slice(start // shared, (stop - 1) // shared + 1)
        numbers = tuple(head // shared - keys.start for head in range(start, stop))
        count = keys.stop - keys.start
        even = (stop - start) % count == 0 and numbers == tuple(
            number for number in range(count) for _ in range((stop - start) // count)
        )
        divided.append(_Heads(slice(start, stop), keys, None if even else numbers))
        start = stop
    return tuple(divided)


def sliced_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    row_slice: RowSlice | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # Transformers' name for attention sinks, (H,)
    **_transformers: object,  # other arguments that model families pass to attention functions
) -> tuple[Tensor, None]:
    """Compute attention over whole sequences: query (1, H, S, D), key and value (1, J, S, D) → (1, S, H, D)."""
    if row_slice is None:
        raise UnsupportedError(f"{type(module).__name__} with ulysses_size > 1 runs by the verbs of its model only")
    if query.dtype != value.dtype:  # under autocast, rotary embeddings leave queries and keys in fp32
        query, key = query.to(value.dtype), key.to(value.dtype)
    ranks, size = row_slice.ranks, row_slice.size
    heads = divide_heads(query.shape[1], key.shape[1], ranks.size)
    own = heads[ranks.number]

    # One message carries queries, keys and values. Heads are flattened to columns: (S, columns) for each rank.
    q_SHD, k_SJD, v_SJD = (x[0].transpose(0, 1) for x in (query, key, value))
    parts = [_columns(q_SHD[:, each.queries], k_SJD[:, each.keys], v_SJD[:, each.keys]) for each in heads]
    received = _exchange(parts, [size * parts[ranks.number].shape[1]] * ranks.size, ranks)
    widths = (own.query_count * q_SHD.shape[2], own.key_count * k_SJD.shape[2], own.key_count * v_SJD.shape[2])
    columns = torch.cat(received).view(ranks.size * size, sum(widths)).split(widths, 1)
    counts = (own.query_count, own.key_count, own.key_count)
    whole_q, whole_k, whole_v = (
        each.unflatten(1, (count, -1)).transpose(0, 1)[None] for each, count in zip(columns, counts, strict=True)
    )
    if own.expanded is not None:
        numbers = torch.tensor(own.expanded, device=query.device)
        whole_k, whole_v = whole_k.index_select(1, numbers), whole_v.index_select(1, numbers)

    out_1PHD, _ = packed_attention(
        module,
        whole_q,
        whole_k,
        whole_v,
        attention_mask,
        packing=row_slice.packing,
        scaling=scaling,
        dropout=dropout,
        sliding_window=sliding_window,
        softcap=softcap,
        s_aux=None if s_aux is None else s_aux[own.queries],
    )
    width = out_1PHD.shape[-1]
    back = _exchange(list(out_1PHD[0].split(size)), [size * each.query_count * width for each in heads], ranks)
    return torch.cat([each.view(size, -1, width) for each in back], 1)[None], None


def _columns(*tensors_SHD: Tensor) -> Tensor:
    return torch.cat([each.flatten(1) for each in tensors_SHD], 1)


def _exchange(parts: Sequence[Tensor], received: Sequence[int], ranks: Ranks) -> tuple[Tensor, ...]:
    """Send part r to rank r, and return what each rank sent here, flattened; ``received``: how many numbers these are.

    All ranks of the group must call this.
    """
    flat = torch.cat([part.reshape(-1) for part in parts])
    got: Tensor = _Exchanged.apply(flat, [part.numel() for part in parts], list(received), ranks)
    return got.split(list(received))


def register() -> None:
    """Register ``attn_implementation="twinkle_sliced"`` with transformers, which builds no mask for unknown names."""
    AttentionInterface.register(SLICED, sliced_attention)


# --- messages with gradients ------------------------------------------------------------------------------------------
# Every rank computes the same loss from gathered values. The loss counts once, so a rank's gradient is that of its own
# part; it is not added up over ranks here, but when the gradients of weights are.


class _Exchanged(torch.autograd.Function):
    """All-to-all: the backward pass sends gradients where the numbers came from."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, sent: list[int], received: list[int], ranks: Ranks) -> Tensor:
        ctx.sent, ctx.received, ctx.ranks = sent, received, ranks
        return _all_to_all(flat, sent, received, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradient.contiguous(), ctx.received, ctx.sent, ctx.ranks), None, None, None


def _all_to_all(flat: Tensor, sent: list[int], received: list[int], ranks: Ranks) -> Tensor:
    result = flat.new_empty(sum(received))
    dist.all_to_all_single(result, flat, received, sent, group=ranks.group)
    return result


class _Gathered(torch.autograd.Function):
    """Joins the parts of all ranks along the first dimension."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks) -> Tensor:
        ctx.start = ranks.number * len(part)
        ctx.stop = ctx.start + len(part)
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(ranks.size)]
        dist.all_gather(parts, part.contiguous(), group=ranks.group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient[ctx.start : ctx.stop], None


class _Sum(torch.autograd.Function):
    """Adds up the parts of all ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks) -> Tensor:
        result = part.clone()
        ranks.add_up(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None


# --- what cannot be cut -----------------------------------------------------------------------------------------------


def check_model(model: PreTrainedModel, ranks: int) -> None:
    """Raise for a model whose rows cannot be cut into slices for this many ranks."""
    config = model.config.get_text_config()
    values = config.to_dict()
    reason = None
    if not mixes_by_attention_alone(model):
        reason = "its layers carry state along the sequence (linear attention or convolutions)"
    elif config.model_type not in TESTED_FAMILIES:
        reason = f"only these families have been tested with it: {', '.join(sorted(TESTED_FAMILIES))}"
    elif values.get("output_router_logits"):
        reason = "output_router_logits asks for an auxiliary loss, which is computed from whole rows"
    elif values.get("attention_dropout"):
        reason = f"attention_dropout is {values['attention_dropout']}, allowed: 0"
    elif config.num_attention_heads < ranks:
        reason = f"each rank needs a query head, and there are {config.num_attention_heads}"
    if reason is not None:
        raise UnsupportedError(f"ulysses_size={ranks} for {type(model).__name__} ({config.model_type}): {reason}")


def check_lengths(lengths: Sequence[int], model: PreTrainedModel) -> None:
    """Raise for sequences with which a model's rotary frequencies depend on the longest position in the row.

    No rank sees that position but the one with its slice.
    """
    config = model.config.get_text_config()
    limit, longest = fixed_rope_length(config), max(lengths, default=0)
    if limit is not None and longest > limit:
        raise UnsupportedError(
            f"ulysses_size > 1 for {type(model).__name__} ({config.model_type}): a sequence has {longest} tokens, "
            f"allowed: {limit}; beyond that its rotary frequencies depend on the longest sequence of the batch"
        )


def check_same_rows(batch: SequenceBatch, parallel: Parallelism) -> None:
    """Raise on all ranks if the ranks of any sequence group have different rows. All ranks must call this."""
    digest = hashlib.sha256()
    for row in batch.rows:
        for name in sorted(row):
            digest.update(f"{name} {row[name].shape} ".encode())
            digest.update(row[name].numpy().tobytes())
    first = dist.get_process_group_ranks(parallel.sequence.group)[0]  # identifies the group
    found = parallel.ranks.gather((first, digest.hexdigest()))
    if len(set(found)) > len({group for group, _ in found}):
        size = parallel.sequence.size
        raise InvalidInputError(
            "inputs",
            "different rows on ranks of one sequence group",
            f"the same rows on each {size} ranks with the same data_rank of the mesh (ulysses_size={size})",
        )
