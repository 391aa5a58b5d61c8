"""A request in progress, and the order in which the requests of a call are computed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from twinkle.model.adapters.adapter import Adapter
from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.lora.dropout import DropoutDraw
from twinkle.model.objectives.custom_loss import Evaluation
from twinkle.model.objectives.validation import CheckedItem
from twinkle.model.trainer.packing import MicroBatch, SequenceRef
from twinkle.model.types import FloatArray, RouteArray, TokenValues


@dataclass
class Request:
    """A request in progress, with everything computed for it so far."""

    item: CheckedItem
    adapter: Adapter | None  # None: the base model
    evaluation: Evaluation | None = None  # set for a request with an objective instead of a named loss
    keeps_values: bool = False
    dropout: DropoutDraw | None = None  # None: nothing is dropped
    values: dict[int, TokenValues] = field(default_factory=dict)  # datum → its values; filled if keeps_values
    logprobs: dict[int, FloatArray] = field(default_factory=dict)  # datum → (T, K)
    routes: dict[int, RouteArray] = field(default_factory=dict)  # datum → (T, layers, K); filled if it asks for them
    metrics: dict[str, float] = field(default_factory=dict)  # once complete
    gradient_P: Tensor | None = None
    finite: bool = True

    @property
    def layout_digest(self) -> str:
        """Return the digest of the adapter's layout, the same on all ranks; empty for the base model."""
        return "" if self.adapter is None else self.adapter.whole.digest

    @property
    def complete(self) -> bool:
        return len(self.logprobs) == len(self.item.data)

    @property
    def ordered_logprobs(self) -> list[FloatArray]:
        return [self.logprobs[number] for number in range(len(self.item.data))]

    @property
    def ordered_values(self) -> list[TokenValues]:
        return [self.values[number] for number in range(len(self.item.data))]

    def keep_gradient(self) -> None:
        if self.gradient_P is not None:
            assert self.adapter is not None
            self.adapter.add_gradient(self.gradient_P)
            self.gradient_P = None


def ordered_sequences(requests: Mapping[int, Request], architecture: Architecture) -> list[SequenceRef]:
    """Return all sequences of the requests, ordered by stack, dropout, loss, width and slot.

    In this order the rows of a stack with dropout, and those without, are one contiguous range each, and rows with the
    same loss or width are neighbours.
    """

    def order(index: int) -> tuple[int, str, bool, str, int, int, int]:
        request = requests[index]
        loss, width = f"{request.item.output} {request.item.loss.name}", request.item.width
        drops = request.dropout is not None
        if request.adapter is None:
            return 0, "", drops, loss, width, -1, index
        slot = request.adapter.slot
        rank = request.adapter.whole.rank
        return rank, request.layout_digest, drops, loss, width, -1 if slot is None else slot, index

    sequences = []
    for index in sorted(requests, key=order):
        item, data = requests[index].item, requests[index].item.data
        more = item.columns if item.output == "logits" else 0  # an embedding is one row, whatever the length
        # Neighbours of equal width form one block of the head; in padded batches, equal lengths waste least.
        numbers = sorted(
            range(len(data)),
            key=lambda number: (data[number].width, len(data[number].tokens) if architecture.padded else 0),
        )
        sequences += [
            SequenceRef(index, number, len(data[number].tokens), data[number].width + more) for number in numbers
        ]
    return sequences


def describe(plan: Sequence[Sequence[MicroBatch]], requests: Mapping[int, Request]) -> str:
    """Return what the ranks of one model must have in common: order, cuts, tenants, lengths and layouts."""
    rows = []
    for batch in (batch for group in plan for batch in group):
        for index, sequences in batch.by_item.items():
            request = requests[index]
            lengths = [len(request.item.data[sequence.datum].tokens) for sequence in sequences]
            rows.append((index, request.item.adapter_id, request.layout_digest, lengths))
    return repr(([[(len(batch.sequences), batch.recompute) for batch in group] for group in plan], rows))
