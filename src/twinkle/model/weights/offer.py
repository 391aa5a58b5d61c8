"""What a model offers to a sampler when their weights are synchronised."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from twinkle import hub
from twinkle.model.weights.buckets import TensorMeta

__all__ = ["BaseModel", "LiveWeights", "WeightsOffer", "pretrained_id"]


@dataclass(frozen=True)
class BaseModel:
    """What another process needs to load the same base model. ``dtype``: the one that training computes with."""

    model_id: str
    tokenizer_id: str | None
    dtype: torch.dtype


@dataclass(frozen=True)
class LiveWeights:
    """The tensors that a model of this process computes with, which a sampler of this process may share.

    ``module``: the model itself, with the layers that it has now. ``tensors``: by name; only those that are sent as
    they are, so neither shards nor weights with a merged adapter.
    ``changes``: returns how often training or loading has changed them so far.
    """

    owner: object
    module: PreTrainedModel
    tensors: Mapping[str, Tensor]
    changes: Callable[[], int]


@dataclass(frozen=True)
class WeightsOffer:
    """The weights of one synchronisation.

    ``base``: the tensors of the base model, by the names of its checkpoint. If ``merged``, they include the adapter.
    ``adapter``: the tensors of the adapter by PEFT's names, and ``peft_config`` its config; empty and None if the
    adapter is merged, and for a model without adapters, whose ``adapter_name`` is "".
    ``base_id``: a sampler that has received the base model with this id need not receive it again. None: it is always
    sent, because training changes it.
    """

    adapter_name: str
    merged: bool
    base: tuple[TensorMeta, ...]
    base_id: str | None
    adapter: tuple[TensorMeta, ...] = ()
    peft_config: Mapping[str, Any] | None = None
    live: LiveWeights | None = None  # None outside the model's own process

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "live": None}


def pretrained_id(model_id: str) -> str | None:
    """Return the ``base_id`` of a base model that is as it was loaded, and stays so.

    None for random weights: different devices draw different numbers from one seed.
    """
    return f"pretrained {model_id}" if hub.resolve(model_id).random_seed is None else None
