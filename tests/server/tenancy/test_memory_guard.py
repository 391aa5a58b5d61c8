"""The guard refuses new work before memory runs out, and drops caches first."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.support.servers.running import Server, Tenant, mock_config, sample_body, training_body
from twinkle.errors import OverloadedError
from twinkle.model.trainer.host_memory import HostMemory
from twinkle.server.tenancy import memory
from twinkle.server.tenancy.memory import MemoryGuard

MIB = 2**20
LIMIT = 4096 * MIB


@dataclass
class Machine:
    used: int = 0

    def read(self) -> HostMemory:
        return HostMemory(LIMIT, self.used)


def test_work_that_would_touch_the_reserve_is_refused() -> None:
    machine = Machine(LIMIT - 300 * MIB)
    guard = MemoryGuard(256 * MIB, machine.read)
    guard.check(30 * MIB)
    with pytest.raises(OverloadedError, match="memory_reserve_bytes") as refused:
        guard.check(20 * MIB)  # the first request counts, although memory was not read again since
    assert refused.value.retry_after > 0
    guard.check(20 * MIB, urgent=True)
    assert (guard.budget.resource, guard.budget.limit) == ("process_memory", LIMIT - 256 * MIB)


def test_the_default_reserve_is_a_part_of_the_limit() -> None:
    assert MemoryGuard(None, Machine().read).reserve == 256 * MIB
    assert MemoryGuard(None, lambda: HostMemory(40 * LIMIT, 0)).reserve == 4096 * MIB
    assert MemoryGuard(None, lambda: HostMemory(512 * MIB, 0)).reserve == 128 * MIB


def test_caches_go_before_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_SECONDS", 0.01)
    machine = Machine(LIMIT - 400 * MIB)
    guard = MemoryGuard(256 * MIB, machine.read)

    def drop() -> int:
        machine.used -= 1024 * MIB
        return 1024 * MIB

    guard.relieve_with(drop)

    async def main() -> None:
        watching = asyncio.create_task(guard.watch())
        for _ in range(500):
            await asyncio.sleep(0.01)
            if guard.free > 500 * MIB:
                break
        watching.cancel()

    asyncio.run(main())
    guard.check(500 * MIB)


def test_new_work_is_refused_and_the_rest_goes_on(own_server: Callable[..., Server]) -> None:
    """The reserve is larger than the machine's memory, so all new work is refused."""
    server = own_server(mock_config())
    tenant = Tenant(server.url, "tml-a")
    model = tenant.model()
    passed = tenant.forward_backward(model, 1)
    tenant.loss(passed)
    sampler = tenant.json(tenant.publish(model, 2))["sampling_session_id"]
    session = model.partition(":train:")[0]
    server.stop()
    server.configure({**server.config, "limits": {"memory_reserve_bytes": 2**60}})
    server.start()
    create = {"session_id": session, "model_seq_id": 1, "base_model": "mock", "lora_config": {"rank": 8}}
    refused = [
        tenant.post("create_model", {**create, "type": "create_model"}),
        tenant.post("forward_backward", training_body(model, 3)),
        tenant.post("asample", sample_body(sampler)),
    ]
    for answer in refused:
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5"), answer.text
        assert "memory_reserve_bytes" in answer.json()["detail"]
    assert tenant.post("session_heartbeat", {"session_id": session}).status_code == 200
    assert tenant.loss(passed) > 0
    assert tenant.json(tenant.optim_step(model, 3))
    assert tenant.json(tenant.save(model, 4, "kept"))["path"]
    assert 'twinkle_refusals_total{limit="memory_reserve_bytes"} 3.0' in tenant.http.get(f"{server.url}/metrics").text
