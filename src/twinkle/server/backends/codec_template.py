"""A template for a model that has a codec and no tokenizer's files, as the mock has."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from twinkle.server.backends.text_codec import TextCodec
from twinkle.template.labels import IGNORE, shift_labels, unshift_labels
from twinkle.template.messages import conversation, plain_text, refuse_media

Row = dict[str, Any]


class CodecTemplate:
    """As :class:`~twinkle.template.Template`, without options and without tool calls in what was generated."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    def batch_encode(self, trajectories: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> list[Row]:
        """A codec knows conversations only as they are before the assistant's turn, so that is what both are."""
        return [self._encode(trajectory) for trajectory in trajectories]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self._codec.token_text(token) for token in token_ids)

    def concat_input_feature(self, feature: Mapping[str, Any], new_tokens: Sequence[int]) -> Row:
        before = np.asarray(feature["input_ids"], np.int64)
        labels = np.asarray(feature.get("labels", np.full(len(before), IGNORE)), np.int64)
        grown = dict(feature)
        if feature.get("messages"):
            answer = {"role": "assistant", "content": self._codec.decode(new_tokens)}
            grown["messages"] = [*feature["messages"], answer]
        for name, value in (("completion_mask", 1), ("mm_token_type_ids", 0)):
            if feature.get(name) is not None:
                grown[name] = np.concatenate([feature[name], np.full(len(new_tokens), value)])
        grown["labels"] = shift_labels(np.concatenate([unshift_labels(labels), new_tokens]).astype(np.int64))
        return _with_positions(grown, np.concatenate([before, new_tokens]).astype(np.int64))

    def _encode(self, trajectory: Mapping[str, Any]) -> Row:
        refuse_media(trajectory)
        messages = [plain_text(message) for message in conversation(trajectory)]
        tokens = np.asarray(self._codec.encode_chat(messages, trajectory.get("tools") or []), np.int64)
        row = {**trajectory, "messages": messages, "labels": np.full(len(tokens), IGNORE)}
        return _with_positions(row, tokens)


def _with_positions(row: Row, tokens: np.ndarray[Any, np.dtype[np.int64]]) -> Row:
    length = len(tokens)
    return {
        **row,
        "input_ids": tokens,
        "attention_mask": np.ones(length, np.int64),
        "position_ids": np.arange(length),
        "length": length,
    }
