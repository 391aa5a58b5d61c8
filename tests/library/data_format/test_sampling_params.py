"""Sampling parameters: every error names its field, and the two translations are equivalent."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from twinkle.data_format import SampledSequence, SampleResponse, SamplingParams
from twinkle.errors import InvalidInputError, MissingDependencyError, UnknownNameError, UnsupportedError

WRONG = [
    ("temperature", "hot"),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", 0),
    ("top_k", -2),
    ("top_k", 1.5),
    ("logprobs", -1),
    ("logprobs", 1.0),
    ("prompt_logprobs", True),
    ("num_samples", 0),
    ("max_tokens", -1),
    ("max_tokens", 2.0),
    ("repetition_penalty", 0),
    ("min_p", 1.5),
    ("min_p", "small"),
    ("presence_penalty", 2.5),
    ("frequency_penalty", float("nan")),
    ("ignore_eos", 1),
    ("seed", "x"),
    ("stop", 3),
    ("stop", ["a", 1]),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_wrong_value_names_its_field(field, value):
    with pytest.raises(InvalidInputError, match=f"^{field}: got"):
        SamplingParams(**{field: value})


def test_nothing_to_generate_is_allowed():
    assert SamplingParams(max_tokens=0, prompt_logprobs=1).max_tokens == 0


def test_from_dict_takes_the_other_name_and_leaves_its_argument_alone():
    given = {"max_new_tokens": 7, "temperature": 0.5}
    assert SamplingParams.from_dict(given) == SamplingParams(max_tokens=7, temperature=0.5)
    assert given == {"max_new_tokens": 7, "temperature": 0.5}


def test_from_dict_refuses_what_nobody_reads():
    with pytest.raises(UnknownNameError, match=r"unknown sampling parameter 'top'; known: .*top_k"):
        SamplingParams.from_dict({"top": 1})


def test_stops_are_told_apart():
    assert SamplingParams(stop="END").stop_strings == ["END"]
    assert SamplingParams(stop=["a", "b"]).stop_token_ids == []
    assert SamplingParams(stop=[5, 6]).stop_token_ids == [5, 6]


def test_generate_arguments():
    greedy = SamplingParams(temperature=0).to_transformers()
    assert greedy["do_sample"] is False
    assert greedy["max_new_tokens"] == 2048
    assert "temperature" not in greedy
    sampled = SamplingParams(max_tokens=3, top_k=5, logprobs=1).to_transformers()
    assert (sampled["do_sample"], sampled["max_new_tokens"], sampled["top_k"]) == (True, 3, 5)
    assert sampled["return_dict_in_generate"] is True


def test_stop_tokens_join_the_end_token():
    tokenizer = SimpleNamespace(eos_token_id=2)
    assert SamplingParams(stop=[7]).to_transformers(tokenizer)["eos_token_id"] == [2, 7]
    assert SamplingParams(stop="x").to_transformers(tokenizer)["stop_strings"] == ["x"]
    with pytest.raises(InvalidInputError, match="tokenizer"):
        SamplingParams(stop=[7]).to_transformers()


@pytest.mark.parametrize("params", [{"seed": 1}, {"prompt_logprobs": 1}])
def test_what_generate_cannot_do_is_said(params):
    with pytest.raises(UnsupportedError):
        SamplingParams(**params).to_transformers()


def test_vllm_arguments(monkeypatch):
    vllm, inner = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vllm.SamplingParams = lambda **arguments: arguments
    inner.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", inner)
    arguments = SamplingParams(
        max_tokens=0, stop="x", num_samples=2, logprobs=1, min_p=0.1, presence_penalty=0.5, ignore_eos=True
    ).to_vllm(top_p=0.5)
    assert (arguments["min_p"], arguments["presence_penalty"], arguments["frequency_penalty"]) == (0.1, 0.5, 0.0)
    assert arguments["ignore_eos"] is True
    assert arguments["max_tokens"] == 1
    assert arguments["stop"] == ["x"]
    assert arguments["stop_token_ids"] is None
    assert (arguments["n"], arguments["output_kind"], arguments["top_p"]) == (2, "final", 0.5)
    assert "output_kind" not in SamplingParams().to_vllm()


def test_vllm_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingDependencyError, match="vllm"):
        SamplingParams().to_vllm()


def test_responses_default_to_nothing_asked_for():
    response = SampleResponse([SampledSequence("stop", [1, 2])])
    assert response.prompt_logprobs is None
    assert response.sequences[0].new_input_feature is None
