"""The requests on the page of the native protocol get the answers that the page shows, from a mock server."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.docs.code_blocks import Block, blocks_of
from tests.support.paths import ROOT
from tests.support.servers.native_caller import Caller
from tests.support.servers.running import MODEL, Server

BLOCKS = [block for block in blocks_of(ROOT / "docs" / "native-protocol.md") if block.language == "http"]
TOKEN = "EMPTY_TOKEN"  # of the page
ADAPTER = "a"


@dataclass(frozen=True)
class Exchange:
    """A request and its answer, as a block shows them. ``path`` is empty if the block has only an answer."""

    path: str
    body: Any
    status: int
    answer: Any
    headers: dict[str, str]

    @classmethod
    def read(cls, block: Block) -> "Exchange":
        request, status, answer = re.split(r"^(\d{3})\n", block.text, maxsplit=1, flags=re.MULTILINE)
        path = re.match(r"POST (\S+)\n", request)
        headers = dict(re.findall(r"^([\w-]+): (.+)$", answer, re.MULTILINE))
        bodies = [json.loads(part[part.index("{") :]) if "{" in part else None for part in (request, answer)]
        return cls(path[1] if path else "", bodies[0], int(status), bodies[1], headers)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("server")).start()
    yield running
    running.close()


def test_answers_are_as_shown(server: Server) -> None:
    unknown, first, other, wrong = map(Exchange.read, BLOCKS)
    caller = Caller(server.url, TOKEN)
    shown = re.findall(r"session_[0-9a-f]{32}", BLOCKS[1].text)[0]
    session = caller.begin()
    config = {"r": 8, "target_modules": "all-linear"}
    added = {"adapter_name": ADAPTER, "config": config, "seed": 1}
    prefix = f"{server.url}/api/v1/model/{MODEL}/twinkle"
    chosen = {"adapter_name": ADAPTER, "optimizer_cls": "AdamW", "lr": 1e-3, "seq_id": 1}
    for verb, body in (("add_adapter_to_model", added), ("set_optimizer", chosen)):
        assert caller.http.post(f"{prefix}/{verb}", json=body).status_code == 200

    def sent(exchange: Exchange, body: Any) -> httpx.Response:
        answer = caller.http.post(f"{server.url}{exchange.path or first.path}", json=body)
        assert answer.status_code == exchange.status, answer.text
        assert json.loads(answer.text.replace(session, shown)) == exchange.answer
        assert {name: answer.headers[name] for name in exchange.headers} == exchange.headers
        return answer

    sent(unknown, unknown.body)
    assert sent(first, first.body).content == sent(first, first.body).content
    sent(other, {**first.body, "inputs": first.body["inputs"][:1]})
    sent(wrong, wrong.body)
