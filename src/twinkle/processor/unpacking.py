"""Unpacking of a packed row: from [1, sum of T] to one row for each sequence.

Shapes: B sequences, T tokens, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.processor.collation import Batch, sequence_starts, text_positions

__all__ = ["last_token_embeddings", "unpack_inputs", "unpack_packed_sequences"]

# The fields that are unpacked, and the values that pad them.
_INPUT_PADDING = {"labels": -100, "completion_mask": 0}
_OUTPUT_PADDING = {"logps": 0.0, "entropies": 0.0, "logits": 0.0}


def unpack_packed_sequences(
    inputs: Mapping[str, Any], outputs: Mapping[str, Any] | None = None, task: str = "causal_lm"
) -> tuple[Batch, Batch]:
    """Unpack labels, completion mask, logps, entropies and logits to [sequences, longest].

    A padded batch is returned unchanged, and so are embeddings (``task="embedding"``), which already have one row for
    each sequence.
    """
    taken_in, taken_out = dict(inputs), dict(outputs or {})
    lengths = _packed_lengths(inputs)
    if lengths is None or task == "embedding":
        return taken_in, taken_out
    for fields, padding in ((taken_in, _INPUT_PADDING), (taken_out, _OUTPUT_PADDING)):
        for name, value in padding.items():
            if fields.get(name) is not None:
                parts = fields[name][0].split(lengths)
                fields[name] = pad_sequence(parts, batch_first=True, padding_value=value)
    return taken_in, taken_out


def unpack_inputs(inputs: Sequence[Mapping[str, Any]], task: str = "causal_lm") -> list[Batch]:
    """Call :func:`unpack_packed_sequences` for the inputs of several batches."""
    return [unpack_packed_sequences(batch, None, task)[0] for batch in inputs]


def last_token_embeddings(inputs: Mapping[str, Any], features_BTH: Tensor) -> Tensor:
    """Return the hidden state of each sequence's last token (not padding), normalised to length 1: [sequences, H]."""
    lengths = _packed_lengths(inputs)
    if lengths is not None:
        last = torch.tensor(lengths, device=features_BTH.device).cumsum(0) - 1
        picked = features_BTH[0, last]
    elif inputs.get("attention_mask") is not None:
        mask_BT = inputs["attention_mask"]
        places = torch.arange(mask_BT.shape[1], device=mask_BT.device)
        last = (mask_BT * places).argmax(dim=1)  # the last token that is not padding, for padding on either side
        picked = features_BTH[torch.arange(len(mask_BT), device=mask_BT.device), last]
    else:
        picked = features_BTH[:, -1]
    return torch.nn.functional.normalize(picked, dim=-1)


def _packed_lengths(inputs: Mapping[str, Any]) -> list[int] | None:
    """Return the lengths of the sequences of a packed row, or None for a batch that is not packed."""
    positions = inputs.get("position_ids")
    if positions is None:
        return None
    positions_BT = text_positions(positions)
    if positions_BT is None:
        raise UnsupportedError("position_ids: rope axes without the text's positions cannot be taken apart")
    if positions_BT.shape[0] != 1 or int((positions_BT == 0).sum()) < 2:
        return None
    starts = sequence_starts(positions_BT)
    if int(starts[0]) != 0:
        raise InvalidInputError("position_ids", positions_BT[0, :8].tolist(), "sequences that start at position 0")
    return starts.diff().tolist()
