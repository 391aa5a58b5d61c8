"""A model behind OpenAI's chat completions, streamed: Ollama, vLLM, a Twinkle server, OpenAI."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from twinkle_client.client.transport import needs_certificates
from twinkle_client.errors import ConnectionLostError, ServerError, invalid

__all__ = ["ChatModel", "Message", "without_surrogates"]

Message = dict[str, Any]

_SECONDS = 300.0  # without a byte of the answer: a model may have to be loaded first
_MOST_CALLS = 16  # in one answer


@dataclass(frozen=True)
class ChatModel:
    """A model by its endpoint (an address that ends with /v1) and its name there."""

    base_url: str
    model: str
    api_key: str = ""

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise invalid("llm_base_url", self.base_url, "an address that begins with http:// or https://")

    def answer(self, messages: Sequence[Message], tools: Sequence[Message], on_text: Callable[[str], None]) -> Message:
        """Return the model's answer as a message. ``on_text`` is called with each piece of its text."""
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        body = {"model": self.model, "messages": list(messages), "tools": list(tools), "stream": True}
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        answer: Message = {"role": "assistant", "content": ""}
        calls: dict[int, Message] = {}
        try:
            with (
                httpx.Client(timeout=httpx.Timeout(_SECONDS, connect=10.0), verify=needs_certificates(url)) as http,
                http.stream("POST", url, json=body, headers=headers) as response,
            ):
                if not response.is_success:
                    text = response.read().decode(errors="replace")
                    raise ServerError(response.status_code, text[:500], url)
                try:
                    for delta in _deltas(response, url):
                        if delta.get("content"):
                            text = without_surrogates(delta["content"])
                            answer["content"] += text
                            on_text(text)
                        for part in delta.get("tool_calls") or []:
                            _add(calls, part)
                except (AttributeError, TypeError) as error:  # a list or a number in the place of an object or a text
                    raise ServerError(response.status_code, f"an event of another form: {error}", url) from error
        except httpx.InvalidURL as error:
            raise invalid("llm_base_url", self.base_url, f"an address ({error})") from None
        except httpx.HTTPError as error:
            raise ConnectionLostError(f"no answer from {url}: {error or type(error).__name__}", url) from error
        if calls:
            answer["tool_calls"] = [calls[index] for index in sorted(calls)]
        return answer


def _deltas(response: httpx.Response, url: str) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue  # comments and empty lines
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise ServerError(response.status_code, f"an event that is no JSON object: {data[:200]}", url)
        if event.get("error"):
            raise ServerError(response.status_code, str(event["error"])[:500], url)
        for choice in event.get("choices") or []:
            yield choice.get("delta") or {}


def _add(calls: dict[int, Message], part: Message) -> None:
    """Add a part of a tool call: name and id come once, and the arguments in pieces."""
    given = part.get("index")
    index = given if isinstance(given, int) else len(calls)
    if index not in calls and len(calls) >= _MOST_CALLS:
        raise invalid("tool_calls", len(calls) + 1, f"at most {_MOST_CALLS} in one answer")
    call = calls.setdefault(
        index, {"id": f"call_{index}", "type": "function", "function": {"name": "", "arguments": ""}}
    )
    function = part.get("function") or {}
    call["id"] = part.get("id") or call["id"]
    call["function"]["name"] += without_surrogates(function.get("name") or "")
    call["function"]["arguments"] += without_surrogates(function.get("arguments") or "")


def without_surrogates(text: str) -> str:
    """Return the text with "?" for halves of characters, which JSON can name and which no request or file can hold."""
    return text.encode("utf-8", "replace").decode()
