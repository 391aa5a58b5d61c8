"""Programs that train eight tenants on every rank of a mesh, or in one process with the Trainer of Transformers.

A program gets the requests of all ranks; each rank takes its own sequences. The comparisons are in the tests.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.model.megatron import stage_programs
from tests.model.megatron.stage_programs import device_mesh, make_mesh
from tests.support.models.reference import random_datum
from twinkle.model import AdamParams, Datum, LoraSpec, ObjectiveValue, TokenValues, Trainer, TrainFailure, TrainItem
from twinkle.model.adapters.cuts import ModelCuts
from twinkle.model.decoder.linear_attention.bounds import Bounds
from twinkle.model.megatron import layers
from twinkle.model.megatron.head import VocabParallelHead
from twinkle.model.megatron.trainer import load_trainer
from twinkle.model.trainer.batch import GradientRow
from twinkle.model.trainer.call import TrainerCall

Sizes = Mapping[str, Any]  # of a mesh; empty: one process with Transformers' layers

# The first step of Adam moves a weight by about g / (|g| + eps): a large eps keeps the noise of small ones small.
ADAM = AdamParams(learning_rate=5e-4, eps=1e-5, weight_decay=0.01, grad_clip_norm=0.5)


def squared(values: Sequence[TokenValues]) -> ObjectiveValue:
    """The square of the sum of all log-probabilities. It cannot be computed sequence by sequence."""
    total = float(sum(value.logprobs.sum() for value in values))
    slopes = [np.full(len(value.logprobs), 0.01 * total, np.float32) for value in values]
    return ObjectiveValue(0.005 * total**2, slopes)


def entropy_bonus(values: Sequence[TokenValues]) -> ObjectiveValue:
    """Cross entropy with a bonus for the entropy of each token."""
    loss = -sum(float(value.logprobs.sum() + 0.3 * value.entropies.sum()) for value in values)
    logprobs = [np.full(len(value.logprobs), -1, np.float32) for value in values]
    return ObjectiveValue(loss, logprobs, [np.full(len(value.logprobs), -0.3, np.float32) for value in values])


@dataclass(frozen=True)
class Tenant:
    """An adapter and its requests. ``owners``: the data rank of each sequence."""

    spec: LoraSpec
    lengths: tuple[int, ...]
    loss: str = "cross_entropy"
    owners: tuple[int, ...] = (0, 1)
    width: int = 0  # targets per token; 0: one, without a dimension of its own
    options: Mapping[str, Any] | None = None  # of the request

    def request(self, model: Any, name: str, seed: int) -> "Request":
        data = [random_datum(model, self.loss, n, seed + k, self.width) for k, n in enumerate(self.lengths)]
        options = dict(self.options or {})
        if "objective" in options:  # it takes no weights
            data = [Datum(datum.tokens, datum.targets) for datum in data]
        return Request(TrainItem(name, data, loss=self.loss, **options), self.owners)


@dataclass(frozen=True)
class Request:
    item: TrainItem
    owners: tuple[int, ...]

    def share(self, rank: int, size: int) -> TrainItem:
        """Return the sequences of one data rank. The last owner also has all sequences that follow."""
        padded = self.owners + self.owners[-1:] * len(self.item.data)
        own = [number for number in range(len(self.item.data)) if padded[number] % size == rank]
        return replace(self.item, data=[self.item.data[number] for number in own], numbers=own)


# Both factors are random from the start: with B = 0 the gradient of A is zero and would hide mistakes.
_DENSE: dict[str, Tenant] = {
    "attention": Tenant(
        LoraSpec(2, 0.5, 1, train_mlp=False, dropout=0.2, init_weights=False), (7, 19, 3), owners=(1, 0, 1)
    ),
    "all": Tenant(LoraSpec(8, 2, 2, init_weights=False), (11, 4), "ppo", options={"temperature": 1.3}),
    "mlp": Tenant(LoraSpec(20, 4, 3, train_attn=False, init_weights=False), (9, 2, 33), "importance_sampling", (1, 0)),
    "head": Tenant(LoraSpec(4, 1, 4, train_unembed=True, init_weights=False), (6, 17), "gspo"),
    "head alone": Tenant(LoraSpec(3, 1, 5, target_modules=["lm_head"], init_weights=False), (5, 8), width=4),
    "patterns": Tenant(
        LoraSpec(
            4,
            1.5,
            6,
            use_rslora=True,
            rank_pattern={"q_proj": 10, "down_proj": 3},
            alpha_pattern={"o_proj": 0.5},
            init_weights=False,
        ),
        (21, 5, 2),
        "cispo",
    ),
    "one layer": Tenant(
        LoraSpec(5, 2, 7, target_modules=["k_proj", "up_proj", "o_proj"], layers_to_transform=[1], init_weights=False),
        (12, 13),
        owners=(1,),
        options={"objective": squared},
    ),
    "dropout": Tenant(
        LoraSpec(6, 2, 8, dropout=0.3, train_unembed=True, init_weights=False),
        (10, 3, 8),
        options={"objective": entropy_bonus, "statistics": True},
        owners=(0,),
    ),
}
# In a model with experts those named "all", "mlp", "head" and "patterns" are on all experts. The first two have the
# same bucket, and "w2 of one layer" is on one projection of some layers alone.
_EXPERTS = {name: tenant for name, tenant in _DENSE.items() if name not in ("dropout", "one layer")} | {
    "dropout": replace(_DENSE["dropout"], spec=replace(_DENSE["dropout"].spec, train_mlp=False)),
    "mlp": replace(_DENSE["mlp"], spec=LoraSpec(7, 4, 3, train_attn=False, init_weights=False)),
    "w2 of one layer": replace(
        _DENSE["one layer"],
        spec=LoraSpec(5, 2, 7, target_modules=["k_proj", "experts.w2"], layers_to_transform=[2, 3], init_weights=False),
    ),
}
# In a model with linear attention those without names of modules are on q, k, v, z and out of it, too. "joint" has
# PEFT's form, and is on the gates that the switches leave out. Adapters are smaller, like the model's weights.
_LINEAR = _DENSE | {
    "mlp": replace(_DENSE["mlp"], spec=replace(_DENSE["mlp"].spec, rank=7)),
    "patterns": replace(
        _DENSE["patterns"],
        spec=replace(_DENSE["patterns"].spec, rank_pattern={"in_proj_v": 10, "q_proj": 9, "linear_attn.out_proj": 3}),
    ),
    "one layer": replace(
        _DENSE["one layer"],
        spec=LoraSpec(
            5, 2, 7, target_modules=["in_proj_k", "up_proj", "out_proj"], layers_to_transform=[1], init_weights=False
        ),
    ),
    "joint": Tenant(
        LoraSpec(3, 1, 9, target_modules=["in_proj_qkv", "in_proj_a", "in_proj_b", "o_proj"], init_weights=False),
        (70, 14),  # longer than a chunk of the delta rule
        owners=(1, 0),
    ),
}
_LINEAR = {name: replace(each, spec=replace(each.spec, alpha=each.spec.alpha / 4)) for name, each in _LINEAR.items()}


def make_model(name: str) -> PreTrainedModel:
    """Return a small model, or with the name "wide" one with 512 hidden features: toys can hide differences."""
    if name != "wide":
        return stage_programs.make_model(name)
    config = LlamaConfig(
        vocab_size=1001,  # not a multiple of 2
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.04,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return LlamaForCausalLM(config).eval()


def tenants(model: str) -> dict[str, Tenant]:
    return {"qwen3_moe": _EXPERTS, "qwen3_5": _LINEAR}.get(model, _DENSE)


def make_calls(model: Any, name: str) -> list[list[Request]]:
    """Return the requests of three calls: two before a step, one after it."""
    everyone = tenants(name)
    return [
        [
            tenant.request(model, each, 1000 * call + 50 * number)
            for number, (each, tenant) in enumerate(everyone.items())
            if call != 1 or number % 2
        ]
        for call in range(3)
    ]


@contextmanager
def mistake(name: str | None) -> Iterator[None]:
    """Make a mistake on purpose, which the comparisons must find."""
    own_cut = ModelCuts.cut

    def exchanged(self: ModelCuts, *args: Any) -> Any:
        number = self._tensor.number
        self._tensor.number = 1 - number
        try:
            return own_cut(self, *args)
        finally:
            self._tensor.number = number

    def unmasked(self: VocabParallelHead, *args: Any) -> None:
        own_head(self, *args)
        self._slice = replace(self._slice, real=len(self.spec.weight_VH))

    def of_own_requests(self: TrainerCall, gradient: GradientRow) -> None:
        if gradient.index in self._requests:
            own_add(self, gradient)

    own_bounds = Bounds.from_lengths

    def of_one_sequence(lengths: Sequence[int], device: torch.device) -> Bounds:
        return own_bounds((sum(lengths),), device)

    own_head, own_add = VocabParallelHead.__init__, TrainerCall._add_gradient
    patches = {
        "no sum of whole factors": mock.patch.object(ModelCuts, "unite", return_value=None),
        "no sum of the inputs' gradients": mock.patch.object(layers, "enter_cut", lambda x, *args, **kwargs: x),
        "no bounds of sequences": mock.patch.object(Bounds, "from_lengths", of_one_sequence),
        "exchanged cuts": mock.patch.object(ModelCuts, "cut", exchanged),
        "unmasked vocabulary": mock.patch.object(VocabParallelHead, "__init__", unmasked),
        "no gradients of others' requests": mock.patch.object(TrainerCall, "_add_gradient", of_own_requests),
    }
    if name is None:
        yield
        return
    with patches[name]:
        yield


def make_trainer(
    folder: Path | str, sizes: Sizes, max_tokens: int, device: str = "cpu", dtype: str = "fp32"
) -> Trainer:
    """Return a trainer. ``max_tokens`` is small, so that a call has several micro-batches."""
    options: dict[str, Any] = {"device": device, "dtype": dtype, "max_tokens_per_batch": max_tokens}
    if not sizes:
        return Trainer.from_pretrained(folder, **options)
    make_mesh(sizes)
    return load_trainer(folder, device_mesh=device_mesh(sizes), **options)


def add_tenants(trainer: Trainer, model: str) -> None:
    for name, tenant in tenants(model).items():
        trainer.create_adapter(name, tenant.spec)


def train(
    folder: Path,
    model: str,
    sizes: Sizes,
    calls: Sequence[Sequence[Request]],
    max_tokens: int = 60,
    wrong: str | None = None,
    device: str = "cpu",
    dtype: str = "fp32",
) -> dict[str, Any]:
    """Train all tenants, and return everything that came out."""
    with mistake(wrong):
        trainer = make_trainer(folder, sizes, max_tokens, device, dtype)
        add_tenants(trainer, model)
        data = trainer._parallel.data
        initial = {name: trainer.weights(name) for name in trainer.adapter_ids()}
        losses: dict[tuple[int, str], float] = {}
        logprobs: dict[tuple[int, str, int], Any] = {}
        gradients, norms = {}, {}
        for number, requests in enumerate(calls):
            items = [request.share(data.number, data.size) for request in requests]
            for item, result in zip(items, trainer.forward_backward(items), strict=True):
                assert not isinstance(result, TrainFailure), result.error
                losses[number, item.adapter_id] = result.metrics["loss:sum"]
                for place, array in zip(item.numbers, result.logprobs, strict=True):
                    logprobs[number, item.adapter_id, place] = array
            if number == 0:
                continue  # the window goes on
            gradients[number] = {name: trainer.gradients(name) for name in trainer.adapter_ids()}
            for name in trainer.adapter_ids():
                norms[number, name] = trainer.optim_step(name, ADAM)["unclipped_grad_l2:mean"]
        states = {name: trainer.snapshot(name) for name in trainer.adapter_ids()}
        return {
            "data": data.number,
            "initial": initial,
            "configs": {name: trainer.peft_config(name) for name in initial},
            "losses": losses,
            "logprobs": logprobs,
            "gradients": gradients,
            "norms": norms,
            "weights": {name: trainer.weights(name) for name in states},
            "moments": {name: {"m": state.exp_avg, "v": state.exp_avg_sq} for name, state in states.items()},
            "counts": {name: (state.step, state.passes) for name, state in states.items()},
            "outputs": outputs(trainer, calls[0]),
        }


def outputs(trainer: Trainer, requests: Sequence[Request]) -> dict[tuple[str, int, str], Any]:
    """Return everything that a forward pass can give: log-probabilities, statistics, logits and embeddings."""
    data = trainer._parallel.data
    kinds = ("logps", "logits", "embeddings")
    items = []
    for number, request in enumerate(requests):
        item = request.share(data.number, data.size)
        kind: Any = kinds[number % 3] if item.data and item.data[0].targets.ndim == 1 else "logps"
        if kind == "embeddings":
            item = replace(item, data=[Datum(each.tokens, each.targets) for each in item.data], loss="cross_entropy")
        items.append(replace(item, objective=None, output=kind, statistics=kind == "logits"))
    found = {}
    for item, result in zip(items, trainer.forward(items), strict=True):
        assert not isinstance(result, TrainFailure), result.error
        for place, (number, array) in enumerate(zip(item.numbers, result.logprobs, strict=True)):
            found[item.adapter_id, number, "logprobs"] = array
            if result.values:
                value = result.values[place]
                found[item.adapter_id, number, "output"] = value.output
                if item.statistics:
                    found[item.adapter_id, number, "entropies"] = value.entropies
                    found[item.adapter_id, number, "predictions"] = value.predictions
    return found
