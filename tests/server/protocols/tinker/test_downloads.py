"""Exported weights and traces: fetched by signed addresses, without a key, until the address expires."""

import json
import struct
import time
from collections.abc import Callable
from datetime import datetime

import httpx
import pyrage
import pytest

from tests.support.servers.running import Server, Tenant, mock_config

FILES = ["adapter_config.json", "adapter_model.safetensors"]


def export(tenant: Tenant, name: str = "out", model: str | None = None, seq: int = 1, **more: object) -> str:
    body = {"model_id": model or tenant.model(), "seq_id": seq, "path": name, **more}
    return tenant.json(tenant.submit("save_weights_external", body))["path"]


def place(path: str) -> str:
    run, _, checkpoint = path.removeprefix("tinker://").partition("/")
    return f"training_runs/{run}/checkpoints/{checkpoint}"


def urls(tenant: Tenant, path: str) -> dict[str, str]:
    answer = tenant.get(f"{place(path)}/external_weights_urls")
    assert answer.status_code == 200, answer.text
    return answer.json()["urls"]


def fetch(url: str, **headers: str) -> httpx.Response:
    """Fetch with only the address, as urllib does."""
    return httpx.get(url, headers=headers, trust_env=False)


def tensors(content: bytes) -> dict[str, list[int]]:
    """Return the names and shapes in a safetensors file."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    return {name: about["shape"] for name, about in header.items() if name != "__metadata__"}


def test_the_files_of_an_export(tenant: Tenant, server: Server) -> None:
    model = tenant.model()
    request = tenant.submit("save_weights_external", {"model_id": model, "seq_id": 1, "path": "out"})
    result = tenant.json(request)
    assert result["path"] == f"tinker://{model}/external_weights/out"
    answer = tenant.get(f"{place(result['path'])}/external_weights_urls").json()
    assert sorted(answer["urls"]) == FILES
    assert 3000 < datetime.fromisoformat(answer["expires"]).timestamp() - time.time() <= 3600
    assert all(url.startswith(f"{server.url}/api/v1/") for url in answer["urls"].values())
    contents = {name: fetch(url).content for name, url in answer["urls"].items()}
    assert sum(map(len, contents.values())) == result["size_bytes"]
    assert json.loads(contents["adapter_config.json"])["r"] == 8
    assert tensors(contents["adapter_model.safetensors"]) == {"w": [8]}
    (listed,) = tenant.get(f"training_runs/{model}/checkpoints").json()["checkpoints"]
    assert listed["checkpoint_type"] == "external"
    assert listed["size_bytes"] == result["size_bytes"]


@pytest.mark.parametrize(
    ("version", "kinds"),
    [
        ("0.16.1", ["training"]),
        ("0.27.2", ["training"]),
        ("0.28.0", ["external", "training"]),
        (None, ["external", "training"]),
    ],
)
def test_lists_for_older_sdks(tenant: Tenant, version: str | None, kinds: list[str]) -> None:
    """SDKs before 0.28 cannot read a list with an exported checkpoint, so these are neither listed nor counted."""
    model = tenant.model()
    tenant.json(tenant.save(model, 1, "ck"))
    export(tenant, model=model, seq=2)
    tenant.http.headers.update({} if version is None else {"X-Stainless-Package-Version": version})
    answer = tenant.get("checkpoints", limit=1).json()
    of_run = tenant.get(f"training_runs/{model}/checkpoints").json()["checkpoints"]
    assert sorted(each["checkpoint_type"] for each in of_run) == kinds
    assert answer["checkpoints"][0]["checkpoint_type"] == kinds[0]  # the newest
    assert answer["cursor"]["total_count"] == len(kinds)


def test_parts_of_a_file(tenant: Tenant) -> None:
    url = urls(tenant, export(tenant))["adapter_config.json"]
    whole = fetch(url)
    assert whole.headers["accept-ranges"] == "bytes"
    assert int(whole.headers["content-length"]) == len(whole.content)
    part = fetch(url, Range="bytes=5-14")
    assert (part.status_code, part.content) == (206, whole.content[5:15])
    assert fetch(url, Range="bytes=-7").content == whole.content[-7:]
    assert fetch(url, Range=f"bytes={len(whole.content)}-").status_code == 416


def test_other_addresses_are_refused(tenant: Tenant, server: Server) -> None:
    path = export(tenant)
    url = urls(tenant, path)["adapter_config.json"]
    head, token, file = url.rsplit("/", 2)
    header, payload, signature = token.split(".")
    other = urls(tenant, export(tenant, "other"))["adapter_config.json"].split("/")[-2].split(".")[1]
    assert other != payload
    trace = tenant.get(f"sessions/{path.removeprefix('tinker://').partition(':')[0]}/trace_export").json()["url"]
    wrong = [
        f"{header}.{payload}.{signature[:-2]}",
        f"{header}.{payload}.{'A' * len(signature)}",
        f"{header}.{other}.{signature}",
        f"{header}.{payload}.",
        f"{payload}.{signature}",
        f"eyJhbGciOiJub25lIn0.{payload}.",
        trace.rsplit("/", 1)[1],  # a valid token, but for a trace
        "x",
    ]
    for changed in wrong:
        answer = fetch(f"{head}/{changed}/{file}")
        assert answer.status_code == 403, changed
        assert "ask for a new one" in answer.json()["detail"]
    assert fetch(f"{server.url}/api/v1/traces/{token}").status_code == 403
    for absent in ("adapter.npz", "..", ".", "%2e%2e%2fstate.db", "%2Fetc%2Fpasswd"):
        assert fetch(f"{head}/{token}/{absent}").status_code == 404, absent


def test_an_address_ends_with_its_checkpoint(tenant: Tenant) -> None:
    model = tenant.model()
    url = urls(tenant, export(tenant, model=model))["adapter_config.json"]
    assert tenant.http.delete(f"training_runs/{model}/checkpoints/external_weights/out").is_success
    assert fetch(url).status_code == 404
    again = export(tenant, model=model, seq=2)  # the same name, but other files
    assert fetch(url).status_code == 404
    assert fetch(urls(tenant, again)["adapter_config.json"]).status_code == 200
    assert tenant.http.put(f"{place(again)}/ttl", json={"ttl_seconds": 1}).is_success
    time.sleep(1.1)
    assert tenant.get(f"{place(again)}/external_weights_urls").status_code == 404


def test_addresses_expire_and_survive_a_restart(own_server: Callable[..., Server]) -> None:
    """They also begin with the server's public address."""
    server = own_server(mock_config(public_url="http://127.0.0.1:1/behind"), signed_url=600.0)
    tenant = Tenant(server.url, "tml-local")
    path = export(tenant)
    url = urls(tenant, path)["adapter_config.json"]
    assert url.startswith("http://127.0.0.1:1/behind/api/v1/downloads/")
    reachable = url.replace("http://127.0.0.1:1/behind", server.url)
    assert fetch(reachable).status_code == 200
    server.tuning["signed_url"] = -1.0  # for addresses signed from now on
    server.kill()
    server.start()
    assert fetch(reachable).status_code == 200
    old = urls(tenant, path)["adapter_config.json"].replace("http://127.0.0.1:1/behind", server.url)
    answer = fetch(old)
    assert (answer.status_code, "expired" in answer.text) == (403, True)


def test_what_is_no_export_has_no_addresses(tenant: Tenant) -> None:
    path = tenant.json(tenant.save(tenant.model(), 1, "ck"))["path"]
    answer = tenant.get(f"{place(path)}/external_weights_urls")
    assert answer.status_code == 404
    assert "external_weights" in answer.json()["detail"]


def test_exports_are_for_other_tools(tenant: Tenant) -> None:
    """An export, renamed or encrypted for other tools, cannot be loaded or sampled from here."""
    model = tenant.model()
    path = export(tenant, model=model)
    assert "weights or sampler_weights" in tenant.error(tenant.load(model, 2, path, optimizer=False))
    session = model.partition(":")[0]
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    assert "weights or sampler_weights" in tenant.post("create_sampling_session", body).json()["detail"]
    assert tenant.post("weights_info", {"tinker_path": path}).json()["lora_rank"] == 8


def test_a_name_is_taken_once(tenant: Tenant) -> None:
    model = tenant.model()
    export(tenant, model=model)
    body = {"model_id": model, "seq_id": 2, "path": "out"}
    assert "exists" in tenant.error(tenant.submit("save_weights_external", body))
    assert tenant.loss(tenant.forward_backward(model, 3)) > 0  # the model still works


# --- age --------------------------------------------------------------------------------------------------------------

SSH_PUBLIC = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIMsLZEH4r9Hxd0SQuVk+fWnTUDfMSO3dUwsUALPVsDkW test"
# Made only for this test.
_SSH_KEY = """
b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtzc2gtZW
QyNTUxOQAAACDLC2RB+K/R8XdEkLlZPn1p01A3zEjt3VMLFACz1bA5FgAAAIhsi6+MbIuv
jAAAAAtzc2gtZWQyNTUxOQAAACDLC2RB+K/R8XdEkLlZPn1p01A3zEjt3VMLFACz1bA5Fg
AAAEB18xc/rtzkDJ2jtNGyJAQ+gO0gUKlE4a+fFMdRt88z5csLZEH4r9Hxd0SQuVk+fWnT
UDfMSO3dUwsUALPVsDkWAAAABHRlc3QB
"""
_KIND = "OPENSSH PRIVATE KEY"
SSH_PRIVATE = f"-----BEGIN {_KIND}-----{_SSH_KEY}-----END {_KIND}-----\n"


def test_files_are_encrypted_to_every_recipient(tenant: Tenant, server: Server) -> None:
    native = pyrage.x25519.Identity.generate()
    ssh = pyrage.ssh.Identity.from_buffer(SSH_PRIVATE.encode())
    model = tenant.model()
    plain = {name: fetch(url).content for name, url in urls(tenant, export(tenant, "plain", model)).items()}
    recipients = [str(native.to_public()), SSH_PUBLIC]
    secret = export(tenant, "secret", model, 2, age_encryption_recipients=recipients)
    fetched = {name: fetch(url).content for name, url in urls(tenant, secret).items()}
    assert sorted(fetched) == [f"{name}.age" for name in FILES]
    for name, content in plain.items():
        for identity in (native, ssh):
            assert pyrage.decrypt(fetched[f"{name}.age"], [identity]) == content
        with pytest.raises(pyrage.DecryptError):
            pyrage.decrypt(fetched[f"{name}.age"], [pyrage.x25519.Identity.generate()])
    (directory,) = server.data_dir.glob(f"checkpoints/{model.replace(':', '-')}/external_weights/secret/*")
    left = {file.name for file in directory.iterdir()} - {"checksums.json"}
    assert left == set(fetched), "nothing is left in the clear"


@pytest.mark.parametrize(
    ("recipients", "named"),
    [
        ([], "age_encryption_recipients: got '0 recipients'"),
        (["age1x"], "age_encryption_recipients[0]: got 'age1x'"),
        ([SSH_PUBLIC, "ssh-rsa AAAA"], "age_encryption_recipients[1]: got 'ssh-rsa AAAA'"),
        (["age1yubikey1qg"], "age_encryption_recipients[0]"),
        ("age1x", "age_encryption_recipients"),
        ([SSH_PUBLIC] * 21, "21 recipients"),
    ],
)
def test_what_is_no_recipient(tenant: Tenant, recipients: object, named: str) -> None:
    """Nothing is written unencrypted instead, and the model still works."""
    model = tenant.model()
    body = {"model_id": model, "seq_id": 1, "path": "out", "age_encryption_recipients": recipients}
    assert named in tenant.error(tenant.submit("save_weights_external", body))
    assert tenant.get(f"training_runs/{model}/checkpoints").json()["checkpoints"] == []
    export(tenant, model=model, seq=2)


# --- traces -----------------------------------------------------------------------------------------------------------


def test_a_trace_tells_when_what_was_done(tenant: Tenant) -> None:
    session = tenant.session()
    model = tenant.model(session)
    requests = [
        tenant.forward_backward(model, 1),
        tenant.optim_step(model, 2),
        tenant.forward_backward(model, 3, loss="nonsense"),
    ]
    for request in requests:
        tenant.result(request)
    tenant.forward_backward(model, 9)  # waits for the ops before it
    answer = tenant.get(f"sessions/{session}/trace_export").json()
    assert answer["status"] == "ready"
    trace = fetch(answer["url"]).json()
    named, *events = trace["traceEvents"]
    assert model in named["args"]["name"]
    assert [event["name"] for event in events] == ["create", "forward_backward", "optim_step"] + [
        "forward_backward"
    ] * 2
    assert [event["args"]["seq_id"] for event in events] == [0, 1, 2, 3, 9]
    assert [event["args"]["failed"] for event in events] == [False, False, False, True, False]
    assert [event["ph"] for event in events] == ["X"] * 4 + ["B"]
    assert all(abs(event["ts"] / 1e6 - time.time()) < 60 for event in events)
    assert trace["otherData"]["session_id"] == session
    assert "tokens" not in json.dumps(trace)
