"""Two replicas of a model and a gateway, as on Ray but in one process: the right replica answers each request."""

import asyncio
import io
import json
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from safetensors.numpy import load, save_file

from tests.support.servers.running import mock_config, training_body
from twinkle.model.trainer.host_memory import HostMemory
from twinkle.server.app import make_app
from twinkle.server.backends.loading import load_served_model
from twinkle.server.config import ServerConfig
from twinkle.server.config.sections import LimitsConfig
from twinkle.server.gateway.fleet import report_of
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.http import asgi_relay as relay
from twinkle.server.runtime.assembly import Process
from twinkle.server.runtime.ray.directory import Directory
from twinkle.server.runtime.ray.layout import layout_of
from twinkle.server.runtime.ray.remote_fleet import RemoteFleet
from twinkle.server.runtime.ray.replica import ReplicaGoneError
from twinkle.server.runtime.ray.router import Router, answered
from twinkle.server.state.errors import DatabaseUnavailableError
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.state.store import Store
from twinkle.server.tenancy.memory import MemoryGuard
from twinkle.server.tenancy.tenants import Tenants, TenantTerms


class Member:
    """A replica of the model: like ModelHost, but without Ray."""

    def __init__(self, config: ServerConfig, name: str) -> None:
        self.config = config
        self.name = name
        self.is_gone = False

    async def start(self) -> "Member":
        (served,) = self.config.served_models
        self.process = await Process.open(self.config, shared=True)
        group = layout_of(self.config).models[served.name]
        self.services = self.process.add_model(
            load_served_model(served),
            merge=True,
            is_ours=lambda run: group.owner(run.run_id, run.replica) == self.name,
        )
        self.app = make_app()
        self.gateway = self.process.open_gateway(self.app, replica=self.name)
        await self.process.start()
        return self

    async def stop(self) -> None:
        self.gateway.release_waiters()
        self.process.cancel_tasks()
        await self.process.stop()
        await self.process.close()

    async def answer(self, request: relay.HttpRequest) -> relay.HttpReply:
        self._check()
        return await answered(self.app, request)

    async def stream(self, request: relay.HttpRequest) -> AsyncIterator[relay.HttpHead | bytes]:
        self._check()
        async for part in relay.stream(self.app, request):
            yield part

    async def report(self):
        self._check()
        return report_of(self.services, 600)

    async def release_session(self, session, state):
        self._check()
        await self.gateway.release_session(session, state)

    async def evict_run(self, run, why):
        self._check()
        await self.gateway.evict(run, why)

    def _check(self) -> None:
        if self.is_gone:
            raise ReplicaGoneError(self.name)


def app_of(gateway: Gateway) -> FastAPI:
    app = make_app()
    app.state.gateway = gateway
    return app


class Cluster:
    def __init__(self, config: ServerConfig) -> None:
        self.config = config

    async def __aenter__(self) -> "Cluster":
        layout = layout_of(self.config)
        self.members = {name: await Member(self.config, name).start() for name in layout.addresses}
        self.store = await Store.open(self.config.data_dir, shared=True)
        fleet = RemoteFleet(layout, self.members)
        for member in self.members.values():
            member.gateway.fleet_of_all = fleet
        self.gateway = Gateway(self.config, self.store, {}, DataDir(self.config.data_dir), fleet=fleet)
        directory = Directory(self.config, layout, self.store)
        self.router = Router(app_of(self.gateway), directory, self.members, max_body_bytes=2**20)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.router),
            base_url="http://localhost/api/v1/",
            headers={"X-API-Key": "tml-a"},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        for member in self.members.values():
            await member.stop()
        await self.store.close()

    async def post(self, path: str, body: object) -> httpx.Response:
        if isinstance(body, bytes):
            return await self.http.post(path, content=body, headers={"Content-Type": "application/x-protobuf"})
        return await self.http.post(path, json=body)

    async def result(self, request_id: str) -> httpx.Response:
        while (answer := await self.post("retrieve_future", {"request_id": request_id})).status_code == 408:
            pass
        return answer

    async def model(self, session: str, number: int) -> str:
        body = {"session_id": session, "model_seq_id": number, "base_model": "mock", "lora_config": {"rank": 4}}
        made = (await self.post("create_model", body)).json()
        assert (await self.result(made["request_id"])).status_code == 200
        return str(made["model_id"])

    async def session(self) -> str:
        return str((await self.post("create_session", {"tags": []})).json()["session_id"])


Check = Callable[[Cluster], Awaitable[None]]


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    config = mock_config(runtime="ray", data_dir=str(tmp_path))
    config["applications"][1]["deployments"] = [{"num_replicas": 2}]
    return config


@pytest.fixture
def run(config: dict[str, Any]) -> Callable[[Check], None]:
    async def work(check: Check) -> None:
        async with Cluster(ServerConfig.model_validate(config)) as cluster:
            await check(cluster)

    return lambda check: asyncio.run(work(check))


def live(cluster: Cluster) -> dict[str, int]:
    adapters = {name: member.services.training.adapters for name, member in cluster.members.items()}
    return {name: len({adapter.run.tenant_id for adapter in here}) for name, here in adapters.items()}


def test_everything_lands_where_it_belongs(run):
    async def check(cluster: Cluster) -> None:
        session = await cluster.session()
        models = [await cluster.model(session, number) for number in range(6)]
        assert live(cluster) == {"model-0": 1, "model-1": 1}  # the tenant has adapters on both
        counts = [len(m.services.training.adapters) for m in cluster.members.values()]
        assert counts == [3, 3]
        for model in models:
            submitted = (await cluster.post("forward_backward", training_body(model, 1))).json()
            assert (await cluster.result(submitted["request_id"])).status_code == 200
            step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
            assert (await cluster.result((await cluster.post("optim_step", step)).json()["request_id"])).is_success
            save = {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 10 + models.index(model)}
            made = await cluster.result((await cluster.post("save_weights_for_sampler", save)).json()["request_id"])
            sample = {
                "sampling_session_id": made.json()["sampling_session_id"],
                "seq_id": 0,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
                "sampling_params": {"max_tokens": 3},
            }
            sampled = (await cluster.post("asample", sample)).json()
            assert (await cluster.result(sampled["request_id"])).status_code == 200
        status = (await cluster.http.get("status")).json()
        assert status["models"]["mock"]["adapters"] == 6
        assert status["models"]["mock"]["ops"] == 6 * 4
        capacity = (await cluster.http.get("twinkle/capacity_info")).json()
        assert capacity["used_loras"] == 6

    run(check)


async def save_like_gpt_oss(cluster: Cluster) -> str:
    """Save a checkpoint, put an adapter on gpt-oss into it, and return its run and name for paths."""
    for member in cluster.members.values():
        model = replace(member.services.model, architecture="gpt_oss")
        member.services = replace(member.services, model=model)
        member.process.services["mock"] = member.gateway.services["mock"] = member.services
    model = await cluster.model(await cluster.session(), 0)
    save = {"model_id": model, "seq_id": 1, "path": "ck"}
    assert (await cluster.result((await cluster.post("save_weights", save)).json()["request_id"])).is_success
    record = await cluster.store.checkpoints.get(model, "weights", "ck")
    assert record is not None
    directory = cluster.config.data_dir / record.directory
    for file in directory.iterdir():
        file.unlink()
    layer, count, rank = "base_model.model.model.layers.0", 2, 3
    shapes = {
        "self_attn.q_proj": ((rank, 4), (6, rank)),
        "mlp.experts.base_layer": ((count * rank, 4), (8, rank * count)),
        "mlp.experts": ((count * rank, 4), (4, rank * count)),
    }
    values = np.random.default_rng(1)
    tensors = {
        f"{layer}.{name}.lora_{factor}.weight": values.normal(size=size).astype(np.float32)
        for name, sizes in shapes.items()
        for factor, size in zip("AB", sizes, strict=True)
    }
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = {"r": rank, "lora_alpha": rank, "target_modules": ["q_proj"], "target_parameters": parameters}
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "LORA"}))
    return f"{model}/checkpoints/weights/ck"


def adapter_in(archive: bytes) -> dict[str, Any]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        name = next(each for each in tar.getnames() if each.endswith("adapter_model.safetensors"))
        file = tar.extractfile(name)
        assert file is not None
        return load(file.read())


def test_any_process_knows_the_form_of_a_models_adapters(run):
    """The model is in other processes; its family decides names and the order of the experts' rows in archives."""

    async def check(cluster: Cluster) -> None:
        place = await save_like_gpt_oss(cluster)
        signed = await cluster.http.get(f"training_runs/{place}/archive")
        assert signed.status_code == 302, signed.text
        url = signed.headers["location"].replace("http://localhost/api/v1/", "")
        found = adapter_in((await cluster.http.get(url)).content)
        assert {name.split(".")[5] for name in found} == {"attn", "mlp"}
        native = f"twinkle/checkpoints/{place.replace('/checkpoints', '', 1)}/archive?format=tinker"
        there = (await cluster.http.get(native)).content
        member = next(iter(cluster.members.values()))
        member.gateway.store = cluster.store
        here = httpx.AsyncClient(transport=httpx.ASGITransport(member.app), base_url="http://localhost/api/v1/")
        same = await here.get(native, headers={"X-API-Key": "tml-a"})
        assert {name: each.tobytes() for name, each in adapter_in(there).items()} == {
            name: each.tobytes() for name, each in adapter_in(same.content).items()
        }
        assert any(".attn." in name for name in adapter_in(there))
        await here.aclose()

    run(check)


def test_a_conversion_needs_free_memory(run):
    async def check(cluster: Cluster) -> None:
        place = await save_like_gpt_oss(cluster)
        native = f"twinkle/checkpoints/{place.replace('/checkpoints', '', 1)}/archive"
        memory = HostMemory(limit=2**40, used=0)
        cluster.gateway.memory.guard = MemoryGuard(2**40 - 1000, lambda: memory)  # 1000 bytes are free
        refused = await cluster.http.get(f"{native}?format=peft")
        assert refused.status_code == 503, refused.text
        assert "memory_reserve_bytes" in refused.json()["detail"]
        assert (await cluster.http.get(native)).status_code == 200  # as saved, it is read in pieces

    run(check)


def test_the_form_of_a_model_that_has_never_answered(run):
    """A gateway that has just started must not guess."""

    async def check(cluster: Cluster) -> None:
        place = await save_like_gpt_oss(cluster)
        signed = await cluster.http.get(f"training_runs/{place}/archive")
        url = signed.headers["location"].replace("http://localhost/api/v1/", "")
        for member in cluster.members.values():
            member.is_gone = True
        refused = await cluster.http.get(url)
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1"), refused.text
        assert "mock does not answer yet" in refused.json()["detail"]
        for member in cluster.members.values():
            member.is_gone = False
        assert (await cluster.http.get(url)).status_code == 200

    run(check)


def test_silent_sessions_make_room_on_all_replicas(run, config):
    """A replica that is asked for one adapter too many has another replica evict its own."""
    config["limits"] = {"silent_session_seconds": 0.5}

    async def check(cluster: Cluster) -> None:
        session = await cluster.session()
        models = [await cluster.model(session, number) for number in range(30)]
        await asyncio.sleep(0.6)
        later = await cluster.session()
        made = [await cluster.model(later, number) for number in range(4)]
        states = [(await cluster.store.runs.get(model)).state for model in [*models, *made]]
        assert states == ["parked"] * 4 + ["live"] * 30
        submitted = (await cluster.post("forward_backward", training_body(models[0], 1))).json()
        assert "fell silent" in (await cluster.result(submitted["request_id"])).json()["error"]
        # Each replica evicts runs that only the other one has.
        runs = [await cluster.store.runs.get(model) for model in models[4:]]
        for name, member in cluster.members.items():
            elsewhere = next(run for run in runs if run.replica != name)
            await member.gateway.evict_anywhere(elsewhere, "it was asked to")
            assert (await cluster.store.runs.get(elsewhere.run_id)).state == "parked"

    run(check)


def test_errors_are_those_of_one_process(run):
    async def check(cluster: Cluster) -> None:
        session = await cluster.session()
        unknown = {"session_id": session, "model_seq_id": 0, "base_model": "nobody", "lora_config": {"rank": 4}}
        refused = await cluster.post("create_model", unknown)
        assert refused.status_code == 400
        assert "mock" in refused.json()["detail"]
        assert (await cluster.post("optim_step", {"model_id": "s:train:7", "seq_id": 1})).status_code == 404
        assert (await cluster.post("forward_backward", b"\xff")).status_code == 400
        assert (await cluster.post("create_session", b"x" * (2**20 + 1))).status_code == 413
        model = await cluster.model(session, 0)
        stranger = {"X-API-Key": "tml-b"}
        step = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
        assert (await cluster.http.post("optim_step", json=step, headers=stranger)).status_code == 404
        assert (await cluster.http.get("/nowhere")).status_code == 404

    run(check)


def test_a_session_that_ends_is_parked_where_its_adapters_are(run):
    async def check(cluster: Cluster) -> None:
        session = await cluster.session()
        models = [await cluster.model(session, number) for number in range(4)]
        await cluster.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
        assert live(cluster) == {"model-0": 0, "model-1": 0}
        step = {"model_id": models[0], "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
        refused = await cluster.result((await cluster.post("optim_step", step)).json()["request_id"])
        assert "create_training_client_from_state_with_optimizer" in refused.json()["error"]

    run(check)


def test_a_replica_that_is_away(run):
    async def check(cluster: Cluster) -> None:
        session = await cluster.session()
        models = [await cluster.model(session, number) for number in range(4)]
        record = await cluster.store.runs.get(models[0])
        assert record is not None
        (before,) = (await cluster.http.get("status")).json()["models"].values()
        assert before["replicas"] == {"configured": 2, "answering": 2, "silent": []}
        cluster.members[record.replica].is_gone = True
        (status,) = (await cluster.http.get("status")).json()["models"].values()
        assert status["replicas"] == {"configured": 2, "answering": 1, "silent": [record.replica]}
        assert status["state"] == f"no answer from {record.replica}"
        for member in cluster.members.values():
            member.is_gone = True
        (status,) = (await cluster.http.get("status")).json()["models"].values()
        assert status["replicas"] == {"configured": 2, "answering": 0, "silent": ["model-0", "model-1"]}
        for name, member in cluster.members.items():
            member.is_gone = name == record.replica
        step = {"model_id": models[0], "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
        refused = await cluster.post("optim_step", step)
        assert refused.status_code == 503
        assert refused.headers["Retry-After"] == "1"
        stream = {"model": models[0], "messages": [{"role": "user", "content": "a"}], "stream": True}
        assert (await cluster.http.post("chat/completions", json=stream)).status_code == 503
        health = await cluster.http.get("twinkle/healthz/deep")
        assert health.status_code in (200, 503)
        assert (await cluster.http.get("healthz")).status_code == 200
        cluster.members[record.replica].is_gone = False
        assert (await cluster.result((await cluster.post("optim_step", step)).json()["request_id"])).is_success

    run(check)


def test_streams_come_through(run):
    async def check(cluster: Cluster) -> None:
        body = {"model": "mock", "prompt": "a", "max_tokens": 4, "stream": True}
        async with cluster.http.stream("POST", "completions", json=body) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        assert answer.status_code == 200
        assert lines[-1] == "data: [DONE]"
        assert len(lines) > 1

    run(check)


def test_an_application_at_a_route_of_its_own(run):
    async def check(cluster: Cluster) -> None:
        for path in ("/api/v1/healthz", "/healthz"):  # with and without its route_prefix
            scope = {"type": "http", "method": "GET", "path": path, "root_path": "/api/v1", "headers": []}
            sent: list[Any] = []

            async def receive() -> dict[str, Any]:
                return {"type": "http.request", "body": b""}

            async def send(message: Any, into: list[Any] = sent) -> None:
                into.append(message)

            await cluster.router({**scope, "query_string": b"", "client": None}, receive, send)
            assert sent[0]["status"] == 200

    run(check)


def test_older_paths_reach_the_same_replica(run):
    """Today's path is set before a replica is chosen and before bodies are limited."""

    async def check(cluster: Cluster) -> None:
        root = "http://localhost"
        session = (await cluster.post(f"{root}/server/create_session", {})).json()["session_id"]
        cluster.http.headers["X-Twinkle-Session-Id"] = session
        for name in ("a", "b", "c", "d"):
            body = {"adapter_name": name, "config": {"r": 4, "target_modules": "all-linear"}}
            made = await cluster.post(f"{root}/models/mock/add_adapter_to_model", body)
            assert made.status_code == 200, made.text
            assert made.json()["adapter_name"] == f"{session}-{name}"
        counts = [len(member.services.training.adapters) for member in cluster.members.values()]
        assert counts == [2, 2]
        for name in ("a", "b", "c", "d"):
            assert (await cluster.post(f"{root}/models/mock/zero_grad", {"adapter_name": name})).status_code == 200
        sampled = {"inputs": [{"input_ids": [1, 2]}], "sampling_params": {"max_tokens": 2}, "adapter_name": "d"}
        assert (await cluster.post(f"{root}/samplers/mock/sample", sampled)).status_code == 200

        model = await cluster.model(await cluster.session(), 0)
        for number, prefix in enumerate(("/tinker", "/api/v1/tinker", "/models/mock/tinker"), 1):
            op = await cluster.post(f"{root}{prefix}/forward_backward", training_body(model, number))
            assert (await cluster.result(op.json()["request_id"])).status_code == 200
        assert (await cluster.post(f"{root}/server/create_session", b" " * (2**20 + 1))).status_code == 413
        unknown = await cluster.post(f"{root}/tinker/nonsense", {})
        assert (unknown.status_code, "/tinker/nonsense" in unknown.json()["detail"]) == (404, True)
        del cluster.http.headers["X-API-Key"]
        for path in ("/server/create_session", "/tinker/create_session", "/v1/models"):
            refused = await cluster.http.request("GET" if path == "/v1/models" else "POST", f"{root}{path}")
            assert (refused.status_code, "TINKER_API_KEY" in refused.text) == (401, True)

    run(check)


def test_a_client_that_leaves_while_its_op_is_written_down(run, monkeypatch):
    async def check(cluster: Cluster) -> None:
        model = await cluster.model(await cluster.session(), 0)
        record = await cluster.store.runs.get(model)
        assert record is not None
        ops = cluster.members[record.replica].process.store.ops
        accept, reached = ops.accept, asyncio.Event()

        async def slowly(*arguments: Any) -> Any:
            accepted = await accept(*arguments)
            reached.set()
            await asyncio.sleep(0.05)  # while the database answers
            return accepted

        monkeypatch.setattr(ops, "accept", slowly)
        impatient = asyncio.create_task(cluster.post("forward_backward", training_body(model, 1)))
        await reached.wait()
        impatient.cancel()
        monkeypatch.undo()
        await asyncio.sleep(0.1)
        again = (await cluster.post("forward_backward", training_body(model, 1))).json()
        assert (await cluster.result(again["request_id"])).status_code == 200
        step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
        assert (await cluster.result((await cluster.post("optim_step", step)).json()["request_id"])).is_success

    run(check)


def test_long_bodies_of_strangers_are_not_read(run):
    async def check(cluster: Cluster) -> None:
        async def endless() -> AsyncIterator[bytes]:
            yield b"[" * 2**15
            raise AssertionError("it was read")

        del cluster.http.headers["X-API-Key"]
        for path in ("create_session", "chat/completions", "forward_backward"):
            assert (await cluster.http.post(path, content=endless())).status_code == 401

    run(check)


def test_a_session_that_could_not_be_parked_is_parked_later(run, monkeypatch):
    async def check(cluster: Cluster) -> None:
        session = await cluster.session()
        models = [await cluster.model(session, number) for number in range(2)]
        for member in cluster.members.values():
            monkeypatch.setattr(
                member.process.store.checkpoints, "get", unavailable
            )  # fails before the adapter is saved
        await cluster.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
        assert [run.state for run in await cluster.store.runs.of_session(session)] == ["live", "live"]
        monkeypatch.undo()
        for member in cluster.members.values():
            monkeypatch.setattr(member.process.store.runs, "set_state", unavailable)  # fails after it was saved
            with pytest.raises(DatabaseUnavailableError):
                await member.gateway.maintain_services(0)
        monkeypatch.undo()
        for member in cluster.members.values():
            await member.gateway.maintain_services(0)
        assert [run.state for run in await cluster.store.runs.of_session(session)] == ["parked", "parked"]
        for model in models:
            assert await cluster.store.checkpoints.get(model, "weights", "parked") is not None

    run(check)


async def unavailable(*_: object) -> None:
    raise DatabaseUnavailableError


def test_an_adapter_that_nobody_has(run):
    """A gateway serves no model itself and would otherwise call the model unknown."""

    async def check(cluster: Cluster) -> None:
        session = (await cluster.post("twinkle/create_session", {})).json()["session_id"]
        headers = {"X-Twinkle-Session-Id": session}
        refused = await cluster.http.post("model/mock/twinkle/step", json={"adapter_name": "nobody"}, headers=headers)
        assert (refused.status_code, "nobody" in refused.text) == (404, True)
        body = {"adapter_name": "nobody", "inputs": [{"input_ids": [1]}]}
        refused = await cluster.http.post("sampler/mock/twinkle/sample", json=body, headers=headers)
        assert (refused.status_code, "nobody" in refused.text) == (404, True)

    run(check)


def test_a_tenants_uploads_are_counted_where_they_are_read(run):
    """A body counts with its announced size until the answer. Small bodies and other tenants are admitted meanwhile."""

    async def check(cluster: Cluster) -> None:
        limits = TenantTerms(LimitsConfig(max_uploading_bytes_per_tenant=1_000_000))
        cluster.gateway.tenants = Tenants(limits)
        model = await cluster.model(await cluster.session(), 0)
        go_on = asyncio.Event()

        async def slowly(size: int) -> AsyncIterator[bytes]:
            yield b"x"
            await go_on.wait()
            yield b"x" * (size - 1)

        async def upload(size: int, announced: bool = True, key: str = "tml-a") -> httpx.Response:
            headers = {"X-API-Key": key, **({"Content-Length": str(size)} if announced else {})}
            return await cluster.http.post("forward_backward", content=slowly(size), headers=headers)

        first = asyncio.create_task(upload(600_000))
        await asyncio.sleep(0.05)
        refused = await upload(600_000)
        assert refused.status_code == 429
        assert "max_uploading_bytes_per_tenant" in refused.json()["detail"]
        assert refused.headers["Retry-After"] == "1"
        other = asyncio.create_task(upload(600_000, key="tml-b"))
        unannounced = asyncio.create_task(upload(900_000, announced=False))
        await asyncio.sleep(0.05)
        assert (await cluster.post("forward_backward", training_body(model, 1))).status_code == 200
        go_on.set()
        assert (await unannounced).status_code == 429, "it did not say how long it would be"
        assert ((await first).status_code, (await other).status_code) == (400, 400), "read, and no protobuf"
        assert (await upload(600_000)).status_code == 400, "there is room again"

    run(check)
