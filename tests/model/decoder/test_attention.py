"""packed_attention, compared with the plain formula, one sequence at a time."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from twinkle.errors import UnsupportedError
from twinkle.model.decoder.attention import Packing, packed_attention, with_sinks

HEADS, KV_HEADS, SIZE = 4, 2, 8
TOLERANCE = 1e-5

LENGTHS = {
    "one sequence": (13,),
    "one token": (1,),
    "ragged": (5, 1, 17, 9),
    "runs of equal lengths": (4, 4, 4, 7, 7, 1, 1, 12),
    "equal lengths apart": (6, 3, 6, 3),
}


def tensors(tokens: int, *, kv_heads: int = KV_HEADS, value_size: int = SIZE) -> tuple[Tensor, Tensor, Tensor]:
    """Return query (1, H, T, D), key (1, J, T, D) and value (1, J, T, D')."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = (HEADS, SIZE), (kv_heads, SIZE), (kv_heads, value_size)
    query, key, value = (
        torch.randn(1, heads, tokens, size, generator=generator).mul_(1.5).requires_grad_() for heads, size in shapes
    )
    return query, key, value


def plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the softmax of the scores of all visible tokens, by loops over sequences, heads and tokens."""
    rows = []
    start = 0
    for length in lengths:
        for position in range(length):
            first = start if window is None else max(start, start + position - window + 1)
            reach = slice(first, start + position + 1)
            rows.append(
                torch.stack(
                    [
                        _attend(query[0, head, start + position], key, value, head, reach, scaling, softcap, sinks)
                        for head in range(HEADS)
                    ]
                )
            )
        start += length
    return torch.stack(rows)[None]


def _attend(
    q_D: Tensor,
    key: Tensor,
    value: Tensor,
    head: int,
    reach: slice,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    shared = head * key.shape[1] // HEADS  # adjacent query heads share a key/value head
    scores = key[0, shared, reach] @ q_D * (1 / math.sqrt(SIZE) if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    total = scores.exp().sum() + (0 if sinks is None else sinks[head].exp())
    return scores.exp() / total @ value[0, shared, reach]


def check(
    lengths: Sequence[int],
    *,
    scaling=None,
    window=None,
    softcap=None,
    kv_heads=KV_HEADS,
    value_size=SIZE,
    with_sinks=False,
):
    """Check that values and gradients agree."""
    inputs = tensors(sum(lengths), kv_heads=kv_heads, value_size=value_size)
    sinks = torch.tensor([-1.0, 0.5, 2.0, 6.0]).requires_grad_() if with_sinks else None
    packing = Packing.from_lengths(tuple(lengths), torch.device("cpu"))
    ours, weights = packed_attention(
        nn.Identity(),
        *inputs,
        None,
        packing=packing,
        scaling=scaling,
        sliding_window=window,
        softcap=softcap,
        s_aux=sinks,
    )
    theirs = plain(*inputs, lengths, scaling, window, softcap, sinks)
    assert weights is None
    assert ours.shape == (1, sum(lengths), HEADS, value_size)
    assert_close(ours, theirs)
    direction = torch.randn(ours.shape, generator=torch.Generator().manual_seed(0))
    trained = inputs if sinks is None else (*inputs, sinks)
    for left, right in zip(
        torch.autograd.grad(ours, trained, direction), torch.autograd.grad(theirs, trained, direction), strict=True
    ):
        assert_close(left, right)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """Compare relative to the whole tensor. The gradient of query and key is zero for a token that sees only itself."""
    error = (ours - theirs).norm().item()
    assert error <= TOLERANCE * max(1.0, theirs.norm().item()), error


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_lengths(lengths: tuple[int, ...]) -> None:
    check(lengths)


@pytest.mark.parametrize("window", [1, 3, 7, 8, 100])
@pytest.mark.parametrize("lengths", [(5, 8, 8, 17), (2, 7)])
def test_sliding_windows_count_the_token_itself(lengths: tuple[int, ...], window: int) -> None:
    check(lengths, window=window)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("scaling", [None, 0.2])
def test_softcap(window: int | None, scaling: float | None) -> None:
    check((5, 8, 8, 11), softcap=1.5, window=window, scaling=scaling)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_sinks(window: int | None, softcap: float | None) -> None:
    check((5, 8, 8, 11, 1), window=window, softcap=softcap, with_sinks=True)


def test_sinks_after_the_softmax() -> None:
    """A kernel that gives the denominators of its softmax needs no further pass for sinks."""
    query, key, value = (x.detach() for x in tensors(13))
    sinks = torch.tensor([-1.0, 0.5, 2.0, 6.0])
    packing = Packing.from_lengths((13,), torch.device("cpu"))
    out, _ = packed_attention(nn.Identity(), query, key, value, None, packing=packing)
    scores = query[0] @ key[0].repeat_interleave(HEADS // KV_HEADS, 0).transpose(1, 2) / math.sqrt(SIZE)
    norm = scores.masked_fill(torch.ones(13, 13).triu(1) > 0, float("-inf")).logsumexp(2)
    changed, total = with_sinks(out[0], norm, sinks)
    expected, _ = packed_attention(nn.Identity(), query, key, value, None, packing=packing, s_aux=sinks)
    assert_close(changed, expected[0])
    assert_close(total, (norm.exp() + sinks[:, None].exp()).log())


def test_scaling() -> None:
    check((5, 8), scaling=0.7)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_shared_key_value_heads(kv_heads: int, softcap: float | None) -> None:
    check((5, 8, 8), kv_heads=kv_heads, softcap=softcap)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_values_of_another_size(softcap: float | None) -> None:
    """The value size differs from the key size, as in multi-head latent attention."""
    check((5, 8), value_size=4, softcap=softcap)


def test_bf16_is_near_fp32() -> None:
    lengths = (5, 8, 8, 17)
    inputs = [x.detach() for x in tensors(sum(lengths))]
    packing = Packing.from_lengths(lengths, torch.device("cpu"))
    for softcap in (None, 2.0):
        exact, _ = packed_attention(nn.Identity(), *inputs, None, packing=packing, softcap=softcap)
        rounded, _ = packed_attention(
            nn.Identity(), *(x.bfloat16() for x in inputs), None, packing=packing, softcap=softcap
        )
        assert rounded.dtype == torch.bfloat16
        assert (rounded.float() - exact).norm() <= 0.01 * exact.norm()


def test_neighbours_do_not_meet() -> None:
    """Changing one sequence changes no bit of the others; NaN does not spread either."""
    query, key, value = (x.detach() for x in tensors(13))
    packing = Packing.from_lengths((4, 4, 5), torch.device("cpu"))
    before, _ = packed_attention(nn.Identity(), query, key, value, None, packing=packing)
    for x in (query, key, value):
        x[:, :, 4:8] = float("nan")
    after, _ = packed_attention(nn.Identity(), query, key, value, None, packing=packing)
    others = [*range(4), *range(8, 13)]
    assert torch.equal(after[:, others], before[:, others])
    assert after[:, 4:8].isnan().all()


def test_packing_knows_where_sequences_end() -> None:
    packing = Packing.from_lengths((3, 1, 5), torch.device("cpu"))
    assert packing.ends_N1.tolist() == [0, 3, 4, 9]
    assert packing.ends_N1.dtype == torch.int32
    assert packing.longest == 8  # an upper bound: the next power of two
    assert Packing.from_lengths((1,), torch.device("cpu")).longest == 1


@pytest.mark.parametrize("wrong", [{"packing": None}, {"attention_mask": torch.ones(1, 1, 5, 5)}, {"dropout": 0.1}])
def test_what_packing_cannot_do_is_refused(wrong: dict) -> None:
    query, key, value = tensors(5)
    arguments = {"attention_mask": None, "packing": Packing.from_lengths((5,), torch.device("cpu")), **wrong}
    with pytest.raises(UnsupportedError, match="Identity cannot run packed"):
        packed_attention(nn.Identity(), query, key, value, **arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("size", [8, 64, 128])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_kernel_is_the_formula(size: int, window: int | None, has_sinks: bool) -> None:
    """Our kernels and varlen_attn on CUDA in bf16, compared with SDPA in fp32, including gradients."""
    lengths = (5, 1, 17, 17, 140, 64, 65)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, heads, sum(lengths), size, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    if has_sinks:
        inputs.append(torch.tensor([-1.0, 0.5, 2.0, 6.0]))
    outcomes = []
    for device, dtype in ((torch.device("cpu"), torch.float32), (torch.device("cuda"), torch.bfloat16)):
        given = [x.bfloat16().to(device, dtype).requires_grad_() for x in inputs]
        packing = Packing.from_lengths(lengths, device)
        options = {"packing": packing, "sliding_window": window, "s_aux": given[3] if has_sinks else None}
        out, _ = packed_attention(nn.Identity(), *given[:3], None, **options)
        with torch.no_grad():
            scored, _ = packed_attention(nn.Identity(), *given[:3], None, **options)
        assert torch.equal(out, scored)
        generator.manual_seed(1)
        slope = torch.randn(out.shape, generator=generator).bfloat16().to(device, dtype)
        outcomes.append([out.detach(), *torch.autograd.grad(out, given, slope)])
    for exact, kernel in zip(*outcomes, strict=True):
        assert (kernel.float().cpu() - exact).norm() <= 0.01 * exact.norm()
