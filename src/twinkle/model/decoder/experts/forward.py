"""The experts of a layer, computed for all tenants of a batch at once. Transformers calls this instead of its own code.

Transformers looks the function up by the name :data:`TENANTS` in a model's configuration, as it does for attention. For
the time of one call the module of the experts holds the adapters of the batch (``lora``).

The product with W + B A is never formed. Autograd knows the hidden states, the activations and the router's weights,
which depend on the hidden states; the gradients of A and B are added to the gradient rows of the batch.

On CUDA, :mod:`.on_device` computes the same without the host.

Shapes: T rows, K experts of a row, S pairs, H hidden size, I width of an expert, E experts.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from twinkle.model.decoder.experts.expert_lora import PartOnPairs, on_pairs
from twinkle.model.decoder.experts.on_device import experts_on_device, without_adapters
from twinkle.model.decoder.experts.routes import Routes, by_expert

TENANTS = "twinkle_experts"


def register() -> None:
    """Make the function known to Transformers. It is never compiled: adapters on experts change with every batch."""
    ALL_EXPERTS_FUNCTIONS.register(TENANTS, torch.compiler.disable(experts_forward))


def experts_forward(experts: Any, x_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return what the experts of each row compute, weighted by the router and added up (T, H).

    ``experts``: the module of Transformers, with the weights of all experts of a layer.
    """
    lora = getattr(experts, "lora", None)
    trained = experts.gate_up_proj.requires_grad or experts.down_proj.requires_grad
    if trained or runs_kernels(x_TH):
        adapters = None if trained or lora is None else lora.experts_on_device(experts.adapter_name, x_TH)
        if adapters is None and not trained and torch.is_grad_enabled():
            adapters = without_adapters(x_TH)  # our function needs less memory for the backward pass
        if adapters is not None:
            return experts_on_device(experts, x_TH, chosen_TK, weights_TK, adapters)
        # Transformers' function gives trained weights their gradients. On CUDA the host does not wait for its routes
        # either, so it can be captured.
        plain: Tensor = grouped_mm_experts_forward(experts, x_TH, chosen_TK, weights_TK)
        return plain
    up, down = ([], []) if lora is None else lora.experts(experts.adapter_name)
    routes = Routes.from_choices(chosen_TK, len(experts.gate_up_proj))
    gate_up_EHN, down_EIH = experts.gate_up_proj, experts.down_proj
    if not experts.is_transposed:
        gate_up_EHN, down_EIH = gate_up_EHN.transpose(1, 2), down_EIH.transpose(1, 2)
    bias_EN, bias_EH = (experts.gate_up_proj_bias, experts.down_proj_bias) if experts.has_bias else (None, None)
    gate_up_SN = _GateUp.apply(x_TH, gate_up_EHN, bias_EN, routes, on_pairs(up, routes, len(x_TH)))
    activations_SI = experts._apply_gate(gate_up_SN)
    y_TH: Tensor = _Down.apply(
        activations_SI, weights_TK.to(x_TH.dtype), down_EIH, bias_EH, routes, on_pairs(down, routes, len(x_TH))
    )
    return y_TH


def runs_kernels(x_TH: Tensor) -> bool:
    """Return whether the kernels for CUDA compute these rows."""
    return x_TH.is_cuda


class _GateUp(torch.autograd.Function):
    """The products of all pairs with their experts' gate and up."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weight_EHN: Tensor,
        bias_EN: Tensor | None,
        routes: Routes,
        parts: list[PartOnPairs],
    ) -> Tensor:
        x_SH = routes.gather(x_TH)
        y_SN = by_expert(x_SH, weight_EHN, routes.sizes)
        if bias_EN is not None:
            y_SN += bias_EN[routes.expert_S]
        inner = []
        for on in parts:
            h = on.inner_of_rows(x_TH) if on.part.shares_a else on.inner_of_pairs(x_SH)
            on.add_to_pairs(y_SN, routes.gather(h) if on.part.shares_a else h)
            inner.append(h)
        ctx.routes, ctx.parts = routes, parts
        ctx.save_for_backward(x_TH, weight_EHN, *inner)
        return y_SN

    @staticmethod
    def backward(ctx: Any, dy_SN: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, weight_EHN, *inner = ctx.saved_tensors
        routes: Routes = ctx.routes
        dy_SN = dy_SN.contiguous()
        dx_SH = by_expert(dy_SN, weight_EHN.transpose(1, 2), routes.sizes)
        shared = []
        for on, h in zip(ctx.parts, inner, strict=True):
            if on.part.shares_a:
                dh_SR = on.outer_gradient_of_pairs(dy_SN, routes.gather(h))
                shared.append((on, routes.add_up(dh_SR)))
            else:
                dh_SR = on.outer_gradient_of_pairs(dy_SN, h)
                on.inner_gradient_of_pairs(dh_SR, routes.gather(x_TH), dx_SH)
        dx_TH = routes.add_up(dx_SH)
        for on, dh_TR in shared:
            on.inner_gradient_of_rows(dh_TR, x_TH, dx_TH)
        return dx_TH, None, None, None, None


class _Down(torch.autograd.Function):
    """The products of all pairs with their experts' down, weighted and added up by row."""

    @staticmethod
    def forward(
        ctx: Any,
        a_SI: Tensor,
        weights_TK: Tensor,
        weight_EIH: Tensor,
        bias_EH: Tensor | None,
        routes: Routes,
        parts: list[PartOnPairs],
    ) -> Tensor:
        y_SH = by_expert(a_SI, weight_EIH, routes.sizes)
        if bias_EH is not None:
            y_SH += bias_EH[routes.expert_S]
        weights_S1 = routes.weights(weights_TK)[:, None]
        inner = [on.inner_of_pairs(a_SI) for on in parts]
        for on, h_SR in zip(parts, inner, strict=True):
            if not on.part.shares_b:
                on.add_to_pairs(y_SH, h_SR)
        y_TH = routes.add_up(y_SH * weights_S1)
        for on, h_SR in zip(parts, inner, strict=True):
            if on.part.shares_b:
                on.add_to_rows(y_TH, routes.add_up(h_SR * weights_S1))
        ctx.routes, ctx.parts = routes, parts
        ctx.save_for_backward(a_SI, weights_TK, weight_EIH, bias_EH, *inner)
        return y_TH

    @staticmethod
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[Tensor | None, ...]:
        a_SI, weights_TK, weight_EIH, bias_EH, *inner = ctx.saved_tensors
        routes: Routes = ctx.routes
        weights_S1 = routes.weights(weights_TK)[:, None]
        dy_TH = dy_TH.contiguous()
        # Before the router's weight: y[row] is the sum of weight · f(a), so the weight's gradient is dy · f(a). Of a
        # product that is linear in a, this equals the product of a with the gradient that flows back to a; a bias adds
        # its own product.
        dy_SH = routes.gather(dy_TH)
        back_SI = by_expert(dy_SH, weight_EIH.transpose(1, 2), routes.sizes)
        for on, h_SR in zip(ctx.parts, inner, strict=True):
            weighted_SR = h_SR * weights_S1
            if on.part.shares_b:
                dh_SR = routes.gather(on.outer_gradient_of_rows(dy_TH, routes.add_up(weighted_SR)))
            else:
                dh_SR = on.outer_gradient_of_pairs(dy_SH, weighted_SR)
            on.inner_gradient_of_pairs(dh_SR, a_SI * weights_S1, back_SI)
        dweights_S = (back_SI * a_SI).sum(1)
        if bias_EH is not None:
            dweights_S += (dy_SH * bias_EH[routes.expert_S]).sum(1)
        return back_SI * weights_S1, routes.unordered(dweights_S), None, None, None, None
