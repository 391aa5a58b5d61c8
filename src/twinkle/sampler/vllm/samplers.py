"""Our own drawing in place of vLLM's, in vLLM's worker processes.

vLLM's log-probabilities are either raw or renormalised over the tokens that ``top_k`` and ``top_p`` leave. Ours are
those of the tempered distribution over the whole vocabulary, and a seed must give the same tokens as the torch sampler.
So the model runner gets a sampler of ours, which draws the tokens of the whole batch at once and returns them with
exactly the log-probabilities that were asked for. A logits processor, vLLM's own way to change sampling, would be
slower: vLLM then waits for every token before it prepares the next step, and computes log-probabilities and ranks over
the whole vocabulary once more.

vLLM has two model runners, and chooses by model and version. Each has its own interface of a sampler. Batches with
requests that are not ours, such as those of vLLM's own warm-up, go to vLLM's own sampler.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.outputs import SamplerOutput as SamplerOutputV1

from twinkle.sampler.torch_sampler.drawing import Penalties
from twinkle.sampler.vllm.batch_drawing import BatchDrawing, DrawnBatch, DrawSettings


class RunnerV1(Protocol):
    """What we use of vLLM's model runner V1. ``requests``: by id, with their parameters, prompts and outputs."""

    input_batch: Any
    requests: Mapping[str, Any]
    sampler: Any


class DrawingSamplerV1(nn.Module):
    """The sampler of model runner V1. Rows are the requests of the runner's batch, in its order."""

    def __init__(self, runner: RunnerV1) -> None:
        super().__init__()
        self._runner = runner
        self._own = runner.sampler
        self._drawing = BatchDrawing()
        self._metadata: object = None  # vLLM makes a new one whenever the rows of the batch change
        self._settings: dict[str, DrawSettings] = {}  # those of the batch, by id of the request
        self._generated: list[list[int]] = []  # vLLM appends to these lists; it writes −1 where it only knows the count

    @property
    def logprobs_mode(self) -> str:
        """Return vLLM's own mode, which its warm-up asks for."""
        return str(self._own.logprobs_mode)

    def forward(self, logits: Tensor, sampling_metadata: Any) -> SamplerOutputV1:
        if sampling_metadata is not self._metadata and not self._read_batch(sampling_metadata):
            return self._own(logits=logits, sampling_metadata=sampling_metadata)
        positions_M = np.fromiter(map(len, self._generated), np.int64, len(self._generated))
        drawn = self._drawing.draw(logits, positions_M, self._penalties())
        return SamplerOutputV1(drawn.tokens.int().unsqueeze(1), _logprobs(drawn))

    def _read_batch(self, metadata: object) -> bool:
        """Read the settings of the batch's requests. Return False if one of them is not ours."""
        batch = self._runner.input_batch
        self._metadata = None
        if metadata is not batch.sampling_metadata:  # vLLM's warm-up has no requests
            return False
        requests = [self._runner.requests[request_id] for request_id in batch.req_ids]
        settings = {
            request_id: self._settings.get(request_id)
            or DrawSettings.from_extra_args(request.sampling_params.extra_args)
            for request_id, request in zip(batch.req_ids, requests, strict=True)
        }
        rows = [each for each in settings.values() if each is not None]
        if not rows or len(rows) < len(requests):
            return False
        self._metadata = metadata
        self._settings = dict(zip(settings, rows, strict=True))
        self._drawing.set_rows(rows)
        self._generated = [request.output_token_ids for request in requests]
        return True

    def _penalties(self) -> dict[int, Penalties]:
        found = {}
        for row in self._drawing.penalised:
            request_id = self._runner.input_batch.req_ids[row]
            prompt = self._runner.requests[request_id].prompt_token_ids
            known = [token for token in self._generated[row] if token >= 0]
            found[row] = self._settings[request_id].penalties(np.array(prompt or (), np.int64), known)
        return found


class DrawingSamplerV2:
    """The sampler of model runner V2, which keeps requests in numbered slots and names the slot of each row."""

    def __init__(self, own: Any) -> None:
        self._own = own
        self._drawing = BatchDrawing()
        self._settings: dict[int, DrawSettings | None] = {}  # by slot

    def __getattr__(self, name: str) -> Any:
        """Return everything else that the runner asks of its sampler, such as states of requests, from vLLM's own."""
        return getattr(self._own, name)

    def add_request(self, req_idx: int, *args: Any) -> None:
        """Take a new request into a slot. The last argument is vLLM's SamplingParams in all versions."""
        self._settings[req_idx] = DrawSettings.from_extra_args(args[-1].extra_args)
        self._own.add_request(req_idx, *args)

    def __call__(self, logits: Tensor, input_batch: Any) -> Any:
        slots_M = input_batch.idx_mapping_np
        settings = [self._settings.get(slot) for slot in slots_M.tolist()]
        rows = [each for each in settings if each is not None]
        if len(rows) < len(settings) or logits.shape[0] != len(settings):
            return self._own(logits, input_batch)
        self._drawing.set_rows(rows)
        states = self._own.req_states
        # Without speculative decoding, which is never on, the host knows how many tokens every row has.
        lengths_M = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        prompts_M = states.prompt_len.np[slots_M]
        penalties = {
            row: _penalties_v2(rows[row], states.all_token_ids.gpu[slots_M[row], : lengths_M[row]], prompts_M[row])
            for row in self._drawing.penalised
        }
        drawn = self._drawing.draw(logits, (lengths_M - prompts_M).astype(np.int64), penalties)
        return self._output(drawn, input_batch)

    def _output(self, drawn: DrawnBatch, input_batch: Any) -> Any:
        # Imported here, because at the top they would load Triton, which runner V1 does not need.
        from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        num_sampled, num_rejected = get_num_sampled_and_rejected(
            input_batch.seq_lens.new_ones(input_batch.num_reqs),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self._own.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=drawn.tokens.contiguous().unsqueeze(1),
            logprobs_tensors=_logprobs(drawn),
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )


def install(worker: Any) -> None:
    """Give the model runner of a vLLM worker our sampler. Call it after the model was loaded."""
    runner = worker.model_runner
    if runner.sampler is None:  # only the last rank of a pipeline samples
        return
    runner.sampler = DrawingSamplerV2(runner.sampler) if worker.use_v2_model_runner else DrawingSamplerV1(runner)


def _penalties_v2(settings: DrawSettings, tokens: Tensor, prompt_length: int) -> Penalties:
    """Read the tokens before a draw from the device. Only rows with penalties wait for their last token."""
    known = tokens.cpu().numpy().astype(np.int64)
    return settings.penalties(known[:prompt_length], known[prompt_length:].tolist())


def _logprobs(drawn: DrawnBatch) -> LogprobsTensors:
    """Return the log-probabilities as vLLM transports them. Nobody reads the ranks."""
    ranks_M = torch.zeros(drawn.ids.shape[0], dtype=torch.int32, device=drawn.ids.device)
    return LogprobsTensors(drawn.ids.int(), drawn.logprobs, ranks_M)
