"""The types of data: conversations, inputs and outputs of models, samples. They are the library's, as plain dicts.

Dicts are never checked here; the ``TypedDict`` types name the keys that Twinkle itself reads. Dataclasses have the same
fields as the library's, whose objects may be given instead.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Literal, TypedDict

from twinkle_client.errors import InvalidRequestError, invalid
from twinkle_client.protocol.sampling import SampledSequenceModel, SampleResponseModel

__all__ = [
    "InputFeature",
    "LossOutput",
    "Message",
    "ModelOutput",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "Tool",
    "ToolCall",
    "Trajectory",
    "pack_value",
    "sampling_fields",
    "user_data_get",
]

# --- conversations ----------------------------------------------------------------------------------------------------


class FunctionCall(TypedDict, total=False):
    name: str
    arguments: dict[str, Any] | str


class ToolCall(TypedDict, total=False):
    id: str
    type: Literal["function"]
    function: FunctionCall


class Tool(TypedDict, total=False):
    """A function that an assistant may call: ``function`` has name, description and the JSON schema of parameters."""

    type: Literal["function"]
    function: dict[str, Any]


class Message(TypedDict, total=False):
    """One message. ``content`` is text, or a list of blocks: ``{"type": "text", "text": …}``, and for models that read
    images ``{"type": "image", "image": …}``. An image is a path, a URL, a data URI, base64, bytes, a Pillow image, or a
    dict with ``bytes`` or ``path``; ``images`` take the places of ``<image>`` in the text.
    """

    role: Literal["system", "user", "assistant", "tool"]
    type: str
    content: str | list[dict[str, Any]]
    tool_calls: list[ToolCall]
    tool_call_id: str
    reasoning_content: str
    images: list[Any]
    videos: list[Any]
    audios: list[Any]


class Trajectory(TypedDict, total=False):
    """One conversation. ``user_data`` holds values for rewards and metrics, as pairs of a key and a JSON text."""

    messages: list[Message]
    tools: list[Tool]
    user_data: list[tuple[str, str]]
    images: list[Any]
    videos: list[Any]
    audios: list[Any]
    prompt: str


def pack_value(value: object) -> str:
    """Return the JSON text of a value for ``user_data``. Types that JSON does not know are converted by ``str``."""
    return json.dumps(value, ensure_ascii=False, default=str)


def user_data_get(items: object, key: str, default: Any = None) -> Any:
    """Return the value of the first pair with this key in ``user_data``.

    Values are parsed as JSON. A value that is not valid JSON, as other programs may write it, is returned unchanged.
    """
    if not isinstance(items, list | tuple):
        return default
    for item in items:
        if isinstance(item, list | tuple) and len(item) == 2 and item[0] == key:
            return _unpack(item[1])
    return default


def _unpack(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


# --- inputs and outputs of models -------------------------------------------------------------------------------------


class InputFeature(TypedDict, total=False):
    """One sequence of tokens. ``labels[t]`` is the target of position t, or −100 where nothing is learnt."""

    input_ids: Sequence[int]
    attention_mask: Sequence[int]
    position_ids: Sequence[int]
    labels: Sequence[int]
    completion_mask: Sequence[int]
    length: int
    routed_experts: Any  # (T, layers, K): numbers, or an answer's packed form


class ModelOutput(TypedDict, total=False):
    """The outputs of a model, as a server sends them: rows of numbers, without padding."""

    logits: Any
    loss: Any
    logps: Any
    entropies: Any
    num_tokens: Any
    embeddings: Any
    routed_experts: Any


class LossOutput(TypedDict, total=False):
    loss: Any
    num_tokens: Any


# --- samples ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SamplingParams:
    """The parameters of sampling. The server checks them.

    ``max_tokens=None``: up to the end of the context; 0: score the prompt and generate nothing. ``temperature=0``:
    greedy. ``top_k=-1``: off. ``stop``: a text, texts, or token ids. ``logprobs=1``: the log-probability of each
    sampled token; ``logprobs=k``: those of the k likeliest tokens. ``prompt_logprobs=k``: those of the prompt's tokens
    and of the k likeliest at each place. ``min_p``, the penalties and ``ignore_eos`` have vLLM's meaning; reported
    log-probabilities are those before penalties. ``routed_experts``: return the experts of each token.
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
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    ignore_eos: bool = False
    routed_experts: bool = False


# What a sampler returns; the protocol's types have the fields of the library's.
SampledSequence = SampledSequenceModel
SampleResponse = SampleResponseModel


def sampling_fields(sampling_params: object) -> dict[str, Any]:
    """Return the fields of a SamplingParams, ours or the library's, or of a mapping with the same keys."""
    if isinstance(sampling_params, Mapping):
        return dict(sampling_params)
    if is_dataclass(sampling_params) and not isinstance(sampling_params, type):
        return asdict(sampling_params)
    raise invalid("sampling_params", sampling_params, "a SamplingParams, or its fields as a mapping")


# --- tables -----------------------------------------------------------------------------------------------------------


def columns_to_rows(columns: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a table that is given by columns of one length, or by its rows."""
    if not isinstance(columns, Mapping):
        return [dict(row) for row in columns]
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise InvalidRequestError(
            f"columns: got columns of {lengths} rows, allowed: one length. A function that changes the number of rows "
            "must return all columns, or remove_columns must name the others"
        )
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def rows_to_columns(
    rows: Sequence[Mapping[str, Any]] | Mapping[str, Any], keys: Sequence[str] | None = None
) -> dict[str, list[Any]]:
    """Return the columns of rows, or of one row; a row without one of the keys has None there.

    ``keys`` are by default those of all rows, in the order of their first appearance.
    """
    table = [rows] if isinstance(rows, Mapping) else rows
    names = list(dict.fromkeys(key for row in table for key in row)) if keys is None else keys
    return {name: [row.get(name) for row in table] for name in names}
