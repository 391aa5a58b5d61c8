"""A server whose trainer and sampler take the times of an H200 and compute hardly anything, to study the service.

What is real: the server process, with its HTTP, journal, scheduler and threads; and the clients. What is simulated: the
calls of the trainer and the sampler. They wait, as for a GPU, for the times in ``DeviceTimes``, which were measured
with the 1b model, and return results of the right shape. The sampler works like the torch sampler on CUDA: in turns of
about 50 ms, in which all decoding sequences draw 8 tokens (a flight), then prompts are computed, and so on. Without
prompts, the next flight starts before the results of the last one are read.

All times are multiplied by ``stretch``, and so are the limits of the server that are seconds: with a stretch of 4, a
second of the simulation is a quarter of a second on the device. A machine with few cores needs that, because the
processes of the clients would otherwise decide how long everything takes.

    python benchmarks/service_rollouts.py --simulate 4 --tenants 16 --steps 8 --len 512 --samples 8 \
        --prompt 256 --tokens 128

This file is the server of that command: ``simulated_device.py CONFIG STRETCH TIMELINE``. At its end it writes what the
device did and when to TIMELINE: one JSON list for each call, of its kind, its size, and its first and last second.
"""

import json
import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from twinkle.errors import InvalidInputError
from twinkle.model.types import EMPTY, AdamParams, TrainFailure, TrainItem, TrainResult
from twinkle.sampler.types import Finished, Progress, SampledSequence, SampleRequest, SampleResult, SamplerNumbers
from twinkle.sampler.validation import Limits, check_request
from twinkle.server.backends import compute_thread
from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.mock import MockTrainer, mock_model
from twinkle.server.config import load_config
from twinkle.server.config.applications import ServedModelConfig
from twinkle.server.config.timings import Timings
from twinkle.server.runtime.embedded import serve_embedded
from twinkle.server.scheduling import gathering

TOKENS_PER_BATCH = 16_384
CHEAP_TOKENS = 2048
TURN_SECONDS = 0.05
CHUNK_TOKENS = 4096  # prompt tokens of one pass
MAX_SEQUENCES = 512
AHEAD = 8  # tokens of each sequence between two looks of the host
AHEAD_OF_PROMPTS = 2  # the same while most sequences wait for their prompts

Points = tuple[tuple[float, float], ...]  # (size, milliseconds), by size


@dataclass(frozen=True)
class DeviceTimes:
    """Milliseconds of calls, measured with the 1b model on one H200; between two points they grow evenly."""

    train: Points = ((1024, 20.5), (2048, 33.0), (4096, 56.5), (8192, 106.0), (16_384, 206.0))  # by tokens
    optim_step: float = 2.0
    prompts: Points = ((256, 5.5), (1024, 9.3), (4096, 26.4))  # by tokens
    decode: Points = ((1, 1.9), (16, 2.0), (48, 2.4), (128, 4.3), (256, 7.0), (512, 13.0))  # by sequences
    copy: float = 4.0  # of an adapter's weights to the host, in the compute thread
    publish: float = 3.0
    files: float = 45.0  # to write an adapter's weights, in a thread of its own


def interpolated(points: Points, size: float) -> float:
    """Return the milliseconds for a size. Below the first point they are constant, above the last they grow evenly."""
    place = min(max(1, bisect_left([each for each, _ in points], size)), len(points) - 1)
    (left, low), (right, high) = points[place - 1], points[place]
    return low + (high - low) * max(0.0, size - left) / (right - left)


@dataclass
class Device:
    """Takes the time of calls, and remembers them. Used by one thread at a time, except ``write_files``."""

    stretch: float
    times: DeviceTimes = field(default_factory=DeviceTimes)
    calls: list[tuple[str, int, float, float]] = field(default_factory=list)

    @contextmanager
    def taking(self, kind: str, size: int, milliseconds: float) -> Iterator[None]:
        """Run the body, and wait until the call has taken its time. Waiting lets other threads run."""
        started = time.monotonic()
        yield
        left = started + self.stretch * milliseconds / 1e3 - time.monotonic()
        if left > 0:
            time.sleep(left)
        self.calls.append((kind, size, started, time.monotonic()))


class SimulatedTrainer(MockTrainer):
    """A mock trainer whose calls take the time of the device."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def forward_backward(self, items: Sequence[TrainItem]) -> list[TrainResult | TrainFailure]:
        tokens = sum(len(datum.tokens) for item in items for datum in item.data)
        with self._device.taking("train", len(items), interpolated(self._device.times.train, tokens)):
            return super().forward_backward(items)

    def optim_step(
        self, adapter_id: str, params: AdamParams, *, decoupled: bool = True, decay_norms: bool = True
    ) -> dict[str, float]:
        with self._device.taking("optim_step", 1, self._device.times.optim_step):
            return super().optim_step(adapter_id, params, decoupled=decoupled, decay_norms=decay_norms)

    def prepare_save(
        self,
        adapter_id: str,
        optimizer: bool = True,
        state: Mapping[str, object] = EMPTY,
        companions: Callable[[Path], None] | None = None,
        synced: bool = True,
    ) -> Callable[[Path], None]:
        device = self._device
        with device.taking("copy", 1, device.times.copy):
            write = super().prepare_save(adapter_id, optimizer, state, companions, synced)

        def write_files(directory: Path) -> None:
            with device.taking("files", 1, device.times.files):
                write(directory)

        return write_files


@dataclass(eq=False)
class _Request:
    request: SampleRequest
    length: int  # tokens of each sample
    drawn: int = 0  # tokens that each sample has
    prompted: bool = False


class SimulatedSampler:
    """A :class:`~twinkle.sampler.types.Sampler` that draws random tokens, in the turns of the torch sampler."""

    def __init__(self, device: Device, trainer: MockTrainer) -> None:
        self._device = device
        self._limits = Limits(trainer.vocab_size, trainer.max_length, trainer.max_length, stop_strings=False)
        self._versions: dict[str, None] = {}
        self._requests: dict[str, _Request] = {}
        self._random = np.random.default_rng(0)
        self._other_work_is_next: Callable[[], bool] = lambda: False
        self._numbers = SamplerNumbers(0, 0)

    def end_turns_when(self, other_work_is_next: Callable[[], bool]) -> None:
        self._other_work_is_next = other_work_is_next

    def numbers(self) -> SamplerNumbers:
        return self._numbers

    def publish(self, version_id: str, adapter_id: str) -> None:
        with self._device.taking("publish", 1, self._device.times.publish):
            self._versions[version_id] = None

    def load_version(self, version_id: str, directory: str) -> None:
        self._versions[version_id] = None

    def retire(self, version_id: str) -> None:
        self._versions.pop(version_id, None)

    def version_ids(self) -> list[str]:
        return list(self._versions)

    def submit(self, request: SampleRequest) -> None:
        if request.version_id is not None and request.version_id not in self._versions:
            raise InvalidInputError("version_id", request.version_id, "a published version")
        checked = check_request(request, self._limits)
        self._requests[request.request_id] = _Request(request, checked.max_tokens)

    def cancel(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def step(self) -> list[Finished | Progress]:
        events: list[Finished | Progress] = []
        deadline = time.monotonic() + self._device.stretch * TURN_SECONDS
        over = flies = False  # flies: the next flight has started
        while self._requests and (flies or not over):
            flies = not over and all(each.prompted for each in self._requests.values())
            self._decode()
            self._prompt()
            events += self._finished()
            over = over or time.monotonic() >= deadline or self._other_work_is_next()
        return events

    def _decode(self) -> None:
        decoding = [each for each in self._requests.values() if each.prompted]
        rows = min(MAX_SEQUENCES, sum(each.request.num_samples for each in decoding))
        if not rows:
            return
        tokens = AHEAD_OF_PROMPTS if len(decoding) < len(self._requests) - len(decoding) else AHEAD
        with self._device.taking("decode", rows, tokens * interpolated(self._device.times.decode, rows)):
            before = self._numbers
            self._numbers = SamplerNumbers(before.decode_steps + tokens, before.decoded_tokens + tokens * rows)
            for each in decoding:
                each.drawn += tokens

    def _prompt(self) -> None:
        waiting, tokens = [], 0
        for each in self._requests.values():
            if not each.prompted and (not waiting or tokens + len(each.request.prompt) <= CHUNK_TOKENS):
                waiting.append(each)
                tokens += len(each.request.prompt)
        if waiting:
            with self._device.taking("prompts", len(waiting), interpolated(self._device.times.prompts, tokens)):
                for each in waiting:
                    each.prompted, each.drawn = True, 1

    def _finished(self) -> Iterator[Finished]:
        for request_id, each in list(self._requests.items()):
            if each.drawn >= each.length:
                del self._requests[request_id]
                sequences = [self._sequence(each.length) for _ in range(each.request.num_samples)]
                yield Finished(request_id, SampleResult(sequences))

    def _sequence(self, length: int) -> SampledSequence:
        tokens = self._random.integers(100, 200, length)
        return SampledSequence(tokens, np.full(length, -1.5, np.float32), "length")


def simulated_model(served: ServedModelConfig, device: Device) -> ServedModel:
    trainer = SimulatedTrainer(device)
    return replace(
        mock_model(served.name, served.aliases),
        trainer=trainer,
        sampler=SimulatedSampler(device, trainer),
        tokens_per_batch=TOKENS_PER_BATCH,
        cheap_tokens=CHEAP_TOKENS,
        device="cuda",
    )


def device_report(timeline: Path, stretch: float, interval: tuple[float, float]) -> dict[str, Any]:
    """Return what the simulated device did in an interval, in its own seconds: how often, for how long, how much."""
    calls = [json.loads(line) for line in timeline.read_text().splitlines()]
    report: dict[str, Any] = {}
    for kind in dict.fromkeys(kind for kind, *_ in calls):
        own = [
            (size, end - start)
            for name, size, start, end in calls
            if name == kind and interval[0] <= start < interval[1]
        ]
        if own:
            report[kind] = {
                "calls": len(own),
                "seconds": sum(seconds for _, seconds in own) / stretch,
                "mean_size": statistics.mean(size for size, _ in own),
            }
    report["busy_seconds"] = sum(each["seconds"] for kind, each in report.items() if kind != "files")
    return report


def stretch_limits(stretch: float) -> None:
    """Multiply the limits of the server that are seconds of the device's time."""
    gathering.LONGEST *= stretch
    gathering._LEAST_ERROR *= stretch
    compute_thread._SOON *= stretch
    compute_thread._SHORTEST_TURN *= stretch


def main() -> None:
    config_file, stretch, timeline = sys.argv[1:]
    device = Device(float(stretch))
    stretch_limits(device.stretch)
    config, notes = load_config(config_file)
    timings = Timings()
    config = config.with_timings(replace(timings, snapshot=timings.snapshot * device.stretch))

    def load(served: ServedModelConfig, _timings: Timings) -> ServedModel:
        return simulated_model(served, device)

    try:
        serve_embedded(config, notes, load)
    finally:
        Path(timeline).write_text("".join(json.dumps(call) + "\n" for call in device.calls))


if __name__ == "__main__":
    main()
