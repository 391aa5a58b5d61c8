"""Small requests that declare or cause much work: refused with the limit's name, or priced at what they really cost."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from tests.robustness.attack.confined import ConfinedServer
from tests.support.losses.traced import request
from tests.support.servers.running import Tenant, datum, key_for, tensor, training_body
from twinkle.server.wire import tinker_pb2 as pb

pytestmark = pytest.mark.attack

MODEL = "random://llama-tiny"
MIB = 2**20
Make = Callable[..., ConfinedServer]


def config(**limits: int) -> dict[str, Any]:
    return {
        "applications": [
            {"name": "server", "import_path": "server"},
            {"name": "model", "import_path": "model", "args": {"model_id": MODEL, "backend": "transformers"}},
        ],
        "limits": limits,
    }


class Client(Tenant):
    """A tenant of the tiny model."""

    def adapter(self) -> tuple[str, str]:
        """Create a session and an adapter in it; return both ids."""
        session = self.session()
        made = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 8, "seed": 1}}
        return session, str(self.json(self.submit("create_model", {**made, "type": "create_model"}))["model_id"])


def client(server: ConfinedServer, name: str) -> Client:
    return Client(server.url, key_for(name))


def sparse(rows: int, columns: int, dtype: pb.DType = pb.DTYPE_INT64) -> pb.Tensor:
    """Return a sparse tensor without values."""
    csr = pb.SparseCsr(crow_indices=np.zeros(rows + 1, "<i8").tobytes())
    return pb.Tensor(sparse_csr=csr, dtype=dtype, shape=[rows, columns])


def wide(columns: int, tokens: int = 1) -> pb.Datum:
    chunk = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.ones(tokens, "<i4").tobytes()))
    return pb.Datum(model_input=[chunk], loss_fn_inputs={"target_tokens": sparse(tokens, columns)})


def step_seconds(tenant: Client, model: str, seq: int) -> float:
    began = time.monotonic()
    passed, stepped = tenant.forward_backward(model, seq, [datum([5] * 129)]), tenant.optim_step(model, seq + 1)
    tenant.training(passed)
    tenant.json(stepped)
    return time.monotonic() - began


def test_one_wide_target_does_not_kill_the_server(confined_server: Make) -> None:
    """A request of 3.7 kB has K = 2**22 next to 299 plain tokens. The server still runs after a restart."""
    server = confined_server(config())
    greedy, honest = client(server, "greedy"), client(server, "honest")
    (_, own), (_, other) = greedy.adapter(), honest.adapter()
    body = training_body(own, 1, [wide(2**22), datum([7] * 300)])
    assert len(body) < 4000
    refused = greedy.submit("forward_backward", body)
    loss = honest.loss(honest.forward_backward(other, 1, [datum([7] * 200)]))
    message = greedy.error(refused)
    assert "data[0].loss_fn_inputs['target_tokens'].shape: got (1, 4194304)" in message
    assert "max_targets_per_token" in message
    server.kill()
    server.start()
    assert greedy.error(refused) == message
    assert honest.loss(honest.forward_backward(other, 2, [datum([7] * 200)])) == pytest.approx(loss, rel=1e-3)


def test_the_widest_that_is_allowed_costs_its_neighbour_nothing(confined_server: Make) -> None:
    """With legal widths: the vocabulary is the limit, and no other request is padded to it."""
    server = confined_server(config())
    greedy, honest = client(server, "greedy"), client(server, "honest")
    (_, own), (_, other) = greedy.adapter(), honest.adapter()
    before = server.rss()
    for seq in range(1, 9):
        greedy.forward_backward(own, seq, [wide(256), datum([7] * 300)])
    assert step_seconds(honest, other, 1) < 30
    for seq in range(1, 9):
        greedy.result(f"{own}:{seq}")
    assert server.rss() - before < 600 * MIB
    assert "targets" in greedy.error(greedy.forward_backward(own, 9, [wide(1024)])), "more than its vocabulary"


def test_queued_sparse_requests_take_what_they_list(confined_server: Make) -> None:
    """seq 1 is held back, so the others wait. Each has 123 bytes and once took 256 MiB."""
    server = confined_server(config(max_targets_per_token=2**23))
    greedy = client(server, "greedy")
    _, own = greedy.adapter()
    before = server.rss()
    for seq in range(2, 62):
        body = training_body(own, seq, [wide(2**23)], forward_only=True)
        assert len(body) < 140
        answer = greedy.post("forward_backward", body)
        if answer.status_code == 429:
            assert "max_unfetched_result_bytes" in answer.text, "their results would not fit"
            break
    assert seq > 12
    assert server.rss() - before < 200 * MIB
    greedy.forward_backward(own, 1)
    for waiting in range(2, seq):
        assert "at most" in greedy.error(f"{own}:{waiting}"), "there are fewer tokens in the vocabulary"


def test_many_targets_of_one_token_hold_nobody_up(confined_server: Make) -> None:
    """One token with 2**20 targets once took a Python loop of 20 s.

    Allowed widths are a single operation; see test_widths in tests/model.
    """
    server = confined_server(config())
    greedy, honest = client(server, "greedy"), client(server, "honest")
    (_, own), (_, other) = greedy.adapter(), honest.adapter()
    step_seconds(honest, other, 1)
    body = training_body(own, 1, [wide(2**20)])
    assert len(body) < 140
    request_id = greedy.submit("forward_backward", body)
    assert step_seconds(honest, other, 3) < 10
    assert "max_targets_per_token" in greedy.error(request_id)


def powers(numbers: int) -> Callable[[Any], Any]:
    """Return a loss that takes twelve powers of this many numbers."""

    def power(logprobs: Any) -> Any:
        grid = logprobs.new_ones(numbers, dtype=torch.float64) * logprobs.sum().exp()
        for _ in range(12):
            grid = grid**1.0001
        return grid.sum(), {}

    return power


def custom_passes(tenant: Client, session: str, model: str, numbers: int) -> list[str]:
    """Submit eight requests of one token with such a loss; return their ids."""
    made = tenant.json(tenant.submit("create_custom_loss", request(powers(numbers), {"logprobs": 1}, session)))
    fields = {"loss": "custom", "loss_fn_config_v2": {"loss_id": pb.LossConfigValue(text=str(made["loss_id"]))}}
    rows = [datum([5, 6], weights=tensor([1.0]))]
    return [tenant.forward_backward(model, seq, rows, **fields) for seq in range(1, 9)]


def test_custom_losses_have_a_limit(confined_server: Make) -> None:
    """Eight requests of one token, each with twelve powers of 2**22 numbers, once delayed a neighbour by 31 s."""
    server = confined_server(config())
    greedy, honest = client(server, "greedy"), client(server, "honest")
    (session, own), (_, other) = greedy.adapter(), honest.adapter()
    step_seconds(honest, other, 1)
    ids = custom_passes(greedy, session, own, 2**22)
    beside = step_seconds(honest, other, 3)
    for request_id in ids:
        assert "more work than one request may" in greedy.error(request_id)
    assert beside < 20


def test_custom_losses_within_the_limit_wait_their_turn(confined_server: Make) -> None:
    """With an eighth of the numbers, which is allowed. Once all eight were in one batch before the neighbour's step."""
    server = confined_server(config())
    greedy, honest = client(server, "greedy"), client(server, "honest")
    (session, own), (_, other) = greedy.adapter(), honest.adapter()
    step_seconds(honest, other, 1)
    ids = custom_passes(greedy, session, own, 2**19)
    with ThreadPoolExecutor(len(ids)) as pool:
        waiting = [pool.submit(client(server, "greedy").training, request_id) for request_id in ids]
        step_seconds(honest, other, 3)
        unfinished = sum(not future.done() for future in waiting)
        assert all("loss:sum" in future.result().metrics for future in waiting)
    assert unfinished >= 5, "the neighbour's step came between them"


def test_a_long_pass_gives_way_at_every_micro_batch(confined_server: Make) -> None:
    """During one request of 49 152 tokens, a neighbour's steps run between its micro-batches."""
    server = confined_server(config())
    greedy, honest = client(server, "greedy"), client(server, "honest")
    (_, own), (_, other) = greedy.adapter(), honest.adapter()
    step_seconds(honest, other, 1)
    request_id = greedy.forward_backward(own, 1, [datum([5] * 129)] * 384)
    ended: list[float] = []

    def wait() -> None:
        greedy.result(request_id, 300)
        ended.append(time.monotonic())

    waiting = threading.Thread(target=wait)
    waiting.start()
    for seq in range(3, 9, 2):
        step_seconds(honest, other, seq)
    assert not ended, "the long pass is still under way, and three steps of a neighbour are done"
    waiting.join(300)
    assert ended
