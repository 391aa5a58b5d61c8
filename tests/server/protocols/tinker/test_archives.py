"""Checkpoints as tar files: a redirect to a signed address, which works until its expiry and has all files."""

import io
import json
import tarfile
import time
from collections.abc import Callable
from datetime import datetime
from email.utils import parsedate_to_datetime

import httpx
import pytest

from tests.support.servers.running import Server, Tenant, mock_config

KINDS = {"weights": "save_weights", "sampler_weights": "save_weights_for_sampler"}
KINDS["external_weights"] = "save_weights_external"


def saved(tenant: Tenant, kind: str = "weights", model: str | None = None, seq: int = 1, **more: object) -> str:
    """Save a checkpoint and return its path in the REST interface."""
    model = model or tenant.model()
    tenant.json(tenant.submit(KINDS[kind], {"model_id": model, "seq_id": seq, "path": "ck", **more}))
    return f"training_runs/{model}/checkpoints/{kind}/ck"


def address(tenant: Tenant, place: str) -> str:
    answer = tenant.get(f"{place}/archive")
    assert answer.status_code == 302, answer.text
    return answer.headers["location"]


def fetch(url: str) -> httpx.Response:
    """Fetch with only the address, as urllib does."""
    return httpx.get(url, trust_env=False)


def files(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar.getmembers()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_of_a_checkpoint(tenant: Tenant, server: Server, kind: str) -> None:
    place = saved(tenant, kind)
    answer = tenant.get(f"{place}/archive")
    assert answer.status_code == 302
    url = answer.headers["location"]
    assert url.startswith(f"{server.url}/api/v1/archives/")
    assert answer.json()["url"] == url
    expires = datetime.fromisoformat(answer.json()["expires"])
    assert expires == parsedate_to_datetime(answer.headers["expires"])
    assert 3000 < expires.timestamp() - time.time() <= 3600

    archive = fetch(url)
    assert archive.headers["content-type"] == "application/x-tar"
    assert int(archive.headers["content-length"]) == len(archive.content)
    found = files(archive.content)
    (*names, last) = found
    assert (last, found[last]) == ("checkpoint_complete", b"")
    assert not any("/" in name for name in names)
    run, _, own = place.removeprefix("training_runs/").partition("/checkpoints/")
    record = next(one for one in tenant.get(f"training_runs/{run}/checkpoints").json()["checkpoints"])
    assert record["checkpoint_id"] == own
    assert sum(map(len, found.values())) == record["size_bytes"]
    dashboards = files(tenant.get(f"twinkle/checkpoints/{run}/{own}/archive").content)
    assert {name.partition("/")[2]: content for name, content in dashboards.items()} == {
        name: found[name] for name in names
    }


def test_other_addresses_are_refused(tenant: Tenant, server: Server) -> None:
    place = saved(tenant, "external_weights")
    head, _, token = address(tenant, place).rpartition("/")
    header, payload, signature = token.split(".")
    file = next(iter(tenant.get(f"{place}/external_weights_urls").json()["urls"].values()))
    for changed in (f"{header}.{payload}.", f"{header}.{payload}.{signature[:-2]}", file.split("/")[-2], "x"):
        answer = fetch(f"{head}/{changed}")
        assert answer.status_code == 403, changed
        assert "ask for a new one" in answer.json()["detail"]
    # The address of an archive gives no access to single files or traces.
    assert fetch(f"{server.url}/api/v1/downloads/{token}/adapter_config.json").status_code == 403
    assert fetch(f"{server.url}/api/v1/traces/{token}").status_code == 403


def test_an_address_ends_with_its_checkpoint(tenant: Tenant) -> None:
    model = tenant.model()
    place = saved(tenant, model=model)
    url = address(tenant, place)
    saved(tenant, model=model, seq=2, overwrite=True)
    assert fetch(url).status_code == 404  # by now another checkpoint has its name
    url = address(tenant, place)
    assert fetch(url).status_code == 200
    assert tenant.http.put(f"{place}/ttl", json={"ttl_seconds": 1}).is_success
    time.sleep(1.1)
    assert fetch(url).status_code == 404
    assert tenant.get(f"{place}/archive").status_code == 404


def test_public_checkpoints_are_for_all(tenant: Tenant, other_tenant: Tenant) -> None:
    place = saved(tenant)
    assert other_tenant.get(f"{place}/archive").status_code == 404
    assert tenant.post(f"{place}/publish", {}).is_success
    assert fetch(address(other_tenant, place)).status_code == 200


def test_reading_is_on_record(tenant: Tenant) -> None:
    address(tenant, saved(tenant))
    events = json.dumps(tenant.get("audit").json())
    assert "checkpoint_read" in events


def test_addresses_expire_and_begin_with_the_servers_own(own_server: Callable[..., Server]) -> None:
    server = own_server(mock_config(public_url="http://127.0.0.1:1/behind"), signed_url=-1.0)
    tenant = Tenant(server.url, "tml-local")
    url = address(tenant, saved(tenant))
    assert url.startswith("http://127.0.0.1:1/behind/api/v1/archives/")
    answer = fetch(url.replace("http://127.0.0.1:1/behind", server.url))
    assert (answer.status_code, "expired" in answer.text) == (403, True)
