"""The models that score rounds: replies, log-probabilities and embeddings, from a sampler or over HTTP."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from twinkle.data_format import SamplingParams
from twinkle.errors import InvalidInputError, TwinkleError, UnsupportedError
from twinkle_agentic.protocol.openai import request_fields, request_messages

__all__ = ["LLMBackend", "OpenAIBackend", "SamplerBackend"]

Messages = Sequence[Mapping[str, Any]]
Logprobs = list[float | None]  # of each token of a text; None for the first, which nothing predicts

_CONCURRENCY = 8  # requests to a server at a time


class LLMBackend(ABC):
    """A model that answers chats and scores texts. Results come in the order of the inputs."""

    def chat(self, messages: Messages, sampling_params: SamplingParams | None = None) -> str:
        """Return the assistant's answer to a conversation."""
        return self.chat_batch([messages], sampling_params)[0]

    @abstractmethod
    def chat_batch(self, batch: Sequence[Messages], sampling_params: SamplingParams | None = None) -> list[str]:
        """Return one answer for each conversation."""

    @abstractmethod
    def prompt_logprobs(self, texts: Sequence[str]) -> list[Logprobs]:
        """Return the log-probabilities of the tokens of each text."""

    @abstractmethod
    def prompt_logprobs_ids(self, batch: Sequence[Sequence[int]]) -> list[Logprobs]:
        """Return the log-probabilities of the tokens of each list of token ids."""

    @abstractmethod
    def embeddings(self, texts: Sequence[str]) -> list[list[float]]:
        """Return one vector for each text."""


class BackendError(TwinkleError, RuntimeError):
    """A server that scores rounds did not answer, or not in the expected form."""


class OpenAIBackend(LLMBackend):
    """A server that speaks OpenAI's protocol, such as vLLM's.

    endpoint: its address, with or without ``/v1``. Log-probabilities of prompts need ``echo`` of ``/v1/completions``,
    which vLLM's server has and Twinkle's has not. timeout: seconds for one request. Failed requests are not repeated.
    """

    def __init__(self, endpoint: str, model: str = "default", api_key: str = "", timeout: float = 120) -> None:
        if not isinstance(endpoint, str) or not endpoint.startswith(("http://", "https://")):
            raise InvalidInputError("endpoint", endpoint, "an address that begins with http:// or https://")
        self.endpoint = endpoint.rstrip("/").removesuffix("/v1")
        self.model = model
        self.timeout = timeout
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client: httpx.Client | None = None  # shared by all threads; reading certificates for a new one is slow

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_client": None}  # connections stay with their process

    def chat_batch(self, batch: Sequence[Messages], sampling_params: SamplingParams | None = None) -> list[str]:
        fields, extensions = request_fields(sampling_params or SamplingParams())
        options = {**fields, **extensions}
        bodies = [{"messages": list(request_messages({"messages": messages})), **options} for messages in batch]
        answers = self._post_all("chat/completions", bodies)
        return [str(_at(answer, "choices", 0, "message").get("content") or "") for answer in answers]

    def prompt_logprobs(self, texts: Sequence[str]) -> list[Logprobs]:
        return self._echoed(list(texts))

    def prompt_logprobs_ids(self, batch: Sequence[Sequence[int]]) -> list[Logprobs]:
        return self._echoed([[int(token) for token in ids] for ids in batch])

    def embeddings(self, texts: Sequence[str]) -> list[list[float]]:
        (answer,) = self._post_all("embeddings", [{"input": list(texts)}])
        data = sorted(_at(answer, "data"), key=lambda each: int(each["index"]))
        return [[float(value) for value in each["embedding"]] for each in data]

    def _echoed(self, prompts: Sequence[Any]) -> list[Logprobs]:
        # one token is generated, because not every server accepts 0; it is cut off by the number of prompt tokens
        options = {"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 0}
        answers = self._post_all("completions", [{"prompt": prompt, **options} for prompt in prompts])
        scored = []
        for answer in answers:
            values, count = (
                _at(answer, "choices", 0, "logprobs", "token_logprobs"),
                _at(answer, "usage", "prompt_tokens"),
            )
            scored.append([None, *(float(value) for value in values[1:count])])
        return scored

    def _post_all(self, path: str, bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
        if self._client is None:
            self._client = httpx.Client(headers=self._headers, timeout=self.timeout)
        client = self._client
        with ThreadPoolExecutor(_CONCURRENCY) as pool:
            return list(pool.map(lambda body: self._post(client, path, body), bodies))

    def _post(self, client: httpx.Client, path: str, body: Mapping[str, Any]) -> Any:
        address = f"{self.endpoint}/v1/{path}"
        try:
            answer = client.post(address, json={"model": self.model, **body})
        except httpx.HTTPError as error:
            raise BackendError(f"{address}: {error!r}") from error
        if answer.status_code != 200:
            raise BackendError(f"{address} answered {answer.status_code}: {answer.text[:500]}")
        return answer.json()


class SamplerBackend(LLMBackend):
    """A sampler of the library, such as ``LocalSampler`` or ``vLLMSampler``, with its template set.

    A sampler makes no embeddings: they come from ``embed_endpoint``, a server that speaks OpenAI's protocol, by its
    model ``embed_model``.
    """

    def __init__(self, sampler: Any, embed_endpoint: str = "", embed_model: str = "bge-m3") -> None:
        if not callable(getattr(sampler, "sample", None)):
            raise InvalidInputError("sampler", sampler, "an object with a method sample")
        self.sampler = sampler
        self._embedder = OpenAIBackend(embed_endpoint, embed_model) if embed_endpoint else None

    def chat_batch(self, batch: Sequence[Messages], sampling_params: SamplingParams | None = None) -> list[str]:
        if not batch:
            return []
        inputs = [{"messages": [dict(message) for message in messages]} for messages in batch]
        responses = self.sampler.sample(inputs, sampling_params or SamplingParams())
        return [self._text(response.sequences[0]) for response in responses]

    def prompt_logprobs(self, texts: Sequence[str]) -> list[Logprobs]:
        tokenizer = self.sampler.template.tokenizer
        return self.prompt_logprobs_ids([tokenizer.encode(text, add_special_tokens=False) for text in texts])

    def prompt_logprobs_ids(self, batch: Sequence[Sequence[int]]) -> list[Logprobs]:
        if not batch:
            return []
        params = SamplingParams(max_tokens=0, prompt_logprobs=1)
        responses = self.sampler.sample([{"input_ids": list(ids)} for ids in batch], params)
        return [list(response.prompt_logprobs) for response in responses]

    def embeddings(self, texts: Sequence[str]) -> list[list[float]]:
        if self._embedder is None:
            raise UnsupportedError("embeddings: a sampler makes none; give SamplerBackend an embed_endpoint")
        return self._embedder.embeddings(texts)

    def _text(self, sequence: Any) -> str:
        """Return the text of a sample without special tokens."""
        template = getattr(self.sampler, "template", None)
        if template is None:
            return sequence.decoded or ""
        return str(template.decode(sequence.tokens, skip_special_tokens=True)).strip()


def _at(answer: Any, *path: str | int) -> Any:
    """Return a part of a JSON answer; say what is missing."""
    value = answer
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            raise BackendError(f"the server's answer has no {'.'.join(map(str, path))}: {str(answer)[:300]}") from None
    return value
