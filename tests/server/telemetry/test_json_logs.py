"""JSON logs: every line is JSON and names its request."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.support.servers.running import Server, Tenant, environment
from twinkle.server.app import make_app
from twinkle.server.telemetry.logs import JsonFormatter, enter_request

KEY = "tml-secret-of-a-tenant"


class JsonServer(Server):
    """A server whose stderr goes to its own file; the announcement goes to stdout."""

    @property
    def errors(self) -> Path:
        return self.directory / "stderr.log"

    def spawn(self) -> "JsonServer":
        arguments = self.command(
            "launch", "-c", str(self.directory / "config.yaml"), "--log-format", "json", "--log-level", "debug"
        )
        with (self.directory / "server.log").open("ab") as out, self.errors.open("ab") as err:
            self.process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment()
            )
        return self

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.errors.read_text().splitlines()]


def test_every_line_says_what_it_is_about(tmp_path: Path) -> None:
    server = JsonServer(tmp_path)
    server.start()
    try:
        tenant = Tenant(server.url, KEY)
        model = tenant.model()
        body = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
        answer = tenant.post("optim_step", body, **{"X-Request-Id": "my-client.7"})
        request_id = answer.json()["request_id"]
        tenant.result(request_id)
        assert server.stop() == 0
    finally:
        server.close()
    lines = server.lines()
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    (access,) = [line for line in lines if line.get("client_request_id") == "my-client.7"]
    assert access["http_request_id"] == answer.headers["x-request-id"]
    assert access["request_id"] == request_id
    assert access["run_id"] == model
    assert access["message"].startswith("POST /api/v1/optim_step 200 ")
    assert any(line["message"] == "SIGTERM: finishing what runs" for line in lines)
    assert KEY not in server.errors.read_text()
    assert "learning_rate" not in server.errors.read_text()


def test_every_answer_has_an_id_of_its_own(server: Server, tenant: Tenant) -> None:
    answers = [tenant.get("get_server_capabilities"), tenant.get("no/such/page"), tenant.post("create_model", b"{")]
    ids = [answer.headers.get_list("x-request-id") for answer in answers]
    assert all(len(one) == 1 and re.fullmatch(r"[0-9a-f]{16}", one[0]) for one in ids)
    assert len({one[0] for one in ids}) == 3


@pytest.fixture
def record() -> logging.LogRecord:
    return logging.LogRecord("a.logger", logging.WARNING, __file__, 1, "got %s", ("ü",), None)


def test_outside_of_requests(record: logging.LogRecord) -> None:
    line = json.loads(JsonFormatter().format(record))
    assert line.pop("time").endswith("+00:00")
    assert line == {"level": "warning", "logger": "a.logger", "message": "got ü"}


def test_whoever_logs_may_name_the_request(record: logging.LogRecord) -> None:
    """In the compute thread no request is being served, so the code that logs may name one."""
    record.request_id = "s-1:sample:0:3"
    line = json.loads(JsonFormatter().format(record))
    assert line["request_id"] == "s-1:sample:0:3"
    assert line["sampling_session_id"] == "s-1:sample:0"


def test_errors_are_one_line(record: logging.LogRecord) -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        record.exc_info = sys.exc_info()
    text = JsonFormatter().format(record)
    assert "\n" not in text
    assert json.loads(text)["error"].endswith("ValueError: broken")


@pytest.mark.parametrize("sent", ["a b", "x" * 129, 'a"b', "ü", ""])
def test_ids_of_no_form_are_not_repeated(sent: str) -> None:
    assert enter_request(sent).client_id is None


def test_a_bug_is_found_by_the_id_of_its_answer() -> None:
    """The answer to an unexpected error is made outside of the middleware that adds the id."""
    app = make_app(lambda _app: None)  # type: ignore[arg-type,return-value]  # never started: there is no gateway
    answer = TestClient(app, raise_server_exceptions=False).get("/api/v1/healthz/ready")
    assert answer.status_code == 500
    assert re.fullmatch(r"[0-9a-f]{16}", answer.headers["x-request-id"])
