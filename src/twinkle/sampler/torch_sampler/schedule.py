"""The scheduler: which sequences are computed next. Plain Python over sequences and cache blocks.

At most ``max_sequences`` sequences run at once; each of them has a place. Places are shared fairly among scopes (on a
server: tenants), then among the requests of a scope, not among samples. A scope does not get another place while a
waiting scope has fewer; the same holds for the requests of one scope. Among equals, the first to arrive goes first. So
a late small request gets a place at once, even if another tenant has hundreds of samples running. Pieces of prompts are
shared among scopes in the same way.

No room is reserved for tokens that may never be drawn. When the cache is full, a sequence is preempted: the last sample
of the request with the most samples, in the scope with the most. It gives its blocks back and later computes its tokens
again, except those whose blocks the prefix cache still has. Every sequence fits into the cache alone (larger requests
are refused) and the oldest running sequence is never preempted, so there is always progress.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count, zip_longest

from twinkle.sampler.torch_sampler.cache import BLOCK, KeyValueCache, blocks_for
from twinkle.sampler.torch_sampler.jobs import Job, Sequence
from twinkle.sampler.torch_sampler.prefix_cache import first_name, next_name
from twinkle.sampler.torch_sampler.states.pool import StatePool

_SHORTEST_STORED = 4 * BLOCK  # tokens: computing fewer again costs less than a copy of the state behind them

Eligible = Callable[[Job], bool]


@dataclass(frozen=True)
class Step:
    """Tokens ``start``…``stop`` of a sequence, to be computed in this pass."""

    sequence: Sequence
    start: int
    stop: int


class Schedule:
    """The waiting and running sequences, and the cache blocks they own.

    Without a cache every sequence is computed whole each time, and needs no room.
    """

    def __init__(
        self,
        cache: KeyValueCache | None,
        *,
        max_sequences: int,
        chunk_tokens: int,
        length_class: Callable[[int], int],
    ) -> None:
        """Start without sequences.

        chunk_tokens: the size of the pieces in which prompts are computed, and about the number of prompt tokens of one
        pass. length_class: maps a length to the way in which positions are encoded at that length.
        """
        self._cache = cache
        self._states = None if cache is None else cache.states
        self._max_sequences = max_sequences if self._states is None else min(max_sequences, self._states.running)
        self._chunk_tokens = chunk_tokens
        self._length_class = length_class
        self._waiting: dict[Job, list[Sequence]] = {}  # no list is empty; sorted by ``order``, as is _running
        self._running: list[Sequence] = []
        self._turns = count(1)
        self._prompt_turns: dict[str, int] = {}  # when each scope that runs last had a piece of a prompt computed

    def add(self, sequence: Sequence) -> None:
        insort(self._waiting.setdefault(sequence.job, []), sequence, key=lambda each: each.order)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that is done or cancelled, and free its blocks."""
        self._release(sequence)
        self._leave(sequence)
        if sequence.job not in self._waiting:
            self._drop_stem(sequence.job)

    def forget(self, version_key: int) -> None:
        """Stop reusing blocks that were computed with this version."""
        if self._cache is not None:
            self._cache.forget(version_key)

    def keep_stem(self, sequence: Sequence) -> None:
        """Keep the prompt's blocks for samples that have not begun. The sequence must hold its whole prompt.

        Where there is no room for the state behind the prompt, samples find the prompt in the prefix cache, in part.
        """
        job, states = sequence.job, self._states
        if states is not None and sequence.state is not None:
            job.stem_state = states.hold(sequence.state)
            if job.stem_state is None:
                return
        if self._cache is not None:
            job.stem = self._cache.share(sequence.blocks[: blocks_for(job.prompt_length)])

    def restart(self, steps: Collection[Step]) -> bool:
        """Begin anew the sequences of a pass that failed, where that is needed. Return whether any of them do.

        A failed pass may have changed the states of some layers. Sequences that begin in it do so with the state 0, so
        the pass can be repeated as it was. A sequence alone begins anew only if it came further than when its pass
        failed last.
        """
        touched = [step for step in steps if step.start > 0] if self._states is not None else []
        if len(steps) == 1:
            touched = [step for step in touched if step.stop > step.sequence.failed_at]
            for step in touched:
                step.sequence.failed_at = step.stop
        self.begin_anew(touched)
        return bool(touched)

    def begin_anew(self, steps: Iterable[Step]) -> None:
        """Compute the sequences of these steps from their first token on, or from a stored prefix."""
        for step in steps:
            self._release(step.sequence)

    # --- places -------------------------------------------------------------------------------------------------------

    def candidates(self) -> list[Job]:
        """Return the jobs that are running or could get a place now, in the order of arrival."""
        entering = [sequence for sequence, _ in self._entrants(lambda job: True)]
        jobs = {sequence.job for sequence in [*self._running, *entering]}
        return sorted(jobs, key=lambda job: job.number)

    def admit(self, eligible: Eligible) -> None:
        """Give places to waiting sequences, as far as the cache has room."""
        for sequence, leaving in self._entrants(eligible):
            if leaving is not None:
                self._preempt(leaving)
            if self._cache is not None and self._cache.free < self._wanted(sequence):
                if self._running:
                    return
                self._drop_stems()
            self._leave(sequence)
            self._begin(sequence)
            sequence.running = True
            insort(self._running, sequence, key=lambda each: each.order)

    def _entrants(self, eligible: Eligible) -> Iterator[tuple[Sequence, Sequence | None]]:
        """Yield the sequences that may get a place, fewest places first, each with the sequence it replaces.

        The second is None while places are free.
        """
        shares = _Shares(self._running)
        places = self._max_sequences - len(self._running)
        if places == 0 and not shares.unequal(self._waiting):
            return
        queues = {job: queue[::-1] for job, queue in self._waiting.items() if eligible(job)}
        heap = [(*shares.places_of(job), job.number, job) for job in queues]
        heapify(heap)
        refused: set[str] = set()  # scopes without a claim to a place; their other requests have even less
        while heap:
            scope_places, samples, number, job = heappop(heap)
            if job.scope in refused:
                continue
            if (scope_places, samples) != shares.places_of(job):  # stale: its scope has gained or lost places since
                heappush(heap, (*shares.places_of(job), number, job))
                continue
            leaving = None
            if places == 0:
                leaving = shares.take_for(job)
                if leaving is None:
                    refused.add(job.scope)
                    continue
            else:
                places -= 1
            entering = queues[job].pop()
            shares.add(entering)
            yield entering, leaving
            if queues[job]:
                heappush(heap, (*shares.places_of(job), number, job))

    def _begin(self, sequence: Sequence) -> None:
        """Start from what the cache holds: the prompt's blocks, or more if the sequence ran before."""
        if self._states is not None:
            sequence.state = self._states.take()
        self._follow_length(sequence)
        self._adopt(sequence)
        job, cache = sequence.job, self._cache
        fits = self._length_class(job.prompt_length) == sequence.length_class
        if cache is not None and job.stem and fits and sequence.cached < job.prompt_length:
            self._release(sequence)
            sequence.blocks = cache.share(job.stem)
            sequence.cached = job.prompt_length
            self._go_on_from(sequence, job.stem_state)
        if job not in self._waiting:
            self._drop_stem(job)

    def _wanted(self, sequence: Sequence) -> int:
        """Return how many blocks the sequence needs for its present tokens, plus one to go on with."""
        return blocks_for(len(sequence.tokens)) - len(sequence.job.stem) + 1

    def _leave(self, sequence: Sequence) -> None:
        """Take the sequence out of the running list or out of its waiting queue."""
        if sequence.running:
            self._running.remove(sequence)
            sequence.running = False
            if self._states is not None and sequence.state is not None:
                self._states.release(sequence.state)
                sequence.state = None
        elif sequence in (samples := self._waiting.get(sequence.job, [])):
            samples.remove(sequence)
            if not samples:
                del self._waiting[sequence.job]

    # --- steps --------------------------------------------------------------------------------------------------------

    def decode_steps(
        self, eligible: Eligible, ahead: int = 1, pending: Mapping[Sequence, int] | None = None
    ) -> list[Step]:
        """Plan one token for each eligible running sequence whose other tokens are all in the cache.

        Each gets room for ``ahead`` tokens; sequences that are preempted to make room are left out. pending: how many
        tokens of a sequence the device is computing now. Sequences that surely end with these are left out too.
        """
        steps: dict[Sequence, Step] = {}
        pending = {} if pending is None else pending
        for sequence in list(self._running):
            if sequence.running and eligible(sequence.job) and self._decodes(sequence):
                length, longest = len(sequence.tokens) + pending.get(sequence, 0), sequence.job.longest
                if length <= longest and self._make_room(sequence, min(length + ahead - 1, longest), steps):
                    steps[sequence] = Step(sequence, length - 1, length)
        return list(steps.values())

    def room_ahead(self, tokens: int) -> bool:
        """Return whether every running sequence could surely get this many more tokens without preempting any."""
        return self._cache is not None and self._cache.free >= len(self._running) * (blocks_for(tokens) + 1)

    @property
    def mostly_prompts(self) -> bool:
        """Return whether more running sequences wait for their prompts than decode."""
        decoding = sum(each.job.prompt_done and each.cached == len(each.tokens) - 1 for each in self._running)
        return decoding < len(self._running) - decoding

    @property
    def room_for_prompts(self) -> bool:
        """Return whether there is surely room for the prompts of a pass without preempting any sequence."""
        if self._cache is None:
            return False
        return self._cache.free >= blocks_for(self._chunk_tokens) + 2 * len(self._running)

    def prompt_steps(self, eligible: Eligible) -> list[Step]:
        """Plan pieces of prompts, and of sequences that were preempted and begin anew, as many as fit into a pass."""
        steps: dict[Sequence, Step] = {}
        tokens = 0
        for sequence in self._in_turn_of_scopes():
            if not sequence.running or not eligible(sequence.job) or self._decodes(sequence):
                continue
            self._adopt(sequence)  # another sequence may have computed the same tokens since
            start, stop = self._range(sequence)
            if steps and tokens + stop - start > self._chunk_tokens:
                continue
            if self._make_room(sequence, stop, steps):
                steps[sequence] = Step(sequence, start, stop)
                tokens += stop - start
        turn = next(self._turns)
        for sequence in steps:
            self._prompt_turns[sequence.job.scope] = turn
        return list(steps.values())

    def computed(self, step: Step, *, ahead: bool = False) -> None:
        """Record that the step's tokens are in the cache now.

        ahead: they were drawn in a row. The device may have begun to draw more, which changes the sequence's state.
        """
        sequence, cache = step.sequence, self._cache
        if cache is None:
            sequence.turn = next(self._turns)
            return
        sequence.cached = step.stop
        sequence.job.reached(step.stop, reused=False)
        for index in range(step.start // BLOCK, step.stop // BLOCK):
            cache.remember(sequence.job.version_key, self._name(sequence, index), sequence.blocks[index])
        if self._states is not None and sequence.state is not None and not ahead and self._stores(step):
            name = self._name(sequence, step.stop // BLOCK - 1)
            self._states.store(sequence.job.version_key, name, sequence.state)

    def _in_turn_of_scopes(self) -> list[Sequence]:
        """Return the running sequences round robin by scope, first the scope whose prompts have waited longest."""
        scopes: dict[str, list[Sequence]] = {}
        for sequence in self._in_turn():
            scopes.setdefault(sequence.job.scope, []).append(sequence)
        self._prompt_turns = {scope: self._prompt_turns.get(scope, 0) for scope in scopes}
        ordered = sorted(scopes, key=self._prompt_turns.__getitem__)  # stable: ties in order of arrival
        rounds = zip_longest(*(scopes[scope] for scope in ordered))
        return [sequence for each in rounds for sequence in each if sequence is not None]

    def _in_turn(self) -> list[Sequence]:
        """Return the running sequences in order of arrival.

        Without a cache every token costs as much as a whole prompt, so the least recently computed sequence goes first.
        """
        if self._cache is not None:
            return list(self._running)
        return sorted(self._running, key=lambda sequence: (sequence.turn, sequence.order))

    def _decodes(self, sequence: Sequence) -> bool:
        self._follow_length(sequence)
        return sequence.job.prompt_done and self._cache is not None and sequence.cached == len(sequence.tokens) - 1

    def _range(self, sequence: Sequence) -> tuple[int, int]:
        length = len(sequence.tokens)
        if self._cache is None:
            return 0, length
        stop = min(length, (sequence.cached // self._chunk_tokens + 1) * self._chunk_tokens)
        if self._length_class(stop) != sequence.length_class:
            stop = length
        if self._states is not None:
            # A piece ends behind the last full block that another request can share, so that the state there is stored.
            shared = (length - 1) // BLOCK * BLOCK
            if shared >= _SHORTEST_STORED and sequence.cached < shared < stop:
                stop = shared
        return sequence.cached, stop

    def _stores(self, step: Step) -> bool:
        """Return whether to store the state behind a piece. Single tokens are drawn ones, and change it every time."""
        return step.stop % BLOCK == 0 and step.stop >= _SHORTEST_STORED and step.stop - step.start > 1

    # --- contents of the cache ----------------------------------------------------------------------------------------

    def _follow_length(self, sequence: Sequence) -> None:
        """Drop the sequence's blocks if its length has entered another length class.

        Some models encode positions differently from some length on, which makes earlier keys and values useless.
        """
        length_class = self._length_class(len(sequence.tokens))
        if sequence.length_class != length_class:
            self._release(sequence)
            sequence.length_class = length_class
            sequence.names.clear()

    def _adopt(self, sequence: Sequence) -> None:
        """Share remembered blocks that hold the sequence's next tokens, if there are any."""
        cache, job, blocks = self._cache, sequence.job, sequence.blocks
        if cache is None or sequence.cached != len(blocks) * BLOCK:
            return
        if self._states is not None:
            self._adopt_with_state(sequence, cache, self._states)
            return
        while (len(blocks) + 1) * BLOCK <= job.reusable(sequence):
            block = cache.find(job.version_key, self._name(sequence, len(blocks)))
            if block is None:
                break
            blocks += cache.share([block])
        sequence.cached = len(blocks) * BLOCK
        job.reached(sequence.cached, reused=True)

    def _adopt_with_state(self, sequence: Sequence, cache: KeyValueCache, states: StatePool) -> None:
        """Share remembered blocks up to the last one behind which a state is stored, and copy that state."""
        job, key, found = sequence.job, sequence.job.version_key, list[int]()
        first, best, state = len(sequence.blocks), 0, None
        while (first + len(found) + 1) * BLOCK <= job.reusable(sequence):
            name = self._name(sequence, first + len(found))
            block = cache.find(key, name)
            if block is None:
                break
            found.append(block)
            slot = states.find(key, name)
            if slot is not None:
                best, state = len(found), slot
        if best:
            sequence.blocks += cache.share(found[:best])
            sequence.cached = len(sequence.blocks) * BLOCK
            self._go_on_from(sequence, state)
            job.reached(sequence.cached, reused=True)

    def _go_on_from(self, sequence: Sequence, state: int | None) -> None:
        """Copy a state into the sequence's slot; in models without linear attention there is none."""
        if self._states is not None:
            assert sequence.state is not None and state is not None, "running sequences and stems have states"
            self._states.copy(state, sequence.state)

    def _name(self, sequence: Sequence, index: int) -> bytes:
        """Return the name of the sequence's full block number ``index``."""
        names = sequence.names
        for number in range(len(names), index + 1):
            before = names[-1] if names else first_name(sequence.length_class, sequence.job.request.scope)
            start, stop = number * BLOCK, (number + 1) * BLOCK
            names.append(next_name(before, sequence.tokens[start:stop], sequence.job.images.beginning_in(start, stop)))
        return names[index]

    # --- room ---------------------------------------------------------------------------------------------------------

    def _make_room(self, sequence: Sequence, stop: int, planned: Collection[Sequence]) -> bool:
        """Give the sequence blocks of its own up to ``stop``. Return False if it waits, or was preempted itself."""
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
                last = self._last(planned)
                if last is not None:
                    self._preempt(last)
                if last is None or last is sequence:
                    return False
        if copied:
            shared, sequence.blocks[first] = sequence.blocks[first], cache.take_copy(sequence.blocks[first])
            cache.release([shared])
        sequence.blocks += [cache.take() for _ in range(missing)]
        return True

    def _last(self, planned: Collection[Sequence]) -> Sequence | None:
        """Return the sequence to preempt: never the oldest, nor one whose step is already planned.

        Return None if there is no other. Then the oldest waits for a pass in which its scope is planned first.
        """
        samples = Counter(sequence.job for sequence in self._running)
        scopes = Counter(sequence.job.scope for sequence in self._running)
        others = [sequence for sequence in self._running[1:] if sequence not in planned]
        assert others or planned, "a sequence must fit the cache alone"
        return max(others, key=lambda each: (scopes[each.job.scope], samples[each.job], each.order), default=None)

    def preempt_all(self) -> None:
        """Take the places of all running sequences, which begin anew when they get one again."""
        for sequence in list(self._running):
            self._preempt(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        self._leave(sequence)
        self.add(sequence)

    def _drop_stems(self) -> bool:
        """Release the prompt blocks kept for samples that have not begun. Return False if there were none."""
        jobs = [job for job in self._waiting if job.stem]
        for job in jobs:
            self._drop_stem(job)
        return bool(jobs)

    def _drop_stem(self, job: Job) -> None:
        if self._cache is not None:
            self._cache.release(job.stem)
            job.stem = []
        if self._states is not None and job.stem_state is not None:
            self._states.drop(job.stem_state)
            job.stem_state = None

    def _release(self, sequence: Sequence) -> None:
        if self._cache is not None:
            self._cache.release(sequence.blocks)
        sequence.blocks, sequence.cached = [], 0


class _Shares:
    """The number of places of each scope and each request, kept up to date while places are given and taken."""

    def __init__(self, running: Iterable[Sequence]) -> None:
        self._jobs: dict[str, dict[Job, list[Sequence]]] = {}  # by scope; no list is empty
        self._places: Counter[str] = Counter()
        for sequence in running:
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        self._jobs.setdefault(sequence.job.scope, {}).setdefault(sequence.job, []).append(sequence)
        self._places[sequence.job.scope] += 1

    def places_of(self, job: Job) -> tuple[int, int]:
        """Return how many places the job's scope has, and how many the job has."""
        return self._places[job.scope], len(self._jobs.get(job.scope, {}).get(job, ()))

    def unequal(self, waiting: Iterable[Job]) -> bool:
        """Return whether a waiting job might be entitled to the place of a running sequence."""
        most = max(self._places.values(), default=0)
        several = any(len(samples) > 1 for jobs in self._jobs.values() for samples in jobs.values())
        return several or any(self._places[job.scope] + 1 < most for job in waiting)

    def take_for(self, job: Job) -> Sequence | None:
        """Take a place for this job from the scope with the most places, else from a larger request of its own scope.

        Return the sequence that has to leave. Return None if no other has at least two places more than the job's
        scope, or than the job within its scope: moving one place would then only swap the two.
        """
        scope = max(self._places, key=lambda each: (self._places[each], each != job.scope))
        if self._places[scope] > self._places[job.scope] + 1:
            return self._take_last(scope)
        own = self._jobs.get(job.scope, {})
        most = max(map(len, own.values()), default=0)
        return self._take_last(job.scope) if most > len(own.get(job, ())) + 1 else None

    def _take_last(self, scope: str) -> Sequence:
        """Take the last sample of the request with the most samples in the scope."""
        jobs = self._jobs[scope]
        most = max(jobs.values(), key=lambda each: (len(each), each[0].order))
        leaving = most.pop()
        if not most:
            del jobs[leaving.job]
        self._places[scope] -= 1
        return leaving
