"""The SDK's console script, command by command, against a server over a socket.

``checkpoint push-hf`` is missing because it needs a hub. The server issues keys and tokens, so that all of ``auth``
works.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.servers.cli_process import CliProcess, Said
from tests.support.servers.running import Server, Tenant, environment, mock_config
from twinkle.server.state.store import Store


class Terminal:
    """A user's shell with a home directory, and a model that was trained before."""

    def __init__(self, server: Server, process: CliProcess, home: Path, key: str) -> None:
        self.server = server
        self.home = home
        self.key = key
        self.tenant = Tenant(server.url, key)
        self._process = process
        session = self.tenant.session()
        self.run_id = self.tenant.model(session)
        self.session_id = session
        self.weights = self.tenant.json(self.tenant.save(self.run_id, 1, "ck"))["path"]
        named = {"model_id": self.run_id, "seq_id": 2, "path": "named"}
        self.sampler = self.tenant.json(self.tenant.submit("save_weights_for_sampler", named))["path"]
        exported = {"model_id": self.run_id, "seq_id": 3, "path": "out"}
        self.external = self.tenant.json(self.tenant.submit("save_weights_external", exported))["path"]

    def __call__(self, *arguments: str, key: bool = True, stdin: str = "", code: int = 0) -> Said:
        settings = {"TINKER_BASE_URL": self.server.url, "HOME": str(self.home)}
        if key:
            settings["TINKER_API_KEY"] = self.key
        said = self._process.run(*arguments, directory=self.home, environment=settings, stdin=stdin)
        assert said.code == code, said
        return said

    def checkpoints(self) -> dict[str, dict[str, object]]:
        listed = self("--format", "json", "checkpoint", "list", "--run-id", self.run_id).json["checkpoints"]
        return {each["tinker_path"]: each for each in listed}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = mock_config(auth={"mode": "keys", "jwt": True})
    running = Server(tmp_path_factory.mktemp("cli"), config, key_cache=0.1).start()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def process() -> Iterator[CliProcess]:
    settings = {name: value for name, value in environment().items() if not name.startswith("TINKER_")}
    running = CliProcess(settings)
    yield running
    running.close()


@pytest.fixture
def tinker(server: Server, process: CliProcess, tmp_path: Path) -> Terminal:
    """A shell of a tenant that no other test uses."""

    async def key() -> str:
        store = await Store.open(server.data_dir, server.database, lock=False)
        _, made = await store.keys.create(f"tenant-{secrets.token_hex(12)}", "laptop", time.time())
        await store.close()
        return made

    return Terminal(server, process, tmp_path, asyncio.run(key()))


def test_version(tinker: Terminal) -> None:
    assert tinker("version").out.startswith("tinker 0.")


def test_auth(tinker: Terminal) -> None:
    file = tinker.home / ".tinker" / "credentials.json"
    said = tinker("auth", "login", key=False, stdin=f"{tinker.key}\n")
    assert "Stored API key 'laptop'" in said.out
    stored = json.loads(file.read_text())
    (entry,) = stored["keys"].values()
    assert entry["key"] == tinker.key
    assert "Tinker accessible: yes" in tinker("auth", "status", key=False).out
    who = tinker("--format", "json", "auth", "whoami", key=False).json
    assert who["user_urn"] == entry["details"]["org_details"]["name"]
    assert "still active" in tinker("auth", "logout", key=False).out
    assert tinker.tenant.get("get_server_capabilities").status_code == 200
    entry["type"] = "generated"  # marks the key as made by a login, so that a logout revokes it
    file.write_text(json.dumps(stored))
    tinker("auth", "logout", key=False)
    assert tinker.tenant.get("get_server_capabilities").status_code == 401
    assert "401" in tinker("auth", "login", key=False, stdin=f"{tinker.key}\n", code=1).err


def test_models_and_runs(tinker: Terminal) -> None:
    assert [each["model_name"] for each in tinker("--format", "json", "model", "list").json["models"]] == ["mock"]
    assert "No model name contains" in tinker("model", "list", "zzz", code=1).err
    (run,) = tinker("--format", "json", "run", "list").json["runs"]
    assert run["training_run_id"] == tinker.run_id
    assert run["last_checkpoint"]["tinker_path"] == tinker.weights
    assert run["last_sampler_checkpoint"]["tinker_path"] == tinker.sampler
    assert "mock" in tinker("run", "list", "--limit", "0", "-c", "id,model,owner,checkpoint,checkpoint_time").out
    assert tinker("--format", "json", "run", "info", tinker.run_id).json["lora_rank"] == 8
    assert "unknown model" in tinker("run", "info", "s-none:train:0", code=1).err


def test_checkpoints(tinker: Terminal) -> None:
    paths = {tinker.weights, tinker.sampler, tinker.external}
    assert set(tinker.checkpoints()) == paths
    listed = tinker("--format", "json", "checkpoint", "list").json["checkpoints"]
    assert {each["tinker_path"] for each in listed} == paths
    info = tinker("--format", "json", "checkpoint", "info", tinker.external).json
    assert (info["checkpoint_type"], info["lora_rank"]) == ("external", 8)
    for command, public in (("publish", True), ("unpublish", False)):
        tinker("checkpoint", command, tinker.weights)
        assert tinker.checkpoints()[tinker.weights]["public"] is public
    for options, expires in ((["--ttl", "7200"], True), (["--remove"], False)):
        tinker("checkpoint", "set-ttl", tinker.weights, *options)
        assert (tinker.checkpoints()[tinker.weights]["expires_at"] is not None) is expires


def test_deleting(tinker: Terminal) -> None:
    command = ["--format", "json", "checkpoint", "delete", "-y"]
    assert tinker(*command, tinker.sampler).json == {"deleted_count": 1, "failed": []}
    of_run = ["--run-id", tinker.run_id]
    tinker(*command, *of_run, "--before", "2020-01-01")
    assert set(tinker.checkpoints()) == {tinker.weights, tinker.external}
    tinker(*command, *of_run, "--type", "weights", "--after", "2020-01-01")
    assert set(tinker.checkpoints()) == {tinker.external}
    tinker(*command, *of_run)
    assert tinker.checkpoints() == {}
    (failed,) = tinker(*command, tinker.weights).json["failed"]
    assert "unknown checkpoint" in str(failed)


def test_downloading(tinker: Terminal) -> None:
    """Training weights are exported in a separate session, which leaves no export behind."""
    contents = []
    for path in (tinker.external, tinker.weights):
        said = tinker("--format", "json", "checkpoint", "download", path, "-o", "here")
        files = sorted(Path(tinker.home, said.json["destination"]).iterdir())
        assert [file.name for file in files] == ["adapter_config.json", "adapter_model.safetensors"]
        assert sum(file.stat().st_size for file in files) == said.json["file_size_bytes"]
        contents.append([file.read_bytes() for file in files])
    assert contents[0] == contents[1]
    exports = [
        each for each in tinker.tenant.get("checkpoints").json()["checkpoints"] if "external" in each["tinker_path"]
    ]
    assert [each["tinker_path"] for each in exports] == [tinker.external]
    refused = tinker("checkpoint", "download", tinker.sampler, "-o", "here", code=1)
    assert "Sampler checkpoints cannot be downloaded" in refused.err


def test_traces(tinker: Terminal) -> None:
    said = tinker("--format", "json", "session", "export-trace", tinker.session_id).json
    trace = json.loads(Path(tinker.home, said["destination"]).read_text())
    kinds = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert kinds == ["create", "save", "publish", "export"]
    url = tinker("--format", "json", "session", "export-trace", tinker.session_id, "--url-only").json["url"]
    assert httpx.get(url, trust_env=False).json() == trace
    tinker("session", "export-trace", "s-none", code=1)
