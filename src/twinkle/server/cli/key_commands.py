"""Commands about API keys and the names of tenants: ``keys create|list|revoke`` and ``rename-tenant``."""

import argparse
import sys
import time
from collections.abc import Sequence

from twinkle.errors import TwinkleServerError
from twinkle.server.cli.config_commands import Commands, add_command, on_new_store, on_store
from twinkle.server.cli.names import Names, Tenant, find_key
from twinkle.server.cli.tables import add_json, iso, moment, print_json, print_rows
from twinkle.server.runtime.generated_key import delete_file_of
from twinkle.server.state.records.keys import KeyRecord
from twinkle.server.state.store import Store

_COLUMNS = {
    "key_id": "key",
    "name": "name",
    "tenant": "tenant",
    "state": "state",
    "created": "created",
    "tenant_id": "tenant id",
}


def add_parsers(commands: Commands) -> None:
    keys = commands.add_parser("keys", help="manage API keys, for auth.mode: keys").add_subparsers(
        required=True, metavar="ACTION"
    )
    create = add_command(keys, "create", _create, "create a key; it is shown once and not stored")
    create.add_argument(
        "--name",
        default="",
        help="name of the tenant; if no tenant has it, a new one is created. With --tenant: name of the key only",
    )
    create.add_argument("--tenant", default=None, metavar="NAME", help="name or id of an existing tenant")
    add_json(create)
    listing = add_command(keys, "list", _list, "list names, tenants and states of keys, but not the keys themselves")
    listing.add_argument("--tenant", default=None, metavar="NAME", help="only keys of this tenant, by name or id")
    add_json(listing)
    revoke = add_command(keys, "revoke", _revoke, "revoke a key; a running server refuses it within ten seconds")
    which = revoke.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "key", nargs="?", default=None, metavar="KEY", help="id or name of a key; a name must fit one key only"
    )
    which.add_argument("--tenant", default=None, metavar="NAME", help="revoke all keys of this tenant, by name or id")
    add_json(revoke)
    rename = add_command(commands, "rename-tenant", _rename, "name a tenant, or change its name")
    rename.add_argument("tenant", metavar="TENANT", help="name or id of the tenant")
    rename.add_argument("name", metavar="NAME", help="its new name, which no other tenant may have")
    add_json(rename)


@on_new_store
async def _create(args: argparse.Namespace, store: Store) -> None:
    tenant_id = None if args.tenant is None else (await Names.read(store)).find(args.tenant).tenant_id
    record, key = await store.keys.create(tenant_id, args.name, time.time())
    tenant = (await Names.read(store)).tenant(record.tenant_id)
    others = [each for each in await store.keys.list() if each.tenant_id == record.tenant_id and each != record]
    if args.json:
        print_json({"key": key, **_about(record, tenant), "other_keys": len(others)})
    else:
        print(key)
    print(f"{record.key_id}: {_whose(tenant, others)}; the key is not stored: save it now", file=sys.stderr)


def _whose(tenant: Tenant, others: Sequence[KeyRecord]) -> str:
    if not others:
        return f"a key of the tenant {tenant}, which has no other key"
    revoked = sum(key.revoked_at is not None for key in others)
    count = f"{len(others)} other {'key' if len(others) == 1 else 'keys'}" + (
        f" ({revoked} revoked)" if revoked else ""
    )
    return f"a further key of the existing tenant {tenant}, which has {count}"


@on_store
async def _list(args: argparse.Namespace, store: Store) -> None:
    names = await Names.read(store)
    wanted = None if args.tenant is None else names.find(args.tenant).tenant_id
    keys = [key for key in await store.keys.list() if wanted in (None, key.tenant_id)]
    rows = [_about(key, names.tenant(key.tenant_id)) for key in keys]
    if args.json:
        print_json(rows)
        return
    shown = [{**row, "created": moment(key.created_at)} for row, key in zip(rows, keys, strict=True)]
    print_rows(shown, _COLUMNS, "no keys")


def _about(key: KeyRecord, tenant: Tenant) -> dict[str, object]:
    return {
        "key_id": key.key_id,
        "name": key.name,
        "tenant": tenant.name,
        "tenant_id": key.tenant_id,
        "state": "revoked" if key.revoked_at is not None else "active",
        "created_at": iso(key.created_at),
        "revoked_at": iso(key.revoked_at),
    }


@on_store
async def _revoke(args: argparse.Namespace, store: Store) -> None:
    names, keys = await Names.read(store), await store.keys.list()
    if args.tenant is None:
        chosen = [find_key(keys, args.key, names)]
    else:
        tenant = names.find(args.tenant)
        chosen = [key for key in keys if key.tenant_id == tenant.tenant_id and key.revoked_at is None]
        if not chosen:
            raise TwinkleServerError(f"tenant {tenant} has no active key")
    lines = []
    for key in chosen:
        file = await delete_file_of(store, key.key_id)
        if not await store.keys.revoke(key.key_id, time.time()):
            raise TwinkleServerError(f"{key.key_id} was revoked by somebody else meanwhile")
        whose = f"{key.key_id} of tenant {names.tenant(key.tenant_id)}"
        lines.append(f"revoked {whose}" + ("" if file is None else f" and deleted {file}, which held it"))
    if args.json:
        print_json([{"key_id": key.key_id, "tenant_id": key.tenant_id} for key in chosen])
    else:
        print("\n".join(lines))


@on_store
async def _rename(args: argparse.Namespace, store: Store) -> None:
    tenant = (await Names.read(store)).find(args.tenant)
    await store.tenants.rename(tenant.tenant_id, args.name, time.time())
    if args.json:
        print_json({"tenant_id": tenant.tenant_id, "tenant": args.name, "earlier_name": tenant.name})
    else:
        print(f"{tenant} is named {args.name} now; `tenants:` in a configuration may still have the earlier name")
