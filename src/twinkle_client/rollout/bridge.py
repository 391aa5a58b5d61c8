"""Append tool answers to the tokens of a running conversation.

Rendering and tokenising the whole conversation anew could change tokens that were sampled. Instead it is rendered as
text without and with the new messages; only the additional text is tokenised and appended. Its labels are −100, so
that training ignores it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

__all__ = ["BridgeTemplate", "extend_with_bridge"]

IGNORE = -100

Feature = dict[str, Any]


class BridgeTemplate(Protocol):
    """The part of a template that is used here; the library's templates have it."""

    tokenizer: Any
    enable_thinking: bool

    def _invoke_post_pipeline(self, features: list[Feature]) -> list[Feature]: ...


def extend_with_bridge(
    feature: Mapping[str, Any], tool_messages: Sequence[Mapping[str, Any]], template: BridgeTemplate
) -> Feature | None:
    """Return the feature extended by the messages and the prompt of the next turn; None if the template drops it as too
    long."""
    tokens = np.asarray(feature["input_ids"], dtype=np.int64)
    labels = np.asarray(feature["labels"], dtype=np.int64)
    if len(tokens) != len(labels):
        raise RuntimeError(f"input_ids has {len(tokens)} tokens and labels {len(labels)}: they must be aligned")
    before = list(feature["messages"])
    after = [*before, *(dict(message) for message in tool_messages)]
    bridge = _tokens(template, _suffix(template, before, after, feature.get("tools"), int(tokens[-1])))
    grown: Feature = {**feature, "messages": after}
    grown["input_ids"] = np.concatenate([tokens, bridge])
    # The labels are shifted left by one. Undo that here, because the template's last step shifts them again.
    grown["labels"] = np.concatenate([np.roll(labels, 1), np.full(len(bridge), IGNORE, dtype=np.int64)])
    for name in ("mm_token_type_ids", "completion_mask"):
        if feature.get(name) is not None:
            grown[name] = np.concatenate([np.asarray(feature[name], dtype=np.int64), np.zeros_like(bridge)])
    made = template._invoke_post_pipeline([grown])
    return {name: _plain(value) for name, value in made[0].items()} if made else None


def _suffix(template: BridgeTemplate, before: list[Any], after: list[Any], tools: object, last_token: int) -> str:
    rendered = _render(template, before, tools, add_generation_prompt=False)
    longer = _render(template, after, tools, add_generation_prompt=True)
    if not longer.startswith(rendered):
        raise RuntimeError("the chat template renders earlier messages differently once tools have answered")
    return _after_turn(template, rendered, last_token) + longer[len(rendered) :]


def _after_turn(template: BridgeTemplate, rendered: str, last_token: int) -> str:
    """Return the text that the chat template writes after the token that ends the model's turn, mostly a line break.

    Sampling stops at that token, so the text is not among the tokens yet.
    """
    end = str(template.tokenizer.decode([last_token]))
    rest = rendered.rpartition(end)[2] if end and end in rendered else ""
    return "" if rest.strip() else rest


def _render(template: BridgeTemplate, messages: list[Any], tools: object, *, add_generation_prompt: bool) -> str:
    return str(
        template.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=template.enable_thinking,
        )
    )


def _tokens(template: BridgeTemplate, text: str) -> Any:
    tokens = np.asarray(template.tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)
    if not len(tokens):
        raise RuntimeError("the chat template renders nothing for the answers of tools")
    return tokens


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
