"""Finding a tenant, a key or a run by what an operator typed: its id or its name. An unknown one is an error."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.server.cli.tables import printable
from twinkle.server.state.records.keys import KeyRecord
from twinkle.server.state.store import Store
from twinkle.server.types import RunRecord

_SHOWN = 20  # names that an error lists


@dataclass(frozen=True)
class Tenant:
    """A tenant on record. ``name`` is None if it has none."""

    tenant_id: str
    name: str | None

    def __str__(self) -> str:
        return self.tenant_id if self.name in (None, self.tenant_id) else f"{self.name} ({self.tenant_id})"


class Names:
    """The tenants on record, by id and by name, as they were when it was read."""

    def __init__(self, known: dict[str, str | None]) -> None:
        in_order = sorted(known.items(), key=lambda item: (item[1] is None, item[1], item[0]))  # those with names first
        self.tenants = {tenant_id: Tenant(tenant_id, name) for tenant_id, name in in_order}
        self._by_name = {tenant.name: tenant for tenant in self.tenants.values() if tenant.name is not None}

    @classmethod
    async def read(cls, store: Store) -> "Names":
        return cls(await store.tenants.known())

    def find(self, given: str) -> Tenant:
        """Return the tenant with this id or this name; UnknownNameError if there is none."""
        found = self.tenants.get(given) or self._by_name.get(given)
        if found is None:
            raise unknown("tenant", given, [tenant.name or tenant.tenant_id for tenant in self.tenants.values()])
        return found

    def tenant(self, tenant_id: str) -> Tenant:
        """Return the tenant with this id, which a record names."""
        return self.tenants.get(tenant_id) or Tenant(tenant_id, None)


def unknown(kind: str, given: str, known: Iterable[str]) -> UnknownNameError:
    """Return the error for an unknown name. It lists the names that are most like it; if none is, up to twenty."""
    names = sorted({printable(name) for name in known})
    shown = difflib.get_close_matches(given, names, n=5, cutoff=0.6) or names[:_SHOWN]
    more = len(names) - len(shown)
    return UnknownNameError(kind, given, [*shown, *([f"… ({more} more)"] if more else [])] or ["none yet"])


async def find_run(store: Store, given: str, tenant: Tenant | None) -> RunRecord:
    """Return the run with this id, or the only live run of this name, of one tenant or of all.

    UnknownNameError if there is none; InvalidInputError, which lists the ids, if several live runs have the name.
    """
    found = await store.runs.get(given)
    if found is not None and (tenant is None or found.tenant_id == tenant.tenant_id):
        return found
    live = [run for run in await store.runs.in_state("live") if tenant is None or run.tenant_id == tenant.tenant_id]
    named = [run for run in live if run.name == given]
    if len(named) > 1:
        ids = ", ".join(run.run_id for run in named)
        raise InvalidInputError("RUN", given, f"the id of one of the {len(named)} live runs of this name: {ids}")
    if not named:
        raise unknown("live run", given, [each for run in live for each in (run.run_id, run.name) if each])
    return named[0]


def find_key(keys: Sequence[KeyRecord], given: str, names: Names) -> KeyRecord:
    """Return the active key with this id, or the only active one of this name or of the tenant with this name or id.

    UnknownNameError if there is none; InvalidInputError, which lists the ids, if there are several.
    """
    active = [key for key in keys if key.revoked_at is None]
    matching = [key for key in active if key.key_id == given] or [
        key for key in active if given in (key.name, key.tenant_id, names.tenant(key.tenant_id).name)
    ]
    if len(matching) > 1:
        ids = ", ".join(key.key_id for key in matching)
        allowed = f"the id of one of the {len(matching)} active keys: {ids}; --tenant revokes all keys of a tenant"
        raise InvalidInputError("KEY", given, allowed)
    if not matching:
        known = [each for key in active for each in (key.key_id, key.name, names.tenant(key.tenant_id).name) if each]
        raise unknown("active key", given, known)
    return matching[0]
