"""The interface between services and compute: the methods of a :class:`~twinkle.model.Trainer`, without torch.

A tenant's mistake raises a :class:`~twinkle.errors.UserError`; any other exception is a failure of the server.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from twinkle.model.types import (
    EMPTY,
    AdamParams,
    AdapterSnapshot,
    FloatArray,
    TrainerNumbers,
    TrainFailure,
    TrainingSpec,
    TrainItem,
    TrainResult,
)
from twinkle.sampler.types import Sampler
from twinkle.server.backends.image_reader import ImageReader
from twinkle.server.backends.text_codec import TextCodec

TrainMode = Literal["lora", "full"]

_CONTENDED_PART = 16  # a tenant gets at most this fraction (1/16) of a batch while others wait


class TrainingBackend(Protocol):
    """The adapters on one frozen base model, and what is computed with them.

    A trainer of all parameters implements the same methods for one run at a time, which has the whole model. Its specs
    are :class:`~twinkle.model.types.FullSpec`; ``remove_adapter`` puts the weights of the base model back.

    All methods are called in the compute thread, unless a method says otherwise.
    """

    def check_adapter(self, spec: TrainingSpec) -> None:
        """Raise a UserError if the base model can have no adapter of this shape. Called in any thread."""

    def create_adapter(self, adapter_id: str, spec: TrainingSpec) -> TrainingSpec: ...

    def remove_adapter(self, adapter_id: str) -> None: ...

    def adapter_ids(self) -> list[str]: ...

    def resident_adapter_ids(self) -> list[str]:
        """Return the adapters on the device; all others are in host memory. Called in any thread.

        A backend that inherits this method has all adapters on the device.
        """
        return self.adapter_ids()

    def host_bytes(self) -> int:
        """Return the bytes of host memory that adapters take. Called in any thread.

        On a CPU this includes the adapters on the device, because that is host memory too.
        """

    def host_bytes_of(self, spec: TrainingSpec) -> int:
        """Return the most bytes of host memory that an adapter of this shape takes. Called in any thread.

        It may wait for a call of the compute thread, so the event loop does not call it.
        """

    def numbers(self) -> TrainerNumbers:
        """Return counts and memory of the trainer, without waiting for the device."""

    def forward(self, items: Sequence[TrainItem]) -> list[TrainResult | TrainFailure]: ...

    def forward_backward(self, items: Sequence[TrainItem]) -> list[TrainResult | TrainFailure]: ...

    def in_steps(
        self,
        items: Sequence[TrainItem],
        *,
        train: bool,
        limit: Callable[[], int | None] | None,
        give_way: Callable[[], None] | None = None,
    ) -> Generator[None, None, list[TrainResult | TrainFailure]]:
        """Compute one micro-batch a step, of at most ``limit()`` tokens if possible, and yield after each.

        Between steps the compute thread may work for others. A backend that can be interrupted in the middle of a step
        calls ``give_way`` there, as often as it likes. Without a ``limit`` there is one step, and ``give_way`` uses the
        sampler of the same model, but not the backend. A backend that inherits this method computes all in one step.
        """
        yield from ()
        return self.forward_backward(items) if train else self.forward(items)

    def optim_step(
        self, adapter_id: str, params: AdamParams, *, decoupled: bool = True, decay_norms: bool = True
    ) -> dict[str, float]: ...

    def optimizer_step(
        self, adapter_id: str, name: str, settings: Mapping[str, Any], *, decay_norms: bool = True
    ) -> dict[str, float]:
        """Take a step of another optimizer than Adam: a class of torch.optim by name, with all its settings.

        ``decay_norms``: whether norms and biases get weight decay where all parameters are trained.
        """

    def zero_grad(self, adapter_id: str) -> None: ...

    def snapshot(self, adapter_id: str) -> AdapterSnapshot: ...

    def restore(self, adapter_id: str, snapshot: AdapterSnapshot) -> None: ...

    def prepare_save(
        self,
        adapter_id: str,
        optimizer: bool = True,
        state: Mapping[str, object] = EMPTY,
        companions: Callable[[Path], None] | None = None,
        synced: bool = True,
    ) -> Callable[[Path], None]:
        """Copy the adapter's state, and return a function that writes the copy to a directory, replacing what is there.

        The returned function may be called in any thread. ``optimizer``: with its optimizer state. ``state``: the
        training progress to write beside it, if any. ``companions`` writes further files into the directory before that
        takes its final name. With ``synced=False`` the function may return before the files have reached the disk: they
        then survive the death of the process, but not a power failure in the next half minute.
        """

    def load(self, adapter_id: str, directory: str | Path, optimizer: bool = True) -> None: ...

    def scale_gradient(self, adapter_id: str, factor: float) -> None: ...

    def gradient_norm(self, adapter_id: str, norm_type: float = 2.0) -> float: ...

    def vocabulary_size(self) -> int: ...

    def weights(self, adapter_id: str) -> dict[str, FloatArray]: ...

    def shapes(self, adapter_id: str) -> dict[str, tuple[int, ...]]: ...

    def peft_config(self, adapter_id: str) -> dict[str, object]: ...


def run_passes(
    trainer: TrainingBackend, items: Sequence[TrainItem], *, train: bool, let_sampling_run: Callable[[], None]
) -> list[TrainResult | TrainFailure]:
    """Run passes in one step. ``let_sampling_run`` is called in the middle of it if the trainer can be interrupted."""
    steps = trainer.in_steps(items, train=train, limit=None, give_way=let_sampling_run)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            results: list[TrainResult | TrainFailure] = end.value
            return results


@dataclass(frozen=True)
class ServedModel:
    """A loaded base model with its trainer and sampler.

    ``name`` is its id in the configuration; ``tokenizer_dir`` is a directory on this machine.
    """

    name: str
    aliases: tuple[str, ...]
    trainer: TrainingBackend
    sampler: Sampler | None  # None: the model is for training only
    architecture: str
    max_context_length: int
    tokens_per_batch: int
    tokenizer_dir: str | None
    tokenizer_id: str | None  # the public repository from which clients on other machines can load the tokenizer
    memory: str  # a sentence for operators: how memory is divided
    text: TextCodec | None  # None: there is no tokenizer, and tenants can send only tokens
    device: str = "cpu"  # what the trainer computes on: cpu or cuda
    cheap_tokens: int = 0  # this many more tokens in a batch take hardly any time; 0 on a CPU, where every token does
    train_mode: TrainMode = "lora"  # full: the one live run trains all parameters, and there are no adapters
    images: ImageReader | None = None  # None: as it is served here, the model reads text only
    max_replayed_steps: int | None = None  # optimizer steps that recovery may repeat at most; None: no limit

    @property
    def contended_tokens(self) -> int:
        """Return the limit in tokens on one tenant's part of a batch while others have work; 0 on a CPU.

        The scheduler raises the limit to what another tenant asks for, and lets a tenant's first pass exceed a limit
        that is not 0.
        """
        return min(self.cheap_tokens, self.tokens_per_batch // _CONTENDED_PART)
