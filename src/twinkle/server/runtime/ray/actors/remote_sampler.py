"""A sampler whose engine is in another process, and is replaced when that process dies.

Two threads call the engine: versions are published in the compute thread of training, everything else runs in that of
sampling. Unfinished requests are kept here, each with a seed, and versions with their weights or directory. When an
engine dies, its replacement gets both and draws the same tokens again. Tokens that were already streamed are not
streamed twice. A request that was under way in four deaths fails.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from twinkle.errors import TwinkleError, TwinkleServerError
from twinkle.sampler.noise import fresh_seed
from twinkle.sampler.types import Finished, Progress, SampleFailure, SampleRequest, TopLogprobs
from twinkle.server.backends.backend import TrainingBackend
from twinkle.server.runtime.ray.actors.sampler_engine import AdapterWeights
from twinkle.server.runtime.ray.replica import end_process, raised

T = TypeVar("T")

logger = logging.getLogger(__name__)

_START_TRIES = 3
_MOST_DEATHS = 3  # a request that was under way in more deaths than this may be their cause
_DIED = (RayActorError, OutOfMemoryError)  # OutOfMemoryError: Ray killed the process to save the machine


@dataclass(frozen=True)
class _Version:
    """How an engine gets a version: the method to call, and its argument, arrays in Ray's store or a directory."""

    method: str
    source: Any  # an ObjectRef, or the name of a directory that all machines see


@dataclass(eq=False)
class _UnderWay:
    """A request that the engine works on, with the number of tokens already streamed for each of its samples."""

    request: SampleRequest
    deaths: int = 0  # engines that died while they had the request
    told: dict[int, int] = field(default_factory=dict)  # tokens streamed, by sample
    to_skip: dict[int, int] = field(default_factory=dict)  # of these, how many the present engine will draw again
    ended: set[int] = field(default_factory=set)  # samples whose end was streamed

    def begin_again(self) -> None:
        self.deaths += 1
        self.to_skip = dict(self.told)

    def unheard(self, event: Progress) -> Progress | None:
        """Return the part of an event that was not streamed before; None if all of it was."""
        if event.index in self.ended:
            return None
        skipped = min(len(event.tokens), self.to_skip.get(event.index, 0))
        if skipped:
            self.to_skip[event.index] -= skipped
            event = _without_first(event, skipped)
            if not len(event.tokens) and event.stop_reason is None:
                return None
        self.told[event.index] = self.told.get(event.index, 0) + len(event.tokens)
        if event.stop_reason is not None:
            self.ended.add(event.index)
        return event


class RemoteSampler:
    """A :class:`~twinkle.sampler.types.Sampler` that calls an engine in another process. Several threads may use it."""

    def __init__(self, engine: Any, start: Callable[[], Any], trainer: TrainingBackend, *, whole: bool = False) -> None:
        """Use ``engine`` until it dies. ``start`` returns the next engine and blocks until that is ready.

        ``trainer`` has the weights that are published. ``whole``: they are all weights of the model, not an adapter's.
        """
        self._engine = engine
        self._start = start
        self._trainer = trainer
        self._whole = whole
        self._lock = threading.Lock()  # held while anything below changes, and while an engine is replaced
        self._versions: dict[str, _Version] = {}
        self._requests: dict[str, _UnderWay] = {}
        self._failed: list[Finished] = []

    def publish(self, version_id: str, adapter_id: str) -> None:
        """Publish an adapter's weights, or all weights. Runs in the compute thread of training.

        They are put into Ray's store once; this process and the engine's read them there.
        """
        config = {} if self._whole else self._trainer.peft_config(adapter_id)
        weights = AdapterWeights(config, self._trainer.weights(adapter_id))
        self._add(version_id, _Version("receive_version", ray.put(weights)))

    def version_saved(self, version_id: str, directory: str) -> None:
        """Note the files of a version. All weights of a model are large: Ray's store need not hold them any more."""
        if not self._whole:
            return

        def note(_answer: object) -> None:
            if version_id in self._versions:
                self._versions[version_id] = _Version("load_version", directory)

        self._ask("version_saved", version_id, directory, note=note)

    def load_version(self, version_id: str, directory: str) -> None:
        self._add(version_id, _Version("load_version", directory))

    def retire(self, version_id: str) -> None:
        self._ask("retire", version_id, note=lambda _: self._versions.pop(version_id, None))

    def version_ids(self) -> list[str]:
        return list(self._versions)

    def submit(self, request: SampleRequest) -> None:
        if request.params.seed is None:
            request = replace(request, params=replace(request.params, seed=fresh_seed()))
        started = _UnderWay(request)
        self._ask("submit", request, note=lambda _: self._requests.update({request.request_id: started}))

    def cancel(self, request_id: str) -> None:
        self._ask("cancel", request_id, note=lambda _: self._requests.pop(request_id, None))

    @property
    def busy(self) -> bool:
        return bool(self._requests or self._failed)

    def step(self) -> list[Finished | Progress]:
        if not self._requests:
            with self._lock:
                return self._take_failed()
        return self._ask("step", note=self._heard)

    # --- calls of the engine ------------------------------------------------------------------------------------------

    def _add(self, version_id: str, version: _Version) -> None:
        self._ask(
            version.method, version_id, version.source, note=lambda _: self._versions.update({version_id: version})
        )

    def _ask(self, method: str, *arguments: object, note: Callable[[Any], T]) -> T:
        """Call a method of the engine and return what ``note`` makes of the answer, under the lock.

        If the engine was replaced meanwhile, its answer is dropped and the next engine is called.
        """
        while True:
            engine = self._engine
            try:
                answer = ray.get(getattr(engine, method).remote(*arguments))
            except _DIED as error:
                self._replace(engine, error)
                continue
            with self._lock:
                if self._engine is engine:
                    return note(raised(answer))

    def _heard(self, events: Sequence[Finished | Progress]) -> list[Finished | Progress]:
        heard = self._take_failed()
        for event in events:
            known = self._requests.get(event.request_id)
            if known is None:
                continue
            if isinstance(event, Finished):
                del self._requests[event.request_id]
                heard.append(event)
            elif (new := known.unheard(event)) is not None:
                heard.append(new)
        return heard

    def _take_failed(self) -> list[Finished | Progress]:
        taken, self._failed = self._failed, []
        return list(taken)

    def _replace(self, dead: Any, error: Exception) -> None:
        """Start the next engine, unless another thread has done so. After three failed starts this process ends."""
        with self._lock:
            if self._engine is not dead:
                return
            logger.error("the sampler's process died, another takes its place: %s", error)
            ray.kill(dead)  # it may still run and only be out of reach
            for request in self._requests.values():
                request.begin_again()
            for _ in range(_START_TRIES):
                try:
                    self._engine = self._started_again()
                    return
                except (RayError, TwinkleError):
                    logger.exception("the sampler's process could not be started")
        end_process("there is no sampler any more")

    def _started_again(self) -> Any:
        """Return a new engine with the versions and requests of the last one.

        A version that cannot be loaded any more is left out. A request that cannot be submitted, or was under way in
        too many deaths, fails.
        """
        engine = self._start()
        for version_id, version in list(self._versions.items()):
            try:
                raised(ray.get(getattr(engine, version.method).remote(version_id, version.source)))
            except TwinkleError:  # its directory was deleted: requests for it fail below
                logger.exception("version %s is lost", version_id)
                del self._versions[version_id]
        for request_id, each in list(self._requests.items()):
            try:
                if each.deaths > _MOST_DEATHS:
                    raise TwinkleServerError(f"the sampler died {each.deaths} times while it computed this request")
                raised(ray.get(engine.submit.remote(each.request)))
            except TwinkleError as error:
                del self._requests[request_id]
                self._failed.append(Finished(request_id, SampleFailure(error)))
        return engine


def _without_first(event: Progress, count: int) -> Progress:
    likeliest = event.topk_logprobs
    if likeliest is not None:
        likeliest = TopLogprobs(likeliest.token_ids[count:], likeliest.logprobs[count:])
    return replace(event, tokens=event.tokens[count:], logprobs=event.logprobs[count:], topk_logprobs=likeliest)
