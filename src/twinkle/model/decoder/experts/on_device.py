"""The experts of a layer on CUDA: as :mod:`.forward`, but nothing about the routes comes to the host.

Pairs of a row and an expert are ordered on the device, by expert and within it by request. The base's products are
torch's grouped ones, whose offsets are on the device, too; those of the adapters are the kernels of
:mod:`.pair_kernels`. So the host only launches, and the sampler can capture the whole in a graph.

Of the activations, autograd keeps the rows, gate and up, and x A.T; the product of gate and up is computed again.

Shapes: T rows, K experts of a row, S pairs, E experts, G groups (requests), R rank, H hidden size, I width of an
expert, N outputs of gate and up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from twinkle.model.decoder.experts.expert_lora import Part
from twinkle.model.decoder.lora.segments import Segment
from twinkle.model.decoder.transfer import to_device

if TYPE_CHECKING:
    from twinkle.model.decoder.experts.pair_kernels import Items, Matrices

T = TypeVar("T")

A, B, DA, DB, RANK = range(5)  # of a table: the addresses of A, B and their gradients, and the rank, for each group
_FEW_ROWS = 512  # up to so many, LoRA's first products are computed beside those of the base
_ALIGNMENT = 16  # bytes, of the rows of torch's grouped products


@dataclass(frozen=True)
class DevicePart:
    """One projection's adapters for all groups, as a table on the device that the kernels read.

    ``outputs``: the columns of the base product that it adds to. Groups without such an adapter have the address 0.
    """

    table_5G: Tensor  # int64, (5, G + 1) or wider; group G has no adapter
    rank: int  # the largest
    outputs: slice
    shares_a: bool
    shares_b: bool

    def matrices(self, which: int) -> "Matrices":
        from twinkle.model.decoder.experts.pair_kernels import Matrices  # Triton comes with CUDA builds of torch

        return Matrices(self.table_5G[which], self.table_5G[RANK], self.rank, which in (A, DA))


@dataclass(frozen=True)
class DeviceGroups:
    """The rows of each group. Rows without an adapter belong to group G."""

    count: int  # G
    group_T: Tensor  # int32
    starts: Tensor | None = None  # int32, (G + 1,): the first row of each group; only training needs it
    ends: Tensor | None = None
    _limits: dict[int, Tensor] = field(default_factory=dict)  # by the number of experts; all layers share them

    @classmethod
    def from_segments(cls, segments: Sequence[Segment], rows: int, device: torch.device) -> "DeviceGroups":
        """Number the requests of all segments, in order."""
        sizes = [size for segment in segments for size in segment.groups.sizes]
        count = len(sizes)
        table = np.zeros(rows + 2 * (count + 1), np.int32)
        group_T, starts, ends = table[:rows], table[rows : rows + count + 1], table[rows + count + 1 :]
        group_T[:] = count
        number = 0
        for segment in segments:
            row = segment.start
            for size in segment.groups.sizes:
                group_T[row : row + size], starts[number], ends[number] = number, row, row + size
                row, number = row + size, number + 1
        on_device = to_device(torch.from_numpy(table), device)
        return cls(count, *on_device.split([rows, count + 1, count + 1]))

    @cached_property
    def items(self) -> "Items":
        from twinkle.model.decoder.experts.pair_kernels import Items

        return Items(self.group_T, self.count, 1, None, self.starts, self.ends)

    def limits(self, experts: int) -> Tensor:
        """Return the keys at which runs begin and end; without training, only those at which an expert's pairs end."""
        if experts not in self._limits:
            keys, device = self.count + 1, self.group_T.device
            first, step = (keys, keys) if self.starts is None else (0, 1)
            limits = torch.arange(first, experts * keys + 1, step, dtype=torch.int32, device=device)
            self._limits[experts] = limits
        return self._limits[experts]


class BatchGroups:
    """The groups of one batch, which all its layers share; made when the first of them asks."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self._groups: DeviceGroups | None = None

    def on_device(self, rows: int, device: torch.device) -> DeviceGroups:
        if self._groups is None:
            self._groups = DeviceGroups.from_segments(self._segments, rows, device)
        assert len(self._groups.group_T) == rows, "all layers of a batch have the same rows"
        return self._groups


@dataclass(frozen=True)
class DeviceExperts:
    """The adapters on the experts of one layer, for the rows of a batch."""

    groups: DeviceGroups
    up: tuple[DevicePart, ...]  # on gate and up
    down: tuple[DevicePart, ...]


def without_adapters(x_TH: Tensor) -> DeviceExperts:
    """Return no adapters for these rows. It can be captured."""
    return DeviceExperts(DeviceGroups(0, torch.zeros(len(x_TH), dtype=torch.int32, device=x_TH.device)), (), ())


def device_parts(parts: Sequence[Part], segments: Sequence[Segment], device: torch.device) -> tuple[DevicePart, ...]:
    """Return the parts of all segments by projection and form. They must outlive the tables, which hold addresses."""
    firsts = dict(zip((each.start for each in segments), np.cumsum([0, *map(_size, segments)]).tolist(), strict=False))
    groups = sum(map(_size, segments))
    found: dict[tuple[int | None, int | None, int | None, bool, bool], list[Part]] = {}
    for part in parts:
        columns = part.outputs
        found.setdefault((columns.start, columns.stop, columns.step, part.shares_a, part.shares_b), []).append(part)
    if not found:
        return ()
    tables = np.zeros((len(found), 5, -(-(groups + 1) // 2) * 2), np.int64)  # the kernels like rows of 16 bytes
    for table, members in zip(tables, found.values(), strict=True):
        for part in members:
            first = firsts[part.segment.start]
            _enter(table[:, first : first + _size(part.segment)], part)
    on_device = to_device(torch.from_numpy(tables), device)
    return tuple(
        DevicePart(table_5G, max(part.rank for part in members), members[0].outputs, *key[3:])
        for table_5G, (key, members) in zip(on_device, found.items(), strict=True)
    )


def _size(segment: Segment) -> int:
    return len(segment.groups.sizes)


def _enter(table_5G: NDArray[np.int64], part: Part) -> None:
    numbers = np.arange(table_5G.shape[1])
    for row, tensor in ((A, part.a_GERI), (B, part.b_GEOR), (DA, part.da_GERI), (DB, part.db_GEOR)):
        if tensor is not None:
            assert tensor[0].is_contiguous(), "the matrices of all experts follow each other"
            table_5G[row] = tensor.data_ptr() + numbers * tensor.stride(0) * tensor.itemsize
    table_5G[RANK] = part.rank


@dataclass(frozen=True)
class DeviceRoutes:
    """The pairs of a batch, ordered by expert and within it by group."""

    items: "Items"
    order_S: Tensor  # the place of each pair among (row, choice)
    place_TK: Tensor  # int32: the place of each (row, choice) among the ordered pairs
    ends_E: Tensor  # int32: where the pairs of each expert end

    @classmethod
    def from_choices(cls, chosen_TK: Tensor, experts: int, groups: DeviceGroups) -> "DeviceRoutes":
        from twinkle.model.decoder.experts.pair_kernels import Items, find_places

        keys_of_expert = groups.count + 1
        key_TK = torch.add(groups.group_T[:, None], chosen_TK, alpha=keys_of_expert).int()
        key_S, order_S = key_TK.flatten().sort(stable=True)
        row_S, place_TK = find_places(order_S, chosen_TK.shape[1])
        bounds = torch.searchsorted(key_S, groups.limits(experts), out_int32=True)
        if groups.starts is None:
            return cls(Items(key_S, groups.count, experts, row_S), order_S, place_TK, bounds)
        ends_E = bounds[keys_of_expert::keys_of_expert].contiguous()
        starts, ends = bounds[:-1], bounds[1:]
        return cls(Items(key_S, groups.count, experts, row_S, starts, ends), order_S, place_TK, ends_E)

    def gather(self, rows_TN: Tensor) -> Tensor:
        """Return the row of each pair (S, N)."""
        assert self.items.row_N is not None
        return rows_TN.index_select(0, self.items.row_N)

    def of_expert(self, values_EN: Tensor) -> Tensor:
        """Return the values of each pair's expert (S, N)."""
        return values_EN.index_select(0, self.items.key_N // (self.items.groups + 1))

    def weights(self, weights_TK: Tensor) -> Tensor:
        """Return the router's weight of each pair (S,)."""
        return weights_TK.flatten()[self.order_S]

    def unordered(self, pairs_S: Tensor) -> Tensor:
        """Return a number for each pair by row and choice (T, K)."""
        return pairs_S.index_select(0, self.place_TK.flatten()).view(self.place_TK.shape)

    def product(self, pairs_SI: Tensor, weights_EIO: Tensor) -> Tensor:
        """Return the product (S, O) of each pair with the weights of its expert."""
        if _strides_fit(pairs_SI) and _strides_fit(weights_EIO):
            return F.grouped_mm(pairs_SI, weights_EIO, offs=self.ends_E)
        product_SO = pairs_SI.new_empty(len(pairs_SI), weights_EIO.shape[2])
        start = 0
        for expert, end in enumerate(self.ends_E.tolist()):  # waits for the device; only for odd sizes of tiny models
            torch.mm(pairs_SI[start:end], weights_EIO[expert], out=product_SO[start:end])
            start = end
        return product_SO


def _strides_fit(tensor: Tensor) -> bool:
    """Return whether torch's grouped product takes a tensor: it asks for rows or columns of 16 bytes each."""
    return all(stride == 1 or stride * tensor.itemsize % _ALIGNMENT == 0 for stride in tensor.stride())


def experts_on_device(
    experts: Any, x_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor, adapters: DeviceExperts
) -> Tensor:
    """Return what the experts of each row compute, weighted by the router and added up (T, H)."""
    routes = DeviceRoutes.from_choices(chosen_TK, len(experts.gate_up_proj), adapters.groups)
    y_TH: Tensor = _Experts.apply(x_TH.contiguous(), weights_TK.to(x_TH.dtype).contiguous(), experts, routes, adapters)
    return y_TH


class _Experts(torch.autograd.Function):
    """All experts of a layer as one node of the autograd graph. The gradients of A and B go to the batch's rows."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, weights_TK: Tensor, experts: Any, routes: DeviceRoutes, adapters: DeviceExperts
    ) -> Tensor:
        from twinkle.model.decoder.experts.pair_kernels import add_from_rank, add_up, parts_for, to_rank

        rows, pairs = adapters.groups.items, routes.items
        train = any(ctx.needs_input_grad)
        beside = not train and x_TH.is_cuda and len(x_TH) <= _FEW_ROWS

        def inner_of_up() -> list[Tensor]:
            parts = 1 if train else parts_for(*x_TH.shape)
            return [
                to_rank(rows, x_TH, part.matrices(A), parts=parts)
                if part.shares_a
                else to_rank(pairs, x_TH, part.matrices(A), by_row=True)
                for part in adapters.up
            ]

        up_inner, gate_up_SN = _both(
            inner_of_up,
            lambda: routes.product(routes.gather(x_TH), _inputs_first(experts, experts.gate_up_proj)),
            beside=beside and len(adapters.up) > 0,
        )
        _add_bias(gate_up_SN, experts, "gate_up_proj_bias", routes)
        for part, h in zip(adapters.up, up_inner, strict=True):
            add_from_rank(pairs, gate_up_SN[:, part.outputs], h, part.matrices(B), by_row=part.shares_a)
        a_SI = _gate(experts, gate_up_SN)

        def inner_of_down() -> list[tuple[Tensor, Tensor]]:
            """Return a A.T, and for a B that all experts share also its weighted sum for each row."""
            inner = [to_rank(pairs, a_SI, part.matrices(A)) for part in adapters.down]
            return [
                (h_SR, add_up(h_SR, routes.place_TK, weights_TK) if part.shares_b else h_SR)
                for part, h_SR in zip(adapters.down, inner, strict=True)
            ]

        down_inner, y_SH = _both(
            inner_of_down,
            lambda: routes.product(a_SI, _inputs_first(experts, experts.down_proj)),
            beside=beside and len(adapters.down) > 0,
        )
        _add_bias(y_SH, experts, "down_proj_bias", routes)
        for part, (h_SR, _) in zip(adapters.down, down_inner, strict=True):
            if not part.shares_b:
                add_from_rank(pairs, y_SH[:, part.outputs], h_SR, part.matrices(B))
        y_TH = add_up(y_SH, routes.place_TK, weights_TK)
        for part, (_, h_TR) in zip(adapters.down, down_inner, strict=True):
            if part.shares_b:
                add_from_rank(rows, y_TH[:, part.outputs], h_TR, part.matrices(B))
        if train:
            ctx.experts, ctx.routes, ctx.adapters = experts, routes, adapters
            ctx.save_for_backward(x_TH, weights_TK, gate_up_SN, *up_inner, *(h_SR for h_SR, _ in down_inner))
        return y_TH

    @staticmethod
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, weights_TK, gate_up_SN, *inner = ctx.saved_tensors
        up, down = ctx.adapters.up, ctx.adapters.down
        back = _Backward(ctx.experts, ctx.routes, ctx.adapters, weights_TK)
        dgate_up_SN, dweights_TK = back.down(dy_TH.contiguous(), gate_up_SN, inner[len(up) :])
        assert len(inner) == len(up) + len(down)
        return back.up(dgate_up_SN, x_TH, inner[: len(up)]), dweights_TK, None, None, None


def _both(small: Callable[[], T], large: Callable[[], Tensor], *, beside: bool) -> tuple[T, Tensor]:
    """Return the results of both; with ``beside`` the small one is computed on a stream of its own, meanwhile.

    No further synchronisation is needed for memory: the second stream begins after all earlier work of the current one,
    so it never overwrites a tensor that is still read, and the current stream goes on only after it.
    """
    if not beside:
        return small(), large()
    current = torch.cuda.current_stream()
    stream = _second_stream(current.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        found = small()
    product = large()
    current.wait_stream(stream)
    return found, product


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@dataclass(frozen=True)
class _Backward:
    """The backward pass of one layer's experts."""

    experts: Any
    routes: DeviceRoutes
    adapters: DeviceExperts
    weights_TK: Tensor

    def down(self, dy_TH: Tensor, gate_up_SN: Tensor, inner: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the gradients of gate and up and of the router's weights; add those of the adapters on down."""
        from twinkle.model.decoder.experts.pair_kernels import add_from_rank, add_outer, add_up, to_rank

        routes, rows, pairs = self.routes, self.adapters.groups.items, self.routes.items
        weights_S = routes.weights(self.weights_TK)
        dy_SH = routes.gather(dy_TH)
        # Before the router's weight: y[row] is the sum of weight · f(a), so the weight's gradient is dy · f(a). Of a
        # product that is linear in a, this equals the product of a with the gradient that flows back to a.
        back_SI = routes.product(dy_SH, _outputs_first(self.experts, self.experts.down_proj))
        dinner = []
        for part, h_SR in zip(self.adapters.down, inner, strict=True):
            if part.shares_b:
                dy = dy_TH[:, part.outputs]
                dh = to_rank(rows, dy, part.matrices(B))
                add_outer(rows, add_up(h_SR, routes.place_TK, self.weights_TK), dy, part.matrices(DB))
            else:
                dy = dy_SH[:, part.outputs]
                dh = to_rank(pairs, dy, part.matrices(B))
                add_outer(pairs, h_SR, dy, part.matrices(DB), weights_N=weights_S)
            add_from_rank(pairs, back_SI, dh, part.matrices(A), by_row=part.shares_b)
            dinner.append(dh)
        a_SI, dgate_up_SN, dweights_S = _gate_gradient(self.experts, gate_up_SN, back_SI, weights_S)
        for part, dh in zip(self.adapters.down, dinner, strict=True):
            add_outer(pairs, dh, a_SI, part.matrices(DA), h_by_row=part.shares_b, weights_N=weights_S)
        if self.experts.has_bias:
            dweights_S = dweights_S + (dy_SH * routes.of_expert(self.experts.down_proj_bias)).sum(1)
        return dgate_up_SN, routes.unordered(dweights_S)

    def up(self, dgate_up_SN: Tensor, x_TH: Tensor, inner: Sequence[Tensor]) -> Tensor:
        """Return the gradient of x; add those of the adapters on gate and up."""
        from twinkle.model.decoder.experts.pair_kernels import add_from_rank, add_outer, add_up, to_rank

        routes, rows, pairs = self.routes, self.adapters.groups.items, self.routes.items
        dx_SH = routes.product(dgate_up_SN, _outputs_first(self.experts, self.experts.gate_up_proj))
        shared = []
        for part, h in zip(self.adapters.up, inner, strict=True):
            dy_SO = dgate_up_SN[:, part.outputs]
            dh_SR = to_rank(pairs, dy_SO, part.matrices(B))
            add_outer(pairs, h, dy_SO, part.matrices(DB), h_by_row=part.shares_a)
            if part.shares_a:
                shared.append((part, add_up(dh_SR, routes.place_TK)))
            else:
                add_from_rank(pairs, dx_SH, dh_SR, part.matrices(A))
                add_outer(pairs, dh_SR, x_TH, part.matrices(DA), wide_by_row=True)
        dx_TH = add_up(dx_SH, routes.place_TK)
        for part, dh_TR in shared:
            add_from_rank(rows, dx_TH, dh_TR, part.matrices(A))
            add_outer(rows, dh_TR, x_TH, part.matrices(DA))
        return dx_TH


def _inputs_first(experts: Any, weights: Tensor) -> Tensor:
    """Return the weights of all experts as (E, inputs, outputs)."""
    return weights if experts.is_transposed else weights.transpose(1, 2)


def _outputs_first(experts: Any, weights: Tensor) -> Tensor:
    """Return the weights of all experts as (E, outputs, inputs)."""
    return weights.transpose(1, 2) if experts.is_transposed else weights


def _add_bias(y_SO: Tensor, experts: Any, name: str, routes: DeviceRoutes) -> None:
    if experts.has_bias:
        y_SO += routes.of_expert(getattr(experts, name))


def _is_silu(experts: Any) -> bool:
    """Return whether the experts compute SiLU(gate) · up by Transformers' own function."""
    own = type(experts)._apply_gate.__module__ == "transformers.integrations.moe"
    silu = type(getattr(experts, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    return own and silu and experts.is_concatenated


def _gate(experts: Any, gate_up_SN: Tensor) -> Tensor:
    if not _is_silu(experts):
        plain: Tensor = experts._apply_gate(gate_up_SN)
        return plain
    from twinkle.model.decoder.experts.gate_kernels import silu_gate

    return silu_gate(gate_up_SN)


def _gate_gradient(
    experts: Any, gate_up_SN: Tensor, back_SI: Tensor, weights_S: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a = gate(gate and up), the gradient of gate and up, and Σ back · a. a's gradient is weight · back."""
    if _is_silu(experts):
        from twinkle.model.decoder.experts.gate_kernels import silu_gate_gradient

        return silu_gate_gradient(gate_up_SN, back_SI, weights_S)
    with torch.enable_grad():
        gate_up_SN = gate_up_SN.detach().requires_grad_()
        a_SI = experts._apply_gate(gate_up_SN)
    (dgate_up_SN,) = torch.autograd.grad(a_SI, gate_up_SN, back_SI * weights_S[:, None])
    return a_SI.detach(), dgate_up_SN, (back_SI * a_SI.detach()).sum(1)
