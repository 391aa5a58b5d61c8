"""A logits processor that draws tokens inside vLLM, with our own noise and truncation.

vLLM's own log-probabilities are either raw or renormalised over the tokens that ``top_k`` and ``top_p`` leave. Ours are
those of the tempered distribution over the whole vocabulary, and a seed must give the same tokens as the torch sampler.
So every request reaches vLLM as a greedy one, and this processor, which vLLM imports by name into its own process,
draws the token.

Shapes: M rows of a batch, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams as EngineParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from twinkle.model.types import IntArray
from twinkle.sampler.noise import uniform
from twinkle.sampler.torch_sampler.drawing import Draw, Penalties, draw_tokens
from twinkle.sampler.types import SamplingParams
from twinkle.sampler.vllm import message, server_watch

# The import name under which vLLM loads the processor.
IMPORT_NAME = f"{__name__}:DrawingProcessor"
# The entry of vLLM's additional_config with the process id of the server that started vLLM.
SERVER = "twinkle_server"
_KEY = "twinkle_draw"
_ELEMENTS = 2**24  # logits drawn from at once: vLLM reserves no memory for this


@dataclass(frozen=True)
class DrawSettings:
    """How one sample is drawn; sent along with its request. ``top``: how many of the likeliest tokens to report."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    sample: int
    top: int
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def to_extra_args(self) -> dict[str, object]:
        return {_KEY: list(astuple(self))}

    @classmethod
    def from_params(cls, params: EngineParams) -> "DrawSettings | None":
        """Read the settings of a request. Return None for a request that is not ours, such as vLLM's own warm-up."""
        values = (params.extra_args or {}).get(_KEY)
        return None if values is None else cls(*values)

    def draw(self, prompt: IntArray, generated: Sequence[int]) -> Draw:
        noise = uniform(self.seed, self.sample, len(generated))
        params = SamplingParams(
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        )
        penalties = None
        if params.penalises:
            known = [token for token in generated if token >= 0]  # vLLM writes −1 where a token is not known yet
            penalties = Penalties.for_draw(params, prompt, known)
        return Draw(self.temperature, self.top_k, self.top_p, noise, self.top, self.min_p, penalties)


@dataclass(frozen=True)
class _Row:
    settings: DrawSettings
    prompt: IntArray
    generated: list[int]  # vLLM appends to this list as it generates

    def draw(self) -> Draw:
        return self.settings.draw(self.prompt, self.generated)


class DrawingProcessor(LogitsProcessor):  # type: ignore[misc]  # without vLLM it is Any
    """Draws a token for each row of a batch, by the settings of the request that the row belongs to."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}
        server_watch.end_with(vllm_config.additional_config[SERVER])

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _new_row)

    def apply(self, logits: Tensor) -> Tensor:
        rows = [index for index in sorted(self._rows) if index < logits.shape[0]]
        at_once = max(1, _ELEMENTS // logits.shape[1])
        for start in range(0, len(rows), at_once):
            self._draw(logits, rows[start : start + at_once])
        return logits

    def _draw(self, logits_MV: Tensor, rows: list[int]) -> None:
        draws = [self._rows[row].draw() for row in rows]
        chosen = slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else torch.tensor(rows)
        part_MV = logits_MV[chosen]
        message.write(draw_tokens(part_MV, draws, part_MV.shape[1]), part_MV)
        if not isinstance(chosen, slice):  # the message was written to a copy
            logits_MV[chosen] = part_MV


def _new_row(params: EngineParams, prompt: list[int] | None, generated: list[int]) -> _Row | None:
    settings = DrawSettings.from_params(params)
    return None if settings is None else _Row(settings, np.array(prompt or (), np.int64), generated)
