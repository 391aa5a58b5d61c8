"""Guarantees of Tinker's protocol for every call: repeated, compressed, and awaited by a thousand clients."""

import asyncio
import gzip
import json
import resource

import pytest
import zstandard

from tests.support.servers.running import Server, Tenant, training_body


def test_a_repeated_request_is_done_once(tenant: Tenant) -> None:
    """The same ids come back, and the model equals that of a client that sent everything once."""
    session = tenant.session()
    create = {"session_id": session, "model_seq_id": 0, "base_model": "mock", "lora_config": {"rank": 8, "seed": 1}}
    model = f"{session}:train:0"
    step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
    save = {"model_id": model, "seq_id": 3, "path": "ck"}
    publish = {"model_id": model, "seq_id": 4, "sampling_session_seq_id": 0}
    calls = [
        ("create_model", create),
        ("forward_backward", training_body(model, 1)),
        ("optim_step", step),
        ("save_weights", save),
        ("save_weights_for_sampler", publish),
    ]
    for path, body in calls:
        first, again = tenant.post(path, body).json(), tenant.post(path, body).json()
        assert first == again
        results = [tenant.result(first["request_id"]) for _ in range(2)]  # a result can be fetched twice
        assert results[0] == results[1]
        assert b'"error"' not in results[0]
        assert tenant.post(path, body).json() == first  # also after its end
    once = tenant.model()
    tenant.forward_backward(once, 1)
    tenant.optim_step(once, 2)
    tenant.json(tenant.save(once, 3, "ck"))
    tenant.json(tenant.publish(once, 4))
    losses = [tenant.loss(tenant.forward_backward(one, 5)) for one in (model, once)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("encoding", ["zstd", "gzip", "identity"])
def test_compressed_bodies(tenant: Tenant, encoding: str) -> None:
    model = tenant.model()
    expected = tenant.result(tenant.forward_backward(model, 1))
    twin = tenant.model()
    body = training_body(twin, 1)
    pack = {"zstd": zstandard.ZstdCompressor().compress, "gzip": gzip.compress}.get(encoding, bytes)
    answer = tenant.post("forward_backward", pack(body), **{"Content-Encoding": encoding})
    assert tenant.result(answer.json()["request_id"]) == expected


def test_a_thousand_long_polls(server: Server, tenant: Tenant) -> None:
    """Each poll has its own connection. Other requests are answered meanwhile, and in the end all polls are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    session = tenant.session()
    model = tenant.model(session)
    waiting = tenant.forward_backward(model, 2)  # waits for number 1
    body = json.dumps({"request_id": waiting}).encode()
    head = (
        f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {tenant.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )

    async def poll(sent: asyncio.Semaphore) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head.encode() + body)
        await writer.drain()
        sent.release()
        answer = await reader.read()
        writer.close()
        return answer

    async def all_of_them() -> list[bytes]:
        sent = asyncio.Semaphore(0)
        polls = [asyncio.create_task(poll(sent)) for _ in range(1000)]
        for _ in polls:
            await sent.acquire()
        beat = await asyncio.to_thread(tenant.post, "session_heartbeat", {"session_id": session})
        assert beat.status_code == 200
        assert not any(one.done() for one in polls)
        await asyncio.to_thread(tenant.forward_backward, model, 1)
        return await asyncio.gather(*polls)

    answers = asyncio.run(all_of_them())
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
    assert len({answer.partition(b"\r\n\r\n")[2] for answer in answers}) == 1
