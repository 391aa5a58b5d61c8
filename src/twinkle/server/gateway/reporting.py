"""Telemetry of one server process: created before its state is opened, and closed just before the state is closed.

Most metrics are counted as things happen. The readings here are looked up at the moment of a scrape or an export: the
current state of the gateway, its services, the machine and the database.
"""

import asyncio
import hmac
import logging
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric

from twinkle.errors import ConfigError
from twinkle.extras import missing
from twinkle.server.config import TelemetryConfig
from twinkle.server.config.meshes import describe_mesh
from twinkle.server.config.timings import Timings
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.state.errors import DatabaseUnavailableError
from twinkle.server.telemetry import instruments
from twinkle.server.telemetry.metrics import Metrics, Reading, of_all_replicas
from twinkle.server.telemetry.readings import machine_readings
from twinkle.server.telemetry.tenant_series import TenantSeries
from twinkle.server.telemetry.tracing import NO_TRACING
from twinkle.server.usage import Usage

if TYPE_CHECKING:
    from twinkle.server.telemetry.otlp import Export


logger = logging.getLogger(__name__)

_SHORTEST_TOKEN = 16


class Telemetry:
    """The metrics and traces of one process.

    usage: the counters of what tenants use; None where usage is not counted.
    replica: the name of this process, if it is a gateway on Ray; None in other processes.
    """

    def __init__(self, config: TelemetryConfig | None = None, export_seconds: float = Timings.export) -> None:
        """Read the token for /metrics, and prepare the export if it is enabled.

        ConfigError for a bad token file, MissingDependencyError if a package for the export is not installed.
        ``export_seconds``: the time limit of one export.
        """
        self.config = config or TelemetryConfig()
        self.metrics = Metrics()
        self.usage: Usage | None = None
        self.replica: str | None = None
        self._token = _read_token(self.config.metrics_token_file)
        most = self.config.tenants_in_metrics
        self._tenants = TenantSeries(most) if most else None  # None: no metrics by tenant
        self._export: Export | None = _export(self.config, export_seconds) if self.config.enabled else None
        self.tracing = NO_TRACING if self._export is None else self._export.tracing
        self._task: asyncio.Task[None] | None = None

    def has_token(self, given: str | None) -> bool:
        """Return whether a scraper's token is the configured one."""
        if self._token is None or given is None:
            return False
        return hmac.compare_digest(self._token.encode(), given.encode())

    async def read(self, gateway: Gateway) -> list[Reading]:
        return [*await self._read_process(gateway), *await _read_state(gateway)]

    async def families(self, gateway: Gateway) -> list[Metric]:
        """Return the metrics of this process and the database; in a gateway on Ray also of the replicas that answer."""
        own = self.metrics.families(await self.read(gateway))
        if self.replica is None:
            return own
        return of_all_replicas({self.replica: own, **await gateway.fleet.metrics()})

    async def families_of_process(self, gateway: Gateway) -> list[Metric]:
        """Return the metrics of this process without the database's. A gateway merges those of several processes."""
        return self.metrics.families(await self._read_process(gateway))

    async def _read_process(self, gateway: Gateway) -> list[Reading]:
        """Return the readings of this process, without those of the database."""
        readings = [Reading(instruments.UPTIME, time.time() - gateway.started_at)]
        configured = {served.name: served.model for served in gateway.config.served_models}
        for name, entry in gateway.services.items():
            if (args := configured.get(name)) is not None:
                readings.append(Reading(instruments.PROCESSES, args.processes, (name, describe_mesh(args))))
            readings += entry.training.readings()
            if entry.sampling is not None:
                readings += entry.sampling.readings(name)
        for budget in gateway.budgets:
            readings.append(Reading(instruments.BUDGET_USED, budget.used, (budget.resource,)))
            readings.append(Reading(instruments.BUDGET_LIMIT, budget.limit, (budget.resource,)))
        if self._tenants is not None:
            if self.usage is not None:
                readings += self._tenants.usage(self.usage.totals())
            waiting: Counter[str] = Counter()
            for entry in gateway.services.values():
                waiting.update(entry.training.context.scheduler.numbers().waiting)
            readings += self._tenants.waiting(waiting)
        monitoring = gateway.tenants.pools.monitoring
        return readings + await monitoring.in_thread("", partial(machine_readings, gateway.files.root))

    def export_from(self, gateway: Gateway) -> None:
        """Start to export metrics, if ``telemetry.enabled`` is set."""
        if self._export is not None:
            self._task = asyncio.create_task(self._send_metrics(self._export, gateway))

    async def close(self) -> None:
        """Stop the export of metrics, and send the spans that are still waiting, within seconds."""
        if self._task is not None:
            self._task.cancel()
        if self._export is not None:
            await asyncio.to_thread(self._export.close)

    async def _send_metrics(self, export: "Export", gateway: Gateway) -> None:
        """Send metrics at the configured interval. :mod:`twinkle.server.telemetry.otlp` logs when none arrive."""
        while True:
            await asyncio.sleep(self.config.export_interval_ms / 1000)
            try:
                readings = await self.read(gateway)
                await asyncio.to_thread(export.send_metrics, self.metrics, readings)
            except Exception:  # an edge: no failure of monitoring may stop the server
                logger.exception("metrics were not exported")


def _export(config: TelemetryConfig, seconds: float) -> "Export":
    try:
        from twinkle.server.telemetry.otlp import Export  # needs packages that the rest of the server does not
    except ImportError as error:
        raise missing("opentelemetry.sdk", "telemetry.enabled: true") from error
    return Export(config, seconds)


def _read_token(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        token = file.read_text().strip()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError("telemetry.metrics_token_file", str(file), f"a file that can be read ({reason})") from error
    if len(token) < _SHORTEST_TOKEN:
        allowed = f"a file with a token of at least {_SHORTEST_TOKEN} characters"
        raise ConfigError("telemetry.metrics_token_file", str(file), allowed)
    return token


_DATABASE_SECONDS = 1.0  # a scrape does not wait longer for a database that does not answer


async def _read_state(gateway: Gateway) -> list[Reading]:
    """Return the readings of the database; only that it is down, if it does not answer within a second."""
    try:
        async with asyncio.timeout(_DATABASE_SECONDS):
            sessions = await gateway.store.sessions.active()
            sampling_sessions = await gateway.store.sampling_sessions.active()
    except (TimeoutError, DatabaseUnavailableError):
        return [Reading(instruments.STATE_UP, 0)]
    return [
        Reading(instruments.STATE_UP, 1),
        Reading(instruments.SESSIONS, sessions),
        Reading(instruments.SAMPLING_SESSIONS, sampling_sessions),
    ]
