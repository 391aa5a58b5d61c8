"""Which replica a request is for: its address, as its route declares it, looked up in the state."""

from collections import OrderedDict
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


@dataclass(frozen=True)
class Destination:
    """``address`` None: any process can answer. ``streams``: the answer is to be handed on as it comes."""

    address: Address | None
    streams: bool


def destination_of(request: HttpRequest, max_bytes: int) -> Destination:
    """Read off a request whom it concerns. ``max_bytes`` of its body after decompression."""
    facts, parameters = ROUTES.find(request.method, request.path)
    envelope = Envelope(request, parameters, max_bytes)
    return Destination(facts.owner(envelope), facts.streams(envelope))


class Directory:
    """Finds replicas for one process. What it has found once stays true as long as the process lives."""

    def __init__(self, config: ServerConfig, layout: Layout, store: Store) -> None:
        self._layout = layout
        self._store = store
        self._names = {name: served.name for served in config.served_models for name in served.names}
        self._turn = 0
        self._found: OrderedDict[str, str] = OrderedDict()  # by run or sampling session

    async def find(self, address: Address) -> str | None:
        """Return the replica's name. None: no replica has it, and any process can say so."""
        match address:
            case OfRun(run_id, model):
                return await self._of_run(run_id) or self._any_of(model)
            case OfSampler(sampling_session_id):
                return await self._of_sampler(sampling_session_id)
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
        if run_id not in self._found:
            self._remember(run_id, await self._store.runs.get(run_id))
        return self._found.get(run_id)

    async def _of_sampler(self, sampling_session_id: str) -> str | None:
        if sampling_session_id not in self._found:
            self._remember(sampling_session_id, await self._store.sampling_sessions.get(sampling_session_id))
        return self._found.get(sampling_session_id)

    async def _of_new_run(self, run_id: str, base_model: str | None, checkpoint: CheckpointPath | None) -> str | None:
        model = self._model(base_model)
        if base_model is None and checkpoint is not None:
            source = await self._store.runs.get(checkpoint.run_id)
            model = None if source is None else source.model_name
        replicas = None if model is None else self._layout.models.get(model)
        if model is None or replicas is None or len(replicas.names) == 1:
            return None if replicas is None else replicas.names[0]
        return replicas.emptiest(run_id, await self._store.runs.live_by_replica(model))

    async def _of_openai_model(self, name: str) -> str | None:
        if name in self._names:
            return self._any(self._layout.models[self._names[name]])
        run_id = name.partition("://")[2].partition("/")[0] if "://" in name else name
        return await self._of_run(run_id)

    def _replicas(self, base_model: str | None) -> Replicas | None:
        model = self._model(base_model)
        return None if model is None else self._layout.models[model]

    def _model(self, base_model: str | None) -> str | None:
        known = None if base_model is None else known_name(base_model, self._names)
        return None if known is None else self._names[known]

    def _any_of(self, base_model: str | None) -> str | None:
        replicas = self._replicas(base_model)
        return None if replicas is None else self._any(replicas)

    def _any(self, replicas: Replicas) -> str:
        """Return one replica after another."""
        self._turn = (self._turn + 1) % len(replicas.names)
        return replicas.names[self._turn]

    def _remember(self, identifier: str, record: RunRecord | SamplingSessionRecord | None) -> None:
        """Note which replica has what a record is about. What is not on record, or not served, is asked for again."""
        replicas = None if record is None else self._layout.models.get(record.model_name)
        if record is None or replicas is None:
            return
        self._found[identifier] = replicas.owner(identifier, record.replica)
        if len(self._found) > _REMEMBERED:
            self._found.popitem(last=False)
