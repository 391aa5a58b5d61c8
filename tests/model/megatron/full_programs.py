"""Programs that train all parameters of a model on every rank of a mesh, or in one process with Transformers' layers.

A program gets the requests of all ranks; each rank takes its own sequences. The comparisons are in the tests.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from tests.model.full.plain_run import RUN
from tests.model.megatron.stage_programs import CPU, device_mesh
from twinkle.errors import CheckpointError, UnsupportedError
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model import AdamParams, AdapterSnapshot, FullSpec, FullTrainer, TrainFailure, TrainItem
from twinkle.model.megatron import full_weights
from twinkle.model.megatron.full import load_full_trainer
from twinkle.model.megatron.mesh import join_mesh, leave_mesh

# of a mesh, and whether data ranks share the optimizer; empty: one process with Transformers' layers
Sizes = Mapping[str, Any]
Window = tuple[Sequence[TrainItem], AdamParams]  # the requests before a step of the optimizer, and its settings


def make_trainer(folder: Path, sizes: Sizes, dtype: str = "fp32", device: str = "cpu") -> FullTrainer:
    """Return a trainer with a run. Micro-batches are small: a call has several, and long sequences are recomputed."""
    options: dict[str, Any] = {"device": device, "dtype": dtype, "max_tokens_per_batch": 24}
    if sizes:
        mesh = device_mesh({name: size for name, size in sizes.items() if name != "share_optimizer"})
        enter_mesh(mesh)
        shared = bool(sizes.get("share_optimizer"))
        trainer = load_full_trainer(folder, device_mesh=mesh, share_optimizer=shared, **options)
    else:
        trainer = FullTrainer.from_pretrained(folder, **options)
    trainer.create_adapter(RUN, FullSpec())
    return trainer


def enter_mesh(mesh: DeviceMesh | None) -> None:
    """Leave the mesh of the program before, unless it is the same: making groups takes time."""
    try:
        join_mesh(mesh, CPU)
    except UnsupportedError:
        leave_mesh()


def share(trainer: FullTrainer, item: TrainItem) -> TrainItem:
    """Return the sequences of this data rank."""
    data = trainer._parallel.data
    return replace(item, data=item.data[data.number :: data.size])


@contextmanager
def mistake(name: str | None) -> Iterator[None]:
    """Make a mistake on purpose, which the comparisons must find."""
    own_sums = full_weights._sums

    def without_partial(piece: Any, stage: Any) -> Any:
        sums, redundant = own_sums(piece, stage)
        return (sums[1:] if piece.dim is None else sums), redundant

    def without_ends(piece: Any, stage: Any) -> Any:
        sums, redundant = own_sums(piece, stage)
        return tuple(ranks for ranks in sums if ranks is not stage.mesh.ends), redundant

    def counted_everywhere(piece: Any, stage: Any) -> Any:
        return own_sums(piece, stage)[0], False

    wrong = {"no sum over tp": without_partial, "no sum of ends": without_ends, "counted twice": counted_everywhere}
    if name is None:
        yield
        return
    with mock.patch.object(full_weights, "_sums", wrong[name]):
        yield


def train(
    folder: Path,
    sizes: Sizes,
    windows: Sequence[Window],
    dtype: str = "fp32",
    wrong: str | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Train, and return everything that came out."""
    with mistake(wrong):
        trainer = make_trainer(folder, sizes, dtype, device)
    found: dict[str, Any] = {"data": trainer._parallel.data.number, "losses": [], "logprobs": [], "norms": []}
    found |= {"gradients": [], "weights": [], "other norms": []}
    for items, params in windows:
        for result in trainer.forward_backward([share(trainer, item) for item in items]):
            assert not isinstance(result, TrainFailure), result.error
            found["losses"].append(result.metrics["loss:sum"])
            found["logprobs"].append(result.logprobs)
        trainer.forward([share(trainer, items[0])])  # a pass without gradients between the last gradient and the step
        found["gradients"].append(trainer.gradients(RUN))
        found["other norms"].append([trainer.gradient_norm(RUN, kind) for kind in (1.0, float("inf"))])
        found["norms"].append(trainer.optim_step(RUN, params)["unclipped_grad_l2:mean"])
        found["weights"].append(trainer.weights(RUN))
    found["computed"] = {name: tensor.float().cpu().numpy().copy() for name, tensor in trainer.gather_compute_weights()}
    found["padding"] = _largest_padding(trainer)
    assert trainer._run is not None
    found["state"] = sum(tensor.numel() for tensor in trainer._run.exp_avg)
    return found


def _largest_padding(trainer: FullTrainer) -> float:
    """Return the largest number in the padding of the vocabulary."""
    weights = trainer._weights
    if not isinstance(weights, full_weights.CutWeights):
        return 0.0
    rows = (each.parameter.detach()[each.rows :].abs().flatten() for each in weights._own)
    return max((float(each.max()) for each in rows if each.numel()), default=0.0)


@dataclass(frozen=True)
class Saved:
    """Folders of a checkpoint with the optimizer's state and of one without, and a snapshot with a gradient."""

    checkpoint: Path
    exported: Path
    snapshot: AdapterSnapshot


def save(folder: Path, sizes: Sizes, windows: Sequence[Window], into: Path) -> Saved:
    """Train all windows but the last step, and save."""
    trainer = make_trainer(folder, sizes)
    for number, (items, params) in enumerate(windows):
        trainer.forward_backward([share(trainer, item) for item in items])
        if number + 1 < len(windows):
            trainer.optim_step(RUN, params)
    saved = Saved(into / "checkpoint", into / "exported", trainer.snapshot(RUN))
    trainer.save(RUN, saved.checkpoint)
    trainer.save(RUN, saved.exported, optimizer=False)
    return saved


def take_over(folder: Path, sizes: Sizes, saved: Saved, window: Window, into: Path) -> dict[str, Any]:
    """Restore and load what :func:`save` left, continue with a window, and return the states on the way."""
    trainer = make_trainer(folder, sizes)
    items, params = window
    states = {"fresh": trainer.snapshot(RUN)}
    trainer.load(RUN, saved.checkpoint)
    states["loaded"] = trainer.snapshot(RUN)
    trainer.save(RUN, into / "again")
    trainer.save(RUN, into / "exported again", optimizer=False)
    trainer.load(RUN, saved.exported, optimizer=False)
    states["exported"] = trainer.snapshot(RUN)
    trainer.remove_adapter(RUN)
    trainer.create_adapter(RUN, FullSpec())
    states["reset"] = trainer.snapshot(RUN)
    trainer.restore(RUN, saved.snapshot)
    states["restored"] = trainer.snapshot(RUN)
    trainer.forward_backward([share(trainer, item) for item in items])  # the restored gradient counts once
    states["continued"] = trainer.snapshot(RUN)
    trainer.optim_step(RUN, params)
    trainer.forward_backward([share(trainer, item) for item in items])
    trainer.optimizer_step(RUN, "SGD", {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}, decay_norms=False)
    states["stepped"] = trainer.snapshot(RUN)
    return states


def fail_and_continue(
    folder: Path, sizes: Sizes, items: Sequence[TrainItem], bad: Sequence[TrainItem]
) -> dict[str, Any]:
    """Run requests that fail on the first data rank between two that do not."""
    trainer = make_trainer(folder, sizes)
    first = trainer._parallel.data.number == 0
    good = [share(trainer, item) for item in items]
    wrong = [item if first else good[0] for item in bad]
    results = trainer.forward_backward([good[0], *wrong, replace(good[0], adapter_id="unknown"), good[1]])
    errors = [type(result.error).__name__ if isinstance(result, TrainFailure) else None for result in results]
    refused = ""
    try:
        trainer.optimizer_step(RUN, "Muon", {"lr": 0.1})
    except UnsupportedError as error:
        refused = str(error)
    written = ""
    try:
        trainer.save(RUN, folder)  # it exists: the first rank cannot write
    except CheckpointError as error:
        written = str(error)
    return {"errors": errors, "gradients": trainer.gradients(RUN), "refused": refused, "written": written}
