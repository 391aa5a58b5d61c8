"""benchmarks/simulated_device.py: the times of its device, and a sampler that takes turns as the torch sampler does."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulated_device import (
    AHEAD,
    Device,
    SimulatedSampler,
    SimulatedTrainer,
    device_report,
    interpolated,
)
from twinkle.model.types import AdamParams, Datum, LoraSpec, TrainItem
from twinkle.sampler.types import CountsSteps, EndsTurns, Sampler, SampleRequest, SamplingParams

STRETCH = 1e-4  # hardly any time


def request(name: str, samples: int = 8, tokens: int = 24) -> SampleRequest:
    return SampleRequest(name, None, np.arange(5, 37), SamplingParams(max_tokens=tokens, stop_at_eos=False), samples)


@pytest.fixture
def device() -> Device:
    return Device(STRETCH)


@pytest.fixture
def sampler(device: Device) -> SimulatedSampler:
    return SimulatedSampler(device, SimulatedTrainer(device))


def test_times_between_the_measured_sizes() -> None:
    points = ((10, 2.0), (20, 4.0), (40, 5.0))
    assert [interpolated(points, size) for size in (1, 10, 15, 20, 30, 40, 80)] == [2.0, 2.0, 3.0, 4.0, 4.5, 5.0, 7.0]


def test_each_call_of_the_trainer_takes_its_time(device: Device) -> None:
    trainer = SimulatedTrainer(device)
    trainer.create_adapter("a", LoraSpec(8, seed=1))
    data = [Datum(np.arange(5, 517), np.arange(6, 518))] * 2
    trainer.forward_backward([TrainItem("a", data)])
    trainer.optim_step("a", AdamParams(0.1))
    assert [(kind, size) for kind, size, _, _ in device.calls] == [("train", 1), ("optim_step", 1)]
    assert all(end - start >= STRETCH * 0.002 for _, _, start, end in device.calls)


def test_it_samples_what_was_asked_for(device: Device, sampler: SimulatedSampler) -> None:
    for each in (Sampler, CountsSteps, EndsTurns):
        assert all(hasattr(sampler, name) for name in vars(each) if not name.startswith("_"))
    sampler.submit(request("a"))
    sampler.submit(request("b", samples=2))
    results = {}
    while sampler.busy:
        results |= {event.request_id: event.outcome for event in sampler.step()}
    assert [len(results[name].sequences) for name in "ab"] == [8, 2]
    assert all(len(sequence.tokens) == 24 for name in "ab" for sequence in results[name].sequences)
    assert sampler.numbers().decoded_tokens == 10 * sampler.numbers().decode_steps
    assert [kind for kind, *_ in device.calls] == ["prompts", "decode", "decode", "decode"]


def test_a_turn_ends_after_the_flight_that_has_started(sampler: SimulatedSampler) -> None:
    sampler.submit(request("a", tokens=10 * AHEAD))
    sampler.end_turns_when(lambda: True)
    steps = []
    while sampler.busy:
        before = sampler.numbers().decode_steps
        sampler.step()
        steps.append(sampler.numbers().decode_steps - before)
    assert steps[0] == 0, "the prompt"
    assert set(steps[1:-1]) == {2 * AHEAD}


def test_a_report_of_what_the_device_did(tmp_path: Path) -> None:
    calls = [("train", 2, 9.0, 9.5), ("train", 4, 10.0, 12.0), ("files", 1, 10.0, 14.0), ("decode", 8, 12.0, 13.0)]
    timeline = tmp_path / "timeline.jsonl"
    timeline.write_text("".join(json.dumps(call) + "\n" for call in calls))
    report = device_report(timeline, 2.0, (10.0, 20.0))
    assert report["train"] == {"calls": 1, "seconds": 1.0, "mean_size": 4}
    assert report["busy_seconds"] == 1.5, "files are written beside the device"
