"""From a loaded model to the services that serve it, on either runtime: making, starting and stopping them."""

import sys
from collections.abc import Callable, Iterable

from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.compute_thread import Compute
from twinkle.server.config import ServerConfig
from twinkle.server.gateway.gateway import Services
from twinkle.server.gateway.reporting import Telemetry
from twinkle.server.services.futures import Futures
from twinkle.server.services.sampling.sampler_service import SamplerService
from twinkle.server.services.training.model_service import ModelService
from twinkle.server.state import Store
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.tenancy.memory import ProcessMemory
from twinkle.server.tenancy.tenants import Tenants
from twinkle.server.types import RunRecord
from twinkle.server.verbs.runs import NativeRuns

# The longest that the compute thread or the event loop may hold the interpreter while the other wants it.
_SWITCH_SECONDS = 0.0005


def let_threads_alternate() -> None:
    """Keep the compute thread and the event loop from waiting for each other for the interpreter's usual 5 ms."""
    sys.setswitchinterval(_SWITCH_SECONDS)


def services_on(
    model: ServedModel,
    config: ServerConfig,
    store: Store,
    compute: Compute,
    files: DataDir,
    tenants: Tenants,
    telemetry: Telemetry,
    *,
    merge: bool,
    sampling_compute: Compute | None = None,
    memory: ProcessMemory | None = None,
    is_ours: Callable[[RunRecord], bool] = lambda _run: True,
    replica: str = "",
) -> Services:
    """Make the services of one model. ``is_ours`` tells which of its runs are recovered here, on this ``replica``.

    ``sampling_compute``: where samplers need not take turns with training; None: they share ``compute``.
    ``memory``: shared with all that runs in this process; None: nothing else does.
    """
    limits = config.limits
    memory = memory or ProcessMemory(limits)
    # Ops of Tinker's runs the service knows; what is different about others is registered here.
    native = NativeRuns(model, compute, tenants, config.allowed_dirs)
    training = ModelService(
        model,
        store,
        compute,
        files,
        kinds=(native,),
        merge=merge,
        tenants=tenants,
        futures=Futures(limits.result_retention_seconds, limits.unfetched_result_seconds, memory.results),
        memory=memory,
        is_ours=is_ours,
        recorder=telemetry.training(model.name),
        replica=replica,
        gap_seconds=limits.sequence_gap_seconds,
    )
    if model.sampler is None:
        return Services(model, training, None, native)
    sampling = SamplerService(
        model.sampler,
        sampling_compute or compute,
        files,
        tenants=tenants,
        context=model.max_context_length,
        futures=Futures(limits.result_retention_seconds, limits.unfetched_result_seconds, memory.results),
        memory=memory,
        completion_streams=config.clients.batched_sample_polls,
        recorder=telemetry.sampling(model.name),
    )
    return Services(model, training, sampling, native)


async def start_services(services: Iterable[Services]) -> None:
    """Recover what the last process had, and begin to work."""
    for entry in services:
        await entry.training.start()
        if entry.sampling is not None:
            await entry.sampling.start()


async def stop_services(services: Iterable[Services]) -> None:
    """Finish what runs, and put every adapter on disk."""
    for entry in services:
        if entry.sampling is not None:
            await entry.sampling.stop()
        await entry.training.stop()
