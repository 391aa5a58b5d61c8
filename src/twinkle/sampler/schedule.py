"""Who is computed next: plain Python over sequences and cache blocks.

Sequences run in the order in which they came. Room is not reserved for tokens that may never be drawn: when the cache
is full, the sequence that came last gives its blocks back and computes its tokens again later. Any sequence fits alone
(requests that do not are refused), so the first one always gets on.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from twinkle.sampler.cache import BLOCK, KeyValueCache, blocks_for
from twinkle.sampler.jobs import Job, Sequence


@dataclass(frozen=True)
class Step:
    """Tokens ``start``…``stop`` of a sequence, to be computed now."""

    sequence: Sequence
    start: int
    stop: int


class Schedule:
    """Without a cache every sequence is computed whole each time, and needs no room."""

    def __init__(
        self,
        cache: KeyValueCache | None,
        *,
        max_sequences: int,
        chunk_tokens: int,
        length_class: Callable[[int], int],
    ) -> None:
        """chunk_tokens: a prompt is computed in pieces of this size, and a pass takes about as many in all."""
        self._cache = cache
        self._max_sequences = max_sequences
        self._chunk_tokens = chunk_tokens
        self._length_class = length_class
        self._waiting: list[Sequence] = []  # both in order
        self._running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=lambda each: each.order)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that is done or no longer wanted, and free its blocks."""
        self._release(sequence)
        self._waiting = [each for each in self._waiting if each is not sequence]
        self._running = [each for each in self._running if each is not sequence]
        if not any(each.job is sequence.job for each in self._waiting):
            self._drop_stem(sequence.job)

    def keep_stem(self, sequence: Sequence) -> None:
        """The sequence holds its whole prompt: keep the prompt's blocks for the samples to come."""
        if self._cache is not None:
            sequence.job.stem = self._cache.share(sequence.blocks[: blocks_for(sequence.job.prompt_length)])

    def candidates(self) -> list[Job]:
        """Those that run or could be let in now, first come first."""
        places = max(1, self._max_sequences - len(self._running))
        sequences = sorted([*self._running, *self._waiting[:places]], key=lambda each: each.order)
        return list(dict.fromkeys(sequence.job for sequence in sequences))

    def next_steps(self, eligible: Callable[[Job], bool]) -> list[Step]:
        """One step for as many sequences as fit into a pass: all that draw a token, and some pieces of prompts."""
        self._admit(eligible)
        steps: list[Step] = []
        chunked = 0
        for sequence in list(self._running):
            if not eligible(sequence.job) or sequence not in self._running:  # it may have had to give way
                continue
            start, stop = self._range(sequence)
            if stop - start > 1 and chunked and chunked + stop - start > self._chunk_tokens:
                continue
            if self._make_room(sequence, stop):
                steps.append(Step(sequence, start, stop))
                chunked += stop - start if stop - start > 1 else 0
        return steps

    def computed(self, step: Step) -> None:
        """The step's tokens are in the cache now."""
        if self._cache is not None:
            step.sequence.cached = step.stop

    def _range(self, sequence: Sequence) -> tuple[int, int]:
        length = len(sequence.tokens)
        if self._cache is None:
            return 0, length
        of_class = self._length_class
        if sequence.cached and of_class(sequence.cached) != of_class(length):
            self._release(sequence)  # positions are encoded in another way from here on
        stop = min(length, (sequence.cached // self._chunk_tokens + 1) * self._chunk_tokens)
        if of_class(stop) != of_class(length):
            stop = length
        return sequence.cached, stop

    def _admit(self, eligible: Callable[[Job], bool]) -> None:
        for sequence in [each for each in self._waiting if eligible(each.job)]:
            if len(self._running) >= self._max_sequences:
                return
            if self._cache is not None:
                if self._cache.free < self._wanted(sequence):
                    if self._running:
                        return
                    self._drop_stems()
                self._start_from_stem(sequence, self._cache)
            self._waiting.remove(sequence)
            insort(self._running, sequence, key=lambda each: each.order)

    def _wanted(self, sequence: Sequence) -> int:
        """Blocks for all that is there to compute, and one more for a beginning."""
        return blocks_for(len(sequence.tokens)) - len(sequence.job.stem) + 1

    def _start_from_stem(self, sequence: Sequence, cache: KeyValueCache) -> None:
        job = sequence.job
        if job.stem and self._length_class(job.prompt_length) == self._length_class(len(sequence.tokens)):
            sequence.blocks = cache.share(job.stem)
            sequence.cached = job.prompt_length
        if not any(each.job is job and each is not sequence for each in self._waiting):
            self._drop_stem(job)

    def _make_room(self, sequence: Sequence, stop: int) -> bool:
        """Give the sequence blocks of its own up to ``stop``; False where it had to give way itself."""
        cache = self._cache
        if cache is None:
            return True
        first = sequence.cached // BLOCK  # the first block that will be written
        while True:
            copied = first < len(sequence.blocks) and cache.shared(sequence.blocks[first])
            missing = blocks_for(stop) - len(sequence.blocks)
            if cache.free >= missing + copied:
                break
            if not self._drop_stems():
                last = self._running[-1]
                assert last is not sequence or len(self._running) > 1, "a sequence must fit the cache alone"
                self._preempt(last)
                if last is sequence:
                    return False
        if copied:
            shared, sequence.blocks[first] = sequence.blocks[first], cache.take_copy(sequence.blocks[first])
            cache.release([shared])
        sequence.blocks += [cache.take() for _ in range(missing)]
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        self._running.remove(sequence)
        self.add(sequence)

    def _drop_stems(self) -> bool:
        """Give up what only sequences to come would use; False where there was nothing."""
        jobs = [job for job in dict.fromkeys(sequence.job for sequence in self._waiting) if job.stem]
        for job in jobs:
            self._drop_stem(job)
        return bool(jobs)

    def _drop_stem(self, job: Job) -> None:
        if self._cache is not None:
            self._cache.release(job.stem)
            job.stem = []

    def _release(self, sequence: Sequence) -> None:
        if self._cache is not None:
            self._cache.release(sequence.blocks)
        sequence.blocks, sequence.cached = [], 0
