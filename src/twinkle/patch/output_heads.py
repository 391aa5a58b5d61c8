"""Patches of a causal language model that take its output head out of the forward pass.

The outputs then hold the hidden states that the head would have read: as "features" for embeddings, or as "logits"
beside the head itself, for a loss that multiplies and reduces in one kernel. ``TransformersModel`` does neither by
patches: its forward has ``task="embedding"`` and ``task="fused_lm_ce"``.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from twinkle.errors import InvalidInputError
from twinkle.patch.interface import Patch

__all__ = ["TransformersEmbeddingPatch", "TransformersFusedCEPatch", "get_lm_head_model"]


def get_lm_head_model(model: Any) -> Any:
    """Return the module that owns the output head: the model itself, or the one inside PEFT's or DDP's wrapper."""
    seen = model
    while seen is not None:
        if _head_of(seen) is not None and not hasattr(seen, "get_base_model"):
            return seen
        inner = seen.get_base_model() if hasattr(seen, "get_base_model") else getattr(seen, "module", None)
        seen = None if inner is seen else inner
    raise InvalidInputError("model", type(model).__name__, "a model with an output head, such as AutoModelForCausalLM")


class _HeadPatch(Patch):
    """Puts an identity in the place of the head, and adds the hidden states to the outputs. Can be undone."""

    removes_head = True
    # the attribute of a patched model that holds its head, and a function that removes the hooks
    _attribute: ClassVar[str] = "_twinkle_replaced_head"

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        owner = get_lm_head_model(module)
        if hasattr(owner, self._attribute):
            raise InvalidInputError("module", type(owner).__name__, "a model without a patch of its head")
        head = _head_of(owner)
        identity = nn.Identity()
        owner.set_output_embeddings(identity)
        read: list[Tensor] = []  # what the head would have read in this pass
        # The logits themselves are no hidden states in families that scale or cap them after the head.
        noting = identity.register_forward_hook(lambda _, inputs, __: read.append(inputs[0]))
        adding = owner.register_forward_hook(lambda _, __, outputs: self._add(outputs, read, head))
        setattr(owner, self._attribute, (head, _both(noting.remove, adding.remove)))
        return module

    def unpatch(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        owner = get_lm_head_model(module)
        head, remove_hooks = getattr(owner, self._attribute)
        remove_hooks()
        owner.set_output_embeddings(head)
        delattr(owner, self._attribute)
        return module

    def _add(self, outputs: Any, read: list[Tensor], head: Any) -> Any:
        if not read:
            return outputs
        hidden = read.pop()
        read.clear()
        self._fill(outputs, hidden, head)
        return outputs

    def _fill(self, outputs: Any, hidden: Tensor, head: Any) -> None:
        raise NotImplementedError


class TransformersEmbeddingPatch(_HeadPatch):
    """Adds the hidden states of the last layer to the outputs as "features"; logits are not computed."""

    def _fill(self, outputs: Any, hidden: Tensor, head: Any) -> None:
        outputs["features"] = hidden


class TransformersFusedCEPatch(_HeadPatch):
    """Puts the hidden states into "logits" and the head into "lm_head", for a fused cross entropy."""

    def _fill(self, outputs: Any, hidden: Tensor, head: Any) -> None:
        outputs["logits"] = hidden
        outputs["lm_head"] = head


def _head_of(model: Any) -> Any:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def _both(first: Callable[[], object], second: Callable[[], object]) -> Callable[[], None]:
    def call() -> None:
        first()
        second()

    return call
