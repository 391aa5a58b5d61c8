"""The price of each operation in a loss graph: never less than the work of torch, forward and backward.

Torch's calls are counted, not timed: the numbers that each call writes, and the products in matrix multiplications.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tests.support.losses.traced import call, calls, decode_graph, ref
from twinkle.errors import UserError
from twinkle.loss.graph.bounds import BOUNDS, Bound, CannotComputeError, shapes_of
from twinkle.loss.graph.catalog import CATALOG
from twinkle.loss.graph.interpreter import Limits, Meter, evaluate
from twinkle.loss.graph.operations import OPERATIONS

SIDE = 32
# For each output number torch writes a few more: copies, masks, gradients. cosine_similarity has the most.
_FEW = 20

X = torch.linspace(0.1, 0.9, SIDE * SIDE).reshape(SIDE, SIDE).requires_grad_()
W = torch.linspace(0.9, 0.2, SIDE * SIDE).reshape(SIDE, SIDE)
ZEROS = (X.detach() * (torch.arange(SIDE) % 3)).requires_grad_()
V = torch.linspace(0.1, 0.9, SIDE).requires_grad_()
ROWS = torch.arange(SIDE)
MASK = X.detach() > 0.4
CUBE = torch.linspace(0, 1, 16 * 4 * 8).reshape(16, 1, 4, 8).requires_grad_()
CUBES = torch.linspace(0, 1, 16 * 8 * 4).reshape(1, 16, 8, 4).requires_grad_()

# Arguments for each function, by the last part of its name; several calls if an argument determines the amount of work.
_EXAMPLES: dict[str, Sequence[tuple[Any, ...]]] = {
    "addcdiv": [(X, W, W)],
    "addcmul": [(X, W, W)],
    "arange": [(SIDE,), (0, 1, 0.01), (-100, 0)],
    "as_tensor": [([[1.0, 2.0], [3.0, 4.0]],)],
    "bitwise_and": [(MASK, MASK)],
    "bitwise_not": [(MASK,)],
    "bitwise_or": [(MASK, MASK)],
    "bitwise_xor": [(MASK, MASK)],
    "bmm": [(CUBE[:, 0], CUBES[0])],
    "broadcast_to": [(V, (SIDE, SIDE)), (V, (100, SIDE))],
    "cat": [([X] * 5,)],
    "chunk": [(X, 7)],
    "clamp": [(X, 0.2, 0.8), (V, W, X)],
    "clamp_max": [(X, 0.8)],
    "clamp_min": [(X, 0.2)],
    "clip": [(X, 0.2, 0.8)],
    "concat": [([X] * 5,)],
    "concatenate": [([X] * 5,)],
    "cosine_similarity": [(X, W, 1)],
    "cumprod": [(X, 0), (X, 1), (ZEROS, 0)],
    "cumsum": [(X, 0)],
    "diff": [(X,), (X, 8), (X, 3, 0)],
    "dot": [(V, V)],
    "einsum": [("ab,cb->ac", X, W), ("ab,cb,db->acd", X, W, W), ("ab->b", X)],
    "expand": [(V, 100, SIDE)],
    "flatten": [(X,)],
    "flip": [(X, (0, 1))],
    "float_power": [(X, 3)],
    "full": [((SIDE, SIDE), 2.0)],
    "full_like": [(X, 2.0)],
    "gather": [(X, 1, MASK.long()), (X, 0, ROWS[None, :1])],
    "getattr": [(X, "T"), (X, "shape")],
    "getitem": [
        (X, 3),
        (X, (slice(None), None, 2)),
        (X, MASK),
        (X, ROWS),
        (X, (ROWS, ROWS)),
        (X, [0, 1]),
        (X, ROWS[0]),
    ],
    "hstack": [([X] * 5,)],
    "index_select": [(X, 0, ROWS), (X, 0, ROWS[:1])],
    "lerp": [(X, W, 0.5)],
    "linalg_norm": [(X,), (X, 1), (X, "fro"), (X, 3, 1), (V, 2)],
    "linalg_vector_norm": [(X, 3)],
    "logcumsumexp": [(X, 0)],
    "log_softmax": [(X, 1)],
    "logsumexp": [(X, 1)],
    "masked_fill": [(X, MASK, 0.0)],
    "masked_select": [(X, MASK)],
    "matmul": [(X, W), (X, V), (V, X), (CUBE, CUBES), (CUBE, W[:8, :3])],
    "max": [(X,), (X, 1), (X, W)],
    "median": [(X,), (X, 1)],
    "min": [(X,), (X, 1), (X, W)],
    "mm": [(X, W)],
    "mv": [(X, V)],
    "narrow": [(X, 0, 3, 1)],
    "new_full": [(X, (SIDE, 5), 2.0)],
    "new_ones": [(X, SIDE, 5)],
    "new_tensor": [(X, [1.0, 2.0])],
    "new_zeros": [(X, (SIDE, 5))],
    "norm": [(X,), (X, 3), (X, "fro"), (X, 2, 1)],
    "normalize": [(X,), (X, 3, 0)],
    "ones": [(SIDE, SIDE)],
    "outer": [(V, V)],
    "pad": [(X, (3, 50)), (X, (0, 0, 7, 7))],
    "permute": [(X, (1, 0))],
    "prod": [(X,), (X, 1), (ZEROS,), (ZEROS, 0)],
    "quantile": [(X, 0.3), (X, 0.3, 1)],
    "repeat": [(V, 5), (V, 9, 9)],
    "reshape": [(X, (-1,))],
    "roll": [(X, 1), (X, (3,) * 8, (0, 1) * 4)],
    "select": [(X, 0, 3)],
    "softmax": [(X, 1)],
    "special_log_softmax": [(X, 1)],
    "special_logsumexp": [(X, 1)],
    "special_softmax": [(X, 1)],
    "split": [(X, 3), (X, (2, 30))],
    "stack": [([X] * 5,)],
    "swapaxes": [(X, 0, 1)],
    "swapdims": [(X, 0, 1)],
    "t": [(X,)],
    "take": [(X, ROWS), (X, ROWS[:1])],
    "take_along_dim": [(X, MASK.long(), 1)],
    "tensor": [([[1.0, 2.0], [3.0, 4.0]],)],
    "tile": [(V, (5,)), (V, (9, 9))],
    "to": [(X, torch.float64), (X, W)],
    "topk": [(X, 3), (X, SIDE)],
    "transpose": [(X, 0, 1)],
    "type": [(X, torch.float64)],
    "unsqueeze": [(X, 0)],
    "view": [(W, -1)],
    "vstack": [([X] * 5,)],
    "where": [(MASK, X, W), (MASK,)],
    "zeros": [(SIDE, SIDE)],
}
_PAIRS = ("add", "eq", "floordiv", "ge", "gt", "le", "lt", "mod", "mul", "ne", "pow", "sub", "truediv")
_SPECIAL: dict[str, Sequence[tuple[Any, ...]]] = {
    "math": [(2.5,)],
    "math.pow": [(2.5, 3)],
    "operator.and_": [(MASK, MASK)],
    "operator.invert": [(MASK,)],
    "operator.or_": [(MASK, MASK)],
    "operator.xor": [(MASK, MASK)],
    "torch.linalg.norm": _EXAMPLES["linalg_norm"],
    ".where": [(X, MASK, W)],
}


def _examples(target: str) -> Sequence[tuple[Any, ...]]:
    home, _, name = target.rpartition(".")
    if target in _SPECIAL or home == "math":
        return _SPECIAL.get(target, _SPECIAL["math"])
    if name in _EXAMPLES:
        return _EXAMPLES[name]
    rule = CATALOG[target]
    two = (
        name in _PAIRS
        if home == "operator"
        else rule.bound in ("broadcast", "divided", "quotient") and rule.arguments == 2
    )
    return [(X, W)] if two and name not in ("elu", "leaky_relu") else [(X,)]


class _Counting(TorchDispatchMode):
    """Counts the numbers that torch's calls write, and the size of the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.work = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            self.work += flop_registry[packet](*args, **(kwargs or {}), out_val=result) // 2
        if not func.is_view:
            sizes = [shape.numel() for shape in shapes_of(result)]
            self.work += sum(sizes)
            self.largest = max([self.largest, *sizes])
        return result


def _counted(target: str, arguments: tuple[Any, ...]) -> _Counting:
    with torch.enable_grad(), _Counting() as counting:
        result = OPERATIONS[target](*arguments)
        results = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, tuple) else []
        differentiable = [each for each in results if isinstance(each, Tensor) and each.requires_grad]
        if differentiable and not target.endswith(("floor_divide", "floordiv")):  # floor division has no derivative
            torch.autograd.backward(differentiable, [torch.ones_like(each) for each in differentiable])
    return counting


def _bound(target: str, arguments: tuple[Any, ...]) -> Bound:
    return BOUNDS[CATALOG[target].bound](OPERATIONS[target], arguments, {})


@pytest.mark.filterwarnings("ignore:reduction")  # a warning of kl_div that its meaning may change
@pytest.mark.parametrize("target", CATALOG)
def test_an_operation_is_charged_what_it_does(target: str) -> None:
    for arguments in _examples(target):
        bound, counted = _bound(target, arguments), _counted(target, arguments)
        given = sum(shape.numel() for shape in shapes_of(arguments))
        assert counted.work <= _FEW * bound.work, (arguments[1:], counted.work / bound.work)
        assert counted.largest <= max(bound.made, given) + 1, (arguments[1:], counted.largest, bound)


def test_what_grows_with_an_argument_is_charged_for_it() -> None:
    assert _bound("torch.diff", (X, 8)).work == 8 * _bound("torch.diff", (X, 1)).work
    assert _bound("torch.roll", (X, (1,) * 8, (0,) * 8)).work == 8 * _bound("torch.roll", (X, 1, 0)).work


# --- calls that are refused -------------------------------------------------------------------------------------------

TENSOR = torch.tensor(5)
# None of these may run. With the sizes used here they would do no harm.
REFUSED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "many differences": ("torch.diff", (X, 9), {}),
    "many differences, by name": (".diff", (X,), {"n": 10**18}),
    "differences that a tensor counts": ("torch.diff", (X, TENSOR), {}),
    "many shifts": ("torch.roll", (X, (1,) * 9, (0,) * 9), {}),
    "a nuclear norm": ("torch.norm", (X, "nuc"), {}),
    "a nuclear norm, by name": (".norm", (X,), {"p": "nuc", "dim": (0, 1)}),
    "a nuclear norm to divide by": ("torch.nn.functional.normalize", (X, "nuc", (0, 1)), {}),
    "a spectral norm": ("torch.linalg.norm", (X, 2), {}),
    "a spectral norm of some": ("torch._C._linalg.linalg_norm", (X,), {"ord": -2, "dim": (0, 1)}),
    "a norm that a tensor names": ("torch.linalg.norm", (X, torch.tensor(2.0)), {}),
    "a size that a tensor tells": ("torch.zeros", (TENSOR,), {}),
    "sizes of which a tensor tells one": ("torch.ones", (3, TENSOR), {}),
    "a new size that a tensor tells": (".new_zeros", (X, TENSOR), {}),
    "another view of the bytes": (".view", (W, torch.bool), {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_cost_that_is_not_known_is_refused(name: str) -> None:
    target, arguments, keywords = REFUSED[name]
    with pytest.raises(CannotComputeError, match="allowed"):
        BOUNDS[CATALOG[target].bound](OPERATIONS[target], arguments, keywords)


def test_division_that_rounds_is_charged_as_what_it_does() -> None:
    plain, rounded = (BOUNDS["quotient"](torch.div, (X, W), {"rounding_mode": mode}) for mode in (None, "floor"))
    assert rounded == BOUNDS["divided"](torch.remainder, (X, W), {})
    assert rounded.work > plain.work


def test_names_and_places_of_arguments_are_told_apart() -> None:
    """(1000, 1) times (1, 1000) has a million elements; the other way round it would have one."""
    tall, wide = torch.ones(1000, 1), torch.ones(1, 1000)
    for keywords in ({"input": tall, "other": wide}, {"other": wide, "input": tall}):
        assert BOUNDS["matmul"](torch.matmul, (), keywords).made == 1_000_000
    assert BOUNDS["arange"](torch.arange, (-1000,), {"end": 0}).made >= 1000


def test_a_mask_is_one_index_for_each_dimension() -> None:
    deep = torch.ones(2, 2, 2, 2, 2, 2) > 0
    assert BOUNDS["index"](OPERATIONS["operator.getitem"], (deep, deep), {}).made == 6 * 64
    assert BOUNDS["where"](torch.where, (deep,), {}).made == 6 * 64


def test_stacks_of_matrices_are_charged_for_their_copies() -> None:
    assert _bound("torch.matmul", (CUBE, CUBES)).made == 16 * 16 * 4 * 8
    assert _bound("torch.matmul", (CUBE, W[:8, :3])).made == 16 * 4 * 3  # one matrix for the whole stack: no copies


def test_dimensions_are_limited() -> None:
    body = calls(call("a", ".reshape", ref("logprobs"), [1] * 17), call("s", ".sum", ref("a")), loss="s")
    with pytest.raises(UserError, match="17 dimensions"):
        evaluate(decode_graph(body), {"logprobs": np.ones(1, np.float32)}, "data[0]", Meter(Limits()))
