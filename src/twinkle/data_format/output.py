"""What a forward pass and a loss hand over. Values are torch tensors where they come from a model here."""

from typing import Any, TypedDict

__all__ = ["LossOutput", "ModelOutput"]


class ModelOutput(TypedDict, total=False):
    """``logps`` and ``entropies`` are of the labels' tokens; ``num_tokens`` counts labels that are not −100."""

    logits: Any
    loss: Any
    logps: Any
    entropies: Any
    num_tokens: Any
    embeddings: Any
    routed_experts: Any


class LossOutput(TypedDict, total=False):
    """A loss and the number of tokens its sum is over (0 for a loss that is a mean already)."""

    loss: Any
    num_tokens: Any
