"""The engine arguments of a script that vLLMSampler itself follows, because its results do not come from vLLM alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from twinkle.data_format import SamplingParams
from twinkle.errors import InvalidInputError
from twinkle.sampler.validation import MAX_WIDTH

__all__ = ["VllmOptions"]

_FOR_ADAPTERS = ("max_loras", "max_cpu_loras", "max_lora_rank")


@dataclass(frozen=True)
class VllmOptions:
    """What a script has asked for by ``engine_args``.

    ``engine_args``: the arguments that remain for vLLM. ``adapters``: whether adapters can be sampled with
    (``enable_lora``; they can if a script says nothing). ``raw_logprobs``: whether log-probabilities must not depend on
    the temperature (``logprobs_mode``). ``max_logprobs``: how many of the likeliest tokens a request may ask for.
    """

    engine_args: dict[str, Any]
    adapters: bool
    raw_logprobs: bool
    max_logprobs: int

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        rest = dict(given)
        adapters = rest.pop("enable_lora", True)
        if not isinstance(adapters, bool):
            raise InvalidInputError("engine_args.enable_lora", adapters, "True or False")
        for name in () if adapters else _FOR_ADAPTERS:
            if name in rest:
                allowed = "nothing beside enable_lora False, which leaves out adapters"
                raise InvalidInputError(f"engine_args.{name}", rest[name], allowed)
        mode = rest.get("logprobs_mode")
        if mode == "raw_logprobs":  # other modes are vLLM's to refuse
            del rest["logprobs_mode"]
        most = rest.pop("max_logprobs", MAX_WIDTH)
        if not isinstance(most, int) or isinstance(most, bool) or not 0 <= most <= MAX_WIDTH:
            raise InvalidInputError("engine_args.max_logprobs", most, f"an integer from 0 to {MAX_WIDTH}")
        return cls(rest, adapters, mode == "raw_logprobs", most)

    def check(self, params: SamplingParams) -> None:
        """Raise if a request asks for something that the engine arguments exclude."""
        for name, value in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if value is not None and value > self.max_logprobs:
                raise InvalidInputError(name, value, f"at most {self.max_logprobs}, which is engine_args.max_logprobs")
        # Prompts are scored at temperature 1, and greedy samples too.
        reports = params.logprobs is not None and params.max_tokens != 0
        if self.raw_logprobs and reports and params.temperature not in (0, 1):
            allowed = "0 or 1 with logprobs and engine_args.logprobs_mode 'raw_logprobs': reported log-probabilities "
            allowed += "are those at the temperature"
            raise InvalidInputError("temperature", params.temperature, allowed)
