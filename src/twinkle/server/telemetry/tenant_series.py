"""Usage by tenant as a bounded number of metric series.

Whenever metrics are read, the busiest tenants without series of their own get them, as long as there is room, and keep
them until the server forgets the tenant: no rate can be computed from a series that comes and goes. The usage of a
tenant before it got its own series stays in the series ``other``, so that no total ever falls.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from twinkle.server.telemetry import instruments
from twinkle.server.telemetry.instruments import Instrument
from twinkle.server.telemetry.metrics import Reading
from twinkle.server.usage import FORGOTTEN, UsageCounts

OTHER = "other"


_Values = dict[Instrument, int]


@dataclass
class _Own:
    """A tenant with series of its own. ``before``: its usage when it got them; ``last``: its usage when last read."""

    before: _Values
    last: _Values


class TenantSeries:
    """The tenants that have series of their own, at most ``most`` at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._own: dict[str, _Own] = {}
        # Usage in series that ended. The total of forgotten tenants includes it now, so ``other`` is reduced by it:
        # otherwise ``other`` would jump by usage that another series has shown before.
        self._moved: Counter[Instrument] = Counter()

    def usage(self, totals: Mapping[str, UsageCounts]) -> list[Reading]:
        """Return the usage of all tenants. Tenants without series of their own are summed up in ``other``."""
        values = {tenant: _values(counts) for tenant, counts in totals.items()}
        self._end_series_of([tenant for tenant in self._own if tenant not in values])
        active = [tenant for tenant, used in values.items() if tenant != FORGOTTEN and any(used.values())]
        busiest = sorted(active, key=lambda tenant: (-sum(values[tenant].values()), tenant))
        for tenant in self._admit(busiest):
            self._own[tenant] = _Own(values[tenant], values[tenant])
        readings = [Reading(instrument, -moved, (OTHER,)) for instrument, moved in self._moved.items()]
        for tenant, used in values.items():
            own = self._own.get(tenant)
            if own is not None:
                own.last = used
            for instrument, value in used.items():
                before = value if own is None else own.before.get(instrument, 0)
                readings.append(Reading(instrument, before, (OTHER,)))
                if own is not None:
                    readings.append(Reading(instrument, value - before, (tenant,)))
        return readings

    def waiting(self, waiting: Mapping[str, int]) -> list[Reading]:
        """Return how many ops wait, by tenant. Tenants without series of their own are summed up in ``other``."""
        return [
            Reading(instruments.TENANT_QUEUE, count, (tenant if tenant in self._own else OTHER,))
            for tenant, count in waiting.items()
        ]

    def _end_series_of(self, forgotten: Iterable[str]) -> None:
        """End the series of forgotten tenants. The total of forgotten tenants includes their usage from now on."""
        for tenant in forgotten:
            own = self._own.pop(tenant)
            for instrument, value in own.last.items():
                self._moved[instrument] += value - own.before[instrument]

    def _admit(self, busiest: Iterable[str]) -> list[str]:
        room = self._most - len(self._own)
        return [tenant for tenant in busiest if tenant not in self._own][: max(0, room)]


def _values(counts: UsageCounts) -> _Values:
    return {
        instruments.TENANT_TRAINED: counts.trained_tokens,
        instruments.TENANT_SAMPLED: counts.sampled_tokens,
        instruments.TENANT_PROMPTS: counts.prompt_tokens,
        instruments.TENANT_STEPS: counts.optim_steps,
        instruments.TENANT_REQUESTS: counts.requests,
    }
