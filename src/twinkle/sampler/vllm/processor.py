"""Drawing tokens inside vLLM, with our own noise and truncation.

vLLM's own log-probabilities are either raw or renormalised over what ``top_k`` and ``top_p`` leave; ours are of the
tempered distribution over the whole vocabulary, and a seed gives the same tokens as the torch sampler. So every request
reaches vLLM as a greedy one, and this processor, which vLLM imports by name into its own process, draws the token.

Shapes: M rows of a batch, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from vllm import SamplingParams as EngineParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from twinkle.sampler.noise import uniform
from twinkle.sampler.torch_sampler.drawing import Draw, draw_tokens
from twinkle.sampler.vllm import message, server_watch

# How vLLM is told to use it.
IMPORT_NAME = f"{__name__}:DrawingProcessor"
# The entry of vLLM's additional_config that tells its processes whose they are.
SERVER = "twinkle_server"
_KEY = "twinkle_draw"
_ELEMENTS = 2**24  # of the logits that are drawn from at once: vLLM sets no memory aside for us


@dataclass(frozen=True)
class DrawSettings:
    """How one sample is drawn; travels with its request. ``top``: so many of the likeliest tokens are reported."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    sample: int
    top: int

    def to_extra_args(self) -> dict[str, object]:
        return {_KEY: [self.temperature, self.top_k, self.top_p, self.seed, self.sample, self.top]}

    @classmethod
    def from_params(cls, params: EngineParams) -> "DrawSettings | None":
        """None for a request that is not ours, such as those of vLLM's own warm-up."""
        values = (params.extra_args or {}).get(_KEY)
        return None if values is None else cls(*values)

    def draw(self, position: int) -> Draw:
        noise = uniform(self.seed, self.sample, position)
        return Draw(self.temperature, self.top_k, self.top_p, noise, self.top)


@dataclass(frozen=True)
class _Row:
    settings: DrawSettings
    generated: list[int]  # grows as vLLM goes on


class DrawingProcessor(LogitsProcessor):  # type: ignore[misc]  # without vLLM it is Any
    """Knows which request each row of the batch belongs to."""

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
        draws = [self._rows[row].settings.draw(len(self._rows[row].generated)) for row in rows]
        chosen = slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else torch.tensor(rows)
        part_MV = logits_MV[chosen]
        message.write(draw_tokens(part_MV, draws, part_MV.shape[1]), part_MV)
        if not isinstance(chosen, slice):  # a copy was written to
            logits_MV[chosen] = part_MV


def _new_row(params: EngineParams, prompt: list[int] | None, generated: list[int]) -> _Row | None:
    settings = DrawSettings.from_params(params)
    return None if settings is None else _Row(settings, generated)
