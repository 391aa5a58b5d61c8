"""Our samplers for vLLM's model runners: which rows they draw, at which positions, and what they leave to vLLM.

The runners are stand-ins with the fields that vLLM's have; the tests of the sampler run the real ones.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from twinkle.sampler.vllm.batch_drawing import BatchDrawing, DrawSettings

pytestmark = pytest.mark.vllm

VOCAB = 300
PLAIN = DrawSettings(1.0, -1, 1.0, seed=1, sample=0, top=0)
OTHER = DrawSettings(0.8, 40, 0.95, seed=2, sample=1, top=2)
PENALISED = DrawSettings(1.0, -1, 1.0, seed=3, sample=0, top=0, repetition_penalty=2.0, presence_penalty=1.0)
PROMPT = [5, 6, 7, 6]


@pytest.fixture(autouse=True)
def _installed() -> None:
    pytest.importorskip("vllm")


def params(settings: DrawSettings | None) -> SimpleNamespace:
    return SimpleNamespace(extra_args=None if settings is None else settings.to_extra_args())


def expected(logits: torch.Tensor, rows: Sequence[DrawSettings], generated: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return ids of the drawn and of the likeliest tokens."""
    drawing = BatchDrawing()
    drawing.set_rows(list(rows))
    penalties = {row: rows[row].penalties(np.array(PROMPT), generated[row]) for row in drawing.penalised}
    return drawing.draw(logits, np.array([len(each) for each in generated]), penalties).ids


class Own:
    """vLLM's own sampler: counts its calls."""

    logprobs_mode = "processed_logprobs"

    def __init__(self) -> None:
        self.calls = 0
        self.added: list[int] = []
        self.req_states: Any = None
        self.penalties_state = object()

    def __call__(self, *_: object, **__: object) -> str:
        self.calls += 1
        return "vLLM's"

    def add_request(self, slot: int, *_: object) -> None:
        self.added.append(slot)


class RunnerV1:
    def __init__(self) -> None:
        self.sampler: Any = Own()
        self.requests: dict[str, SimpleNamespace] = {}
        self.input_batch = SimpleNamespace(req_ids=[], sampling_metadata=object())

    def show(self, **requests: tuple[DrawSettings | None, list[int]]) -> None:
        """Make these requests the batch: their settings and what they have generated."""
        for name, (settings, generated) in requests.items():
            self.requests[name] = SimpleNamespace(
                sampling_params=params(settings), prompt_token_ids=PROMPT, output_token_ids=generated
            )
        self.input_batch = SimpleNamespace(req_ids=list(requests), sampling_metadata=object())


def test_runner_v1() -> None:
    from twinkle.sampler.vllm import samplers

    runner = RunnerV1()
    own = runner.sampler
    samplers.install(SimpleNamespace(model_runner=runner, use_v2_model_runner=False))
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    assert runner.sampler(logits=logits, sampling_metadata=object()) == "vLLM's"  # a dummy run without requests

    runner.show(a=(PLAIN, [9, -1]), b=(PENALISED, [8]), c=(OTHER, []))
    batch = runner.input_batch
    output = runner.sampler(logits=logits, sampling_metadata=batch.sampling_metadata)
    wanted = expected(logits, [PLAIN, PENALISED, OTHER], [[9, -1], [8], []])
    assert output.sampled_token_ids.tolist() == wanted[:, :1].tolist()
    assert output.sampled_token_ids.dtype == torch.int32
    np.testing.assert_array_equal(output.logprobs_tensors.logprob_token_ids, wanted)

    runner.requests["a"].output_token_ids.append(-1)  # the same batch, one token later
    again = runner.sampler(logits=logits, sampling_metadata=batch.sampling_metadata)
    wanted = expected(logits, [PLAIN, PENALISED, OTHER], [[9, -1, -1], [8], []])
    assert again.sampled_token_ids.tolist() == wanted[:, :1].tolist()

    runner.show(c=(OTHER, [4]), d=(PLAIN, []))
    output = runner.sampler(logits=logits[:2], sampling_metadata=runner.input_batch.sampling_metadata)
    assert output.sampled_token_ids.tolist() == expected(logits[:2], [OTHER, PLAIN], [[4], []])[:, :1].tolist()

    runner.show(c=(OTHER, [4]), warm_up=(None, []))
    metadata = runner.input_batch.sampling_metadata
    assert runner.sampler(logits=logits[:2], sampling_metadata=metadata) == "vLLM's"
    assert own.calls == 2


def test_runner_v2(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is used again has the settings of its new request."""
    from twinkle.sampler.vllm import samplers

    input_batch = pytest.importorskip("vllm.v1.worker.gpu.input_batch")
    counted = (torch.ones(2), torch.zeros(2))
    monkeypatch.setattr(input_batch, "get_num_sampled_and_rejected", lambda *_: counted)
    own = Own()
    tokens = torch.zeros(8, 16, dtype=torch.int32)
    tokens[5, :6] = torch.tensor([*PROMPT, 8, 9])
    own.req_states = SimpleNamespace(
        prompt_len=SimpleNamespace(np=np.full(8, len(PROMPT))),
        prefill_len=SimpleNamespace(gpu=None),
        all_token_ids=SimpleNamespace(gpu=tokens),
    )
    runner = SimpleNamespace(sampler=own)
    samplers.install(SimpleNamespace(model_runner=runner, use_v2_model_runner=True))
    sampler = runner.sampler
    assert sampler.penalties_state is own.penalties_state

    def run(slots: list[int], lengths: list[int], logits: torch.Tensor) -> Any:
        batch = SimpleNamespace(
            idx_mapping_np=np.array(slots),
            idx_mapping=None,
            num_computed_tokens_np=np.array(lengths) - 1,
            num_scheduled_tokens=np.ones(len(slots), np.int64),
            seq_lens=torch.tensor(lengths),
            num_reqs=len(slots),
            cu_num_logits=None,
        )
        return sampler(logits, batch)

    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0)).bfloat16()
    sampler.add_request(0, 4, params(None))  # arguments as in older versions of vLLM
    assert run([0, 0], [4, 4], logits) == "vLLM's"
    sampler.add_request(3, params(OTHER))
    sampler.add_request(5, 4, params(PENALISED))
    assert own.added == [0, 3, 5]
    output = run([5, 3], [6, 7], logits)
    wanted = expected(logits, [PENALISED, OTHER], [[8, 9], [1, 2, 3]])
    assert output.sampled_token_ids.tolist() == wanted[:, :1].tolist()
    np.testing.assert_array_equal(output.logprobs_tensors.logprob_token_ids, wanted)
    assert (output.num_sampled, output.num_rejected) == counted
    sampler.add_request(3, params(PLAIN))
    output = run([5, 3], [6, 4], logits)
    assert output.sampled_token_ids.tolist() == expected(logits, [PENALISED, PLAIN], [[8, 9], []])[:, :1].tolist()
    assert own.calls == 1


def test_a_rank_that_does_not_sample_keeps_none() -> None:
    from twinkle.sampler.vllm import samplers

    runner = SimpleNamespace(sampler=None)
    samplers.install(SimpleNamespace(model_runner=runner, use_v2_model_runner=True))
    assert runner.sampler is None
