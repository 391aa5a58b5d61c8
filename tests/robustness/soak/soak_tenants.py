"""Tenants of a soak test: short lives of many kinds, over plain HTTP, that continue when the server dies.

The number of a life determines what it does and which data it trains on. So the same life on an undisturbed server must
end with the same weights. Its report says what the server has acknowledged.
"""

import json
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from tests.support.servers.running import Tenant, datum, sample_body, tensor

MODEL = "random://llama-tiny"
PATIENCE = 240.0  # seconds for which one request is retried
HEARTBEAT = 3.0


def key_of(how: str, number: int) -> str:
    """Return the API key of a life; ``how`` is raw, sdk or native."""
    return f"tml-soak-{how}-{number}"


@dataclass(frozen=True)
class Report:
    """The result of a life. ``steps`` is the number of optim_steps in ``final``, the address of a checkpoint."""

    number: int
    how: str
    kind: str
    requests: int = 0
    steps: int = 0
    final: str | None = None


class Lasting(Tenant):
    """A tenant that repeats requests without an answer. Everything it sends may be sent twice."""

    def __init__(self, url: str, key: str) -> None:
        super().__init__(url, key)
        self.requests = 0

    def post(self, path: str, content: Mapping[str, Any] | bytes, **headers: str) -> httpx.Response:
        return self._lasting(lambda: Tenant.post(self, path, content, **headers))

    def get(self, path: str, **query: Any) -> httpx.Response:
        return self._lasting(lambda: Tenant.get(self, path, **query))

    def delete_checkpoints(self) -> None:
        for one in self.get("checkpoints", limit=1000).json()["checkpoints"]:
            run = one["tinker_path"].removeprefix("tinker://").split("/")[0]
            answer = self._lasting(
                lambda run=run, one=one: self.http.delete(f"training_runs/{run}/checkpoints/{one['checkpoint_id']}")
            )
            assert answer.status_code in (200, 404), answer.text  # 404: it expired, or the first attempt deleted it

    def create(self, session_id: str, rank: int, seed: int) -> str:
        body = {
            "session_id": session_id,
            "model_seq_id": 0,
            "base_model": MODEL,
            "lora_config": {"rank": rank, "seed": seed},
            "type": "create_model",
        }
        answer = self.post("create_model", body)
        assert answer.status_code == 200, answer.text
        return str(self.json(answer.json()["request_id"])["model_id"])

    def sampled(self, body: Mapping[str, Any]) -> bytes:
        """Return a sample. Samples are not journalled, so one that was lost with the server is sent again."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            request_id = self.submit("asample", body)
            answer = self.poll(request_id)
            while answer.status_code == 408 and time.monotonic() < deadline:
                answer = self.poll(request_id)
            if answer.status_code != 410:
                assert answer.status_code == 200, answer.text
                return answer.content
        raise AssertionError(f"no sample after {PATIENCE} s")

    def result(self, request_id: str, seconds: float = PATIENCE) -> bytes:
        return super().result(request_id, seconds)

    def _lasting(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        self.requests += 1
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                answer = send()
                if answer.status_code not in (429, 502, 503):
                    return answer
                trouble = answer.text
            except httpx.TransportError as error:
                trouble = repr(error)
            assert time.monotonic() < deadline, f"no answer for {PATIENCE} s: {trouble}"
            time.sleep(0.3)


class Heartbeats(threading.Thread):
    """Sends heartbeats for all sessions whose client is alive; an abandoned session gets none."""

    def __init__(self, url: str) -> None:
        super().__init__(name="heartbeats", daemon=True)
        self._http = httpx.Client(base_url=f"{url}/api/v1/", timeout=30, trust_env=False, verify=False)
        self._keys: dict[str, str] = {}  # session → key
        self._over = threading.Event()

    def keep(self, session_id: str, tenant: Tenant) -> None:
        self._keys[session_id] = tenant.key

    def leave(self, session_id: str) -> None:
        self._keys.pop(session_id, None)

    def end(self) -> None:
        self._over.set()
        self.join()
        self._http.close()

    def run(self) -> None:
        while not self._over.wait(HEARTBEAT):
            for session_id, key in list(self._keys.items()):
                body, headers = {"session_id": session_id}, {"X-API-Key": key}
                try:
                    self._http.post("session_heartbeat", json=body, headers=headers)
                except httpx.TransportError:
                    break  # the server is down, and extends deadlines by its downtime


@dataclass(frozen=True)
class Life:
    """One life with this number, on the server at ``url``."""

    number: int
    url: str
    beats: Heartbeats

    def run(self) -> Report:
        chance = random.Random(self.number)
        kind = chance.choices(list(LIVES), weights=[weight for weight, _ in LIVES.values()])[0]
        tenant = Lasting(self.url, key_of("raw", self.number))
        try:
            return LIVES[kind][1](self, tenant, chance)
        finally:
            tenant.http.close()

    def report(self, tenant: Lasting, kind: str, steps: int = 0, final: str | None = None) -> Report:
        return Report(self.number, "raw", kind, tenant.requests, steps, final)


# --- kinds of lives ---------------------------------------------------------------------------------------------------


def train(life: Life, tenant: Lasting, chance: random.Random) -> Report:
    """Train, publish, sample, save, load what was saved, make mistakes, and save at the end."""
    session = tenant.session()
    life.beats.keep(session, tenant)
    try:
        model = tenant.create(session, chance.choice([4, 8, 16]), life.number)
        seq, steps = 1, 0
        kept: dict[str, int] = {}  # address → steps in it, for checkpoints that do not expire
        waiting: list[tuple[str, str]] = []
        for step in range(chance.randint(3, 9)):
            if chance.random() < 0.15:
                _fail_a_window(tenant, model, seq, _rows(life.number, step))
                seq += 2
            passed = tenant.forward_backward(model, seq, _rows(life.number, step))
            waiting.append((passed, tenant.optim_step(model, seq + 1, learning_rate=1e-3, eps=1e-8)))
            seq, steps = seq + 2, steps + 1
            match chance.choices(["go on", "publish", "save", "save for a while", "go back"], [9, 5, 2, 2, 2])[0]:
                case "publish":
                    _publish_and_sample(tenant, model, seq, number=step, draws=chance.randint(1, 3))
                    seq += 1
                case "save":
                    kept[tenant.json(tenant.save(model, seq, f"step{step}"))["path"]] = steps
                    seq += 1
                case "save for a while":
                    tenant.json(tenant.save(model, seq, f"step{step}", ttl_seconds=10))
                    seq += 1
                case "go back" if kept:
                    path = chance.choice(list(kept))
                    tenant.json(tenant.load(model, seq, path))
                    seq, steps = seq + 1, kept[path]
            while len(waiting) > 2:
                _collect(tenant, *waiting.pop(0))
        for both in waiting:
            _collect(tenant, *both)
        final = str(tenant.json(tenant.save(model, seq, "final"))["path"])
        return life.report(tenant, "train", steps, final)
    finally:
        life.beats.leave(session)


def abandon(life: Life, tenant: Lasting, chance: random.Random) -> Report:
    """Leave in the middle: unfetched results, ops behind a gap, unfinished samples."""
    session = tenant.session()
    life.beats.keep(session, tenant)
    try:
        model = tenant.create(session, 8, life.number)
        seq = 1
        for step in range(chance.randint(1, 4)):
            tenant.forward_backward(model, seq, _rows(life.number, step))
            tenant.optim_step(model, seq + 1)
            seq += 2
        if chance.random() < 0.5:
            published = tenant.json(tenant.publish(model, seq, 0))["sampling_session_id"]
            seq += 1
            for number in range(3):
                tenant.submit("asample", _sample(published, number, life.number, tokens=64))
        if chance.random() < 0.5:
            tenant.forward_backward(model, seq + 1, _rows(life.number, 99))  # number seq is never sent
        return life.report(tenant, "abandon")
    finally:
        life.beats.leave(session)


def sample(life: Life, tenant: Lasting, chance: random.Random) -> Report:
    """Sample from the base model; cancel some samples, and do not fetch others."""
    session = tenant.session()
    life.beats.keep(session, tenant)
    try:
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
        answer = tenant.post("create_sampling_session", {**body, "type": "create_sampling_session"})
        assert answer.status_code == 200, answer.text
        sampler = answer.json()["sampling_session_id"]
        for number in range(chance.randint(2, 8)):
            wanted = _sample(sampler, number, life.number, tokens=chance.choice([4, 16, 48]))
            if chance.random() < 0.6:
                tenant.sampled(wanted)
            elif chance.random() < 0.5:
                tenant.post("cancel_future", {"request_id": tenant.submit("asample", wanted)})
            else:
                tenant.submit("asample", wanted)
        return life.report(tenant, "sample")
    finally:
        life.beats.leave(session)


def ask(life: Life, tenant: Lasting, chance: random.Random) -> Report:
    """Act as an OpenAI client: whole answers, streams, and streams that are abandoned."""
    headers = {"Authorization": f"Bearer {tenant.key}"}
    with httpx.Client(base_url=f"{life.url}/v1/", headers=headers, timeout=60, trust_env=False, verify=False) as http:
        for number in range(chance.randint(1, 5)):
            prompt = [int(token) for token in np.random.default_rng([life.number, number]).integers(1, 200, 6)]
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 32, "seed": number}
            leaves = chance.random() < 0.4
            try:
                if chance.random() < 0.5:
                    http.post("completions", json=body)
                else:
                    with http.stream("POST", "completions", json={**body, "stream": True}) as answer:
                        for _ in answer.iter_raw():
                            if leaves:
                                break
            except httpx.TransportError:  # this protocol has no way to repeat a request
                time.sleep(0.5)
            tenant.requests += 1
    return life.report(tenant, "ask")


def err(life: Life, tenant: Lasting, chance: random.Random) -> Report:
    """Send invalid requests and ask for missing objects. Each is refused, and nothing is kept."""
    session = tenant.session()
    for _ in range(chance.randint(3, 8)):
        path, content = chance.choice(MISTAKES)
        answer = tenant.post(path, content(session) if callable(content) else content)
        assert 400 <= answer.status_code < 500, f"{path}: {answer.status_code} {answer.text}"
    return life.report(tenant, "err")


MISTAKES: list[tuple[str, Any]] = [
    ("forward_backward", b"\x0a\xff\xff\xff\xff"),
    ("optim_step", {"model_id": "nobody:train:0", "seq_id": 1}),
    ("create_model", lambda session: {"session_id": session, "model_seq_id": 0, "base_model": "no/such"}),
    ("create_model", lambda session: {"session_id": session, "model_seq_id": 0, "base_model": MODEL,
                                      "lora_config": {"rank": 10_000}}),
    ("retrieve_future", {"request_id": "nobody:train:0:3"}),
    ("asample", {"sampling_session_id": "nobody:sample:0", "seq_id": 0}),
    ("session_heartbeat", {"session_id": "nobody"}),
]  # fmt: skip

LIVES: dict[str, tuple[int, Callable[[Life, Lasting, random.Random], Report]]] = {
    "train": (5, train),
    "abandon": (2, abandon),
    "sample": (3, sample),
    "ask": (2, ask),
    "err": (1, err),
}


# --- what they do -----------------------------------------------------------------------------------------------------


def _rows(number: int, step: int) -> list[Any]:
    generator = np.random.default_rng([number, step])
    rows = [generator.integers(1, 200, generator.integers(8, 24)) for _ in range(2)]
    return [datum(row.tolist(), weights=tensor([1.0] * (len(row) - 1))) for row in rows]


def _sample(sampling_session_id: str, number: int, seed: int, tokens: int) -> dict[str, Any]:
    body = sample_body(sampling_session_id, number, seed)
    return {**body, "sampling_params": {**body["sampling_params"], "max_tokens": tokens}}


def _publish_and_sample(tenant: Lasting, model: str, seq: int, number: int, draws: int) -> None:
    published = tenant.json(tenant.publish(model, seq, number))["sampling_session_id"]
    for draw in range(draws):
        tenant.sampled(_sample(published, draw, seq, tokens=8))


def _fail_a_window(tenant: Lasting, model: str, seq: int, rows: list[Any]) -> None:
    """A failed pass fails its whole window."""
    failed = tenant.forward_backward(model, seq, rows, loss="no_such_loss")
    refused = tenant.optim_step(model, seq + 1)
    assert "no_such_loss" in tenant.error(failed, PATIENCE)
    assert str(seq) in tenant.error(refused, PATIENCE)


def _collect(tenant: Lasting, passed: str, stepped: str) -> None:
    tenant.training(passed)
    answer = json.loads(tenant.result(stepped))
    assert "error" not in answer, answer
