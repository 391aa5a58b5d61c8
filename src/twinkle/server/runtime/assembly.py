"""One process of a server, on either runtime: its shared parts, the services of its models, and its maintenance."""

import asyncio
import gc
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI

from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.compute_thread import Compute
from twinkle.server.config import ServerConfig
from twinkle.server.config.applications import SamplerArgs
from twinkle.server.gateway.fleet import Fleet, Services
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.gateway.reporting import Telemetry
from twinkle.server.processors.service import Processors
from twinkle.server.scheduling.scheduler import Scheduler
from twinkle.server.services.futures import Futures
from twinkle.server.services.images import RequestImages
from twinkle.server.services.running_ops import RunningOps
from twinkle.server.services.sampling.sampler_service import SamplerService
from twinkle.server.services.training.context import TrainingContext
from twinkle.server.services.training.measurements import RunMeasurements
from twinkle.server.services.training.model_service import ModelService
from twinkle.server.services.training.run_kind import RunKinds
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.state.store import Store
from twinkle.server.telemetry.recording import SamplingRecorder, TrainingRecorder
from twinkle.server.tenancy.memory import ProcessMemory
from twinkle.server.tenancy.tenants import configured_tenants
from twinkle.server.types import RunRecord
from twinkle.server.verbs.runs import NativeRuns

logger = logging.getLogger(__name__)

# The longest that one thread may hold the interpreter while another waits for it.
_SWITCH_SECONDS = 0.0005


def let_threads_alternate() -> None:
    """Shorten the interpreter's switch interval from 5 to 0.5 ms, so that compute thread and event loop wait less."""
    sys.setswitchinterval(_SWITCH_SECONDS)


class Process:
    """One process: its configuration and state, and what its services share: tenants, memory, telemetry."""

    gateway: Gateway  # set by ``open_gateway``

    def __init__(self, config: ServerConfig, telemetry: Telemetry, store: Store) -> None:
        self.config = config
        self.telemetry = telemetry
        self.store = store
        self.files = DataDir(config.data_dir)
        self.tenants = configured_tenants(config)
        self.telemetry.usage = self.tenants.usage
        self.memory = ProcessMemory(config.limits)
        self.services: dict[str, Services] = {}
        self._computes: list[Compute] = []
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def open(cls, config: ServerConfig, *, shared: bool = False) -> "Process":
        """Open the state and return the process. ``shared``: other processes have the state open, too."""
        timings = config.timings
        telemetry = Telemetry(config.telemetry, timings.export)  # first: it raises for mistakes in the configuration
        store = await Store.open(config.data_dir, config.database_url, shared=shared, timings=timings)
        return cls(config, telemetry, store)

    def add_model(
        self,
        model: ServedModel,
        *,
        merge: bool,
        sampling: SamplerArgs | None = None,
        sampler_apart: bool = False,
        is_ours: Callable[[RunRecord], bool] = lambda _run: True,
        replica: str = "",
    ) -> Services:
        """Make the services of one model, and add them to ``services``.

        ``merge``: whether ops of different adapters may be computed together. ``sampling``: the configuration of the
        model's sampler; None: that of a sampler in this process without special settings. ``is_ours`` says which of the
        model's runs are recovered here, on this ``replica``. ``sampler_apart``: the sampler computes elsewhere, so
        samples need not take turns with training.
        """
        config, limits, memory = self.config, self.config.limits, self.memory
        compute = Compute() if sampling is None else Compute(sampling.sampling_share)
        sampling_compute = Compute() if sampler_apart else compute
        self._computes += [compute, sampling_compute]
        # Services know the runs of Tinker's protocol; other kinds of run are registered here.
        native = NativeRuns(model, compute, self.tenants, config.allowed_dirs, limits.max_logits_per_request)
        context = TrainingContext(
            model,
            self.store,
            compute,
            self.files,
            self.tenants,
            kinds=RunKinds((native,)),
            futures=Futures(limits.result_retention_seconds, limits.unfetched_result_seconds, memory.results),
            recorder=TrainingRecorder(model.name, self.telemetry.metrics, self.telemetry.tracing),
            scheduler=Scheduler(
                model.tokens_per_batch,
                self.tenants.share,
                merge=merge,
                gap_timeout=limits.sequence_gap_seconds,
                contended_tokens=model.contended_tokens,
            ),
            measurements=RunMeasurements(self.store.run_metrics),
            running=RunningOps(self.files.root / "running" / quote(replica or model.name, safe="")),
            snapshot_seconds=config.timings.snapshot,
        )
        training = ModelService(context, memory, is_ours)
        sampler = None
        if model.sampler is not None:
            sampler = SamplerService(
                model.sampler,
                sampling_compute,
                self.files,
                tenants=self.tenants,
                context=model.max_context_length,
                futures=Futures(limits.result_retention_seconds, limits.unfetched_result_seconds, memory.results),
                memory=memory,
                completion_streams=config.clients.batched_sample_polls,
                computes_here=sampling is None or sampling.sampler_type != "vllm",
                recorder=SamplingRecorder(model.name, self.telemetry.metrics, self.telemetry.tracing),
                gathering=context.gathering,
                images=RequestImages(model, self.tenants.pools.images),
                mark_version_seconds=limits.version_mark_seconds,
            )
        self.services[model.name] = Services(model, training, sampler, native)
        return self.services[model.name]

    def open_gateway(
        self, app: FastAPI, processors: Processors | None = None, fleet: Fleet | None = None, replica: str = ""
    ) -> Gateway:
        """Make the gateway of this process, as ``app.state.gateway``, and start to export metrics if configured.

        In a process with services, the gateway reports on these alone. ``fleet``: the way to the services of all
        processes; None: there are no other processes.
        """
        self.gateway = Gateway(
            self.config,
            self.store,
            self.services,
            self.files,
            processors,
            self.tenants,
            fleet=None if self.services else fleet,
            fleet_of_all=fleet,
            replica=replica,
            memory=self.memory,
        )
        app.state.gateway = self.gateway
        self.telemetry.export_from(self.gateway)
        return self.gateway

    async def start(self) -> None:
        """Start the services, which recover what the last process left, and watch memory and running time."""
        self.run(self.memory.guard.watch())
        await self.gateway.usage_recorder.read_names()
        for entry in self.services.values():
            await entry.training.start()
            if entry.sampling is not None:
                await entry.sampling.start()
        self.run(self.gateway.running_time.watch())

    @staticmethod
    def spare_collections() -> None:
        """Exclude all objects that exist now from garbage collection, which would otherwise stop the process for 0.1 s.

        Only for a process that serves and does nothing else: of these objects, cycles that become unreachable later
        are never freed.
        """
        gc.collect()
        gc.freeze()

    def run(self, *work: Coroutine[Any, Any, None]) -> None:
        """Start tasks that run until :meth:`cancel_tasks`."""
        self._tasks += [asyncio.create_task(each) for each in work]

    def cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        """Finish the work that runs, write a snapshot of every changed adapter, and end the services."""
        for entry in self.services.values():
            if entry.sampling is not None:
                await entry.sampling.stop()
            await entry.training.stop()
        await self.gateway.usage_recorder.flush_usage()
        for compute in self._computes:
            compute.close()

    async def close(self) -> None:
        self.cancel_tasks()  # they still run if the start failed
        await self.telemetry.close()  # before the state is closed, which it reads
        await self.store.close()


async def run_maintenance(first: Awaitable[None], work: Callable[[float], Awaitable[None]], seconds: float) -> None:
    """Await ``first`` now, then call ``work`` with the present time every ``seconds``, until cancelled.

    A failure is logged and the next round tries again: a full disk or a database that cannot be reached for a minute
    must not end the expiry of sessions for good.
    """
    pending = first
    while True:
        try:
            await pending
        except Exception:
            logger.exception("maintenance failed")
        await asyncio.sleep(seconds)
        pending = work(time.time())
