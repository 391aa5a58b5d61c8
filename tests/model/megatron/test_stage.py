"""A stage of every family gives the log-probabilities and gradients of transformers' own model, on every mesh."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.megatron import stage_programs
from tests.model.parallel.process_pool import ProcessPool

pytestmark = pytest.mark.megatron

TP2: Mapping[str, Any] = {"tp_size": 2}
PP2: Mapping[str, Any] = {"pp_size": 2}
SP: Mapping[str, Any] = {"tp_size": 2, "sequence_parallel": True}
EP2: Mapping[str, Any] = {"dp_size": 2, "ep_size": 2}
EP2_TP2: Mapping[str, Any] = {"tp_size": 2, "ep_size": 2}  # the experts are divided among the two ranks of tp
DENSE = ("llama", "llama_biases", "llama_tied", "qwen2", "qwen2_window", "qwen3")
MIXTURES = ("qwen3_moe", "qwen3_moe_plain")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Returns the folder of each model, by its name."""
    made = {}
    for name in stage_programs.CONFIGS:
        made[name] = tmp_path_factory.mktemp(name)
        stage_programs.make_model(name).save_pretrained(made[name])
    return made


def wanted_logprobs(name: str) -> list[Tensor]:
    model = stage_programs.make_model(name)
    with torch.no_grad():
        return [model(each[None]).logits[0].log_softmax(-1) for each in stage_programs.make_tokens()]


def wanted_gradients(name: str) -> dict[str, Tensor]:
    """Return the gradients of transformers' model for the sum of squares of all hidden states."""
    model = stage_programs.make_model(name)
    for each in stage_programs.make_tokens():
        model.base_model(each[None]).last_hidden_state.square().sum().backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def check_logprobs(name: str, found: list[list[Tensor] | None], dp: int) -> None:
    wanted = wanted_logprobs(name)
    per_stage = len(found) // 2 if found[0] is None else len(found)
    heads = found[-per_stage:]
    assert all(each is not None for each in heads), "the ranks of the last stage score"
    for rank, scored in enumerate(heads):
        assert scored is not None
        own = wanted[rank // (per_stage // dp) :: dp]
        torch.testing.assert_close(scored, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*DENSE, *MIXTURES])
def test_one_process(folders: Mapping[str, Path], name: str) -> None:
    check_logprobs(name, [stage_programs.score(folders[name], {})], 1)


@pytest.mark.parametrize("name", DENSE)
def test_dense_models_on_two_processes(folders: Mapping[str, Path], two: ProcessPool, name: str) -> None:
    for sizes in (TP2, PP2, SP):
        check_logprobs(name, two.run(stage_programs.score, folders[name], sizes), 1)
