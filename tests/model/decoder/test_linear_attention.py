"""The gated delta rule and its convolution over packed sequences equal Transformers' on one sequence at a time."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule

from twinkle.model.decoder.linear_attention import kernels
from twinkle.model.decoder.linear_attention.bounds import Bounds
from twinkle.model.decoder.linear_attention.convolution import causal_convolution
from twinkle.model.decoder.linear_attention.delta_rule import gated_delta_rule
from twinkle.model.decoder.linear_attention.kernels import delta_rule_kernel

# One token, less and more than a chunk, exactly one, neighbours shorter than the convolution's window.
LENGTHS = {"mixed": (5, 1, 70, 130, 64, 2, 1, 3), "short": (2, 9, 1, 1), "one": (1,), "long": (200,)}
CPU = torch.device("cpu")


def close(ours: Tensor, theirs: Tensor, bound: float = 1e-5) -> None:
    assert (ours - theirs).norm() <= bound * theirs.norm()


def inputs(rows: int, device: torch.device = CPU, dtype: torch.dtype = torch.float32, width: int = 16) -> list[Tensor]:
    """Return q, k, v, g and β of 2 key heads and 4 value heads."""
    generator = torch.Generator().manual_seed(rows)
    q, k, v = (torch.randn(rows, heads, width, generator=generator) for heads in (2, 2, 4))
    g, beta = -2 * torch.rand(rows, 4, generator=generator), torch.rand(rows, 4, generator=generator)
    given = [q.to(dtype), k.to(dtype), v.to(dtype), g, beta.to(dtype)]
    return [each.to(device).requires_grad_() for each in given]


def plain(given: list[Tensor], rule: object = torch_chunk_gated_delta_rule) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta = (each[None] for each in given)
    q, k = (each.repeat_interleave(2, 2) for each in (q, k))
    out, state = rule(
        q, k, v, g=g, beta=beta, initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    return out[0], state[0]


@pytest.mark.matrix
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_the_delta_rule_equals_one_sequence_at_a_time(lengths: tuple[int, ...]) -> None:
    given = inputs(sum(lengths))
    out, states = gated_delta_rule(*given, Bounds.from_lengths(lengths, CPU))
    pieces = [plain(list(piece)) for piece in zip(*(each.split(lengths) for each in given), strict=True)]
    theirs = torch.cat([piece for piece, _ in pieces])
    close(out, theirs)
    close(states, torch.stack([state for _, state in pieces]))
    slopes = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(0))
    ours = torch.autograd.grad((out * slopes).sum(), given)
    for mine, expected in zip(ours, torch.autograd.grad((theirs * slopes).sum(), given), strict=True):
        close(mine, expected)


def test_it_equals_the_rule_token_by_token() -> None:
    given = inputs(77)
    out, states = gated_delta_rule(*given, Bounds.from_lengths((77,), CPU))
    theirs, state = plain(given, torch_recurrent_gated_delta_rule)
    close(out, theirs)
    close(states[0], state)


def exactly(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Return the outputs in float64, token by token."""
    q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    q, k = (each.repeat_interleave(2, 1) for each in (q / q.shape[-1] ** 0.5, k))
    state, outputs = torch.zeros(4, q.shape[-1], v.shape[-1], dtype=torch.float64), []
    for row in range(len(q)):
        state = state * g[row].exp()[:, None, None]
        correction = (v[row] - torch.einsum("vde,vd->ve", state, k[row])) * beta[row][:, None]
        state = state + k[row][:, :, None] * correction[:, None]
        outputs.append(torch.einsum("vde,vd->ve", state, q[row]))
    return torch.stack(outputs)


def test_strong_decay_is_exact() -> None:
    """Sums of logarithms are in the hundreds here; in fp32 their differences would be off by 1e-5."""
    given = inputs(150)
    with torch.no_grad():
        given[3] *= 8
    doubles = [each.detach().double().requires_grad_() for each in given]
    out, _ = gated_delta_rule(*given, Bounds.from_lengths((150,), CPU))
    theirs = exactly(*doubles)
    close(out, theirs, 1e-6)
    ours = torch.autograd.grad(out.square().sum(), given)
    for mine, expected in zip(ours, torch.autograd.grad(theirs.square().sum(), doubles), strict=True):
        close(mine, expected, 1e-6)


def test_pieces_go_on_from_their_states() -> None:
    """Sequences of 70, 3 and 100 rows, cut behind row 20, 2 and 64, and handed over in another order."""
    whole, cuts = (70, 3, 100), (20, 2, 64)
    given = inputs(sum(whole))
    out, states = gated_delta_rule(*given, Bounds.from_lengths(whole, CPU))
    by_sequence = list(zip(*(each.split(whole) for each in given), strict=True))
    first = [torch.cat([each[i][:cut] for each, cut in zip(by_sequence, cuts, strict=True)]) for i in range(5)]
    rest = [torch.cat([each[i][cut:] for each, cut in zip(by_sequence, cuts, strict=True)]) for i in range(5)]
    _, between = gated_delta_rule(*first, Bounds.from_lengths(cuts, CPU))
    left = tuple(length - cut for length, cut in zip(whole, cuts, strict=True))
    later, last = gated_delta_rule(*rest, Bounds.from_lengths(left, CPU), between)
    close(last, states)
    wanted = [piece[cut:] for piece, cut in zip(out.split(whole), cuts, strict=True)]
    close(later, torch.cat(wanted))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_the_convolution_equals_one_sequence_at_a_time(lengths: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(len(lengths))
    x_TF = torch.randn(sum(lengths), 24, generator=generator, requires_grad=True)
    weight_F1W = torch.randn(24, 1, 4, generator=generator, requires_grad=True)
    y_TF = causal_convolution(x_TF, weight_F1W[:, 0], Bounds.from_lengths(lengths, CPU))
    theirs = torch.cat(
        [
            conv1d(piece.t()[None], weight_F1W, padding=3, groups=24)[0, :, : len(piece)].t()
            for piece in x_TF.split(lengths)
        ]
    )
    close(y_TF, theirs)
    slopes = torch.randn(y_TF.shape, generator=generator)
    ours = torch.autograd.grad((y_TF * slopes).sum(), [x_TF, weight_F1W])
    expected = torch.autograd.grad((theirs * slopes).sum(), [x_TF, weight_F1W])
    for mine, other in zip(ours, expected, strict=True):
        close(mine, other)


def test_kernels_are_for_16_bit_numbers_on_cuda() -> None:
    q, _, v, _, _ = inputs(3, dtype=torch.bfloat16)
    assert delta_rule_kernel(q, v) is None


@pytest.mark.parametrize("fault", ["raises", "wrong", "not a number", None])
def test_kernels_that_fail_or_give_other_numbers_are_not_used(
    fault: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def chunked(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, use_qk_l2norm_in_kernel: bool, cu_seqlens: Tensor
    ) -> tuple[Tensor, None]:
        if fault == "raises":
            raise RuntimeError("Triton is too old\nfor this")
        lengths = tuple(cu_seqlens.diff().tolist())
        out, _ = gated_delta_rule(*(each[0] for each in (q, k, v, g, beta)), Bounds.from_lengths(lengths, CPU))
        return out[None] * {"wrong": 1.1, "not a number": float("nan")}.get(str(fault), 1.0), None

    monkeypatch.setattr(kernels, "_chunked", lambda: chunked)
    works = kernels._works.__wrapped__(CPU, torch.bfloat16, (2, 16), (4, 16))
    assert works is (fault is None)
    said = {"raises": "Triton is too old", "wrong": "differ by 1.0e-01", "not a number": "by nan", None: ""}
    assert caplog.text.endswith("\n") == bool(fault)
    assert said[fault] in caplog.text


@pytest.mark.gpu
def test_the_kernels_equal_the_plain_rule() -> None:
    pytest.importorskip("fla")
    device, lengths = torch.device("cuda"), LENGTHS["mixed"]
    given = inputs(sum(lengths), device, torch.bfloat16, width=128)
    bounds = Bounds.from_lengths(lengths, device)
    kernel = delta_rule_kernel(given[0], given[2])
    if kernel is None:
        pytest.skip("fla-core does not give our numbers with this version of Triton: the log says why")
    ours, (theirs, _) = kernel(*given, bounds), gated_delta_rule(*given, bounds)
    close(ours.float(), theirs.float(), 2e-2)
    slopes = torch.randn_like(theirs)
    gradients = torch.autograd.grad((ours * slopes).sum(), given)
    for mine, expected in zip(gradients, torch.autograd.grad((theirs * slopes).sum(), given), strict=True):
        close(mine.float(), expected.float(), 4e-2)
