"""Where a sample ends, and why."""

import numpy as np
import pytest

from tests.support.models.reference import toy_llama
from tests.support.models.sampling import BYTES, END, prompt, request, sample, toy_sampler, toy_tokenizer, toy_trainer
from twinkle.sampler import TorchSampler
from twinkle.sampler.torch_sampler.drawing import Drawn
from twinkle.sampler.torch_sampler.jobs import Job
from twinkle.sampler.validation import Limits, check_request

LONG = 60


@pytest.fixture(scope="module")
def sampler() -> TorchSampler:
    return toy_sampler(toy_trainer({}))


def tokens_without_stop(sampler: TorchSampler, seed: int = 0) -> np.ndarray:
    (sequence,) = sample(sampler, request("x", None, prompt(5), max_tokens=LONG, seed=seed))
    assert sequence.stop_reason == "length"
    assert len(sequence.tokens) == len(sequence.logprobs) == LONG
    return sequence.tokens


def test_a_stop_token_is_the_last_token(sampler: TorchSampler) -> None:
    tokens = tokens_without_stop(sampler)
    stop = int(tokens[20])
    first = int(np.flatnonzero(tokens == stop)[0])
    (sequence,) = sample(sampler, request("x", None, prompt(5), max_tokens=LONG, seed=0, stop_tokens=(END, stop, 1)))
    expected = min(int(np.flatnonzero(np.isin(tokens, (END, stop, 1)))[0]), first)
    np.testing.assert_array_equal(sequence.tokens, tokens[: expected + 1])
    assert len(sequence.logprobs) == expected + 1
    assert sequence.stop_reason == "stop"


def test_the_last_allowed_token_may_stop(sampler: TorchSampler) -> None:
    tokens = tokens_without_stop(sampler)
    for count, reason in ((1, "stop"), (2, "stop")):
        (sequence,) = sample(
            sampler, request("x", None, prompt(5), max_tokens=count, seed=0, stop_tokens=(int(tokens[0]),))
        )
        assert sequence.stop_reason == reason
        assert len(sequence.tokens) == 1


def test_a_stop_token_in_the_prompt_does_not_count(sampler: TorchSampler) -> None:
    tokens, last = tokens_without_stop(sampler), int(prompt(5)[-1])
    (sequence,) = sample(sampler, request("x", None, prompt(5), max_tokens=1, seed=0, stop_tokens=(last,)))
    assert sequence.stop_reason == ("stop" if tokens[0] == last else "length")


def test_a_stop_string_keeps_the_tokens_that_complete_it(sampler: TorchSampler) -> None:
    tokenizer, tokens = toy_tokenizer(), tokens_without_stop(sampler)
    text = tokenizer.decode(tokens[17:21])
    whole = [tokenizer.decode(tokens[: count + 1]) for count in range(LONG)]
    expected = next(count for count, each in enumerate(whole) if text in each)
    (sequence,) = sample(sampler, request("x", None, prompt(5), max_tokens=LONG, seed=0, stop_strings=("never", text)))
    np.testing.assert_array_equal(sequence.tokens, tokens[: expected + 1])
    assert sequence.stop_reason == "stop"


def test_each_sample_stops_by_itself(sampler: TorchSampler) -> None:
    sequences = sample(
        sampler, request("x", None, prompt(5), num_samples=8, max_tokens=LONG, seed=0, stop_tokens=tuple(range(3, 13)))
    )
    assert len({len(sequence.tokens) for sequence in sequences}) > 1
    for sequence in sequences:
        inside = np.isin(sequence.tokens, range(3, 13))
        assert not inside[:-1].any()
        assert inside[-1] == (sequence.stop_reason == "stop")


def test_the_models_own_end_tokens() -> None:
    """There are several: from the configuration, the generation configuration and the tokenizer."""
    model = toy_llama(eos_token_id=50)
    model.generation_config.eos_token_id = [60, 61]
    sampler = toy_sampler(toy_trainer({}, model))
    ends = {50, 60, 61, END}
    assert sampler._end_tokens == ends
    for seed in range(6):
        tokens = tokens_without_stop(sampler, seed)
        stops = np.flatnonzero(np.isin(tokens, list(ends)))
        expected = tokens[: stops[0] + 1] if len(stops) else tokens
        (sequence,) = sample(sampler, request("x", None, prompt(5), max_tokens=LONG, seed=seed, stop_at_eos=True))
        np.testing.assert_array_equal(sequence.tokens, expected)
        assert sequence.stop_reason == ("stop" if len(stops) else "length")


def test_without_a_limit_the_context_is_filled(sampler: TorchSampler) -> None:
    (sequence,) = sample(sampler, request("x", None, prompt(100)))
    assert sequence.stop_reason == "length"
    assert len(sequence.tokens) == 128 - 100


# --- text that arrives in pieces --------------------------------------------------------------------------------------


def stopped_after(stop: str, tokens: list[str]) -> int | None:
    """Return after how many of these tokens the sample stops."""
    vocab = toy_tokenizer().get_vocab()
    asked = request("x", None, np.array([vocab["a"], vocab["b"]]), max_tokens=100, stop_strings=(stop,))
    checked = check_request(asked, Limits(97, 128, 128, True))
    job = Job(checked, None, 0, frozenset(), toy_tokenizer())
    (sequence,) = job.sequences
    for count, token in enumerate(tokens, start=1):
        sequence.add(Drawn(vocab[token], 0.0, True))
        if sequence.stop_reason is not None:
            return count
    return None


def test_characters_of_several_bytes() -> None:
    euro, accent = BYTES[2:], BYTES[:2]
    assert stopped_after("€", [*accent, *euro]) == 5
    assert stopped_after("é€", [*"uv", *accent, *euro, "w"]) == 7
    assert stopped_after("é", [accent[0], "w", *accent]) == 4
    assert stopped_after("€", [*euro[:2], *"uvw"]) is None


def test_strings_do_not_reach_into_the_prompt() -> None:
    assert stopped_after("bc", [*"cwbc"]) == 4


def test_special_tokens_have_a_text_too() -> None:
    assert stopped_after("<eos>", ["w", "<eos>"]) == 2


def test_a_string_far_from_the_beginning() -> None:
    assert stopped_after("needle", [*"straw" * 12, *"needle", *"straw"]) == 66
