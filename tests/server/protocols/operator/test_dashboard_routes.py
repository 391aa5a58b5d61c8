"""The dashboard's page, and the parts of the API that it uses: adapters, sessions, checkpoints as files."""

import asyncio
import io
import json
import re
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import load, save_file
from transformers import AutoModelForImageTextToText

from tests.support.models.seeing_models import seeing_model
from tests.support.servers.native_caller import Caller
from tests.support.servers.native_running import NativeTenant
from tests.support.servers.running import MODEL, Server, Tenant, datum, key_for, mock_config
from tests.support.servers.state_samples import run
from twinkle.model import FullSpec, FullTrainer
from twinkle.server.cli import command_line as cli
from twinkle.server.ids import directory_name
from twinkle.server.protocols.operator import pages as dashboard
from twinkle.server.services.training.adapters import LiveAdapter, Place
from twinkle.server.state.files.export import TarStream
from twinkle.server.state.files.file_checksums import write_checksums
from twinkle.server.tenancy.work_pools import FairPool

FILES = Path(dashboard.__file__).parent / "dashboard"


def get(server: Server, path: str, **headers: str) -> httpx.Response:
    return httpx.get(server.url + path, headers=headers, trust_env=False)


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_and_its_parts_need_no_key_and_allow_nothing_foreign(server: Server) -> None:
    page = get(server, "/dashboard")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    parts = re.findall(r'(?:src|href)="(dashboard/[^"]+)"', page.text)
    assert len(parts) == 3
    for answer in (page, *(get(server, f"/{part}") for part in parts)):
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_every_file_is_served_and_nothing_else(server: Server) -> None:
    files = {file.name for file in FILES.iterdir() if file.suffix in (".js", ".css", ".svg")}
    assert files == dashboard._parts()
    for name in files:
        answer = get(server, f"/dashboard/{name}")
        assert answer.text == (FILES / name).read_text()
        imported = re.findall(r'from "\./([^"]+)"', answer.text)
        assert set(imported) <= files
    for name in ("__init__.py", "index.html", "nothing.js", "..%2f..%2fcli.py", "%2e%2e"):
        assert get(server, f"/dashboard/{name}").status_code == 404
    assert get(server, "/dashboard/").headers["location"] == "../dashboard"


def test_no_markup_is_made_of_texts() -> None:
    for file in FILES.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", file.read_text()
        )
    assert not re.search(r"<script>|<style>|\son\w+=|style=|https?://", (FILES / "index.html").read_text())


def test_a_page_of_another_name_is_refused(server: Server) -> None:
    for path in ("/dashboard", "/dashboard/app.js"):
        assert get(server, path, host="rebound.example:8000").status_code == 400


# --- adapters and sessions --------------------------------------------------------------------------------------------


def test_adapters_and_where_they_are(tenant: Tenant, other_tenant: Tenant) -> None:
    session = tenant.session()
    first, second = tenant.model(session, 0), tenant.model(session, 1, rank=16)
    other_tenant.model()
    tenant.forward_backward(second, 2)  # waits for number 1
    found = tenant.get("twinkle/adapters").json()
    assert found["cursor"]["total_count"] == 2
    by_run = {each["training_run_id"]: each for each in found["adapters"]}
    assert by_run.keys() == {first, second}
    assert [by_run[run]["where"] for run in (first, second)] == ["device", "device"]
    assert [by_run[run]["queued_ops"] for run in (first, second)] == [0, 1]
    assert by_run[second]["lora_rank"] == 16
    assert by_run[second]["protocol"] == "tinker"
    assert found["queues"][MODEL]["own"] == 1
    assert found["queues"][MODEL]["all"] >= 1
    assert other_tenant.get("twinkle/adapters").json()["queues"][MODEL]["own"] == 0

    tenant.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
    parked = tenant.get("twinkle/adapters").json()["adapters"]
    assert {each["where"] for each in parked} == {"parked"}
    assert all("tinker://" in each["note"] for each in parked)


def test_adapters_that_wait_on_disk(own_server: Callable[..., Server]) -> None:
    server = own_server()
    tenant = Tenant(server.url, "tml-disk")
    model = tenant.model()
    assert server.stop() == 0
    server.start()
    assert tenant.get("twinkle/adapters").json()["adapters"][0]["where"] == "disk"
    tenant.result(tenant.forward_backward(model, 1))
    assert tenant.get("twinkle/adapters").json()["adapters"][0]["where"] == "device"


@pytest.mark.parametrize(
    ("place", "resident", "where"),
    [
        (Place.TRAINER, True, "device"),
        (Place.TRAINER, False, "host"),
        (Place.DISK, False, "disk"),
        (Place.NOWHERE, False, "nowhere"),
    ],
)
def test_paged_out_is_not_on_the_device(place: Place, resident: bool, where: str) -> None:
    assert LiveAdapter(run(), place).residency(resident) == where


def test_sessions_of_both_protocols(server: Server, tenant: Tenant, other_tenant: Tenant) -> None:
    other_tenant.session()
    body = {"tags": ["<b>"], "sdk_version": "0.36", "display_name": "a name"}
    session = tenant.post("create_session", body).json()["session_id"]
    model = tenant.model(session)
    sampler = tenant.json(tenant.publish(model, 1))["sampling_session_id"]
    native = Caller(server.url, tenant.key).session()
    found = tenant.get("twinkle/sessions").json()
    assert [each["session_id"] for each in found["sessions"]] == [native, session]
    assert found["cursor"] == {"offset": 0, "limit": 50, "total_count": 2}
    about = found["sessions"][1]
    assert (about["state"], about["display_name"], about["tags"]) == ("active", "a name", ["<b>"])
    assert about["training_run_ids"] == [model]
    assert about["sampler_ids"] == [sampler]
    assert about["last_seen"] >= about["created_at"] > time.time() - 600


# --- checkpoints as files ---------------------------------------------------------------------------------------------


def archive(tenant: Tenant, path: str) -> httpx.Response:
    return tenant.get(f"twinkle/checkpoints/{path.removeprefix('tinker://')}/archive")


def test_a_checkpoint_as_a_tar_file(server: Server, tenant: Tenant) -> None:
    model = tenant.model()
    tenant.result(tenant.forward_backward(model, 1, [datum([1, 2, 3])]))
    path = tenant.json(tenant.save(model, 2, "my.ck-1"))["path"]
    answer = archive(tenant, path)
    assert answer.status_code == 200
    title = f"{directory_name(model)}-weights-my.ck-1"
    assert answer.headers["content-disposition"] == f'attachment; filename="{title}.tar"'
    assert int(answer.headers["content-length"]) == len(answer.content)
    directory = next(server.data_dir.glob(f"checkpoints/{directory_name(model)}/weights/my.ck-1/*"))
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        assert tar.getnames() == sorted(
            f"{title}/{file.name}" for file in directory.iterdir() if file.name != "checksums.json"
        )
        for member in tar:
            content = tar.extractfile(member)
            assert content is not None
            assert content.read() == (directory / Path(member.name).name).read_bytes()


def test_no_archive_of_what_is_gone_or_never_was(tenant: Tenant) -> None:
    model = tenant.model()
    path = tenant.json(tenant.save(model, 1, "ck"))["path"]
    assert tenant.http.delete(f"training_runs/{model}/checkpoints/weights/ck").status_code == 200
    assert archive(tenant, path).status_code == 404
    assert archive(tenant, f"{model}/weights/never").status_code == 404
    assert archive(tenant, f"{model}/secrets/ck").status_code == 400
    assert archive(tenant, f"{model}/weights/..").status_code in (400, 404)


def test_large_files_are_sent_in_pieces_and_whole_when_deleted_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "ck" / "inner").mkdir(parents=True)
    contents = {"a.bin": bytes(range(256)) * 20_000, "empty": b"", "inner/b.txt": b"text" * 129}
    for name, content in contents.items():
        (tmp_path / "ck" / name).write_bytes(content)
    (tmp_path / "ck" / "link").symlink_to("/etc/hostname")
    stream = TarStream(tmp_path / "ck", "top", 5.0)
    for name in contents:
        (tmp_path / "ck" / name).unlink()

    async def sent() -> list[bytes]:
        return [piece async for piece in stream.pieces(FairPool("test", 1, 1), "t")]

    pieces = asyncio.run(sent())
    assert max(map(len, pieces)) <= 2**20
    assert sum(map(len, pieces)) == stream.size
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as tar:
        assert {name: tar.extractfile(f"top/{name}").read() for name in contents} == contents  # type: ignore[union-attr]
        assert len(tar.getnames()) == len(contents)


def all_of(stream: TarStream) -> bytes:
    async def sent() -> list[bytes]:
        return [piece async for piece in stream.pieces(FairPool("test", 1, 1), "t")]

    return b"".join(asyncio.run(sent()))


def a_vision_adapter(directory: Path) -> dict[str, np.ndarray]:
    name, head = (
        "base_model.model.model.language_model.layers.0.mlp.up_proj.lora_A.weight",
        "base_model.model.lm_head.x",
    )
    tensors = {name: np.arange(6.0, dtype=np.float32).reshape(2, 3), head: np.ones(4, np.float32)}
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "other.json").write_text("{}")
    write_checksums(directory)
    return tensors


def test_tinkers_archives_have_the_names_of_the_text_model(tmp_path: Path) -> None:
    tensors = a_vision_adapter(tmp_path / "ck")
    stream = TarStream(tmp_path / "ck", "", 5.0, family="")
    archive = all_of(stream)
    assert len(archive) == stream.size
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        read = load(tar.extractfile("adapter_model.safetensors").read())  # type: ignore[union-attr]
    assert {name.replace("model.model.layers", "model.model.language_model.layers") for name in read} == set(tensors)
    for name, array in read.items():
        np.testing.assert_array_equal(array, tensors.get(name, next(iter(tensors.values()))))


def test_archives_of_all_parameters_keep_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index of a model in several files has the names, too. With other names it would load random weights."""
    monkeypatch.setattr("twinkle.model.full.checkpoint._SHARD_BYTES", 100_000)
    seeing_model("qwen3_vl").save_pretrained(tmp_path / "base")
    trainer = FullTrainer.from_pretrained(tmp_path / "base", device="cpu", dtype="fp32")
    trainer.create_adapter("run", FullSpec())
    trainer.save("run", tmp_path / "ck", optimizer=True)
    write_checksums(tmp_path / "ck")
    with tarfile.open(fileobj=io.BytesIO(all_of(TarStream(tmp_path / "ck", "", 5.0, family="")))) as tar:
        tar.extractall(tmp_path / "read", filter="data")
    names = {file.name for file in (tmp_path / "read").iterdir()}
    assert {"model.safetensors.index.json", "optimizer.safetensors"} < names
    for name in names:
        assert (tmp_path / "read" / name).read_bytes() == (tmp_path / "ck" / name).read_bytes(), name
    loaded, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "read", output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    for name, tensor in seeing_model("qwen3_vl").state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize("place", [3, 40, -1], ids=["length", "names", "numbers"])
def test_a_damaged_file_with_other_names_is_not_sent(tmp_path: Path, place: int) -> None:
    a_vision_adapter(tmp_path / "ck")
    file = tmp_path / "ck" / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)
    with pytest.raises(OSError, match="damaged"):
        all_of(TarStream(tmp_path / "ck", "", 5.0, family=""))


# --- ownership --------------------------------------------------------------------------------------------------------


def test_foreign_is_unknown(server: Server, tenant: Tenant, other_tenant: Tenant) -> None:
    model = tenant.model()
    path = tenant.json(tenant.save(model, 1, "ck"))["path"]
    nobodys = f"s-{'0' * 32}:train:0"

    def answers(run_id: str) -> list[tuple[int, str]]:
        asked = [
            other_tenant.get(f"twinkle/training_runs/{run_id}/metrics"),
            other_tenant.post(f"twinkle/training_runs/{run_id}/metrics", {"values": {"reward": 1.0}}),
            other_tenant.post(f"twinkle/training_runs/{run_id}/metrics", {"values": "nonsense"}),
            archive(other_tenant, f"{run_id}/weights/ck"),
        ]
        return [(each.status_code, each.text.replace(run_id, "<run>")) for each in asked]

    assert answers(model) == answers(nobodys)
    assert {status for status, _ in answers(model)} == {404}
    assert archive(tenant, path).status_code == 200
    assert tenant.get(f"twinkle/training_runs/{model}/metrics").json()["points"] == []
    for listing in ("adapters", "sessions"):
        assert model.split(":")[0] not in other_tenant.get(f"twinkle/{listing}").text


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "adapters"),
        ("GET", "whoami"),
        ("GET", "sessions"),
        ("GET", "training_runs/r/metrics"),
        ("POST", "training_runs/r/metrics"),
        ("GET", "checkpoints/r/weights/n/archive"),
    ],
)
def test_every_route_wants_a_key(server: Server, method: str, path: str) -> None:
    address = f"{server.url}/api/v1/twinkle/{path}"
    assert httpx.request(method, address, trust_env=False).status_code == 401
    rebound = {"x-api-key": "tml-x", "host": "rebound.example"}
    assert httpx.request(method, address, headers=rebound, trust_env=False).status_code == 400


def test_a_server_with_keys(own_server: Callable[..., Server], capsys: pytest.CaptureFixture[str]) -> None:
    server = own_server(mock_config(auth={"mode": "keys"}))
    assert get(server, "/dashboard").status_code == 200
    stranger = Tenant(server.url, key_for("anything"))
    assert stranger.get("twinkle/adapters").status_code == 401
    capsys.readouterr()
    cli.main(["keys", "create", "--name", "alice", "--json", "-c", str(server.directory / "config.yaml")])
    made = json.loads(capsys.readouterr().out)
    owner = Tenant(server.url, made["key"])
    model = owner.model()
    assert owner.get("twinkle/adapters").json()["adapters"][0]["training_run_id"] == model
    assert owner.get("twinkle/whoami").json() == {
        "tenant_id": made["tenant_id"],
        "tenant": "alice",
        "auth_mode": "keys",
        "key_id": made["key_id"],
        "key_name": "alice",
        "is_operator": False,
        "other_runs": None,
    }
    assert owner.get("auth/apikey/me").json()["details"]["org_details"]["name"] == "alice"


def test_an_open_server_says_who_a_key_is(server: Server, tenant: Tenant) -> None:
    """A key that nobody used before is a tenant without runs. The answer says that other keys have some."""
    run = tenant.model(user_metadata={"name": "mine"})
    known = tenant.get("twinkle/whoami").json()
    assert (known["auth_mode"], known["key_id"], known["tenant"]) == ("open", None, None)
    (listed,) = [each for each in tenant.get("twinkle/adapters").json()["adapters"] if each["training_run_id"] == run]
    assert listed["name"] == "mine"
    mistyped = Tenant(server.url, f"{tenant.key}x").get("twinkle/whoami").json()
    assert mistyped["tenant_id"] != known["tenant_id"]
    assert mistyped["other_runs"] > 0


def test_a_native_run_has_the_name_of_its_adapter(server: Server) -> None:
    NativeTenant(server.url, "tml-native-names", MODEL).add_adapter("sft.v1")
    (listed,) = Tenant(server.url, "tml-native-names").get("twinkle/adapters").json()["adapters"]
    assert listed["name"] == "sft.v1"
