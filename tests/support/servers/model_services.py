"""A training service in the test's own process, without a server around it."""

from pathlib import Path

from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.compute_thread import Compute
from twinkle.server.scheduling.scheduler import Scheduler
from twinkle.server.services.futures import Futures
from twinkle.server.services.running_ops import RunningOps
from twinkle.server.services.training.context import TrainingContext
from twinkle.server.services.training.measurements import RunMeasurements
from twinkle.server.services.training.model_service import ModelService
from twinkle.server.services.training.run_kind import RunKinds
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.state.store import Store
from twinkle.server.telemetry.recording import TrainingRecorder
from twinkle.server.tenancy.memory import ProcessMemory
from twinkle.server.tenancy.tenants import Tenants


def model_service(
    model: ServedModel, store: Store, compute: Compute, root: Path, tenants: Tenants | None = None
) -> ModelService:
    """Return a ModelService for the model, with its own scheduler and futures and with its files below ``root``."""
    tenants = tenants or Tenants()
    context = TrainingContext(
        model,
        store,
        compute,
        DataDir(root),
        tenants,
        kinds=RunKinds(),
        futures=Futures(),
        recorder=TrainingRecorder(model.name),
        scheduler=Scheduler(model.tokens_per_batch, tenants.share, contended_tokens=model.contended_tokens),
        measurements=RunMeasurements(store.run_metrics),
        running=RunningOps(root / "running" / model.name),
    )
    return ModelService(context, ProcessMemory())
