"""The tokenizer of a GGUF file, rebuilt from its metadata.

Transformers' own conversion ignores ``tokenizer.ggml.pre``, which says how text is split before the merges: where
spaces precede a digit, 5.22 gives other ids than those the model was trained on; 5.5 also adds a bos token.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from twinkle.errors import UnsupportedError
from twinkle.hub.gguf_file import GgufFile
from twinkle.hub.model_folder import SpecialTokens, TokenIds

__all__ = ["gguf_special_tokens", "gguf_token_ids", "gguf_tokenizer"]

# Values of tokenizer.ggml.token_type
_CONTROL = 3
_USER_DEFINED = 4


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """Return a byte-level BPE tokenizer with the file's vocabulary and merges."""
    _refuse_other_tokenizers(file)
    tokens: list[str] = file.require("tokenizer.ggml.tokens", list)
    types: list[int] = file.require("tokenizer.ggml.token_type", list)
    merges: list[str] = file.require("tokenizer.ggml.merges", list)
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    # No unk token in the BPE model: bytes outside the vocabulary are dropped, as the original tokenizers do.
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = _pre_tokenizer(file)
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    return tokenizer


def _refuse_other_tokenizers(file: GgufFile) -> None:
    model = file.require("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise UnsupportedError(
            f"{file.name} has a tokenizer model {model!r}; only 'gpt2' (byte-level BPE) can be converted"
        )
    for key in ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix"):
        if file.get(key, False):
            raise UnsupportedError(f"{file.name} sets {key}: only tokenizers that add nothing can be converted")


def gguf_token_ids(file: GgufFile) -> TokenIds:
    """Return the ids of bos, eos and padding; a model without a padding token pads with its eos token."""
    eos = file.require("tokenizer.ggml.eos_token_id", int)
    return TokenIds(
        bos=file.require("tokenizer.ggml.bos_token_id", int),
        eos=eos,
        pad=file.get("tokenizer.ggml.padding_token_id", eos),
    )


def gguf_special_tokens(file: GgufFile) -> SpecialTokens:
    """Return bos, eos, padding and, if the file has one, the unknown token as text."""
    tokens: list[str] = file.require("tokenizer.ggml.tokens", list)
    ids = gguf_token_ids(file)
    unk = "tokenizer.ggml.unknown_token_id"
    return SpecialTokens(
        bos=tokens[ids.bos],
        eos=tokens[ids.eos],
        pad=tokens[ids.pad],
        unk=tokens[file.require(unk, int)] if unk in file.fields else None,
    )


def _pre_tokenizer(file: GgufFile) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    known = {
        "gpt-2": words,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words]),
    }
    name = file.require("tokenizer.ggml.pre", str)
    if name not in known:
        raise UnsupportedError(f"{file.name} has a pre-tokenizer {name!r}; supported: {', '.join(sorted(known))}")
    return known[name]
