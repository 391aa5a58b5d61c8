"""Conversion of spans of characters to labels of tokens, and of labels to targets.

Labels are first made unshifted (label t belongs to token t). The last step shifts them, because position t predicts
token t + 1.
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
    """Encode texts with the core of a tokenizer. Transformers' wrapper would cost another sixth of the time."""
    # An earlier use of the tokenizer may have left truncation or padding on. They may not be switched off while another
    # thread encodes, so do it only if necessary.
    if tokenizer.truncation is not None:
        tokenizer.no_truncation()
    if tokenizer.padding is not None:
        tokenizer.no_padding()
    return tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)


def label_spans(encoding: "Encoding", ids: IntArray, rendered: Rendered) -> IntArray:
    """Return unshifted labels (T,): the ids of tokens that begin inside a span, −100 for all others.

    A token that begins before its span is not learnt: it is partly in the prompt, so a model never has to generate it.
    """
    labels = np.full(len(ids), IGNORE, dtype=np.int64)
    for span in rendered.spans:
        first = _first_token(encoding, span.start, span.end)
        if first is not None:
            stop = _first_token(encoding, span.end, len(rendered.text))
            labels[first:stop] = ids[first:stop]
    return labels


def shift_labels(labels: IntArray) -> IntArray:
    """Return targets (T,) from unshifted labels. The last position has no target."""
    shifted = np.empty_like(labels)
    shifted[:-1] = labels[1:]
    shifted[-1:] = IGNORE
    return shifted


def unshift_labels(labels: IntArray) -> IntArray:
    """Reverse :func:`shift_labels`. The first token has no label, because nothing predicts it."""
    unshifted = np.empty_like(labels)
    unshifted[1:] = labels[:-1]
    unshifted[:1] = IGNORE
    return unshifted


def _first_token(encoding: "Encoding", start: int, end: int) -> int | None:
    """Return the first token that begins at ``start`` or later, found from the characters ``start`` to ``end``.

    Some characters have no token (white space that a tokenizer drops), so the search continues with the next character.
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
