"""Programs that train adapters that are cut over processes, or whole adapters in one process.

The base model is whole in every process here, so that the numbers to compare with are those of one process to the last
bit: what is tested is what a trainer does with cut adapters. :class:`CutPasses` gives each process the gradient that it
would have of a base model that is cut.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.model.parallel.lora_programs import datum, llama
from twinkle.model import AdamParams, AdapterSnapshot, LoraSpec, Trainer, TrainItem, adopt_model
from twinkle.model.adapters.adapter import Adapter
from twinkle.model.adapters.cuts import ModelCuts, place_targets
from twinkle.model.adapters.optimizer import OPTIMIZERS
from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.layers import GiveWay
from twinkle.model.decoder.lora.stacks import RowLayout, Stack
from twinkle.model.parallel import ALONE, Parallelism, ProcessRanks, Ranks
from twinkle.model.trainer.batch import Gradients, Part
from twinkle.model.trainer.engine import Computed, Engine
from twinkle.model.trainer.preparation import PreparedModel, prepare_model
from twinkle.utils.progress import Progress

ADAM = AdamParams(learning_rate=5e-4, eps=1e-8, weight_decay=0.01)
CLIPPED = dataclasses.replace(ADAM, grad_clip_norm=0.5)
SPECS = {
    "all": LoraSpec(5, seed=1, train_unembed=True, init_weights=False),
    "mixed": LoraSpec(4, seed=2, rank_pattern={"q_proj": 12, "down_proj": 3}, alpha_pattern={"v_proj": 7.0}),
    "first": LoraSpec(4, seed=3, target_modules=["q_proj", "o_proj"], layers_to_transform=[0]),  # nothing on stage 1
    "head": LoraSpec(9, seed=4, target_modules=["lm_head"]),  # nothing on stage 0
}


@dataclass(frozen=True)
class Layout:
    """The sizes of a mesh. Tensor parallel ranks are neighbours, then data parallel ranks, then stages."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True)
class Groups:
    tensor: Ranks = ALONE
    pipeline: Ranks = ALONE
    data: Ranks = ALONE
    model: Ranks = ALONE
    world: Ranks = ALONE


@cache  # groups have threads: a process makes those of a layout once
def groups(layout: Layout) -> Groups:
    if layout.world == 1:
        return Groups()
    world = dist.group.WORLD
    assert world is not None
    ranks_PDT = np.arange(layout.world).reshape(layout.pp, layout.dp, layout.tp)
    return Groups(
        tensor=_own_group(ranks_PDT.reshape(-1, layout.tp)),
        pipeline=_own_group(ranks_PDT.transpose(1, 2, 0).reshape(-1, layout.pp)),
        data=_own_group(ranks_PDT.transpose(0, 2, 1).reshape(-1, layout.dp)),
        model=_own_group(ranks_PDT.transpose(1, 0, 2).reshape(-1, layout.pp * layout.tp)),
        world=ProcessRanks(world),
    )


def _own_group(ranks_GN: np.ndarray) -> Ranks:
    """Make groups of processes; return the one with this process."""
    if ranks_GN.shape[1] == 1:
        return ALONE
    own = ALONE
    for members in ranks_GN.tolist():
        group = dist.new_group(members)
        if dist.get_rank() in members:
            own = ProcessRanks(group)
    return own


class CutPasses:
    """Computes with whole adapters, and cuts their gradients.

    Of a factor that all tensor parallel ranks have whole, the second rank gets the gradient and the first one gets
    zeros: so their sum is the gradient to the last bit, while what the first rank has by itself, whose copies are those
    that count elsewhere, is wrong.
    """

    def __init__(self, engine: Engine, cuts: ModelCuts, tensor: Ranks) -> None:
        self._engine, self._cuts, self._share = engine, cuts, 1.0 if tensor.size == 1 else (0.0, 1.0)[tensor.number]
        self._stacks: dict[str, Stack] = {}

    @property
    def architecture(self) -> Architecture:
        return self._engine.architecture

    @property
    def token_rows(self) -> int:
        return self._engine.token_rows

    @property
    def padding_rows(self) -> int:
        return self._engine.padding_rows

    def forward(self, parts: Sequence[Part], give_way: GiveWay | None = None) -> Computed:
        whole = self._whole(parts)
        computed = self._engine.forward(whole)
        self._release(whole)
        return computed

    def forward_backward(self, parts: Sequence[Part], *, recompute: bool, give_way: GiveWay | None = None) -> Computed:
        whole = self._whole(parts)
        computed = self._engine.forward_backward(whole, recompute=recompute)
        self._release(whole)
        gradients = computed._gradients
        assert gradients is not None
        adapters = {part.index: part.adapter for part in parts}
        rows = [self._cut(adapters[i], row_P) for i, row_P in zip(gradients.indices, gradients.rows_P, strict=True)]
        return dataclasses.replace(computed, _gradients=Gradients(gradients.indices, tuple(rows), gradients.finite))

    def finish(self) -> None:
        pass

    def _cut(self, adapter: Adapter | None, row_P: Tensor) -> Tensor:
        assert adapter is not None
        own_P = self._cuts.cut(row_P, adapter.layout).clone()
        for part in adapter.layout.cut.shared if adapter.layout.cut is not None else ():
            own_P[part.start : part.stop] *= self._share
        return own_P

    def _whole(self, parts: Sequence[Part]) -> list[Part]:
        whole: dict[str, Adapter] = {}
        for part in parts:
            own = part.adapter
            if own is not None and own.adapter_id not in whole:
                stack = self._stacks.setdefault(own.whole.digest, Stack(own.whole, own.stack.dtype, own.stack.device))
                row_P = self._cuts.gather(own.weights_P, own.layout)
                made = whole[own.adapter_id] = Adapter.fresh(own.adapter_id, own.spec, stack, row_P)
                if not stack.has_free_slot:
                    stack.add_block()
                made.enter(stack.take())
        return [
            part if part.adapter is None else dataclasses.replace(part, adapter=whole[part.adapter.adapter_id])
            for part in parts
        ]

    def _release(self, whole: Sequence[Part]) -> None:
        for adapter in {id(part.adapter): part.adapter for part in whole}.values():
            if adapter is not None and adapter.slot is not None:
                adapter.stack.give_back(adapter.slot)


def make_trainer(layout: Layout, *, memory_budget_bytes: int | None = None) -> Trainer:
    with Progress("preparing test") as progress:
        prepared = prepare_model(
            adopt_model(llama("toy")),
            name="test",
            memory_budget_bytes=memory_budget_bytes,
            max_tokens_per_batch=40,
            compiled=False,
            device_mesh=None,
            reshard_after_forward=True,
            progress=progress,
        )
    return Trainer.from_prepared(_cut_model(prepared, layout) if layout.world > 1 else prepared, model_id="test")


def _cut_model(prepared: PreparedModel, layout: Layout) -> PreparedModel:
    own, engine = groups(layout), prepared.engine
    assert engine is not None
    layers = prepared.architecture.layer_count // layout.pp
    stages = [range(stage * layers, (stage + 1) * layers) for stage in range(layout.pp)]
    place = place_targets(prepared.architecture, stages)
    cuts = ModelCuts(place, tensor=own.tensor, pipeline=own.pipeline, model=own.model, data=own.data)
    return dataclasses.replace(
        prepared,
        passes=CutPasses(engine, cuts, own.tensor),
        engine=None,
        parallel=Parallelism(ranks=own.world, data=own.data, replicas=own.data, model=own.model),
        cuts=cuts,
        memory=own.world.gather(prepared.memory)[0],
    )


def items(layout: Layout, seed: int, names: Sequence[str] = tuple(SPECS)) -> list[TrainItem]:
    """Return requests of several sequences, of which each data parallel rank has some."""
    own = groups(layout).data
    made = []
    for number, name in enumerate(names):
        data = [datum(length, seed * 100 + number * 10 + k, 97) for k, length in enumerate((7, 12, 5, 9))]
        part = [k for k in range(4) if k % own.size == own.number]
        made.append(TrainItem(name, [data[k] for k in part], numbers=tuple(part)))
    return made


def add_adapters(trainer: Trainer) -> None:
    for name, spec in SPECS.items():
        trainer.create_adapter(name, spec)


def train(layout: Layout, folder: str) -> dict[str, Any]:
    """Train, look at everything in between, and save; return all of it."""
    trainer = make_trainer(layout)
    add_adapters(trainer)
    found: dict[str, Any] = {"first": {name: trainer.weights(name) for name in SPECS}}
    results = trainer.forward_backward(items(layout, 1))
    found["losses"] = [result.metrics["loss:sum"] for result in results]
    found["norms"] = [trainer.gradient_norm(name, p) for name in SPECS for p in (1.0, 2.0, float("inf"))]
    trainer.forward_backward(items(layout, 2))  # the parts of a gradient that was united begin anew
    trainer.scale_gradient("all", 0.5)
    found["gradients"] = {name: trainer.gradients(name) for name in SPECS}
    trainer.forward_backward(items(layout, 3))
    found["open"] = {name: trainer.snapshot(name) for name in SPECS}
    for name in SPECS:
        trainer.optim_step(name, ADAM)
    trainer.forward_backward(items(layout, 4))
    found["steps"] = [trainer.optim_step(name, ADAM)["unclipped_grad_l2:mean"] for name in SPECS]
    found["closed"] = {name: trainer.snapshot(name) for name in SPECS}
    found["shapes"] = {name: trainer.shapes(name) for name in SPECS}
    found["configs"] = {name: trainer.peft_config(name) for name in SPECS}
    found["exported"] = {name: trainer.peft_adapter(name, torch.bfloat16) for name in SPECS}
    for name in SPECS:
        trainer.save(name, Path(folder) / name)
    found["sizes"] = {name: trainer._pool.get(name).layout.size for name in SPECS}
    write = [trainer.prepare_save(name) for name in SPECS]
    if layout.world == 1 or dist.get_rank() == 0:
        for name, each in zip(SPECS, write, strict=True):
            each(Path(folder) / f"{name}-copy")
    trainer.forward_backward(items(layout, 5))
    for name in SPECS:
        trainer.optim_step(name, CLIPPED)
    found["clipped"] = {name: trainer.weights(name) for name in SPECS}
    found["copies"] = {name: _copies(trainer._pool.get(name)) for name in SPECS}
    return found


def _copies(adapter: Adapter) -> list[Any]:
    """Return this process's copies of the factors that other processes have, too."""
    shared = adapter.layout.cut.shared if adapter.layout.cut is not None else ()
    return [adapter.weights_P[part.start : part.stop].tolist() for part in shared]


def restored(layout: Layout, snapshots: dict[str, AdapterSnapshot], folder: str) -> dict[str, Any]:
    """Continue from snapshots of an open window, and from files; return snapshots before and after a step."""
    trainer = make_trainer(layout)
    for name, snapshot in snapshots.items():
        trainer.restore(name, snapshot)
    before = {name: trainer.snapshot(name) for name in snapshots}
    trainer.forward_backward(items(layout, 6, tuple(snapshots)))
    for name in snapshots:
        trainer.optim_step(name, ADAM)
    after = {name: trainer.snapshot(name) for name in snapshots}
    for name in SPECS:
        trainer.create_adapter_from_checkpoint(f"{name}-read", Path(folder) / name)
    return {"before": before, "after": after, "read": {name: trainer.snapshot(f"{name}-read") for name in SPECS}}


def other_optimizers(layout: Layout) -> dict[str, AdapterSnapshot]:
    """Take two steps of each optimizer of torch with each adapter."""
    trainer = make_trainer(layout)
    found = {}
    more = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.5}, "Muon": {"weight_decay": 0.1}}
    for optimizer in OPTIMIZERS:
        for name, spec in SPECS.items():
            trainer.create_adapter(name, spec)
        for seed in (7, 8):
            trainer.forward_backward(items(layout, seed))
            for name in SPECS:
                trainer.optimizer_step(name, optimizer, {"lr": 1e-3, **more.get(optimizer, {})})
        found |= {f"{optimizer} {name}": trainer.snapshot(name) for name in SPECS}
        for name in SPECS:
            trainer.remove_adapter(name)
    return found


def paged(layout: Layout) -> tuple[list[list[str]], dict[str, Any]]:
    """Train with room for one adapter at a time; return who was resident after each call, and the weights."""
    trainer = make_trainer(layout)
    add_adapters(trainer)
    adapters = [trainer._pool.get(name) for name in SPECS]
    trainer._pool.budget_bytes = max(a.stack.block_bytes + a.step_bytes for a in adapters)
    resident = []
    for seed in (1, 2):
        trainer.forward_backward(items(layout, seed))
        resident.append(sorted(trainer.resident_adapter_ids()))
        for name in SPECS:
            trainer.optim_step(name, ADAM)
            resident.append(sorted(trainer.resident_adapter_ids()))
    return resident, {name: trainer.weights(name) for name in SPECS}


def gathered_bits(layout: Layout) -> tuple[list[int], list[int]]:
    """Cut a row with odd numbers, such as −0, and gather it; return the bits before and after."""
    trainer = make_trainer(layout)
    trainer.create_adapter("all", SPECS["all"])
    own: RowLayout = trainer._pool.get("all").layout
    whole_P = torch.randn(own.whole.size, generator=torch.Generator().manual_seed(1))
    whole_P[::7], whole_P[1::7] = -0.0, 1e-40
    whole_P[2::7], whole_P[3::7] = float("-inf"), float("nan")
    after_P = trainer._cuts.gather(trainer._cuts.cut(whole_P, own), own)
    return whole_P.view(torch.int32).tolist(), after_P.view(torch.int32).tolist()
