"""A tokenizer whose ``apply_chat_template`` writes DSML, for code that works with the tokenizer itself."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from twinkle.template.dsml import DsmlRenderer
from twinkle.template.messages import conversation as checked_messages
from twinkle.template.messages import renderable

__all__ = ["DsmlTokenizer"]


class DsmlTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]  # Transformers is not type checked
    """As the class it comes from, but for its chat template, which is not Jinja."""

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        return_tensors: str | None = None,
        **variables: Any,
    ) -> Any:
        """The text, its tokens, or both with a mask; ``variables`` are those of :class:`DsmlRenderer`."""
        renderer = DsmlRenderer()
        messages = checked_messages({"messages": list(conversation)})
        shown = [renderable(message, renderer.reasoning_fields) for message in messages]
        text = renderer.render(shown, tools, variables, add_generation_prompt)
        if not tokenize:
            return text
        encoded = self(text, add_special_tokens=False, return_tensors=return_tensors)
        return encoded if return_dict else encoded["input_ids"]
