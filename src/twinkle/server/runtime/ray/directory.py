"""Find the replica that a request is for: the route gives the request's address, the state says where that is."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from twinkle.server.app import ROUTES
from twinkle.server.config import ServerConfig
from twinkle.server.config.applications import known_name
from twinkle.server.http.asgi_relay import HttpRequest
from twinkle.server.http.owners import (
    Address,
    Envelope,
    OfModel,
    OfNewRun,
    OfNewSampler,
    OfOpenAiModel,
    OfProcessors,
    OfRun,
    OfSampler,
)
from twinkle.server.ids import CheckpointPath
from twinkle.server.runtime.ray.layout import Layout, Replicas
from twinkle.server.state.store import Store
from twinkle.server.types import RunRecord, SamplingSessionRecord

_REMEMBERED = 65_536
_Record = RunRecord | SamplingSessionRecord


@dataclass(frozen=True)
class Destination:
    """Where a request goes. ``address`` None: any process can answer. ``streams``: the answer is a stream."""

    address: Address | None
    streams: bool


def destination_of(request: HttpRequest, max_bytes: int) -> Destination:
    """Return the destination that a request's route declares. ``max_bytes``: limit of its body after decompression."""
    facts, parameters = ROUTES.find(request.method, request.path)
    envelope = Envelope(request, parameters, max_bytes)
    return Destination(facts.owner(envelope), facts.streams(envelope))


class Directory:
    """Finds replicas for one process. The replica of a run or sampling session is cached: it does not change."""

    def __init__(self, config: ServerConfig, layout: Layout, store: Store) -> None:
        self._layout = layout
        self._store = store
        self._models = {name: layout.models[served.name] for served in config.served_models for name in served.names}
        self._turn = 0
        self._found: OrderedDict[str, str] = OrderedDict()  # by run or sampling session

    async def find(self, address: Address) -> str | None:
        """Return the name of the replica. None: no replica has the thing addressed, and any process can answer so."""
        match address:
            case OfRun(run_id, model):
                return await self._of_run(run_id) or self._any_of(model)
            case OfSampler(sampling_session_id):
                return await self._owner(sampling_session_id, self._store.sampling_sessions.get)
            case OfNewRun(run_id, base_model, checkpoint):
                return await self._of_run(run_id) or await self._of_new_run(run_id, base_model, checkpoint)
            case OfNewSampler(sampling_session_id, base_model, checkpoint):
                if checkpoint is not None:
                    return await self._of_run(checkpoint.run_id)
                replicas = self._replicas(base_model)
                return None if replicas is None else replicas.chosen(sampling_session_id)
            case OfModel(name, first):
                replicas = self._replicas(name)
                return replicas.names[0] if replicas is not None and first else self._any_of(name)
            case OfOpenAiModel(name):
                return await self._of_openai_model(name)
            case OfProcessors(session_id):
                return self._layout.processors.chosen(session_id) if self._layout.processors.names else None

    async def _of_run(self, run_id: str) -> str | None:
        return await self._owner(run_id, self._store.runs.get)

    async def _owner(self, identifier: str, get: Callable[[str], Awaitable[_Record | None]]) -> str | None:
        """Return the replica that has a run or a sampling session; None, which is not cached, if there is none."""
        if identifier not in self._found:
            record = await get(identifier)
            replicas = None if record is None else self._layout.models.get(record.model_name)
            if record is None or replicas is None:
                return None
            self._found[identifier] = replicas.owner(identifier, record.replica)
            if len(self._found) > _REMEMBERED:
                self._found.popitem(last=False)
        return self._found[identifier]

    async def _of_new_run(self, run_id: str, base_model: str | None, checkpoint: CheckpointPath | None) -> str | None:
        replicas = self._replicas(base_model)
        if base_model is None and checkpoint is not None:
            source = await self._store.runs.get(checkpoint.run_id)
            replicas = None if source is None else self._layout.models.get(source.model_name)
        if replicas is None or len(replicas.names) == 1:
            return None if replicas is None else replicas.names[0]
        return replicas.emptiest(run_id, await self._store.runs.live_by_replica(replicas.model))

    async def _of_openai_model(self, name: str) -> str | None:
        if name in self._models:
            return self._any(self._models[name])
        run_id = name.partition("://")[2].partition("/")[0] if "://" in name else name
        return await self._of_run(run_id)

    def _replicas(self, base_model: str | None) -> Replicas | None:
        known = None if base_model is None else known_name(base_model, self._models)
        return None if known is None else self._models[known]

    def _any_of(self, base_model: str | None) -> str | None:
        replicas = self._replicas(base_model)
        return None if replicas is None else self._any(replicas)

    def _any(self, replicas: Replicas) -> str:
        """Return one of the replicas, in turn."""
        self._turn = (self._turn + 1) % len(replicas.names)
        return replicas.names[self._turn]
