"""From a loaded model to the services that serve it, on either runtime."""

from collections.abc import Callable

from twinkle.server.backend import ServedModel
from twinkle.server.compute import Compute
from twinkle.server.config import ServerConfig
from twinkle.server.files import DataDir
from twinkle.server.futures import Futures
from twinkle.server.gateway import Services
from twinkle.server.model_service import ModelService
from twinkle.server.sampler_service import SamplerService
from twinkle.server.state import Store
from twinkle.server.templates import Templates
from twinkle.server.types import RunRecord


def services_on(
    model: ServedModel,
    config: ServerConfig,
    store: Store,
    compute: Compute,
    files: DataDir,
    *,
    merge: bool,
    is_ours: Callable[[RunRecord], bool] = lambda _run: True,
) -> Services:
    """``is_ours`` tells which runs of this base model are to be brought back here."""
    limits = config.limits
    templates = Templates(model)
    training = ModelService(
        model,
        templates,
        store,
        compute,
        files,
        merge=merge,
        allowed_dirs=config.allowed_dirs,
        max_queued_ops=limits.max_queued_ops_per_tenant,
        max_unfetched_bytes=limits.max_unfetched_result_bytes,
        futures=Futures(limits.result_retention_seconds, limits.unfetched_result_seconds),
        is_ours=is_ours,
    )
    if model.sampler is None:
        return Services(model, training, None, templates)
    sampling = SamplerService(
        model.sampler,
        compute,
        files,
        max_waiting=limits.max_waiting_samples_per_tenant,
        max_unfetched_bytes=limits.max_unfetched_result_bytes,
        futures=Futures(limits.result_retention_seconds, limits.unfetched_result_seconds),
        completion_streams=config.clients.batched_sample_polls,
    )
    return Services(model, training, sampling, templates)
