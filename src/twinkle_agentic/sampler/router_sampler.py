"""A sampler that asks another model where its own model is not sure."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import httpx

from twinkle.data_format import Message, SampledSequence, SampleResponse, SamplingParams
from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.utils.logger import get_logger
from twinkle_agentic.protocol.openai import request_messages

__all__ = ["RoutedSequence", "RouterSampler"]

Method = Literal["entropy", "logp"]
Row = Mapping[str, Any]

_METHODS = ("entropy", "logp")
_REQUESTS_AT_ONCE = 8


class SamplesRows(Protocol):
    """A sampler of the library: LocalSampler, vLLMSampler."""

    template: Any

    def set_template(self, template_cls: Any, **options: Any) -> Any: ...

    def sample(self, inputs: Any, sampling_params: Any = ..., **options: Any) -> list[SampleResponse]: ...


@dataclass(frozen=True)
class RoutedSequence(SampledSequence):
    """An answer of the fallback model. It is text: it has no tokens, no log-probabilities and no feature to train on.

    ``message``: the answer as a message, with its tool calls. ``uncertainty``: the mean entropy or log-probability of
    the local answer that it replaces.
    """

    message: Message | None = None
    fallback_model: str = ""
    uncertainty: float = 0.0

    @property
    def routed(self) -> bool:
        """Return True: a sequence of a local model has no such attribute."""
        return True


class RouterSampler:
    """Samples with a local sampler, and replaces answers of which its model is not sure by those of another model.

    method: ``entropy`` replaces an answer if the mean entropy of its tokens, over the ``top_k_logprobs`` likeliest
    tokens of each place with their probabilities scaled to sum 1, is above ``threshold``; ``logp`` if the mean
    log-probability of its tokens is below ``threshold``.
    The other model is asked by ``POST <fallback_endpoint>/v1/chat/completions``; ``timeout`` in seconds. If that fails,
    the local answer stays, and a warning is logged. Only trajectories are routed: rows that are already encoded have no
    messages to send.

    Replaced answers are :class:`RoutedSequence` objects. They cannot be trained on. Leave them out of training::

        local = [each for each in response.sequences if not isinstance(each, RoutedSequence)]
    """

    def __init__(
        self,
        sampler: SamplesRows,
        fallback_endpoint: str,
        fallback_model: str = "default",
        fallback_api_key: str = "",
        method: Method = "entropy",
        threshold: float = 2.0,
        top_k_logprobs: int = 10,
        fallback_temperature: float = 0.7,
        fallback_max_tokens: int = 4096,
        timeout: float = 120.0,
    ) -> None:
        if method not in _METHODS:
            raise UnknownNameError("method", method, _METHODS)
        if method == "entropy" and top_k_logprobs < 2:
            raise InvalidInputError("top_k_logprobs", top_k_logprobs, "at least 2: one token has no entropy")
        if not str(fallback_endpoint).startswith(("http://", "https://")):
            raise InvalidInputError("fallback_endpoint", fallback_endpoint, "an address that begins with http(s)://")
        try:
            httpx.URL(fallback_endpoint)
        except httpx.InvalidURL as error:
            raise InvalidInputError("fallback_endpoint", fallback_endpoint, f"an address ({error})") from error
        if not fallback_api_key.isascii():
            raise InvalidInputError("fallback_api_key", "(a secret)", "a text of ASCII characters")
        self.sampler = sampler
        self.fallback_model = fallback_model
        self.method = method
        self.threshold = threshold
        self.top_k_logprobs = top_k_logprobs
        self.fallback_temperature = fallback_temperature
        self.fallback_max_tokens = fallback_max_tokens
        self._url = f"{fallback_endpoint.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
        headers = {"Authorization": f"Bearer {fallback_api_key}"} if fallback_api_key else {}
        self._http = httpx.Client(timeout=timeout, headers=headers)

    @property
    def template(self) -> Any:
        """Return the local sampler's template."""
        return self.sampler.template

    def set_template(self, template_cls: Any, **options: Any) -> None:
        self.sampler.set_template(template_cls, **options)

    def sample(
        self,
        inputs: Row | Sequence[Row],
        sampling_params: SamplingParams | Row | None = None,
        adapter_name: str | None = "",
        **options: Any,
    ) -> list[SampleResponse]:
        """Return one response for each input. ``options`` (``adapter_path`` …) are those of the local sampler."""
        options["adapter_name"] = adapter_name
        params = SamplingParams.from_dict(sampling_params) if isinstance(sampling_params, Mapping) else sampling_params
        params = params or SamplingParams()
        rows = [inputs] if isinstance(inputs, Mapping) else list(inputs)
        # The method needs log-probabilities, perhaps others than the caller asked for.
        asked = replace(params, logprobs=self._needed(params.logprobs)) if params.max_tokens != 0 else params
        responses = self.sampler.sample(inputs, asked, **options)
        if params.max_tokens == 0:  # only the prompt is scored: there is no answer to replace
            return responses
        measured = self._uncertainties(rows, responses, params, options)
        local = [replace(each, sequences=[_as_asked(s, params) for s in each.sequences]) for each in responses]
        return self._routed(rows, local, measured)

    def _needed(self, wanted: int | None) -> int | None:
        """Return the ``logprobs`` to ask for.

        Lists of the likeliest tokens may lack the sampled one. So if the caller wants that one (0, 1), the call gives
        that, and the entropy is computed in a second pass.
        """
        if self.method == "logp":
            return 1 if wanted is None else wanted
        return wanted if wanted in (0, 1) else max(wanted or 0, self.top_k_logprobs)

    def _uncertainties(
        self, rows: Sequence[Row], responses: Sequence[SampleResponse], params: SamplingParams, options: Row
    ) -> dict[tuple[int, int], float]:
        """Return the mean entropy or log-probability of each answer that may be routed, by its row and number."""
        found: dict[tuple[int, int], float] = {}
        for place, (row, response) in enumerate(zip(rows, responses, strict=True)):
            if not row.get("messages") or "input_ids" in row:
                continue
            for number, sequence in enumerate(response.sequences):
                if sequence.tokens:
                    tops = self._tops(sequence, params, options)
                    found[place, number] = self._mean(sequence.tokens, tops)
        return found

    def _tops(self, sequence: SampledSequence, params: SamplingParams, options: Row) -> Any:
        if self.method == "logp" and params.logprobs in (None, 0, 1):
            return sequence.logprobs
        if self.method == "entropy" and params.logprobs not in (0, 1):
            return sequence.logprobs
        # A second pass over prompt and answer, at temperature 1.
        scoring = SamplingParams(max_tokens=0, prompt_logprobs=self.top_k_logprobs)
        scored = self.sampler.sample([sequence.new_input_feature], scoring, **options)[0]
        count = len(sequence.tokens)
        if self.method == "entropy":
            return (scored.topk_prompt_logprobs or [])[-count:]
        places = (scored.prompt_logprobs or [])[-count:]
        return [[(token, logp)] for token, logp in zip(sequence.tokens, places, strict=True)]

    def _mean(self, tokens: Sequence[int], tops: Sequence[Sequence[tuple[int, float]]] | None) -> float:
        if tops is None or len(tops) != len(tokens):
            raise InvalidInputError("logprobs", tops and len(tops), f"one list for each of {len(tokens)} tokens")
        if self.method == "logp":
            return math.fsum(pairs[0][1] for pairs in tops) / len(tokens)
        return math.fsum(_entropy([logp for _, logp in pairs[: self.top_k_logprobs]]) for pairs in tops) / len(tokens)

    def _routed(
        self, rows: Sequence[Row], responses: list[SampleResponse], measured: Mapping[tuple[int, int], float]
    ) -> list[SampleResponse]:
        sign = 1 if self.method == "entropy" else -1
        unsure = [key for key, value in measured.items() if sign * value > sign * self.threshold]
        if not unsure:
            return responses
        with ThreadPoolExecutor(max_workers=min(_REQUESTS_AT_ONCE, len(unsure))) as pool:
            answers = list(pool.map(lambda key: self._ask(rows[key[0]], measured[key]), unsure))
        for (place, number), answer in zip(unsure, answers, strict=True):
            if answer is not None:
                responses[place].sequences[number] = answer
        return responses

    def _ask(self, row: Row, uncertainty: float) -> RoutedSequence | None:
        """Return the fallback model's answer; None if there is none."""
        body: dict[str, Any] = {
            "model": self.fallback_model,
            "messages": list(request_messages(row)),
            "temperature": self.fallback_temperature,
            "max_tokens": self.fallback_max_tokens,
        }
        if row.get("tools"):
            body["tools"] = row["tools"]
        try:
            answer = self._http.post(self._url, json=body)
            answer.raise_for_status()
            choice = answer.json()["choices"][0]
            message = choice["message"]
            text = message.get("content") or ""
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            # A fallback that is down or answers nonsense must not end the run: the local answer is there.
            reason = f"{type(error).__name__}: {error}"
            get_logger().warning("RouterSampler: %s gave no answer (%s); the local one stays", self._url, reason)
            return None
        end: Literal["length", "stop"] = "length" if choice.get("finish_reason") == "length" else "stop"
        return RoutedSequence(
            end, [], decoded=text, message=message, fallback_model=self.fallback_model, uncertainty=uncertainty
        )


def _entropy(logps: Sequence[float]) -> float:
    """Return the entropy, in nats, of the distribution over these tokens alone."""
    highest = max(logps)
    weights = [math.exp(logp - highest) for logp in logps]
    total = math.fsum(weights)
    return -math.fsum(weight / total * math.log(weight / total) for weight in weights if weight > 0)


def _as_asked(sequence: SampledSequence, params: SamplingParams) -> SampledSequence:
    """Return the sequence with as many log-probabilities as the caller asked for."""
    if params.logprobs is None:
        return replace(sequence, logprobs=None)
    if params.logprobs <= 1 or sequence.logprobs is None:
        return sequence
    return replace(sequence, logprobs=[pairs[: params.logprobs] for pairs in sequence.logprobs])
