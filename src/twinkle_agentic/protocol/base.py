"""The interface of a model behind an API."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from twinkle.data_format import Message, SamplingParams

__all__ = ["API", "ApiMessage"]


class ApiMessage(Message, total=False):
    """A model's answer. ``finish_reason``: stop, length, tool_calls …, as the API says it; None if it says nothing."""

    finish_reason: str | None


class API(ABC):
    """A model that answers a conversation."""

    @abstractmethod
    def __call__(
        self,
        trajectory: Mapping[str, Any],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> ApiMessage | list[ApiMessage]:
        """Return the answer to the trajectory's messages: a list if ``num_samples`` is greater than one.

        The trajectory's ``tools`` are offered to the model. ``options`` are passed to the API's own library.
        """
