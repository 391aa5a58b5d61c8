"""A pass in parts of a few sequences each, with the outputs, the loss and the gradient of one whole pass.

Many losses are not sums over sequences (means, pairs, contrasts within the batch, functions of the user's), so parts
must not have losses of their own. Instead

1. every part runs forward without an autograd graph, and the outputs of all parts are joined;
2. the loss is computed once, from the joined outputs, with its slopes: d loss / d outputs;
3. every part runs forward again, now with a graph, and its backward pass begins with its part of the slopes.

Only one part's activations are in memory at a time. The price is the additional forward pass of step 1.

Shapes: B sequences, L tokens of the longest, b and l of a part.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from twinkle.errors import UnsupportedError
from twinkle.model.library.optimizer_group import TrainStatus
from twinkle.model.library.sequences import NO_SEQUENCES, SequenceBatch, check_micro_batch_size
from twinkle.model.parallel import Ranks
from twinkle.model.transformers.causal_forward import Asked, CausalForward

Outputs = Mapping[str, Tensor]

_ONE_TOKEN = SequenceBatch(({"input_ids": torch.zeros(1, dtype=torch.long)},))


@dataclass(frozen=True)
class Part:
    """A part of a batch: its sequences, and the position of the first one in the batch."""

    batch: SequenceBatch
    start: int

    def cut(self, value: Tensor, name: str) -> Tensor:
        """Return this part of an output of the whole batch, without padding that only other parts need."""
        rows = value[self.start : self.start + len(self.batch.rows)]
        return rows if name == "embeddings" else rows[:, : max(self.batch.lengths)]


def split(batch: SequenceBatch, micro_batch_size: int | None, ranks: Ranks) -> list[Part]:
    """Split a batch into parts of at most ``micro_batch_size`` sequences; None: one part.

    All ranks get the same number of parts, because the passes of a sharded model need all of them: a rank with fewer
    sequences gets empty parts at the end.
    """
    if micro_batch_size is None:
        return [Part(batch, 0)]
    check_micro_batch_size(micro_batch_size)
    starts = range(0, len(batch.rows), micro_batch_size)
    parts = [Part(batch.part(at, at + micro_batch_size), at) for at in starts]
    count = max(-ranks.smallest(-len(parts)), 1)
    return parts + [Part(NO_SEQUENCES, len(batch.rows))] * (count - len(parts))


def join(outputs: Sequence[Outputs], longest: int) -> dict[str, Tensor]:
    """Join the outputs of parts; values per token are padded with 0 to the ``longest`` sequence of the batch."""
    if len(outputs) == 1:
        return dict(outputs[0])
    if any(value.dim() == 0 for value in outputs[0].values()):
        raise UnsupportedError("micro_batch_size: the auxiliary loss of experts needs the whole batch at once")
    full = [each for each in outputs if all(len(value) for value in each.values())] or outputs[:1]
    return {name: torch.cat([_padded(name, each[name], longest) for each in full]) for name in full[0]}


def _padded(name: str, value: Tensor, longest: int) -> Tensor:
    if name == "embeddings":
        return value
    return F.pad(value, [0, 0] * (value.dim() - 2) + [0, longest - value.shape[1]])


@dataclass(frozen=True)
class Pass:
    """A forward pass that is ready to be computed, in one or several parts. ``status``: where it is stored."""

    status: TrainStatus
    batch: SequenceBatch
    asked: Asked
    parts: list[Part]

    @property
    def longest(self) -> int:
        return max(self.batch.lengths, default=0)


RandomState = list[Tensor]  # of torch's generator on the CPU and, for a model on a GPU, of that on the GPU


class Passes:
    """Computes passes of a model. ``half``: products run under bf16 autocast."""

    def __init__(self, forward: CausalForward, device: torch.device, *, half: bool) -> None:
        self._forward = forward
        self._device = device
        self._half = half

    def outputs(self, one: Pass) -> dict[str, Tensor]:
        """Run a forward pass. The outputs have an autograd graph unless gradients are switched off."""
        return join([self._run(part.batch, one.asked) for part in one.parts], one.longest)

    def leaves(self, one: Pass) -> tuple[dict[str, Tensor], list[RandomState]]:
        """Do step 1: return the joined outputs, as leaves of a new graph, and the generators' states of each part."""
        states: list[RandomState] = []
        parts: list[Outputs] = []
        with torch.no_grad():
            for part in one.parts:
                states.append(self._random_state())
                parts.append(self._run(part.batch, one.asked))
        outputs = join(parts, one.longest)
        return {name: value.requires_grad_(value.is_floating_point()) for name, value in outputs.items()}, states

    def backward(self, one: Pass, states: list[RandomState], loss: Tensor, outputs: Outputs) -> None:
        """Do step 3. An empty part has a gradient of 0, but takes part in the exchange of shards."""
        names = [name for name, value in outputs.items() if value.requires_grad]
        found = torch.autograd.grad(loss, [outputs[name] for name in names], allow_unused=True)
        slopes = {name: slope for name, slope in zip(names, found, strict=True) if slope is not None}
        for part, state in zip(one.parts, states, strict=True):
            with self._replayed(state):
                again = self._run(part.batch, one.asked)
            if part.batch.empty or not slopes:
                floats = [value for value in again.values() if value.requires_grad]
                torch.stack([value.sum() * 0.0 for value in floats]).sum().backward()
            else:
                cut = [part.cut(slope, name) for name, slope in slopes.items()]
                torch.autograd.backward([again[name] for name in slopes], cut)

    def _run(self, batch: SequenceBatch, asked: Asked) -> dict[str, Tensor]:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._half):
            outputs = dict(self._forward(_ONE_TOKEN if batch.empty else batch, asked))
        if batch.empty:  # a rank without data takes part: others may need its shards, and its gradient is 0
            outputs = {name: value[:0] for name, value in outputs.items() if value.dim() > 0}
        return outputs

    def _random_state(self) -> RandomState:
        on_gpu = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return [torch.get_rng_state(), *on_gpu]

    @contextmanager
    def _replayed(self, state: RandomState) -> Iterator[None]:
        """Run with the generators in an earlier state, so that dropout is the same; restore the present one after."""
        on_gpu = self._device.type == "cuda"
        with torch.random.fork_rng(devices=[self._device] if on_gpu else []):
            torch.set_rng_state(state[0])
            if on_gpu:
                torch.cuda.set_rng_state(state[1], self._device)
            yield
