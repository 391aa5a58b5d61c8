"""Writing answers as Anthropic's clients read them: one message of content blocks, or events that build it up."""

import json
import secrets
from collections.abc import Sequence

from twinkle.server.protocols.openai.choices import Delta, ToolCall
from twinkle.server.protocols.openai.generation import Format, Json, Usage

_TEXT = "text"


class MessageFormat(Format):
    """Writes the answer to one request. A stream has one choice, so there is one message to build up.

    ``prompt_tokens``: the length of the prompt, which a stream reports at its beginning.
    """

    def __init__(self, model: str, prompt_tokens: int) -> None:
        self.id = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._blocks = 0  # content blocks that were begun
        self._in_text = False  # whether the last of them is text and is not ended
        self._last = Delta()

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Json:
        (delta,) = choices
        calls = [{**_begun(call), "input": json.loads(call.arguments)} for call in delta.calls]
        text: list[Json] = [{"type": _TEXT, "text": delta.text}] if delta.text or not calls else []
        return self._message([*text, *calls], _stop(delta), usage.prompt_tokens, usage.completion_tokens)

    def opening(self, index: int) -> list[Json]:
        empty = self._message([], _stop(self._last), self._prompt_tokens, 0)
        return [{"type": "message_start", "message": empty}, {"type": "ping"}]

    def chunk(self, index: int, delta: Delta) -> list[Json]:
        events: list[Json] = []
        is_last_and_empty = delta.finish_reason is not None and not (self._blocks or delta.calls)
        if delta.text or is_last_and_empty:  # a message has a block of text even if the text is empty
            if not self._in_text:
                events.append(self._begin({"type": _TEXT, "text": ""}))
                self._in_text = True
            if delta.text:
                events.append(self._continue({"type": "text_delta", "text": delta.text}))
        for call in delta.calls:
            events += self._end_text()
            events.append(self._begin({**_begun(call), "input": {}}))
            events.append(self._continue({"type": "input_json_delta", "partial_json": call.arguments}))
            events.append(self._end())
        self._last = delta
        return events

    def ending(self, usage: Usage) -> list[Json]:
        counts = _counts(usage.prompt_tokens, usage.completion_tokens)
        last: Json = {"type": "message_delta", "delta": _stop(self._last), "usage": counts}
        return [*self._end_text(), last, {"type": "message_stop"}]

    def _message(self, content: list[Json], stop: Json, prompt_tokens: int, completion_tokens: int) -> Json:
        about: Json = {"id": self.id, "type": "message", "role": "assistant", "model": self._model}
        return {**about, "content": content, **stop, "usage": _counts(prompt_tokens, completion_tokens)}

    def _begin(self, block: Json) -> Json:
        self._blocks += 1
        return {"type": "content_block_start", "index": self._blocks - 1, "content_block": block}

    def _continue(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _end(self) -> Json:
        return {"type": "content_block_stop", "index": self._blocks - 1}

    def _end_text(self) -> list[Json]:
        ended = [self._end()] if self._in_text else []
        self._in_text = False
        return ended


def _counts(prompt_tokens: int, completion_tokens: int) -> Json:
    return {"input_tokens": prompt_tokens, "output_tokens": completion_tokens}


def _begun(call: ToolCall) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _stop(delta: Delta) -> Json:
    """Return why an answer ended, as this protocol says it; null while it has not."""
    match delta.finish_reason:
        case None:
            reason = None
        case "tool_calls":
            reason = "tool_use"
        case "length":
            reason = "max_tokens"
        case "stop":
            reason = "end_turn" if delta.stopped_by is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": delta.stopped_by if reason == "stop_sequence" else None}
