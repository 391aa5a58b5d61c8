"""The parameters of sampling; they have the same fields as the library's class, which may be given instead."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from twinkle_client.errors import invalid

__all__ = ["SamplingParams", "sampling_fields"]


@dataclass(frozen=True)
class SamplingParams:
    """The parameters of sampling. The server checks them.

    ``max_tokens=None``: up to the end of the context; 0: score the prompt and generate nothing. ``temperature=0``:
    greedy. ``top_k=-1``: off. ``stop``: a text, texts, or token ids. ``logprobs=1``: the log-probability of each
    sampled token; ``logprobs=k``: those of the k likeliest tokens. ``prompt_logprobs=k``: those of the prompt's tokens
    and of the k likeliest at each place.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_samples: int = 1


def sampling_fields(sampling_params: object) -> dict[str, Any]:
    """Return the fields of a SamplingParams, ours or the library's, or of a mapping with the same keys."""
    if isinstance(sampling_params, Mapping):
        return dict(sampling_params)
    if is_dataclass(sampling_params) and not isinstance(sampling_params, type):
        return asdict(sampling_params)
    raise invalid("sampling_params", sampling_params, "a SamplingParams, or its fields as a mapping")
