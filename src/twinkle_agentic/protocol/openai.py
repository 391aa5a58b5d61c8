"""Models behind OpenAI's chat completions: OpenAI's own, ours (docs/openai.md), vLLM's and others."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twinkle.data_format import SamplingParams
from twinkle.errors import InvalidInputError
from twinkle.extras import missing
from twinkle.utils.logger import get_logger
from twinkle_agentic.protocol.base import API, ApiMessage

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.chat.chat_completion import Choice

__all__ = ["OpenAI", "request_fields", "request_messages"]

# What a request's message may hold. reasoning_content: servers of reasoning models read it back; others refuse it.
_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


class OpenAI(API):
    """A model behind an endpoint of OpenAI's protocol.

    model: its name there. api_key, base_url: None means OPENAI_API_KEY and OPENAI_BASE_URL, as the package ``openai``
    reads them. client_kwargs: further arguments of ``openai.OpenAI``, such as ``timeout`` and ``max_retries``.
    Several threads may call it at the same time.
    """

    def __init__(
        self,
        model: str,
        api_key: str | None = None,
        base_url: str | None = None,
        client_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import openai
        except ImportError as error:
            raise missing("openai", "twinkle_agentic.protocol.OpenAI") from error
        self.model = model
        self.client = openai.OpenAI(**{"api_key": api_key, "base_url": base_url, **(client_kwargs or {})})
        self._warned = False

    def __call__(
        self,
        trajectory: Mapping[str, Any],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> ApiMessage | list[ApiMessage]:
        """Return the answer to the trajectory's messages: a list if ``num_samples`` is greater than one.

        :func:`request_fields` says how the parameters are sent. What OpenAI has no field for is sent in ``extra_body``:
        a server that does not know it refuses it.
        ``logprobs`` and ``prompt_logprobs`` are not asked for, because a message has no place for them. Without
        sampling_params, the server's defaults count. ``options`` (``extra_body``, ``timeout`` …) are passed to
        ``chat.completions.create`` and replace a field of the same name; ``extra_body`` is merged.
        """
        params = SamplingParams.from_dict(sampling_params) if isinstance(sampling_params, Mapping) else sampling_params
        request: dict[str, Any] = {"model": self.model, "messages": list(request_messages(trajectory))}
        if trajectory.get("tools"):
            request["tools"] = trajectory["tools"]
        if params is not None:
            self._tell_of_logprobs(params)
            fields, extensions = request_fields(params)
            request |= fields
        else:
            extensions = {}
        extra = {**extensions, **(options.get("extra_body") or {})}
        request |= options
        if extra:
            request["extra_body"] = extra
        completion: ChatCompletion = self.client.chat.completions.create(**request)
        answers = [_answer(choice) for choice in completion.choices]
        if params is not None and params.num_samples > 1:
            return answers
        if not answers:
            raise InvalidInputError("choices", completion.choices, "at least one; the endpoint answered with none")
        return answers[0]

    def _tell_of_logprobs(self, params: SamplingParams) -> None:
        if not self._warned and (params.logprobs is not None or params.prompt_logprobs is not None):
            self._warned = True
            get_logger().warning(
                "logprobs, prompt_logprobs: not asked for, because an API's message has no place for them"
            )


def request_fields(params: SamplingParams) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two groups of a request's fields: OpenAI's own, and extensions of other servers, with vLLM's names.

    ``num_samples`` is sent as ``n``, and ``repetition_penalty`` p as ``frequency_penalty`` p − 1, so that a request
    cannot have both. ``top_k``, ``min_p``, ``ignore_eos`` and stops that are token ids are extensions. A parameter
    without effect is left out, and so are ``logprobs`` and ``prompt_logprobs``.
    """
    frequency_penalty = params.frequency_penalty
    if params.repetition_penalty != 1.0:
        if frequency_penalty:
            raise InvalidInputError(
                "frequency_penalty", frequency_penalty, "0, because repetition_penalty is sent as frequency_penalty"
            )
        frequency_penalty = params.repetition_penalty - 1.0
    fields = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "max_tokens": params.max_tokens,
        "seed": params.seed,
        "stop": params.stop_strings or None,
        "n": params.num_samples if params.num_samples > 1 else None,
        "presence_penalty": params.presence_penalty or None,
        "frequency_penalty": frequency_penalty or None,
    }
    extensions = {
        "top_k": None if params.top_k == -1 else params.top_k,
        "min_p": params.min_p or None,
        "ignore_eos": params.ignore_eos or None,
        "stop_token_ids": params.stop_token_ids or None,
    }
    return _without_none(fields), _without_none(extensions)


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def request_messages(trajectory: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages as OpenAI's protocol writes them: arguments of calls are JSON text, and calls have ids.

    Rollouts with a template make calls and answers without ids; the answers belong to the calls before them, in order.
    """
    waiting: list[str] = []
    for number, message in enumerate(trajectory.get("messages") or []):
        sent = {key: message[key] for key in _MESSAGE_KEYS if message.get(key) is not None}
        sent.setdefault("content", "")
        if sent.get("tool_calls"):
            sent["tool_calls"] = _calls(sent["tool_calls"], number)
            waiting = [call["id"] for call in sent["tool_calls"]]
        else:
            sent.pop("tool_calls", None)
        if sent.get("role") == "tool":
            own = sent.setdefault("tool_call_id", waiting[0] if waiting else f"call_{number}")
            waiting = [each for each in waiting if each != own]
        yield sent


def _calls(calls: Sequence[Mapping[str, Any]], message: int) -> list[dict[str, Any]]:
    sent = []
    for place, call in enumerate(calls):
        function = call.get("function") or {}
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        identity = call.get("id") or f"call_{message}_{place}"
        sent.append(
            {"id": identity, "type": "function", "function": {"name": function.get("name", ""), "arguments": text}}
        )
    return sent


def _answer(choice: "Choice") -> ApiMessage:
    message = choice.message
    answer: ApiMessage = {
        "role": "assistant",
        "content": message.content or "",
        "finish_reason": choice.finish_reason,
    }
    more = message.model_extra or {}
    reasoning = more.get("reasoning_content") or more.get("reasoning")  # the second name: newer vLLM
    if reasoning:
        answer["reasoning_content"] = reasoning
    if message.tool_calls:
        answer["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
            if call.type == "function"
        ]
    return answer
