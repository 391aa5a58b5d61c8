"""The rows of a batch that stand for images: what the decoder gets there instead of the embeddings of tokens."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ImageRows:
    """The features of all images of a batch, n rows of H numbers each.

    ``rows_n``: their indices among all rows of the batch, padding included. ``embeddings_nH`` replace the embeddings of
    tokens. ``added``: what is added to the hidden states after the first decoder layers, one tensor each (DeepStack);
    empty for most models.
    """

    rows_n: Tensor
    embeddings_nH: Tensor
    added: tuple[Tensor, ...] = ()

    def put(self, embeddings: Tensor) -> Tensor:
        """Return the embeddings (…, H) of a batch, with those of its images in their rows."""
        flat_TH = embeddings.flatten(0, -2)
        return flat_TH.index_copy(0, self.rows_n, self.embeddings_nH.to(flat_TH.dtype)).view_as(embeddings)

    def add(self, hidden_states: Tensor, layer: int) -> Tensor:
        """Return the hidden states (…, H) behind a decoder layer, with what is added to them there."""
        if layer >= len(self.added):
            return hidden_states
        flat_TH = hidden_states.flatten(0, -2)
        return flat_TH.index_add(0, self.rows_n, self.added[layer].to(flat_TH.dtype)).view_as(hidden_states)
