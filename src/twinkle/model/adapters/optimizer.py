"""One step of an optimizer on one adapter's flat row: torch's own code, with all settings passed at each step.

Adam and AdamW call torch's function. The others are objects of :mod:`torch.optim`, made for one step around the
adapter's rows: an optimizer that treats each number by itself gets the whole row as one parameter, Muon gets each A and
B as a matrix, without the padding of its module's rank. On experts, Tinker's form has a matrix for each expert; PEFT's
``target_parameters`` have one A and one B for all experts of a layer. Other adapters play no part in either.

Where adapters are cut (:mod:`twinkle.model.adapters.cuts`), each process takes the step on its own row. Norms are those
of the whole adapter, and Muon, which needs whole matrices, takes its step on the gathered adapter in every process.

An adapter has room for two rows of state. :data:`OPTIMIZERS` says what torch calls them for each optimizer, in the
order ``exp_avg_P``, ``exp_avg_sq_P``.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

from twinkle.errors import InvalidInputError, NonFiniteError, UnsupportedError
from twinkle.model.adapters.adapter import ADAM, Adapter
from twinkle.model.adapters.cuts import WHOLE, AdapterCuts
from twinkle.model.decoder.lora.stacks import RowLayout, Target
from twinkle.model.types import AdamParams, LoraSpec

_PIECE = 512  # numbers of a gradient whose norm is computed in fp32
_PART = 2**24  # numbers of a row that a step in parts has on the device at a time
_COUNT = "step"  # torch's name for the number of steps
_SHOWN = 200  # characters of torch's own message


@dataclass(frozen=True)
class StateNames:
    """What torch calls the state of an optimizer: tensors with a number for each weight, and single numbers."""

    rows: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    counted: bool = True  # whether the state has the number of steps
    matrices: bool = False  # whether it is for matrices, each by itself


# The optimizers of torch whose state fits an adapter's two rows. Adam and AdamW have their own function below.
OPTIMIZERS: Mapping[str, StateNames] = {
    "ASGD": StateNames(("ax",), ("eta", "mu")),
    "Adadelta": StateNames(("square_avg", "acc_delta")),
    "Adagrad": StateNames(("sum",)),
    "Adamax": StateNames(("exp_avg", "exp_inf")),
    "Muon": StateNames(("momentum_buffer",), counted=False, matrices=True),
    "NAdam": StateNames(("exp_avg", "exp_avg_sq"), ("mu_product",)),
    "RAdam": StateNames(("exp_avg", "exp_avg_sq")),
    "RMSprop": StateNames(("square_avg", "momentum_buffer", "grad_avg")),  # of the last two at most one, see below
    "SGD": StateNames(("momentum_buffer",), counted=False),
}


def state_names(name: str, settings: Mapping[str, Any]) -> StateNames:
    """Return the names of an optimizer's state with these settings. UnsupportedError if it is too much state."""
    names = OPTIMIZERS[name]
    if name != "RMSprop":
        return names
    if settings.get("momentum") and settings.get("centered"):
        raise UnsupportedError("RMSprop: momentum and centered together need too much state; allowed: one of them")
    return StateNames(("square_avg", "grad_avg" if settings.get("centered") else "momentum_buffer"))


def adam_step(
    adapter: Adapter,
    params: AdamParams,
    *,
    decoupled: bool = True,
    in_parts: bool = False,
    cuts: AdapterCuts = WHOLE,
) -> dict[str, float]:
    """Take one step with the accumulated gradient, then drop the gradient. Return metrics.

    Without a gradient nothing changes, and the metrics contain ``no_gradient:max``. With ``decoupled`` the weight decay
    shrinks the weights (AdamW); otherwise it is added to the gradient (Adam). With ``in_parts`` weights and state are
    in host memory, and come to the device part by part.
    """
    gradient_P = adapter.gradient_P
    if gradient_P is None:
        return {"unclipped_grad_l2:mean": 0.0, "no_gradient:max": 1.0}
    norm = _finite_norm(adapter, gradient_P, cuts)
    adapter.begin_state(ADAM)
    count = torch.zeros((), device=gradient_P.device)  # made there: a copy would wait for the device
    own = (slice(None), adapter.weights_P, adapter.exp_avg_P, adapter.exp_avg_sq_P)
    for part, weights_p, exp_avg_p, exp_avg_sq_p in adapter.state_in_parts(_PART) if in_parts else [own]:
        gradient_p = gradient_P[part]
        if params.grad_clip_norm > 0:
            # torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6
            gradient_p.mul_(min(1.0, params.grad_clip_norm / (norm + 1e-6)))
        adam(
            [weights_p],
            [gradient_p],
            [exp_avg_p],
            [exp_avg_sq_p],
            [],
            [count.fill_(float(adapter.step))],
            fused=True,
            amsgrad=False,
            decoupled_weight_decay=decoupled,
            beta1=params.beta1,
            beta2=params.beta2,
            lr=params.learning_rate,
            weight_decay=params.weight_decay,
            eps=params.eps,
            maximize=False,
        )
    adapter.step += 1
    adapter.drop_gradient()
    if not in_parts:
        adapter.refresh_compute_copy()
    return {"unclipped_grad_l2:mean": norm}


def optimizer_step(
    adapter: Adapter, name: str, settings: Mapping[str, Any], *, cuts: AdapterCuts = WHOLE
) -> dict[str, float]:
    """Take one step of ``torch.optim``'s optimizer ``name``, one of :data:`OPTIMIZERS`, then drop the gradient.

    ``settings``: all keywords of its constructor. State of another optimizer is dropped first. Without a gradient
    nothing changes, and the metrics contain ``no_gradient:max``.
    """
    gradient_P = adapter.gradient_P
    if gradient_P is None:
        return {"unclipped_grad_l2:mean": 0.0, "no_gradient:max": 1.0}
    names = state_names(name, settings)
    norm = _finite_norm(adapter, gradient_P, cuts)
    is_first = adapter.step == 0 or adapter.optimizer != name
    check_steps(name, settings, 0 if is_first else adapter.step, adapter.scalars)  # a schedule may have changed them
    adapter.begin_state(name)
    own = (adapter.weights_P, adapter.exp_avg_P, adapter.exp_avg_sq_P)
    gathers = names.matrices and adapter.layout.cut is not None
    layout = adapter.whole if gathers else adapter.layout
    if gathers:
        whole = [cuts.gather(row_P, adapter.layout) for row_P in own]
        gradient_P = cuts.gather(gradient_P, adapter.layout)
    else:
        whole = list(own)
    weights, *rows = (_tensors(adapter.spec, layout, row_P, names) for row_P in whole)
    gradients = _tensors(adapter.spec, layout, gradient_P, names)
    adapter.scalars = step_tensors(name, settings, weights, gradients, rows, adapter.step, adapter.scalars)
    if names.matrices:
        for tensors, whole_P in zip((weights, *rows), whole, strict=True):
            _put_back(adapter.spec, layout, whole_P, tensors)
    if gathers:
        for own_P, whole_P in zip(own, whole, strict=True):
            own_P.copy_(cuts.cut(whole_P, adapter.layout))
    adapter.step += 1
    adapter.drop_gradient()
    adapter.refresh_compute_copy()
    return {"unclipped_grad_l2:mean": norm}


def step_tensors(
    name: str,
    settings: Mapping[str, Any],
    weights: list[Tensor],
    gradients: Sequence[Tensor],
    rows: Sequence[Sequence[Tensor]],
    step: int,
    scalars: Mapping[str, float],
) -> dict[str, float]:
    """Take one step of ``torch.optim``'s optimizer ``name`` on some tensors, and return its single numbers.

    ``rows``: its first and second row of state, each with a tensor like every weight; they are changed in place.
    ``step``, ``scalars``: its steps so far and its single numbers, which have no meaning before the first step.
    """
    names = state_names(name, settings)
    optimizer = _made(name, weights, settings)
    state = list(zip(names.rows, rows, strict=False))
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    if step > 0:  # at its first step torch makes the state itself
        for place, weight in enumerate(weights):
            own = {row_name: tensors[place] for row_name, tensors in state}
            optimizer.state[weight] = _counters(step, scalars, names) | own
    optimizer.step()
    for place, weight in enumerate(weights):
        weight.grad = None
        for row_name, tensors in state:  # most optimizers have changed the rows in place
            value = optimizer.state[weight].get(row_name)
            if value is not None and value.data_ptr() != tensors[place].data_ptr():
                tensors[place].copy_(value)
    return {each: float(optimizer.state[weights[0]][each]) for each in names.scalars}


def check_steps(
    name: str, settings: Mapping[str, Any], step: int = 0, scalars: Mapping[str, float] | None = None
) -> None:
    """Take two steps on a small matrix, with an adapter's counters. InvalidInputError if torch fails.

    torch refuses some settings only in a step, after it has changed a part of the state, and some in the second step.
    """
    names = state_names(name, settings)
    weight = torch.zeros(2, 2)
    weight.grad = torch.ones(2, 2)
    try:
        optimizer = _made(name, [weight], settings)
        if step > 0:
            optimizer.state[weight] = _counters(step, scalars or {}, names) | {
                each: torch.zeros(2, 2) for each in names.rows
            }
        optimizer.step()
        optimizer.step()
    except Exception as error:
        allowed = f"values that torch can compute with; it says: {str(error)[:_SHOWN]}"
        raise InvalidInputError(f"settings of {name}", dict(settings), allowed) from error


def _made(name: str, weights: list[Tensor], settings: Mapping[str, Any]) -> Optimizer:
    factory: Callable[..., Optimizer] = getattr(torch.optim, name)
    return factory(weights, **settings)


def _counters(step: int, scalars: Mapping[str, float], names: StateNames) -> dict[str, Tensor]:
    """Return the part of an optimizer's state that consists of single numbers."""
    counted = {_COUNT: torch.tensor(float(step))} if names.counted else {}
    return counted | {each: torch.tensor(scalars[each]) for each in names.scalars}


def _tensors(spec: LoraSpec, layout: RowLayout, row_P: Tensor, names: StateNames) -> list[Tensor]:
    """Return the tensors that an optimizer treats as parameters: the row itself, or its matrices.

    Matrices are views of the row. Those of experts in PEFT's form are copies, see :func:`_put_back`.
    """
    if not names.matrices:
        return [row_P.detach()]
    found: list[Tensor] = []
    for target, a, b in _factors(spec, layout, row_P):
        if target.is_parameter:  # PEFT's A is ordered by expert, its B by rank first
            found += [a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)]
        elif target.copies is None:
            found += [a, b]
        else:
            found += [*a, *b]
    return [matrix.detach() for matrix in found]


def _put_back(spec: LoraSpec, layout: RowLayout, row_P: Tensor, matrices: Sequence[Tensor]) -> None:
    """Write the matrices that :func:`_tensors` has copied to the row."""
    rest = iter(matrices)
    for target, a, b in _factors(spec, layout, row_P):
        if target.is_parameter:
            count, rank = a.shape[:2]
            a.copy_(next(rest).unflatten(0, (count, rank)))
            b.copy_(next(rest).unflatten(1, (rank, count)).permute(2, 0, 1))
        else:
            for _ in range(2 if target.copies is None else len(a) + len(b)):
                next(rest)


def _factors(spec: LoraSpec, layout: RowLayout, row_P: Tensor) -> Iterator[tuple[Target, Tensor, Tensor]]:
    """Yield each module's A and B without the padding of its rank, as views."""
    for target, rank in zip(layout.targets, spec.module_ranks([each.name for each in layout.targets]), strict=True):
        a, b = layout.views(row_P, target.name)
        yield target, a[..., :rank, :], b[..., :rank]


def _finite_norm(adapter: Adapter, gradient_P: Tensor, cuts: AdapterCuts) -> float:
    norm = cut_norm(gradient_P, adapter.layout, cuts)
    if not math.isfinite(norm):
        raise NonFiniteError(
            f"the accumulated gradient of adapter {adapter.adapter_id!r} has norm {norm}: no step taken"
        )
    return norm


def gradient_norm(gradient_P: Tensor, norm_type: float = 2.0) -> float:
    """Return the norm of one adapter's gradient."""
    return float(norm_in_fp64(gradient_P, norm_type))


def cut_norm(gradient_P: Tensor, layout: RowLayout, cuts: AdapterCuts, norm_type: float = 2.0) -> float:
    """Return the norm of one adapter's whole gradient, of which this process has a part.

    The ranks of ``cuts.holders`` call this together. All get the same number, to the last bit.
    """
    holders = cuts.holders(layout)
    if holders.size == 1:
        return gradient_norm(gradient_P, norm_type)
    counted_N = cuts.counted(gradient_P, layout)
    own = gradient_norm(counted_N, norm_type) if len(counted_N) else None  # of no numbers some norms do not exist
    parts = [part for part in holders.gather(own) if part is not None]
    return float(torch.linalg.vector_norm(torch.tensor(parts, dtype=torch.float64), norm_type))


def norm_in_fp64(tensor: Tensor, norm_type: float) -> Tensor:
    """Return the norm of all numbers of a tensor as an fp64 scalar on the same device.

    On a CPU the norms of short pieces are computed in fp32 and combined in fp64: torch's reduction of one long row is
    slow in fp64 and inexact in fp32. Elsewhere torch adds up in a tree, which is exact enough in fp32, and an fp64 copy
    would take memory. Types smaller than fp32 are added up in fp32.
    """
    flat_N, dtype = tensor.reshape(-1), torch.promote_types(tensor.dtype, torch.float32)
    if tensor.device.type != "cpu":
        return torch.linalg.vector_norm(flat_N, norm_type, dtype=dtype).double()
    whole = flat_N.numel() // _PIECE * _PIECE
    norms = torch.linalg.vector_norm(flat_N[:whole].view(-1, _PIECE), norm_type, dim=1, dtype=dtype).double()
    if whole < flat_N.numel():
        norms = torch.cat([norms, torch.linalg.vector_norm(flat_N[whole:], norm_type, dtype=torch.float64)[None]])
    return torch.linalg.vector_norm(norms, norm_type)
