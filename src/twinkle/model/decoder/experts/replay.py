"""Routes of tokens to experts that one pass records and another one replays.

A router of Transformers returns (logits, weights, chosen) for its rows. :func:`watch_routers` puts a hook on each,
which does nothing unless a pass has :class:`PassRoutes`. In a pass that replays, the chosen experts come from the
request; their weights are computed from the router's own logits, and so from the present hidden states, as the router's
family computes them. Rows without routes keep what their router chose, bit for bit. Where a router chooses several
experts, zeros alone are no route either: no router chooses one expert twice, and processors fill up tokens that no
router has seen with zeros.

How a family makes weights of logits is found by asking its router: a rule is used if it gives the router's own weights
for the router's own choice. A model with a router that fits no rule cannot replay.

Shapes: T rows, L decoder layers, K experts of a row, E experts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from twinkle.model.types import RoutingSpec

Rule = Callable[[Tensor, Tensor], Tensor]  # (logits_TE, chosen_TK) → weights (T, K)


def _normalised(weights_TK: Tensor) -> Tensor:
    return weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)


def _softmax(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    return logits_TE.softmax(-1, dtype=torch.float).gather(1, chosen_TK)


def _sigmoid(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    return logits_TE.float().sigmoid().gather(1, chosen_TK)


_RULES: Mapping[str, Rule] = {
    "softmax": _softmax,
    "softmax, divided by the sum": lambda logits, chosen: _normalised(_softmax(logits, chosen)),
    "softmax of the chosen": lambda logits, chosen: logits.gather(1, chosen).softmax(-1),
    "sigmoid": _sigmoid,
    "sigmoid, divided by the sum": lambda logits, chosen: _normalised(_sigmoid(logits, chosen)),
    # Routers of some versions return probabilities in the place of logits.
    "probabilities": lambda logits, chosen: logits.gather(1, chosen),
    "probabilities, divided by the sum": lambda logits, chosen: _normalised(logits.gather(1, chosen)),
}
_CLOSE: Mapping[torch.dtype, float] = {torch.float32: 1e-5}
_CLOSE_IN_HALF = 2e-2  # two ways to round the same weights differ by a few units in the last place
_PROBED_ROWS = 16


@dataclass(eq=False)
class PassRoutes:
    """The routes of one pass: those to replay, and room for those that are recorded.

    ``given_TLK``: −1 in rows whose experts the router chooses. None: nothing is replayed.
    """

    given_TLK: Tensor | None = None
    records: bool = False
    _recorded: dict[int, Tensor] = field(default_factory=dict)  # by layer, (T, K)

    def pass_through(self, layer: int, rule: Rule, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the output of a layer's router with the given routes, and record the routes if that is asked for."""
        logits_TE, weights_TK, chosen_TK = output
        if self.given_TLK is not None:
            given_TK = self.given_TLK[:, layer]
            is_given_TK = given_TK >= 0
            if given_TK.shape[1] > 1:
                is_given_TK &= given_TK.any(1, keepdim=True)
            chosen_TK = torch.where(is_given_TK, given_TK.to(chosen_TK.dtype), chosen_TK)
            again_TK = rule(logits_TE, chosen_TK).to(weights_TK.dtype)
            weights_TK = torch.where(is_given_TK, again_TK, weights_TK)
        if self.records:
            self._recorded[layer] = chosen_TK.detach()
        return logits_TE, weights_TK, chosen_TK

    def recorded(self, layers: int) -> Tensor:
        """Return the routes of all rows after the pass (T, L, K), int16; 0 in layers without experts."""
        example_TK = next(iter(self._recorded.values()))
        nothing_TK = torch.zeros_like(example_TK)
        return torch.stack([self._recorded.get(layer, nothing_TK) for layer in range(layers)], 1).to(torch.int16)


class WatchedRouters:
    """The routers of a model, with a hook on each. ``spec``: what routes of this model look like."""

    def __init__(self, routers: Mapping[int, tuple[nn.Module, Rule]], spec: RoutingSpec) -> None:
        self.spec = spec
        self._routers = {layer: router for layer, (router, _) in routers.items()}
        self._hooks = [router.register_forward_hook(_hook(layer, rule)) for layer, (router, rule) in routers.items()]
        for router in self._routers.values():
            state: Any = router
            state.routes = None

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def use(self, routes: PassRoutes | None) -> Iterator[None]:
        """Let all routers use the routes of a pass for as long as the context lasts."""
        routers: list[Any] = list(self._routers.values())
        before = [router.routes for router in routers]
        for router in routers:
            router.routes = routes
        try:
            yield
        finally:
            for router, own in zip(routers, before, strict=True):
                router.routes = own

    def recomputation(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return contexts for a part of a pass, and for its recomputation in the backward pass, with the same routes.

        It is the ``context_fn`` of ``torch.utils.checkpoint``.
        """
        router: Any = next(iter(self._routers.values()))
        return nullcontext(), self.use(router.routes)

    @contextmanager
    def of_pass(self, layer: int, routes: PassRoutes) -> Iterator[None]:
        """Let the router of a layer, if it has one, use the routes of a pass for as long as the context lasts."""
        router: Any = self._routers.get(layer)
        if router is None:
            yield
            return
        before, router.routes = router.routes, routes
        try:
            yield
        finally:
            router.routes = before


def _hook(layer: int, rule: Rule) -> Callable[..., tuple[Tensor, ...] | None]:
    def hook(router: Any, _inputs: object, output: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        routes: PassRoutes | None = router.routes
        return None if routes is None else routes.pass_through(layer, rule, output)

    return hook


def watch_routers(layers: Sequence[nn.Module]) -> WatchedRouters | None:
    """Put hooks on the routers of decoder layers.

    Return None for a model without experts, and for one with a router whose weights no rule gives.
    """
    found: dict[int, tuple[nn.Module, Rule]] = {}
    widths: set[tuple[int, int]] = set()
    for index, layer in enumerate(layers):
        blocks = [module for module in layer.modules() if isinstance(getattr(module, "experts", None), nn.Module)]
        if not blocks:
            continue
        probed = [each for block in blocks for each in _probed(block)]
        if len(probed) != 1:
            return None
        router, rule, chosen, experts = probed[0]
        found[index] = router, rule
        widths.add((chosen, experts))
    if len(widths) != 1:
        return None
    ((chosen, experts),) = widths
    return WatchedRouters(found, RoutingSpec(len(layers), chosen, experts, tuple(found)))


@torch.no_grad()
def _probed(block: nn.Module) -> Iterator[tuple[nn.Module, Rule, int, int]]:
    """Yield the router of a block with its rule, K and E."""
    for name in ("gate", "router"):
        router = getattr(block, name, None)
        weight = getattr(router, "weight", None)
        if not isinstance(router, nn.Module) or not isinstance(weight, Tensor) or weight.ndim != 2 or weight.is_meta:
            continue
        generator = torch.Generator().manual_seed(0)
        x_TH = torch.randn(_PROBED_ROWS, weight.shape[1], generator=generator).to(weight)
        try:
            output = router(x_TH)
        except TypeError:  # it needs more than the hidden states
            continue
        rule = _rule(router, output, weight.shape[0])
        if rule is not None:
            yield router, rule, output[2].shape[1], weight.shape[0]


def _rule(router: nn.Module, output: object, experts: int) -> Rule | None:
    """Return the rule that gives the router's own weights best; None if none does."""
    if not isinstance(output, tuple) or len(output) != 3 or not all(isinstance(each, Tensor) for each in output):
        return None
    logits_TE, weights_TK, chosen_TK = output
    if logits_TE.shape != (_PROBED_ROWS, experts) or weights_TK.shape != chosen_TK.shape:
        return None
    factor = getattr(router, "routed_scaling_factor", 1.0)
    errors: list[tuple[float, str, float]] = []
    for name, rule in _RULES.items():
        for scale in {1.0, float(factor)}:
            again_TK = (rule(logits_TE, chosen_TK) * scale).to(weights_TK.dtype)
            errors.append((float((again_TK.float() - weights_TK.float()).abs().max()), name, scale))
    error, name, scale = min(errors)
    if not error <= _CLOSE.get(weight_dtype(router), _CLOSE_IN_HALF) * float(weights_TK.float().abs().max()):
        return None
    chosen_rule = _RULES[name]
    return chosen_rule if scale == 1.0 else lambda logits, chosen: chosen_rule(logits, chosen) * scale


def weight_dtype(router: nn.Module) -> torch.dtype:
    return next(router.parameters()).dtype
