"""The memory layout of LoRA weights: each adapter is one flat row, and rows of equal layout are stacked.

A :class:`RowLayout` defines where the A and B of all target modules are in one flat row: all A first, then all B, so
that scaling, copying and optimising an adapter are operations on one or two contiguous ranges. Ranks are padded to the
next bucket (a power of two), not to the largest rank, so one tenant with rank 128 does not make all others use as much.
The modules of an adapter may have different ranks; each is padded to its own bucket.
The padding is zero and stays zero, because its gradient is exactly zero.

Where the base model itself is cut (tensor and pipeline parallelism), each process holds a :class:`Cut` of every row.

A :class:`Stack` holds the compute copies of all resident adapters of one layout in blocks that are never moved.

Shapes: P parameters of a row, S slots of a block, G groups, R bucket rank, I input and O output features, E experts.
"""

import hashlib
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from twinkle.model.types import EXPERT_PARAMETERS, text_name

_SMALLEST_BUCKET = 8
SLOTS_PER_BLOCK = 8


def rank_bucket(rank: int) -> int:
    """Return the smallest of 8, 16, 32, 64, 128 … that is at least ``rank``."""
    return max(_SMALLEST_BUCKET, 1 << (rank - 1).bit_length())


@dataclass(frozen=True)
class Target:
    """A linear layer that adapters may attach to, or one projection of all experts of a layer.

    Where a process holds only some of its input features, ``first_input`` is the number of the first one.
    ``copies``: of a projection of experts, how many A and how many B it has: one for each expert, or 1, which all
    experts share. None: it is a linear layer. ``alternates``: of an expert's gate and up, whether their outputs stand
    in turns in the model's weights, g0, u0, g1, u1, instead of side by side.
    """

    name: str
    in_features: int
    out_features: int
    first_input: int = 0
    copies: tuple[int, int] | None = None
    alternates: bool = False

    @property
    def is_parameter(self) -> bool:
        """Return whether it is a parameter of all experts, PEFT's form; other projections of experts are Tinker's."""
        return self.copies is not None and self.name.endswith(EXPERT_PARAMETERS)

    @property
    def experts_of_a(self) -> tuple[int, ...]:
        """Return the first dimension of A, that of experts; none for a linear layer."""
        return () if self.copies is None else self.copies[:1]

    @property
    def experts_of_b(self) -> tuple[int, ...]:
        """Return the first dimension of B, that of experts; none for a linear layer."""
        return () if self.copies is None else self.copies[1:]

    @property
    def a_rows(self) -> int:
        """Return how many numbers all A have for each unit of the rank."""
        return self.in_features * math.prod(self.experts_of_a)

    @property
    def b_rows(self) -> int:
        """Return how many numbers all B have for each unit of the rank."""
        return self.out_features * math.prod(self.experts_of_b)


@dataclass(frozen=True)
class Cut:
    """What a process knows of the row that its own row is cut from (see :mod:`twinkle.model.adapters.cuts`).

    ``shared``: ranges of the own row that other processes have as well, because only the other factor of a module is
    divided between them. ``of_experts``: ranges of factors that each expert has; they are those of this process's
    experts. ``uncounted``: ranges that another process of those which hold a whole adapter counts. ``spread``: whether
    experts are divided among processes with different data.
    """

    whole: "RowLayout"
    largest: int  # parameters of the largest row that any process holds
    shared: tuple[range, ...]
    of_experts: tuple[range, ...]
    uncounted: tuple[range, ...]
    spread: bool


@dataclass(frozen=True, eq=False)
class RowLayout:
    """The places of all A, then all B, of an adapter's target modules in its flat row. ``digest`` compares layouts."""

    rank: int  # the bucket; if modules have different ones, the largest
    targets: tuple[Target, ...]
    ranks: tuple[int, ...] | None = None  # the bucket of each module; None: all have ``rank``
    cut: Cut | None = None  # None: it is a whole row

    @classmethod
    def for_ranks(cls, targets: tuple[Target, ...], ranks: Sequence[int]) -> "RowLayout":
        """Return the layout of modules that have these ranks."""
        buckets = tuple(map(rank_bucket, ranks))
        return cls(max(buckets), targets, None if len(set(buckets)) == 1 else buckets)

    @property
    def buckets(self) -> tuple[int, ...]:
        return self.ranks or (self.rank,) * len(self.targets)

    @cached_property
    def a_size(self) -> int:
        return sum(rank * target.a_rows for rank, target in zip(self.buckets, self.targets, strict=True))

    @cached_property
    def size(self) -> int:
        b_sizes = (rank * target.b_rows for rank, target in zip(self.buckets, self.targets, strict=True))
        return self.a_size + sum(b_sizes)

    @property
    def whole(self) -> "RowLayout":
        """Return the layout of the row that this one is cut from; if nothing is cut, this layout itself."""
        return self if self.cut is None else self.cut.whole

    @property
    def largest_size(self) -> int:
        """Return the parameters of the largest row that any process holds.

        Memory is counted by it, so that all processes page the same adapters out at the same time.
        """
        return self.size if self.cut is None else self.cut.largest

    @cached_property
    def _places(self) -> dict[str, tuple[Target, int, int, int]]:
        """Return for each module its target, its bucket, and where its A and its B begin."""
        places, a, b = {}, 0, self.a_size
        for rank, target in zip(self.buckets, self.targets, strict=True):
            places[target.name] = (target, rank, a, b)
            a += rank * target.a_rows
            b += rank * target.b_rows
        return places

    def has(self, name: str) -> bool:
        return name in self._places

    @cached_property
    def has_experts(self) -> bool:
        """Return whether the adapter is on experts."""
        return any(target.copies is not None for target in self.targets)

    def is_on_experts(self, module: str) -> bool:
        """Return whether the adapter is on the experts of this module."""
        return any(each.copies is not None and each.name.startswith(f"{module}.") for each in self.targets)

    def offsets(self, name: str) -> tuple[int, int]:
        """Return where A and B of one module begin in the row."""
        return self._places[name][2:]

    def ranges(self, name: str) -> tuple[range, range]:
        """Return where A and B of one module are in the row."""
        target, rank, a, b = self._places[name]
        return range(a, a + rank * target.a_rows), range(b, b + rank * target.b_rows)

    def first_input(self, name: str) -> int:
        """Return the number of the first input feature that this process has of one module."""
        return self._places[name][0].first_input

    def target(self, name: str) -> Target:
        return self._places[name][0]

    def bucket(self, name: str) -> int:
        """Return the bucket of one module's rank; that of the largest rank if the adapter is not on the module."""
        return self._places[name][1] if name in self._places else self.rank

    def views(self, rows: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Return A (…, R, I) and B (…, O, R) of one module as views into ``rows`` (…, P).

        Those of a projection of experts are (…, E, R, I) and (…, E, O, R), with 1 instead of E where experts share it.
        """
        target, rank, a, b = self._places[name]
        a_rows = rows.narrow(-1, a, rank * target.a_rows)
        b_rows = rows.narrow(-1, b, rank * target.b_rows)
        a_front, b_front = ((*rows.shape[:-1], *each) for each in (target.experts_of_a, target.experts_of_b))
        return a_rows.view(*a_front, rank, target.in_features), b_rows.view(*b_front, target.out_features, rank)

    @cached_property
    def digest(self) -> str:
        """Return the name of this layout in snapshots. Rows of layouts with equal digests are interchangeable."""
        rank = self.ranks or self.rank
        text = repr((rank, [(text_name(each.name), *_sizes(each)) for each in self.targets]))
        if self.cut is not None:  # cuts of different rows may be alike, but their adapters are stacked apart everywhere
            text += f" of {self.cut.whole.digest}"
        return _short_hash(text)

    def fits(self, digest: str) -> bool:
        """Return whether rows from a snapshot with this digest can be used here. Older digests are of full names."""
        older = repr((self.ranks or self.rank, [(each.name, *_sizes(each)) for each in self.targets]))
        return digest in (self.digest, _short_hash(older))


def _sizes(target: Target) -> tuple[int, ...]:
    return (target.in_features, target.out_features, *(target.copies or ()))


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def initial_row(layout: RowLayout, ranks: Sequence[int], seed: int, init: bool | str = True) -> Tensor:
    """Return the initial fp32 weights of an adapter whose modules have these ranks. ``init``: see ``INIT_WEIGHTS``.

    They depend only on the ranks, the seed and the modules' names and sizes. They are drawn on the CPU, so they do not
    depend on the device, the slot, the bucket or other adapters.
    """
    row_P = torch.zeros(layout.size)
    for target, rank in zip(layout.targets, ranks, strict=True):
        a_RI, b_OR = layout.views(row_P, target.name)
        if init is True and target.copies is None:
            a_RI[:rank] = initial_a(target.name, rank, target.in_features, seed)
        else:
            a_RI[..., :rank, :], b_OR[..., :rank] = _initial_pair(target, rank, seed, init)
    return row_P


def initial_a(module_name: str, rank: int, in_features: int, seed: int) -> Tensor:
    """Return A (R, I) of one module, uniform in ±1/√I (kaiming with a=√5). ``module_name``: that in the base model."""
    return _uniform(_generator(module_name, seed), rank, in_features)


def _initial_pair(target: Target, rank: int, seed: int, init: bool | str) -> tuple[Tensor, Tensor]:
    """Return A (R, I) and B (O, R) of one module, drawn from the distributions that PEFT draws them from.

    Those of a projection of experts have a first dimension more, as in :meth:`RowLayout.views`.
    """
    generator = _generator(target.name, seed)
    inputs, outputs = target.in_features, target.out_features
    a_front, b_front = target.experts_of_a, target.experts_of_b
    if init is True:
        return _uniform(generator, *a_front, rank, inputs), torch.zeros(*b_front, outputs, rank)
    if init == "gaussian":
        return torch.randn(*a_front, rank, inputs, generator=generator) / rank, torch.zeros(*b_front, outputs, rank)
    if init == "orthogonal":  # A and B use different rows of one orthogonal matrix, hence B A = 0
        q_RR, _ = torch.linalg.qr(torch.randn(rank, rank, generator=generator))
        a_IR = torch.randn(*a_front, inputs, rank // 2, generator=generator) @ q_RR[0::2] / 10
        b_OR = torch.randn(*b_front, outputs, rank // 2, generator=generator) @ q_RR[1::2] / 10
        return a_IR.transpose(-1, -2), b_OR
    assert init is False, "check_spec knows all values"
    return _uniform(generator, *a_front, rank, inputs), _uniform(generator, *b_front, outputs, rank)


def _generator(module_name: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{text_name(module_name)}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def _uniform(generator: torch.Generator, *shape: int) -> Tensor:
    bound = shape[-1] ** -0.5
    return torch.rand(*shape, generator=generator) * (2 * bound) - bound


class Stack:
    """Compute copies of the resident adapters of one layout, in blocks of slots."""

    def __init__(
        self, layout: RowLayout, dtype: torch.dtype, device: torch.device, slots: int = SLOTS_PER_BLOCK
    ) -> None:
        """``slots``: how many a block has."""
        self.layout = layout
        self.slots = slots
        self.dtype = dtype
        self.device = device
        self._blocks: dict[int, Tensor] = {}  # block number → (S, P)
        self._free: list[int] = []  # a heap: low slots are used first, so that the slots of a batch are often one range

    @property
    def block_bytes(self) -> int:
        return self.slots * self.layout.largest_size * self.dtype.itemsize

    @property
    def allocated_bytes(self) -> int:
        return len(self._blocks) * self.block_bytes

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free)

    def add_block(self) -> None:
        number = next(n for n in range(len(self._blocks) + 1) if n not in self._blocks)
        self._blocks[number] = torch.zeros(self.slots, self.layout.size, dtype=self.dtype, device=self.device)
        for slot in range(number * self.slots, (number + 1) * self.slots):
            heapq.heappush(self._free, slot)

    def take(self) -> int:
        """Return a free slot, and mark it as used. There must be one."""
        return heapq.heappop(self._free)

    def give_back(self, slot: int) -> None:
        """Free a slot and clear its row."""
        self.row(slot).zero_()  # so that the next tenant in this slot finds no data of the last one
        heapq.heappush(self._free, slot)

    def drop_empty_blocks(self) -> None:
        for number in list(self._blocks):
            slots = set(range(number * self.slots, (number + 1) * self.slots))
            if slots <= set(self._free):
                del self._blocks[number]
                self._free = [slot for slot in self._free if slot not in slots]
                heapq.heapify(self._free)

    def row(self, slot: int) -> Tensor:
        return self._blocks[slot // self.slots][slot % self.slots]

    def gather(self, slots: Sequence[int], *, copy: bool = False) -> Tensor:
        """Return the rows (G, P) of these slots: a view if they are one range of one block, else a copy.

        With ``copy`` it is always a copy.
        """
        first, count = slots[0], len(slots)
        one_range = list(slots) == list(range(first, first + count))
        if not copy and one_range and first // self.slots == (first + count - 1) // self.slots:
            return self._blocks[first // self.slots].narrow(0, first % self.slots, count)
        return torch.stack([self.row(slot) for slot in slots])
