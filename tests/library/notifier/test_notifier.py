"""Messages about exceptions, and DingTalk's robot."""

import base64
import hashlib
import hmac
import json
import logging
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

import twinkle
from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.notifier import DingNotifier, Notifier, notify_exception


class Remembered(Notifier):
    def __init__(self, failure=None):
        self.messages = []
        self.failure = failure

    def __call__(self, message):
        if self.failure is not None:
            raise self.failure
        self.messages.append(message)

    def to_dict(self):
        return {"class": "Remembered"}

    @classmethod
    def _from_dict_impl(cls, data):
        return cls()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TWINKLE_SESSION_ID", "session")


@pytest.fixture
def robot():
    """A stand-in for DingTalk that records messages; ``answer`` is its reply."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.requests.append((self.path, json.loads(body)))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(server.answer).encode())

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.requests, server.answer = [], {"errcode": 0, "errmsg": "ok"}
    server.url = f"http://127.0.0.1:{server.server_port}/robot/send?access_token=t"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def failure(text="broken"):
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def test_a_message_says_what_and_where():
    told = Remembered()
    notify_exception(told, "training", failure(), name="run 7")
    (message,) = told.messages
    assert message.startswith("# run 7: ValueError\n\ntraining: broken")
    assert "rank -1 of 1" in message
    assert "raise ValueError(text)" in message


def test_one_message_for_a_failure_of_a_session(monkeypatch):
    told = Remembered()
    for _ in range(3):
        notify_exception(told, "training", failure())
    assert len(told.messages) == 1
    notify_exception(told, "sampling", failure())
    assert len(told.messages) == 2
    monkeypatch.setenv("TWINKLE_SESSION_ID", "another")
    notify_exception(told, "training", failure())
    assert len(told.messages) == 3


def test_without_a_notifier_nobody_is_told():
    notify_exception(None, "training", failure())


def test_a_message_that_cannot_be_sent_is_logged():
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = twinkle.get_logger()
    logger.addHandler(handler)
    notify_exception(Remembered(OSError("no network")), "training", failure())
    logger.removeHandler(handler)
    assert "Remembered could not send its message: OSError('no network')" in records[0].getMessage()


def test_uncaught_exceptions_are_told(robot, tmp_path):
    script = f"""
import twinkle
from twinkle.notifier import DingNotifier
twinkle.initialize(seed=None, name="script", notifier=DingNotifier({robot.url!r}))
{{}}["missing"]
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "KeyError: 'missing'" in done.stderr
    ((_, content),) = robot.requests
    assert content["markdown"]["title"] == "script: KeyError"


def test_what_a_robot_is_sent(robot):
    assert DingNotifier(robot.url)("text\n\n## A heading\nmore") == {"errcode": 0, "errmsg": "ok"}
    ((path, content),) = robot.requests
    assert path == "/robot/send?access_token=t"
    assert content == {"msgtype": "markdown", "markdown": {"title": "A heading", "text": "text\n\n## A heading\nmore"}}


def test_a_secret_signs(robot):
    DingNotifier(robot.url, secret="s3cret")("x" * 100)
    ((path, content),) = robot.requests
    query = parse_qs(urlsplit(path).query)
    signed = f"{query['timestamp'][0]}\ns3cret".encode()
    assert query["sign"] == [base64.b64encode(hmac.new(b"s3cret", signed, hashlib.sha256).digest()).decode()]
    assert query["access_token"] == ["t"]
    assert content["markdown"]["title"] == "x" * 64


def test_a_robot_that_says_no(robot):
    robot.answer = {"errcode": 310000, "errmsg": "sign not match"}
    with pytest.raises(RuntimeError, match="310000 sign not match"):
        DingNotifier(robot.url)("text")


def test_notifiers_can_be_written_down():
    ding = DingNotifier("https://example.invalid/robot", secret="s", timeout=2.0)
    assert Notifier.from_dict(ding.to_dict()).to_dict() == ding.to_dict()
    assert type(Notifier.from_dict({"class": "Remembered"})) is Remembered
    with pytest.raises(UnknownNameError, match=r"unknown notifier 'Pigeon'; known: .*DingNotifier"):
        Notifier.from_dict({"class": "Pigeon"})
    with pytest.raises(InvalidInputError, match="'class'"):
        Notifier.from_dict({})
    with pytest.raises(InvalidInputError, match="ding_url: got ''"):
        DingNotifier("")
