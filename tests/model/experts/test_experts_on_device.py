"""The kernels of adapters on experts, compared with the plain loops that CPUs run.

They run on CUDA, and without it in Triton's interpreter, if Triton is installed and TRITON_INTERPRET=1.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs CUDA or TRITON_INTERPRET=1", allow_module_level=True)

from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tests.support.models.reference import relative_error
from twinkle.model.decoder.architecture import Experts
from twinkle.model.decoder.experts.expert_lora import Part
from twinkle.model.decoder.experts.expert_tables import ENTRIES, ExpertTables
from twinkle.model.decoder.experts.forward import experts_forward
from twinkle.model.decoder.experts.on_device import (
    DeviceExperts,
    DeviceGroups,
    device_parts,
    experts_on_device,
    without_adapters,
)
from twinkle.model.decoder.experts.pair_kernels import Items, Matrices, add_from_rank, add_outer, to_rank
from twinkle.model.decoder.lora.grouped import Groups
from twinkle.model.decoder.lora.lora import LayerLora
from twinkle.model.decoder.lora.segments import Segment, SegmentLora
from twinkle.model.decoder.lora.stacks import RowLayout, Target

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter computes no bf16
EXPERTS, CHOICES, HIDDEN, WIDTH = 5, 2, 48, 24
NAMES = ("mlp.experts.w1", "mlp.experts.w2", "mlp.experts.w3")


@dataclass(frozen=True)
class Tenants:
    """Requests whose adapters are of one stack."""

    rank: int
    sizes: tuple[int, ...]
    names: tuple[str, ...] = NAMES
    shared: bool = True  # Tinker's form; False: each expert has its own A and B


MIXED = (Tenants(8, (5, 1)), Tenants(16, (9,), NAMES[1:]), Tenants(32, (2, 3), NAMES[:2]))
INDEPENDENT = (Tenants(8, (4,)), Tenants(16, (7, 2), shared=False))


def targets(tenants: Tenants) -> tuple[Target, ...]:
    up, down = ((1, EXPERTS), (EXPERTS, 1)) if tenants.shared else ((EXPERTS, EXPERTS), (EXPERTS, EXPERTS))
    by_name = {name: Target(name, HIDDEN, WIDTH, copies=up) for name in (NAMES[0], NAMES[2])}
    by_name[NAMES[1]] = Target(NAMES[1], WIDTH, HIDDEN, copies=down)
    return tuple(by_name[name] for name in tenants.names)


def segments_of(stacks: Sequence[Tenants], dtype: torch.dtype) -> list[SegmentLora]:
    generator = torch.Generator().manual_seed(0)
    segments, row = [], 0
    for tenants in stacks:
        layout = RowLayout(tenants.rank, targets(tenants))
        # the slots lie in the middle of a block
        block = torch.randn(len(tenants.sizes) + 2, layout.size, generator=generator) * 0.2
        gradient_GP = torch.randn(len(tenants.sizes), layout.size, generator=generator).to(DEVICE)
        segment = Segment(row, row + sum(tenants.sizes), Groups(tenants.sizes))
        segments.append(SegmentLora(segment, layout, block.to(DEVICE, dtype)[1:-1], gradient_GP))
        row = segment.stop
    return segments


def experts_module(dtype: torch.dtype) -> Any:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=WIDTH, num_experts=EXPERTS, num_experts_per_tok=CHOICES
    )
    config._experts_implementation = "eager"
    module: Any = Qwen3MoeExperts(config).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    module.adapter_name = "mlp.experts"
    return module.to(DEVICE, dtype)


@dataclass(frozen=True)
class Outcome:
    y: Tensor
    dx: Tensor
    dweights: Tensor
    gradients: list[Tensor]

    def tensors(self) -> list[Tensor]:
        return [self.y, self.dx, self.dweights, *self.gradients]


def inputs(rows: int, seed: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, choices, weights and the gradient of the output. Some experts are never chosen."""
    generator = torch.Generator().manual_seed(seed)
    x_TH, dy_TH = torch.randn(2, rows, HIDDEN, generator=generator)
    chosen_TK = torch.rand(rows, EXPERTS - 1, generator=generator).argsort(1)[:, :CHOICES]
    return x_TH, chosen_TK, torch.rand(rows, CHOICES, generator=generator), dy_TH


def compute(module: Any, segments: Sequence[SegmentLora], rows: int, dtype: torch.dtype, *, plain: bool) -> Outcome:
    x_TH, chosen_TK, weights_TK, dy_TH = inputs(rows)
    x_TH, weights_TK, dy_TH = (each.to(DEVICE, dtype) for each in (x_TH, weights_TK, dy_TH))
    lora = LayerLora("", segments, None)
    if plain:
        module = module.cpu().float()
        x_TH, weights_TK, dy_TH = (each.cpu().float() for each in (x_TH, weights_TK, dy_TH))
        lora = LayerLora("", [on_cpu(each) for each in segments], None)
    x_TH.requires_grad_()
    weights_TK.requires_grad_()
    if plain:
        module.lora = lora
        y_TH = experts_forward(module, x_TH, chosen_TK, weights_TK)
    else:
        adapters = lora.experts_on_device("mlp.experts", x_TH)
        assert (adapters is None) == (not segments)
        adapters = adapters or without_adapters(x_TH)
        y_TH = experts_on_device(module, x_TH, chosen_TK.to(DEVICE), weights_TK, adapters)
    y_TH.backward(dy_TH)
    assert x_TH.grad is not None
    assert weights_TK.grad is not None
    gradients = [each.gradient_GP for each in lora._segments if each.gradient_GP is not None]
    return Outcome(y_TH.detach(), x_TH.grad, weights_TK.grad, gradients)


def on_cpu(each: SegmentLora) -> SegmentLora:
    assert each.gradient_GP is not None
    return replace(each, weights_GP=each.weights_GP.cpu().float(), gradient_GP=each.gradient_GP.cpu().float())


def assert_close(ours: Tensor, exact: Tensor, bound: float) -> None:
    assert relative_error(ours.double().cpu().numpy(), exact.double().cpu().numpy()) <= bound


@pytest.mark.parametrize(
    ("stacks", "nobody"), [(MIXED, 3), (INDEPENDENT, 0), ((), 5)], ids=["mixed", "independent", "none"]
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_equals_the_plain_loops(stacks: Sequence[Tenants], nobody: int, dtype: torch.dtype) -> None:
    rows = sum(sum(tenants.sizes) for tenants in stacks) + nobody
    expected = compute(experts_module(dtype), segments_of(stacks, dtype), rows, dtype, plain=True)
    outcome = compute(experts_module(dtype), segments_of(stacks, dtype), rows, dtype, plain=False)
    for ours, exact in zip(outcome.tensors(), expected.tensors(), strict=True):
        assert_close(ours, exact, 1e-5 if dtype == torch.float32 else 2e-2)


def test_tables_of_fixed_size_give_the_same() -> None:
    """Captured graphs have room for more groups and larger ranks than a batch may need."""
    stacks, nobody, most, dtype = MIXED, 3, 8, torch.float32
    rows = sum(sum(tenants.sizes) for tenants in stacks) + nobody
    segments, same = segments_of(stacks, dtype), segments_of(stacks, dtype)
    expected = compute(experts_module(dtype), segments, rows, dtype, plain=False)
    places = ExpertTables([Experts("mlp.experts", EXPERTS, HIDDEN, WIDTH)], rank=32)
    tables_n5G = torch.zeros(3, ENTRIES, most + 2, dtype=torch.int64)
    group_T, bounds = torch.full((rows,), most, dtype=torch.int32), torch.zeros(2, most + 1, dtype=torch.int32)
    number = 0
    for each in same:
        row = each.segment.start
        for size, weights_P, gradient_P in zip(
            each.segment.groups.sizes, each.weights_GP, each.gradient_GP, strict=True
        ):
            tables_n5G[:, :, number] = torch.from_numpy(places.entries(each.layout, weights_P, gradient_P))
            group_T[row : row + size], bounds[0, number], bounds[1, number] = number, row, row + size
            row, number = row + size, number + 1
    groups = DeviceGroups(most, group_T.to(DEVICE), *bounds.to(DEVICE))
    adapters = places.layer("mlp.experts", tables_n5G.to(DEVICE), groups)
    x_TH, chosen_TK, weights_TK, dy_TH = (each.to(DEVICE) for each in inputs(rows))
    x_TH.requires_grad_()
    weights_TK.requires_grad_()
    y_TH = experts_on_device(experts_module(dtype), x_TH, chosen_TK, weights_TK, adapters)
    y_TH.backward(dy_TH)
    found = [y_TH.detach(), x_TH.grad, weights_TK.grad, *(each.gradient_GP for each in same)]
    for ours, theirs in zip(found, expected.tensors(), strict=True):
        assert_close(ours, theirs, 1e-5)


def test_biases_and_alternating_outputs() -> None:
    """Experts of another form, against the code of Transformers; the adapter's part is on every second output."""
    config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS)
    config._experts_implementation = "eager"
    module: Any = GptOssExperts(config).requires_grad_(False).to(DEVICE)
    generator = torch.Generator().manual_seed(4)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    x_TH, chosen_TK, weights_TK, dy_TH = (each.to(DEVICE) for each in inputs(11))
    a_GERI = torch.randn(1, 1, 8, HIDDEN, generator=generator).to(DEVICE) * 0.2
    b_GEOR = torch.randn(1, EXPERTS, WIDTH, 8, generator=generator).to(DEVICE) * 0.2
    segment = Segment(0, 11, Groups((11,)))
    part = Part(segment, slice(1, None, 2), a_GERI, b_GEOR, torch.zeros_like(a_GERI), torch.zeros_like(b_GEOR))
    groups = DeviceGroups.from_segments([segment], 11, x_TH.device)
    adapters = DeviceExperts(groups, device_parts([part], [segment], x_TH.device), ())

    x_TH.requires_grad_()
    weights_TK.requires_grad_()
    ours = experts_on_device(module, x_TH, chosen_TK, weights_TK, adapters)
    found = [ours, *torch.autograd.grad(ours, (x_TH, weights_TK), dy_TH), part.da_GERI, part.db_GEOR]
    a_GERI.requires_grad_()
    b_GEOR.requires_grad_()
    delta_EHI = (b_GEOR[0] @ a_GERI[0]).transpose(1, 2)
    changed = module.gate_up_proj.clone()
    changed[:, :, 1::2] += delta_EHI
    del module.gate_up_proj
    module.gate_up_proj = changed
    theirs = module(x_TH, chosen_TK, weights_TK)
    expected = [theirs, *torch.autograd.grad(theirs, (x_TH, weights_TK, a_GERI, b_GEOR), dy_TH)]
    for left, right in zip(found, expected, strict=True):
        assert left is not None
        assert_close(left.detach(), right.detach(), 1e-5)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("count", [37, 600, 4100, 8200])
def test_runs_across_tiles(count: int, parts: int) -> None:
    """Runs that end within a tile, fill one exactly, or span several; each size of tiles."""
    if DEVICE == "cpu" and count > 600 and parts > 1:
        pytest.skip("slow in the interpreter")
    generator = torch.Generator().manual_seed(3)
    experts, groups, wide, rank = 2, 2, 40, 16
    keys = torch.tensor([0, 1, 2, 3, 4, 5])  # 2 and 5 have no adapter
    sizes = torch.tensor([16, 1, count // 4, 0, 5, 0])
    sizes[3] = count - int(sizes.sum())
    key_N = keys.repeat_interleave(sizes).int().to(DEVICE)
    a_GERI = torch.randn(groups, experts, rank, wide, generator=generator).to(DEVICE)
    addresses = torch.tensor([*(each.data_ptr() for each in a_GERI), 0, 0], device=DEVICE)
    ranks = torch.tensor([rank, rank, 0, 0], device=DEVICE)
    x_NI = torch.randn(count, wide, generator=generator).to(DEVICE)
    items, matrices = Items(key_N, groups, experts), Matrices(addresses, ranks, rank, True)
    h = to_rank(items, x_NI, matrices, parts=parts)
    y_NI = x_NI.clone()
    add_from_rank(items, y_NI, h, matrices)
    whole_NR = h if parts == 1 else h.sum(0)
    for key in keys.tolist():
        expert, group = divmod(key, groups + 1)
        mine = key_N == key
        own = a_GERI[group, expert] if group < groups else torch.zeros(rank, wide, device=DEVICE)
        expected = x_NI[mine] @ own.t()
        torch.testing.assert_close(whole_NR[mine], expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(y_NI[mine], x_NI[mine] + expected @ own, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("groups", [1, 3, 33])
@pytest.mark.parametrize("is_a", [True, False])
def test_gradients_of_many_groups(groups: int, is_a: bool) -> None:
    """Some groups have no pairs with an expert, and some no adapter; a captured pass has places for 32."""
    generator = torch.Generator(DEVICE).manual_seed(groups)
    experts, rank, wide = 3, 16, 24
    keys = experts * (groups + 1)
    sizes = torch.randint(0, 4, (keys,), generator=torch.Generator().manual_seed(groups)).to(DEVICE)
    ends = sizes.cumsum(0).int()
    starts = (ends - sizes).int()
    key_N = torch.repeat_interleave(torch.arange(keys, device=DEVICE), sizes).int()
    pairs = len(key_N)
    h, x = (torch.randn(pairs, width, generator=generator, device=DEVICE) for width in (rank, wide))
    weights = torch.rand(pairs, generator=generator, device=DEVICE)
    shape = (groups, experts, rank, wide) if is_a else (groups, experts, wide, rank)
    before = torch.randn(shape, generator=generator, device=DEVICE)
    found = before.clone()
    addresses = torch.tensor([each.data_ptr() for each in found] + [0], device=DEVICE)
    ranks = torch.full((groups + 1,), rank, device=DEVICE)
    without = groups - 1 if groups > 1 else None  # the number of a group without an adapter
    if without is not None:
        addresses[without] = 0
    items = Items(key_N, groups, experts, key_N, starts, ends)
    add_outer(items, h, x, Matrices(addresses, ranks, rank, is_a), weights_N=weights)
    wanted = before.clone()
    for number, key in enumerate(key_N.tolist()):
        expert, group = divmod(key, groups + 1)
        if group not in (without, groups):
            product = torch.outer(h[number] * weights[number], x[number])
            wanted[group, expert] += product if is_a else product.t()
    assert relative_error(found.cpu().numpy(), wanted.cpu().numpy()) < 1e-6
    assert not torch.equal(found, before)
