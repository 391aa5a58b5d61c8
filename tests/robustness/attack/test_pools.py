"""One tenant's texts, templates and batches block neither the interpreter nor the threads of other tenants."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.robustness.attack.confined import ConfinedServer
from tests.support.servers.native_running import NativeTenant
from twinkle.template import ClineParser, VCPParser
from twinkle.template.dsml import parse_dsml

pytestmark = pytest.mark.attack

TINY, NAME = "random://llama-tiny", "tiny"
PROMPT_SECONDS = 10.0  # generous: a blocked request took a minute
ROWS = [{"input_ids": list(range(1, 65)), "labels": list(range(1, 65))}] * 64
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
IN_FLIGHT = 100


def config(**limits: Any) -> dict[str, Any]:
    model = {"model_id": TINY, "backend": "transformers", "device": "cpu", "dtype": "fp32", "aliases": [NAME]}
    return {
        "applications": [
            {"name": "server", "import_path": "server"},
            {"name": "model", "import_path": "model", "args": model},
            {"name": "sampler", "import_path": "sampler", "args": {"model_id": TINY, "sampler_type": "torch"}},
            {"name": "processor", "import_path": "processor"},
        ],
        "limits": limits,
    }


def took(call: Callable[[], Any]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


class Flood:
    """Sends many concurrent requests of one tenant until it is stopped. ``body`` makes each from two numbers."""

    def __init__(self, tenant: NativeTenant, path: str, body: Callable[[int, int], dict[str, Any]]) -> None:
        self._tenant = tenant
        self._path = path
        self._body = body
        self._stop = threading.Event()
        self.sent = 0
        self.statuses: Counter[int] = Counter()

    def __enter__(self) -> "Flood":
        self._pool = ThreadPoolExecutor(IN_FLIGHT)
        for worker in range(IN_FLIGHT):
            self._pool.submit(self._send, worker)
        deadline = time.monotonic() + 60
        while self.sent < IN_FLIGHT:
            assert time.monotonic() < deadline, "the flood does not begin"
            time.sleep(0.05)
        time.sleep(1)  # time for the requests to arrive
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()

    def _send(self, worker: int) -> None:
        with httpx.Client(
            base_url=self._tenant.http.base_url,
            headers=self._tenant.http.headers,
            timeout=120,
            trust_env=False,
            verify=False,  # there is no TLS here, and loading all certificates a hundred times takes long
        ) as http:
            for number in range(10_000):
                if self._stop.is_set():
                    return
                self.sent += 1
                try:
                    self.statuses[http.post(self._path, json=self._body(worker, number)).status_code] += 1
                except httpx.HTTPError:  # the server ended
                    return


def seconds_of(honest: NativeTenant) -> dict[str, float]:
    """Return how long each kind of request takes a tenant that sends one at a time."""
    return {
        "forward_backward": took(lambda: honest.verb("forward_backward", adapter_name="a", inputs=ROWS)),
        "save": took(lambda: honest.verb("save", adapter_name="a", name=f"ck{time.monotonic_ns()}")),
        "metrics": took(lambda: honest.http.get("/metrics").raise_for_status()),
        "set_template": took(lambda: honest.verb("set_template", adapter_name="a", template_cls="Template")),
        "text": took(lambda: honest.verb("forward_only", adapter_name="a", inputs=[CHAT])),
    }


def test_templates_and_texts_hold_up_nobody(confined_server: Callable[..., ConfinedServer]) -> None:
    """Uses a tokenizer that is slow to load, like those of large models, and texts that are slow to encode."""
    server = confined_server(config(), tokenizer=0.4, encode=2.0)
    greedy, honest = (NativeTenant(server.url, f"tml-{name}", NAME) for name in ("greedy", "honest"))
    for tenant in (greedy, honest):
        tenant.add_adapter("a")
    templates = Flood(
        greedy,
        f"/api/v1/sampler/{NAME}/twinkle/set_template",
        lambda worker, number: {"template_cls": "Template", "default_system": f"{worker} {number}"},
    )
    with templates:
        times = seconds_of(honest)
        assert all(seconds < PROMPT_SECONDS for seconds in times.values()), times
    assert set(templates.statuses) == {200}
    texts = Flood(
        greedy,
        f"/api/v1/model/{NAME}/twinkle/forward_only",
        lambda worker, number: {"adapter_name": "a", "inputs": [CHAT]},
    )
    with texts:
        beside = seconds_of(honest)
        print(times, beside, texts.statuses)
        assert all(seconds < PROMPT_SECONDS for seconds in beside.values()), beside
        assert set(texts.statuses) <= {200}
        assert texts.sent - texts.statuses.total() > IN_FLIGHT // 2, "most of them wait for their turn"
        assert server.process is not None
        server.process.terminate()
        assert server.process.wait(timeout=30) == 0


class Processors:
    """A tenant's session with processors."""

    def __init__(self, tenant: NativeTenant) -> None:
        self._tenant = tenant

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self._tenant.http.post(f"/api/v1/processor/twinkle/{route}", json=body)

    def create(self, kind: str, name: str, **options: Any) -> str:
        answer = self.post("create", processor_type=kind, class_type=name, **options)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["processor_id"])

    def call(self, processor_id: str, function: str, **arguments: Any) -> httpx.Response:
        return self.post("call", processor_id=processor_id, function=function, **arguments)


def loaders(session: Processors, characters: int) -> Iterator[str]:
    """Yield loaders with one batch of 150 rows; each row has a text of this many characters."""
    rows = [{"question": "?", "answer": "#### 1"}] * 150
    meta = json.dumps({"_TWINKLE_TYPE_": "DatasetMeta", "data": rows})
    dataset = session.create("dataset", "Dataset", dataset_meta=meta)
    mapped = session.call(dataset, "map", preprocess_func="GSM8KProcessor", init_args={"system": "x" * characters})
    assert mapped.status_code == 200, mapped.text
    while True:
        yield session.create("dataloader", "DataLoader", dataset=dataset, batch_size=150)


def test_batches_by_reference_have_a_size(confined_server: Callable[..., ConfinedServer]) -> None:
    server = confined_server(config())
    tenant = NativeTenant(server.url, "tml-greedy", NAME)
    tenant.add_adapter("a")
    session = Processors(tenant)
    large = session.call(next(loaders(session, 900_000)), "__next__", by_reference=True)
    assert large.status_code == 400
    assert "bytes of JSON, allowed: at most 67108864" in large.text
    before = server.rss()
    allowed = session.call(next(loaders(session, 300_000)), "__next__", by_reference=True)
    assert allowed.status_code == 200, allowed.text
    reference = allowed.json()["result"]

    def forward(_: int) -> httpx.Response:
        with httpx.Client(
            base_url=tenant.http.base_url, headers=tenant.http.headers, timeout=120, trust_env=False
        ) as http:
            body = {"adapter_name": "a", "inputs": reference}
            return http.post(f"/api/v1/model/{NAME}/twinkle/forward_only", json=body)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(forward, range(4)))
    for answer in answers:  # 45 million characters are more tokens than a request may have
        assert answer.status_code == 400, answer.text
        assert "1048576" in answer.text
    print(f"resident: {before / 2**20:.0f} MB before, {server.rss() / 2**20:.0f} MB after")
    tenant.verb("forward_only", adapter_name="a", inputs=ROWS)


@pytest.mark.parametrize(
    "look",
    [
        lambda: ClineParser().detect("<a>" * 87_000),
        lambda: VCPParser().parse("<<<[TOOL_REQUEST]>>>" * 13_000),
        lambda: parse_dsml(" " * 262_000),
    ],
    ids=["cline", "vcp", "dsml"],
)
def test_long_texts_are_looked_through_in_seconds(look: Callable[[], Any]) -> None:
    """Each text has 260 kB; in quadratic time they took 215, 30 and 222 s."""
    assert took(look) < PROMPT_SECONDS
