"""The gateway: identifies the caller, checks ownership, and chooses the service that handles a request.

Routes turn HTTP into calls of its methods and back; maintenance calls it, too. All methods belong to the event loop.
What it holds in memory only, such as heartbeats since the last maintenance, uploads to a hub and caches, is lost in a
restart.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

from prometheus_client.metrics_core import Metric

from twinkle.errors import (
    CapacityError,
    GoneError,
    InvalidInputError,
    NotFoundError,
    QuotaError,
    UnknownNameError,
    UnsupportedError,
)
from twinkle.images import SentImages
from twinkle.model.types import LoraSpec, TrainingSpec
from twinkle.sampler.types import SampleRequest
from twinkle.server import ids
from twinkle.server.config import ServerConfig
from twinkle.server.config.applications import known_name
from twinkle.server.gateway.checkpoint_actions import CheckpointActions
from twinkle.server.gateway.fleet import Fleet, ModelReport, Services, TenantReport, report_of, tenant_report_of
from twinkle.server.gateway.hub_uploads import HubUploads
from twinkle.server.gateway.identity import Identity, SignedUrls
from twinkle.server.gateway.replica_holds import WrongModeError, check_mode, held_message
from twinkle.server.gateway.running_time import RunningTime
from twinkle.server.gateway.sampling_clients import SamplingClients
from twinkle.server.gateway.silent_sessions import SilentSessions
from twinkle.server.gateway.unloading import Unloading
from twinkle.server.gateway.usage_recorder import UsageRecorder
from twinkle.server.ids import CheckpointPath
from twinkle.server.processors.service import Processors, ProcessorService
from twinkle.server.services.checkpoints.access import readable_checkpoint
from twinkle.server.services.sampling.completions import Completion
from twinkle.server.services.sampling.sampler_service import SamplerService
from twinkle.server.services.training.custom_losses import CustomLosses
from twinkle.server.state.errors import ReplicaHeldError
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.state.records.sampling import SAMPLING_SESSION_ROWS
from twinkle.server.state.records.sessions import SESSION_ROWS
from twinkle.server.state.store import Store
from twinkle.server.tenancy.memory import ProcessMemory
from twinkle.server.tenancy.tenants import Tenants
from twinkle.server.tenancy.work_pools import TenantTurns
from twinkle.server.types import (
    UNNUMBERED,
    Budget,
    CheckpointRecord,
    CreateAdapter,
    FinishReason,
    Op,
    OpKind,
    RunRecord,
    SamplingSessionRecord,
    SessionRecord,
)
from twinkle.server.wire.requests import CreateModelRequest
from twinkle.server.wire.sampling import Encode
from twinkle_client.protocol.base import SESSION_LOST

logger = logging.getLogger(__name__)

_ACKNOWLEDGED_AT_ONCE = 512
_DELETED_VERSIONS = (
    "unnamed versions are deleted when they are unused and there are newer ones: give a save a name to keep it"
)
T = TypeVar("T")


class Gateway:
    def __init__(
        self,
        config: ServerConfig,
        store: Store,
        services: Mapping[str, Services],
        files: DataDir,
        processors: Processors | None = None,
        tenants: Tenants | None = None,
        *,
        fleet: Fleet | None = None,
        fleet_of_all: Fleet | None = None,
        replica: str = "",
        memory: ProcessMemory | None = None,
    ) -> None:
        """Connect the services of this process with the state and the other processes.

        services: the services of this process, by the name of their base model.
        fleet: the fleet for which this gateway answers; None: the services of this process.
        fleet_of_all: for the gateway of a replica, whose ``fleet`` is only its own services: the way to all replicas.
            None: the same as ``fleet``.
        replica: the name of this replica; empty if other processes do not call it by name.
        memory: the memory budgets that the services of this process share; None: new ones.
        """
        self.config = config
        self.store = store
        self.services = services
        self.files = files
        self.processors = processors
        self.tenants = tenants or Tenants()
        self.memory = memory or ProcessMemory(config.limits)
        self.usage_recorder = UsageRecorder(store, self.tenants)
        self.reading = self.tenants.pools.reading  # threads that decode large bodies
        self.copying = TenantTurns(at_once=1)  # a tenant copies one checkpoint at a time
        self.started_at = time.time()
        self.stopping = False
        self.uploads = HubUploads(self.tenants.pools.hub)
        self.replica = replica
        self.fleet: Fleet = fleet or self
        self.fleet_of_all: Fleet = fleet_of_all or self.fleet
        limits = config.limits
        judged = (limits.session_timeout_seconds, limits.silent_session_seconds, limits.unused_version_seconds)
        self.running_time = RunningTime(min(judged))
        self.silent_sessions = SilentSessions(self)
        self.custom_losses = CustomLosses(store, config.limits.max_custom_losses_per_tenant, self.reading)
        self.identity = Identity(config, store.keys)
        self.checkpoint_actions = CheckpointActions(store, files, self.tenants.pools.saving)
        self.signed_urls = SignedUrls(store, self.identity, config.timings.signed_url)
        self.unloading = Unloading(self)
        self._names = {name: entry for entry in services.values() for name in (entry.model.name, *entry.model.aliases)}
        self._sampling_services = [entry.sampling for entry in services.values() if entry.sampling is not None]
        self._served = [name for served in config.served_models for name in served.names]
        self._heartbeats: dict[str, float] = {}
        self._families: dict[str, str] = {}  # a cache: of models in other processes, by the name of the model
        # A cache: every sample looks up its sampling session, and these records never change.
        self._samplers: dict[str, SamplingSessionRecord] = {}
        self._sampling_clients = SamplingClients(store.sampling_sessions)

    # --- the services of this process, as a Fleet --------------------------------------------------------------------

    async def reports(self) -> dict[str, ModelReport]:
        longest = self.config.telemetry.stuck_step_seconds
        return {name: report_of(entry, longest) for name, entry in self.services.items()}

    async def of_tenant(self, tenant_id: str) -> dict[str, TenantReport]:
        return {name: tenant_report_of(entry, tenant_id) for name, entry in self.services.items()}

    async def metrics(self) -> dict[str, Sequence[Metric]]:
        return {}

    async def release_session(self, session: SessionRecord, state: str) -> None:
        """Evict the adapters and release the versions that the services of this process hold for an ended session."""
        for run in await self.store.runs.of_session(session.session_id):
            await self.evict(run, f"session {session.session_id} {state}")
        for sampling_session in await self.store.sampling_sessions.of_session(session.session_id):
            await self._release(sampling_session)

    async def evict(self, run: RunRecord, why: str) -> None:
        """Evict the adapter of a live run, if this process serves its base model; otherwise do nothing.

        The run of a base model that is not served now stays live in the database, until a server serves it again.
        """
        if run.state == "live" and run.model_name in self.services:
            entry = self.services[run.model_name]
            outdated = await entry.training.adapters.evict(run, why, self.config.limits.parked_adapter_seconds)
            entry.release_versions(outdated)

    @property
    def budgets(self) -> list[Budget]:
        """Return the byte budgets that all tenants share in this process, with their limits; one for each resource."""
        budgets = [self.memory.guard.budget, self.memory.results.budget]
        services = [entry.training for entry in self.services.values()]
        of_models = [budget for training in services for budget in training.budgets]
        for resource in dict.fromkeys(budget.resource for budget in of_models):
            same = [budget for budget in of_models if budget.resource == resource]
            budgets.append(Budget(resource, sum(b.used for b in same), sum(b.limit for b in same)))
        budgets += [training.journal.budget for training in services[:1]]  # all services write to one journal
        if isinstance(self.processors, ProcessorService):  # otherwise another process has them, and reports them
            budgets.append(self.processors.budget)
        return budgets

    # --- which model --------------------------------------------------------------------------------------------------

    def is_served(self, name: str) -> bool:
        """Return whether a name is that of a served model, here or in another process."""
        return known_name(name, self._served) is not None

    def model(self, name: str) -> Services:
        """Return the services of a base model by its name or alias; a suffix such as ``:peft:262144`` is ignored.

        UnknownNameError if this process does not serve it.
        """
        known = known_name(name, self._names)
        if known is None:
            raise UnknownNameError("base_model", name, self.config.listed_names)
        return self._names[known]

    def serving(self, model_name: str) -> Services:
        """Return the services of a base model that a database record names.

        UnsupportedError if this process does not serve the model, as when the configuration no longer lists it.
        """
        services = self.services.get(model_name)
        if services is None:
            served = ", ".join(one.name for one in self.config.served_models)
            raise UnsupportedError(f"base model {model_name!r} is not served any more; served: {served}")
        return services

    async def family_of(self, model_name: str) -> str | None:
        """Return the family of a base model that a database record names, which decides what its adapters look like in
        files. None: it is not served any more.

        On Ray its services may be in another process, which is asked once. CapacityError: it has never answered.
        """
        services = self.services.get(model_name)
        if services is not None:
            return services.model.architecture
        if model_name not in (served.name for served in self.config.served_models):
            return None
        if model_name not in self._families:
            reports = await self.fleet_of_all.reports()
            self._families |= {name: report.architecture for name, report in reports.items()}
        if model_name not in self._families:
            raise CapacityError(f"{model_name} does not answer yet: try again")
        return self._families[model_name]

    async def listed_models(self) -> dict[str, ModelReport]:
        """Return the reports of models, by the names that the configuration shows to clients.

        A model from which no report has ever come is left out; one that does not answer now has its last report.
        """
        reports = await self.fleet.reports()
        by_name = {name: report for report in reports.values() for name in report.names}
        return {name: by_name[name] for name in self.config.listed_names if name in by_name}

    def sampler_of(self, session: SamplingSessionRecord) -> SamplerService:
        sampling = self.serving(session.model_name).sampling
        if sampling is None:
            raise UnsupportedError(f"base_model: {session.base_model!r} is served for training only")
        return sampling

    # --- sessions -----------------------------------------------------------------------------------------------------

    async def create_session(self, session: SessionRecord, idempotency_key: str | None) -> SessionRecord:
        limits = self.tenants.limits(session.tenant_id)
        most, most_rows = limits.max_sessions_per_tenant, limits.max_session_rows_per_tenant
        return await self.silent_sessions.with_room(
            session.tenant_id,
            lambda: self.store.sessions.create(session, idempotency_key, most, most_rows),
        )

    async def with_row_room(self, tenant_id: str, create: Callable[[], Awaitable[T]]) -> T:
        """Call ``create`` and return its result.

        If it fails because the tenant has too many rows of sessions or sampling sessions in the database, delete rows
        of its oldest ended sessions and try once more; QuotaError if there are none to delete.
        """
        try:
            return await create()
        except QuotaError as error:
            if error.key not in (SESSION_ROWS, SAMPLING_SESSION_ROWS):
                raise
            if not await self.store.retention.make_room(tenant_id, time.time()):
                raise
        return await create()

    async def session(self, session_id: str, tenant_id: str) -> SessionRecord:
        record = await self.store.sessions.get(session_id)
        if record is None or record.tenant_id != tenant_id:
            raise NotFoundError("session", session_id).with_code(SESSION_LOST)
        return record

    async def active_session(self, session_id: str, tenant_id: str) -> SessionRecord:
        record = await self.session(session_id, tenant_id)
        if record.state != "active":
            allowed = f"a session that is active, this one is {record.state}: make a new client"
            raise InvalidInputError("session_id", session_id, allowed).with_code(SESSION_LOST)
        return record

    async def heartbeat(self, session_id: str, tenant_id: str) -> None:
        """Note that a session's client is alive; GoneError if the session has ended."""
        record = await self.session(session_id, tenant_id)
        self._heartbeats[session_id] = time.time()
        if record.state != "active":
            raise GoneError(f"session {record.session_id} is {record.state}").with_code(SESSION_LOST)

    def last_seen(self, session: SessionRecord) -> float:
        """Return the time of a session's last heartbeat, as far as this process knows."""
        return max(session.last_seen, self._heartbeats.get(session.session_id, 0.0))

    async def finish_session(
        self, session_id: str, tenant_id: str, reason: FinishReason = "success", detail: str | None = None
    ) -> None:
        """End a session because its client says that it is done. A session that has ended keeps its first reason."""
        record = await self.session(session_id, tenant_id)
        if record.state == "active":
            await self.end_session(record, "finished", reason, detail)

    async def end_session(
        self,
        session: SessionRecord,
        state: Literal["finished", "expired"],
        reason: FinishReason | None = None,
        detail: str | None = None,
    ) -> None:
        """End a session with its processors, evict its adapters, and release its versions.

        The last state of each adapter is kept as a checkpoint for a while.
        """
        await self.store.sessions.end(session.session_id, state, time.time(), reason, detail)
        self._heartbeats.pop(session.session_id, None)
        if self.processors is not None:
            await self.processors.end_session(session.session_id)
        await self.fleet.release_session(session, state)

    async def _release(self, sampling_session: SamplingSessionRecord) -> None:
        """Release the version of a sampling session, unless an active session may still sample from its files.

        As long as its files exist, a later request can load the version again.
        """
        self._samplers.pop(sampling_session.sampling_session_id, None)
        self._sampling_clients.forget(sampling_session.sampling_session_id)
        entry = self.services.get(sampling_session.model_name)
        if sampling_session.version_id is None or sampling_session.directory is None or entry is None:
            return
        if not await self.store.sampling_sessions.refer_to(sampling_session.directory):
            entry.release_versions([sampling_session.version_id])

    async def resume_interrupted_evictions(self) -> None:
        """Evict live adapters whose session has ended, and continue unloads that clients asked for.

        Both concern base models that this process serves. Such adapters are left over when the server stopped, or the
        database was unavailable, during an eviction. Runs that hold a replica and could not be saved are tried again.
        """
        failed = [each for entry in self.services.values() for each in entry.training.adapters.failed_evictions()]
        for run, why in failed:
            await self.evict(run, why)
        tried = {run.run_id for run, _ in failed}
        for run in await self.store.runs.left_behind():
            session = await self.store.sessions.get(run.session_id)
            assert session is not None, "a run has a session"
            if run.run_id not in tried:
                await self.evict(run, f"session {session.session_id} {session.state}")
        await self.unloading.resume()

    async def evict_anywhere(self, run: RunRecord, why: str) -> None:
        """Evict an adapter on whichever replica has it."""
        if run.model_name in self.services and run.run_id in self.services[run.model_name].training.adapters:
            await self.evict(run, why)
        else:
            await self.fleet_of_all.evict(run, why)

    def last_request(self, run: RunRecord) -> float:
        """Return the time of a run's last request, as far as this process knows."""
        known = (entry.training.last_requests().get(run.run_id, 0.0) for entry in self.services.values())
        return max([run.last_request_at, *known])

    # --- adapters -----------------------------------------------------------------------------------------------------

    async def create_model(self, tenant_id: str, wanted: CreateModelRequest, body: bytes) -> tuple[str, str]:
        """Create a run of Tinker's protocol; return its run id and the id of the request.

        The future of the request has already failed if the model is not trained in the way that was asked for, or if
        another run trains all its parameters.
        """
        session_id, number, spec = wanted.session_id, wanted.model_seq_id, wanted.spec()
        if isinstance(spec, LoraSpec) and spec.seed is None:
            # Drawn here and stored with the run: a replay must initialize the same weights.
            spec = replace(spec, seed=secrets.randbits(63))
        run_id, metadata = ids.run_id(session_id, number), wanted.user_metadata or {}
        run = self.new_run(run_id, tenant_id, session_id, number, wanted.base_model, spec, metadata)
        op = Op(run_id, 0, OpKind.CREATE, CreateAdapter(spec), body)
        return run_id, await self.create_tinker_run(run, op, "lora_config")

    async def create_tinker_run(self, run: RunRecord, op: Op, field: str) -> str:
        """Create a run as :meth:`create_run` does, but let the future fail if its model cannot have the run now.

        The SDK reports a failed future to its user; it would send a request that is answered with 409 again. ``field``:
        the field of the request that says what is trained.
        """
        await self.active_session(run.session_id, run.tenant_id)
        try:
            check_mode(self.serving(run.model_name).model, run, field)
            return await self.create_run(run, op)
        except (WrongModeError, ReplicaHeldError, UnsupportedError) as error:
            # The record is how the client's next request, for the result of the future, finds its replica.
            await self.store.runs.add_refused(replace(run, state="failed", note=str(error)))
            return self.serving(run.model_name).training.refuse(run, str(error))

    def new_run(
        self,
        run_id: str,
        tenant_id: str,
        session_id: str,
        number: int,
        base_model: str,
        spec: TrainingSpec,
        user_metadata: Mapping[str, str],
    ) -> RunRecord:
        """Return the record of a run that is to be created; InvalidInputError if its rank exceeds the limit."""
        if isinstance(spec, LoraSpec):
            _check_rank(spec, self.config.limits.max_rank)
        now = time.time()
        return RunRecord(
            run_id=run_id,
            session_id=session_id,
            number=number,
            tenant_id=tenant_id,
            base_model=base_model,
            model_name=self.model(base_model).model.name,
            spec=spec,
            created_at=now,
            last_request_at=now,
            user_metadata=user_metadata,
            replica=self.replica,
        )

    async def create_run(self, run: RunRecord, op: Op) -> str:
        """Create a run's adapter with its first op; return the id of the request.

        ReplicaHeldError: another run trains all parameters of the model. The message says since when, and when it ends.
        """
        await self.active_session(run.session_id, run.tenant_id)
        training = self.serving(run.model_name).training
        await self.usage_recorder.check_space(run.tenant_id)  # eviction will save a checkpoint whatever the limit says
        try:
            request_id = await self.silent_sessions.with_room(
                run.tenant_id, lambda: training.create(run, op), own_session=run.session_id
            )
        except ReplicaHeldError as error:
            raise ReplicaHeldError(error.holder, await held_message(self, run, error.holder)) from None
        session = await self.session(run.session_id, run.tenant_id)
        if session.state != "active":  # the session ended meanwhile, and its end missed this adapter
            await self.evict(run, f"session {session.session_id} {session.state}")
        return request_id

    async def run_record(self, run_id: str, tenant_id: str) -> RunRecord:
        for entry in self.services.values():
            live = entry.training.adapters.get(run_id)
            if live is not None and live.run.tenant_id == tenant_id:
                return live.run
        record = await self.store.runs.get(run_id)
        if record is None or record.tenant_id != tenant_id:
            raise NotFoundError("model", run_id)
        return record

    async def tinker_run(self, run_id: str, tenant_id: str) -> RunRecord:
        """Return a run that Tinker's requests may change; InvalidInputError for runs of the native protocol."""
        run = await self.run_record(run_id, tenant_id)
        if not ids.is_tinker_run(run.run_id):
            raise InvalidInputError("model_id", run.run_id, "a model of Tinker's protocol, not of the native client")
        return run

    async def submit(self, op: Op, tenant_id: str) -> str:
        """Accept an op of a Tinker run and return its request id. An op without a number gets the next one of its run.

        The op is not accepted if the run is not live, or if only some of its ops have numbers. Then the future under
        the id that is returned has failed.
        """
        run = await self.tinker_run(op.adapter_id, tenant_id)
        training = self.serving(run.model_name).training
        if run.run_id not in training.adapters:
            return training.refuse(run, training.absence(run))
        if (conflict := training.numbering_conflict(op)) is not None:
            return training.refuse(run, conflict)
        return await (training.submit_unnumbered(op) if op.seq == UNNUMBERED else training.submit(op))

    # --- checkpoints --------------------------------------------------------------------------------------------------

    async def checkpoint(self, path: CheckpointPath, tenant_id: str) -> CheckpointRecord:
        return await readable_checkpoint(self.store, path, tenant_id)

    async def run_of(self, checkpoint: CheckpointRecord) -> RunRecord:
        """Return the run that a checkpoint belongs to."""
        run = await self.store.runs.get(checkpoint.run_id)
        assert run is not None, "a checkpoint has a run"
        return run

    async def run_of_checkpoint(self, address: str, tenant_id: str, field: str) -> RunRecord:
        """Return the run of the checkpoint at ``address``. ``field``: the request's field that holds the address."""
        return await self.run_of(await self.checkpoint(CheckpointPath.parse(address, field), tenant_id))

    # --- sampling -----------------------------------------------------------------------------------------------------

    async def sampling_session(self, sampling_session_id: str, tenant_id: str) -> SamplingSessionRecord:
        record = self._samplers.get(sampling_session_id)
        if record is None:
            record = await self.store.sampling_sessions.get(sampling_session_id)
        if record is None or record.tenant_id != tenant_id:
            raise NotFoundError("sampling session", sampling_session_id, _DELETED_VERSIONS)
        self._samplers[sampling_session_id] = record
        return record

    async def unused_sample_number(self, session: SamplingSessionRecord) -> int:
        """Return a number for a sample request without one."""
        return await self._sampling_clients.unused_number(session.sampling_session_id)

    async def sample(
        self,
        session: SamplingSessionRecord,
        seq_id: int,
        request: SampleRequest,
        encode: Encode,
        digest: bytes,
        images: SentImages,
    ) -> None:
        """Accept a sample request.

        ``digest``: a hash of the request's body. A sequence number that comes again with another digest is refused.
        ``images``: those that are not in the request's prompt yet.
        """
        sampling = self.sampler_of(session)
        if sampling.completions is not None:
            await self._sampling_clients.use(sampling, session.sampling_session_id, seq_id)
        pixels = 0
        if images:
            request, pixels = await sampling.read_images(session, request, images)
        sampling.sample(session, request, digest=digest, encode=encode, pixels=pixels)

    async def completions(
        self, session: SamplingSessionRecord, client: int, place: int, acknowledged: Sequence[str], timeout: float
    ) -> Sequence[Completion]:
        """Return the completed samples of one client that come after ``place`` in its stream of completions.

        If there are none yet, wait up to ``timeout`` seconds. ``acknowledged``: request ids of results that the client
        has received.
        """
        sampling = self.sampler_of(session)
        if sampling.completions is None:
            raise UnsupportedError("retrieve_futures is switched off here, as client/config says: use retrieve_future")
        for start in range(0, len(acknowledged), _ACKNOWLEDGED_AT_ONCE):
            sampling.acknowledge(session.sampling_session_id, acknowledged[start : start + _ACKNOWLEDGED_AT_ONCE])
            await asyncio.sleep(0)  # let the event loop serve other requests
        key = session.sampling_session_id, client
        with sampling.being_asked(session.sampling_session_id):
            return await self._sampling_clients.completions(sampling, sampling.completions, key, place, timeout)

    # --- maintenance --------------------------------------------------------------------------------------------------

    async def flush_heartbeats(self) -> None:
        """Write the heartbeats since the last call to the database."""
        beats, self._heartbeats = self._heartbeats, {}
        if beats:
            await self.store.sessions.touch(beats)

    def release_waiters(self) -> None:
        """End the waits of all long polls now, because this process is about to end."""
        self.stopping = True
        self.unloading.release_waiters()
        self.tenants.pools.release_waiters()
        if self.processors is not None:
            self.processors.release_waiters()
        for entry in self.services.values():
            entry.training.context.futures.close()
        for sampling in self._sampling_services:
            sampling.release_waiters()

    async def maintain(self, now: float) -> None:
        """Do all maintenance, where one process is the whole server, except answering operators' requests."""
        await self.flush_heartbeats()
        await self.expire(now)
        await self.maintain_services(now)

    async def maintain_services(self, now: float) -> None:
        """Do the maintenance of this process's services; delete outdated ops, custom losses and audit entries."""
        await self.usage_recorder.maintain(now)
        await self.resume_interrupted_evictions()
        await self.unloading.end_lifetimes(time.monotonic())
        await self._cancel_samples_of_vanished_clients(now)
        limits = self.config.limits
        for entry in self.services.values():
            await self.store.runs.touch(entry.training.last_requests())
            await self.store.ops.mark_delivered(entry.training.sweep(now), now)
        for sampling in self._sampling_services:
            sampling.sweep(now)
        await self.store.custom_losses.prune()
        await self.store.ops.prune(now, limits.result_retention_seconds, limits.unfetched_result_seconds)
        for entry in self.services.values():
            await entry.training.journal.measure()
        await self.store.audit.prune(now - limits.audit_retention_seconds)

    async def _cancel_samples_of_vanished_clients(self, now: float) -> None:
        """Cancel samples whose client is gone.

        It is gone if no sample of its session was polled for ``silent_session_seconds``, and the session has ended or
        sent no heartbeat for that long either.
        """
        seconds = self.config.limits.silent_session_seconds
        if not self.running_time.ran_for(seconds):
            return
        for sampling in self._sampling_services:
            for session_id in sampling.unasked_sessions(seconds):
                record = await self.store.sessions.get(session_id)
                if record is None or record.state != "active" or self.last_seen(record) < now - seconds:
                    count = sampling.cancel_unasked(session_id, seconds)
                    logger.info("%d samples of session %s cancelled: its client is gone", count, session_id)

    async def expire(self, now: float) -> None:
        """End sessions that time out; delete expired checkpoints, unused versions, and rows of sessions ended long ago.

        A session times out after ``session_timeout_seconds`` without a heartbeat, if it has no unfinished ops.

        If this process was paused or the wall clock was set since the last call, a session's silence proves nothing:
        then all active sessions count as heard from now, and nothing expires this time.
        """
        if self.running_time.take_interruption():
            forgiven = await self.store.sessions.extend_deadlines_after_downtime(now)
            await self.store.ops.extend_deadlines_after_downtime(now)
            logger.warning("the server was paused or its clock was set: %d sessions count as heard of now", forgiven)
            return
        limits = self.config.limits
        silent = await self.store.sessions.silent(now - limits.session_timeout_seconds)
        reports = (await self.fleet.reports()).values() if silent else ()
        for session in silent:
            if not any(session.session_id in report.busy_sessions for report in reports):
                logger.info("session %s expired", session.session_id)
                await self.end_session(session, "expired")
        abandoned = await self.store.sampling_sessions.abandoned(now - limits.sampler_version_retention_seconds)
        unneeded = (*abandoned, *await self.store.sampling_sessions.orphaned(), *await self._unused_versions(now))
        for sampling_session in unneeded:
            assert sampling_session.directory is not None, "a version has files"
            await asyncio.to_thread(self.files.remove, sampling_session.directory)
            await self.store.sampling_sessions.delete(sampling_session.sampling_session_id)
            await self._release(sampling_session)
        await self.checkpoint_actions.delete_expired(now)
        forgotten = await self.store.retention.delete_ended(now - limits.ended_session_retention_seconds)
        if forgotten:
            logger.info("%d rows of sessions that ended long ago were deleted", forgotten)

    async def _unused_versions(self, now: float) -> list[SamplingSessionRecord]:
        """Return unnamed versions of active sessions that are not sampled from, but for the newest of each session.

        There are none until this process has run for that long without a break, because a client of a stopped server
        cannot sample.
        """
        limits = self.config.limits
        newest, seconds = limits.max_unused_versions_per_session, limits.unused_version_seconds
        if newest is None or not self.running_time.ran_for(seconds):
            return []
        older = await self.store.sampling_sessions.superseded(newest)
        reports = (await self.fleet.reports()).values() if older else ()
        under_way = frozenset[str]().union(*(report.sampled_sessions for report in reports))
        older = tuple(each for each in older if each.sampling_session_id not in under_way)

        before = now - seconds - limits.version_mark_seconds  # it may have been used for so long after its mark

        def unused() -> list[SamplingSessionRecord]:
            return [each for each in older if each.directory and self.files.last_used(each.directory) < before]

        found = await asyncio.to_thread(unused)
        if found:
            logger.info("%d unused sampler versions of active sessions are deleted", len(found))
        return found


def _check_rank(spec: LoraSpec, most: int) -> None:
    if spec.rank > most:
        raise InvalidInputError("lora_config.rank", spec.rank, f"1 to {most}")
    for pattern, rank in spec.rank_pattern.items():
        if rank > most:
            raise InvalidInputError(f"rank_pattern[{pattern!r}]", rank, f"1 to {most}")
