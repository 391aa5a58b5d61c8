"""Telemetry of one server process: made from the configuration before anything else, closed after everything else.

The second half reads the instruments whose values are looked up when somebody asks: what a gateway and its services
know at that moment.
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

from twinkle.errors import ConfigError, MissingDependencyError
from twinkle.server.config import TelemetryConfig
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
    """``usage`` counts what tenants use, if it is counted. ``replica``: this process, where there are several."""

    def __init__(self, config: TelemetryConfig | None = None) -> None:
        """Raise for mistakes of the configuration before the slow part of a start."""
        self.config = config or TelemetryConfig()
        self.metrics = Metrics()
        self.usage: Usage | None = None
        self.replica: str | None = None
        self._token = _read_token(self.config.metrics_token_file)
        most = self.config.tenants_in_metrics
        self._tenants = TenantSeries(most) if most else None  # None: metrics do not tell tenants apart
        self._export: Export | None = _export(self.config) if self.config.enabled else None
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
        """Return the metrics of the server: of this process, the state, and all other processes that answer."""
        own = self.metrics.families(await self.read(gateway))
        if self.replica is None:
            return own
        return of_all_replicas({self.replica: own, **await gateway.fleet.metrics()})

    async def families_of_process(self, gateway: Gateway) -> list[Metric]:
        """Return the metrics of this process, for another one that joins those of all."""
        return self.metrics.families(await self._read_process(gateway))

    async def _read_process(self, gateway: Gateway) -> list[Reading]:
        """Read what this process knows."""
        readings = [Reading(instruments.UPTIME, time.time() - gateway.started_at)]
        for name, entry in gateway.services.items():
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
        """Send metrics from now on, if they are to be sent."""
        if self._export is not None:
            self._task = asyncio.create_task(self._send_metrics(self._export, gateway))

    async def close(self) -> None:
        """Send the spans that wait, within seconds."""
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
            except Exception:  # an edge: whatever goes wrong with watching, the server works on
                logger.exception("metrics were not exported")


def _export(config: TelemetryConfig) -> "Export":
    try:
        from twinkle.server.telemetry.otlp import Export  # needs packages that nothing else does
    except ImportError as error:
        raise MissingDependencyError("opentelemetry-sdk", "telemetry", "telemetry.enabled: true") from error
    return Export(config)


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


_DATABASE_SECONDS = 1.0  # a scrape does not wait for a database that is away


async def _read_state(gateway: Gateway) -> list[Reading]:
    """Read what all processes of a server share: the database."""
    try:
        async with asyncio.timeout(_DATABASE_SECONDS):
            sessions = await gateway.store.sessions.active()
            sampling = await gateway.store.sampling_sessions.active()
    except (TimeoutError, DatabaseUnavailableError):
        return [Reading(instruments.STATE_UP, 0)]
    return [
        Reading(instruments.STATE_UP, 1),
        Reading(instruments.SESSIONS, sessions),
        Reading(instruments.SAMPLING_SESSIONS, sampling),
    ]
