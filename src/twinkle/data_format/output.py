"""The results of a forward pass and of a loss. Values are torch tensors if they come from a model of this process."""

from typing import Any, TypedDict

__all__ = ["LossOutput", "ModelOutput"]


class ModelOutput(TypedDict, total=False):
    """The outputs of a model.

    ``logps`` and ``entropies`` have one value for each label; ``num_tokens`` counts the labels that are not −100.
    """

    logits: Any
    loss: Any
    logps: Any
    entropies: Any
    num_tokens: Any
    embeddings: Any
    routed_experts: Any


class LossOutput(TypedDict, total=False):
    """A loss, and the number of tokens that it is a sum over (0 for a loss that is already a mean)."""

    loss: Any
    num_tokens: Any
