"""Replay the requests of twinkle-kit 0.5.1's client on our server: every answer has the fields that the client reads.

tests/clients/kit recorded the requests with a server that gives the smallest answers that the client accepts. Our
answers may have more fields.
"""

import datetime
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.paths import ROOT
from tests.support.servers.running import Server, torch_config

RECORDED = json.loads((ROOT / "tests" / "clients" / "kit" / "recorded_0_5_1.json").read_text())
EXCHANGES: list[dict[str, Any]] = RECORDED["exchanges"]
NAME = "Qwen/Qwen3.5-4B"  # the model's name in the recording
TINY = "random://llama-tiny"

pytestmark = pytest.mark.slow

# Fields with ids that later requests refer to.
_IDENTITIES = ("session_id", "processor_id", "twinkle_path", "request_id")


@dataclass(frozen=True)
class Replayed:
    recorded: dict[str, Any]
    answer: httpx.Response


def _title(number: int) -> str:
    """Return a title such as ``07 add_adapter_to_model``; for processors it includes the called function."""
    exchange = EXCHANGES[number]
    verb = exchange["path"].partition("/twinkle/")[2].partition("/")[0]
    function = (exchange["body"] or {}).get("function", "")
    return f"{number:02d} {verb} {function}".strip()


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Replayed]]:
    """The replayed exchanges. Templates need a tokenizer, so the server has a tiny real model instead of the mock."""
    server = Server(tmp_path_factory.mktemp("kit"), torch_config(TINY, aliases=[NAME])).start()
    try:
        yield replay(server)
    finally:
        server.close()


def replay(server: Server) -> list[Replayed]:
    """Send each request, with the ids of this server in place of the recorded ones."""
    ours: dict[str, str] = {}
    answers = []
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False, verify=False) as http:
        for exchange in EXCHANGES:
            kind = "create_session" if not ours else "others"
            path, query, body, headers = _translated(
                [exchange["path"], exchange["query"], exchange["body"], RECORDED["headers"][kind]], ours
            )
            url = f"{path}?{query}" if query else path
            answer = http.request(exchange["method"], url, json=body, headers=headers)
            answers.append(Replayed(exchange, answer))
            ours |= _identities(exchange["answer"], answer)
    return answers


def _translated(content: list[Any], ours: dict[str, str]) -> list[Any]:
    text = json.dumps(content)
    for theirs in sorted(ours, key=len, reverse=True):  # a path before the run id that is part of it
        text = text.replace(theirs, ours[theirs])
    translated: list[Any] = json.loads(text)
    return translated


def _identities(recorded: Any, answer: httpx.Response) -> dict[str, str]:
    if not isinstance(recorded, dict) or not answer.is_success:
        return {}
    given = answer.json()
    return {recorded[key]: given[key] for key in _IDENTITIES if key in recorded and key in given}


def fits(recorded: Any, given: Any) -> bool:
    """Return whether ``given`` has all keys of ``recorded``, with values of the same types; null matches anything."""
    match recorded:
        case None:
            return True
        case dict():
            return isinstance(given, dict) and all(
                key in given and fits(value, given[key]) for key, value in recorded.items()
            )
        case list():
            return isinstance(given, list) and all(fits(recorded[0], item) for item in given if recorded)
        case bool() | str():
            return type(given) is type(recorded)
        case int() | float():
            return isinstance(given, int | float) and not isinstance(given, bool)
    raise AssertionError(recorded)


def _refused(exchange: dict[str, Any]) -> bool:
    """Return whether the request was recorded for its refusal: an unknown patch, or data of a hub."""
    body = exchange["body"] or {}
    return "NoSuchPatch" in body.values() or "ms://swift" in str(body.get("dataset_meta"))


@pytest.mark.parametrize("number", range(len(EXCHANGES)), ids=_title)
def test_answer(replayed: list[Replayed], number: int) -> None:
    recorded, answer = replayed[number].recorded, replayed[number].answer
    if _refused(recorded):
        assert answer.status_code in (400, 404)
        assert isinstance(answer.json()["detail"], str)
        return
    assert answer.status_code == recorded["status"], answer.text
    assert fits(recorded["answer"], answer.json()), answer.text


def test_times_are_times(replayed: list[Replayed]) -> None:
    runs = _answers(replayed, "GET", "/training_runs")[-1]["training_runs"]
    checkpoints = _answers(replayed, "GET", "/checkpoints")[0]["checkpoints"]
    assert runs
    assert checkpoints
    for text in [run["last_request_time"] for run in runs] + [one["time"] for one in checkpoints]:
        datetime.datetime.fromisoformat(text)


def test_checkpoints_are_listed_by_the_names_the_client_asks_for(replayed: list[Replayed]) -> None:
    saved = [answer["twinkle_path"] for answer in _answers(replayed, "POST", "/save")]
    listed = _answers(replayed, "GET", "/checkpoints")[0]["checkpoints"]
    assert [one["twinkle_path"] for one in listed] == saved  # oldest first
    assert {one["checkpoint_type"] for one in listed} <= {"training", "sampler"}
    assert all(one["twinkle_path"].endswith(f"/{one['checkpoint_id']}") for one in listed)


def test_rows_are_answered_in_their_shape(replayed: list[Replayed]) -> None:
    """logps are aligned with labels and can be sent back as ref_outputs."""
    for ending in ("/forward_only", "/forward_backward"):
        for exchange in replayed:
            if exchange.recorded["path"].endswith(ending):
                lengths = [len(row["input_ids"]) for row in exchange.recorded["body"]["inputs"]]
                rows = exchange.answer.json()["result"]["logps"]
                assert len(rows) == len(lengths)
                assert all(len(row) >= length for row, length in zip(rows, lengths, strict=True))


def test_sampled_sequences(replayed: list[Replayed]) -> None:
    samples = [exchange for exchange in replayed if exchange.recorded["path"].endswith("/sample")]
    assert len(samples) == 3
    for exchange in samples:
        (row,) = exchange.recorded["body"]["inputs"]
        (sample,) = exchange.answer.json()["samples"]
        (sequence,) = sample["sequences"]
        assert sequence["stop_reason"] in {"length", "stop", "abort", "error"}
        assert [top[0][0] for top in sequence["logprobs"]] == sequence["tokens"]
        feature = sequence["new_input_feature"]
        assert feature["input_ids"] == row["input_ids"] + sequence["tokens"]
        assert len(feature["labels"]) == len(feature["input_ids"])
        assert row.keys() <= feature.keys()


def test_an_epoch_ends_with_410(replayed: list[Replayed]) -> None:
    """The client treats any 410 as the end of an iteration and reads its JSON."""
    (end,) = [exchange.answer for exchange in replayed if exchange.recorded["status"] == 410]
    assert end.json() == {"detail": "Iterator exhausted"}


def test_a_session_that_is_gone_is_no_end_of_data(replayed: list[Replayed]) -> None:
    """With status 410, a loop over a remote dataloader would silently end early."""
    headers = {"Authorization": "Bearer kit-token"}
    base = replayed[0].answer.request.url.join("/api/v1/")
    with httpx.Client(base_url=base, headers=headers, timeout=60, trust_env=False, verify=False) as http:
        session = http.post("twinkle/create_session", json={}).json()
        http.headers["X-Twinkle-Session-Id"] = session["session_id"]
        rows = json.dumps({"_TWINKLE_TYPE_": "DatasetMeta", "dataset_id": "", "data": [{"input_ids": [1]}] * 2})
        made = {"processor_type": "dataset", "class_type": "Dataset", "dataset_meta": rows}
        dataset = http.post("processor/twinkle/create", json=made).json()["processor_id"]
        made = {"processor_type": "dataloader", "class_type": "DataLoader", "dataset": dataset, "batch_size": 1}
        loader = http.post("processor/twinkle/create", json=made).json()["processor_id"]
        iteration = [
            http.post("processor/twinkle/call", json={"processor_id": loader, "function": function})
            for function in ("__iter__", "__next__")
        ]
        assert [answer.status_code for answer in iteration] == [200, 200]
        assert http.post("twinkle/finish_session", json=session).is_success
        answer = http.post("processor/twinkle/call", json={"processor_id": loader, "function": "__next__"})
    assert answer.status_code in (400, 404)
    assert session["session_id"] in answer.json()["detail"]


def test_somebody_elses_session_is_unknown(replayed: list[Replayed]) -> None:
    create = next(exchange for exchange in replayed if exchange.recorded["path"].endswith("/add_adapter_to_model"))
    request = create.answer.request
    headers = {**dict(request.headers), "authorization": "Bearer other", "twinkle-authorization": "Bearer other"}
    with httpx.Client(timeout=60, trust_env=False, verify=False) as http:
        answer = http.request(request.method, request.url, content=request.content, headers=headers)
    assert answer.status_code == 404
    assert isinstance(answer.json()["detail"], str)


def _answers(replayed: list[Replayed], method: str, ending: str) -> list[Any]:
    return [
        exchange.answer.json()
        for exchange in replayed
        if exchange.recorded["method"] == method and exchange.recorded["path"].endswith(ending)
    ]
