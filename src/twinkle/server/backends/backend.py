"""What the service asks of compute: the methods of a :class:`~twinkle.model.Trainer`, without torch in sight.

Everything is called from one thread. Errors of a tenant's making are :class:`~twinkle.errors.UserError`.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from twinkle.model.types import (
    EMPTY,
    AdamParams,
    AdapterSnapshot,
    FloatArray,
    LoraSpec,
    TrainerNumbers,
    TrainFailure,
    TrainItem,
    TrainResult,
)
from twinkle.sampler.types import Sampler
from twinkle.server.backends.text_codec import TextCodec

_CONTENDED_PART = 16  # of a batch


class TrainingBackend(Protocol):
    """Many adapters on one frozen model. Called in the compute thread, where a method does not say otherwise."""

    def check_adapter(self, spec: LoraSpec) -> None:
        """Raise for an adapter that can never exist. Called in any thread."""

    def create_adapter(self, adapter_id: str, spec: LoraSpec) -> LoraSpec: ...

    def remove_adapter(self, adapter_id: str) -> None: ...

    def adapter_ids(self) -> list[str]: ...

    def resident_adapter_ids(self) -> list[str]:
        """Return the adapters on the device; the others wait in host memory. Called in any thread."""
        return self.adapter_ids()

    def host_bytes(self) -> int:
        """Return the host memory that adapters take, on a CPU also those on the device. Called in any thread."""

    def host_bytes_of(self, spec: LoraSpec) -> int:
        """Return the host memory that an adapter of this shape takes at most. Called in any thread."""

    def numbers(self) -> TrainerNumbers:
        """Return counts and memory of the trainer, without waiting for the device."""

    def forward(self, items: Sequence[TrainItem]) -> list[TrainResult | TrainFailure]: ...

    def forward_backward(self, items: Sequence[TrainItem]) -> list[TrainResult | TrainFailure]: ...

    def in_steps(
        self,
        items: Sequence[TrainItem],
        *,
        train: bool,
        limit: Callable[[], int | None],
        give_way: Callable[[], None] | None = None,
    ) -> Generator[None, None, list[TrainResult | TrainFailure]]:
        """Compute one micro-batch a step, of at most ``limit()`` tokens if possible; others compute between steps.

        A backend that can be interrupted in the middle of a step calls ``give_way`` there, as often as it likes. One
        that inherits this computes all in one step.
        """
        yield from ()
        return self.forward_backward(items) if train else self.forward(items)

    def optim_step(self, adapter_id: str, params: AdamParams, *, decoupled: bool = True) -> dict[str, float]: ...

    def zero_grad(self, adapter_id: str) -> None: ...

    def snapshot(self, adapter_id: str) -> AdapterSnapshot: ...

    def restore(self, adapter_id: str, snapshot: AdapterSnapshot) -> None: ...

    def prepare_save(
        self,
        adapter_id: str,
        optimizer: bool = True,
        state: Mapping[str, object] = EMPTY,
        companions: Callable[[Path], None] | None = None,
    ) -> Callable[[Path], None]:
        """Copy what is to be saved; the function returned writes it, in any thread, in the place of what is there."""

    def load(self, adapter_id: str, directory: str | Path, optimizer: bool = True) -> None: ...

    def scale_gradient(self, adapter_id: str, factor: float) -> None: ...

    def gradient_norm(self, adapter_id: str, norm_type: float = 2.0) -> float: ...

    def weights(self, adapter_id: str) -> dict[str, FloatArray]: ...

    def peft_config(self, adapter_id: str) -> dict[str, object]: ...


@dataclass(frozen=True)
class ServedModel:
    """A loaded model and the engines on it. ``name`` is its id in the config; ``tokenizer_dir`` is on this machine."""

    name: str
    aliases: tuple[str, ...]
    trainer: TrainingBackend
    sampler: Sampler | None  # None: the model is for training only
    architecture: str
    max_context_length: int
    tokens_per_batch: int
    tokenizer_dir: str | None
    tokenizer_id: str | None  # what clients on other machines can load
    memory: str  # how memory is divided, for people
    text: TextCodec | None  # None: there is no tokenizer, and tokens are all that tenants can send
    cheap_tokens: int = 0  # so many more in a batch cost others no time; on a CPU every one does

    @property
    def contended_tokens(self) -> int:
        """Return what a tenant gets of a batch at most while others have work, if these ask for less."""
        return min(self.cheap_tokens, self.tokens_per_batch // _CONTENDED_PART)
