"""From the characters that are to be learnt to the tokens that are, and from tokens to targets.

Labels are made unshifted (label t belongs to token t) and shifted last of all: position t is to predict token t + 1.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from twinkle.template.chat_template import Rendered

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

__all__ = ["IGNORE", "IntArray", "encode_texts", "label_spans", "shift_labels", "unshift_labels"]

IntArray = NDArray[np.int64]

IGNORE = -100


def encode_texts(tokenizer: "Tokenizer", texts: list[str], add_special_tokens: bool) -> "list[Encoding]":
    """By the core of a tokenizer: what Transformers wraps around it costs a sixth of the time."""
    # Whoever used the tokenizer before may have left these on. Switching them off while others encode is not allowed,
    # so it is done only where it is necessary.
    if tokenizer.truncation is not None:
        tokenizer.no_truncation()
    if tokenizer.padding is not None:
        tokenizer.no_padding()
    return tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)


def label_spans(encoding: "Encoding", ids: IntArray, rendered: Rendered) -> IntArray:
    """Unshifted labels (T,): the ids of the tokens that begin inside a span, −100 elsewhere.

    A token that begins before its span is not learnt: part of it is in the prompt, so no model is ever asked for it.
    """
    labels = np.full(len(ids), IGNORE, dtype=np.int64)
    for span in rendered.spans:
        first = _first_token(encoding, span.start, span.end)
        if first is not None:
            stop = _first_token(encoding, span.end, len(rendered.text))
            labels[first:stop] = ids[first:stop]
    return labels


def shift_labels(labels: IntArray) -> IntArray:
    """Targets (T,) from unshifted labels; nothing is predicted at the last position."""
    shifted = np.empty_like(labels)
    shifted[:-1] = labels[1:]
    shifted[-1:] = IGNORE
    return shifted


def unshift_labels(labels: IntArray) -> IntArray:
    """The reverse of :func:`shift_labels`; nothing predicts the first token."""
    unshifted = np.empty_like(labels)
    unshifted[1:] = labels[:-1]
    unshifted[:1] = IGNORE
    return unshifted


def _first_token(encoding: "Encoding", start: int, end: int) -> int | None:
    """The first token that begins at character ``start`` or later, if a character before ``end`` leads to it.

    Characters can be without a token (white space that a tokenizer drops), so the search goes on to the next one.
    """
    for character in range(start, end):
        token = encoding.char_to_token(character)
        if token is None:
            continue
        while token < len(encoding) and _begin(encoding, token) < start:
            token += 1
        return token if token < len(encoding) else None
    return None


def _begin(encoding: "Encoding", token: int) -> int:
    characters = encoding.token_to_chars(token)
    assert characters is not None, "only tokens that a tokenizer adds by itself stand for no characters"
    return characters[0]
