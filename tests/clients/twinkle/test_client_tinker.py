"""The installed tinker SDK against a stub. It runs in a separate process because the test modifies it."""

import json
import os
import subprocess
import sys

import pytest

from twinkle_client.environment import set_tinker_variables, tinker_key

pytest.importorskip("tinker")

SCRIPT = """
import json
import twinkle_client
twinkle_client.init_tinker_client(*{arguments})
twinkle_client.init_tinker_client(*{arguments})
import tinker
for options in {clients}:
    tinker.ServiceClient(**options).create_sampling_client(model_path="twinkle://run/weights/x")
for scheme in ("twinkle", "tinker"):
    print(tinker.ParsedCheckpointTinkerPath.from_tinker_path(scheme + "://run/weights/x").checkpoint_id)
"""


def run(stub, arguments, clients, **variables):
    """Run a script; return what it printed and the create_sampling_session requests."""
    for path, answer in {
        "/client/config": {},
        "/client/dynamic_config": {},
        "/create_session": {"type": "create_session", "session_id": "s1"},
        "/session_heartbeat": {"type": "session_heartbeat"},
        "/create_sampling_session": {"type": "create_sampling_session", "sampling_session_id": "x1"},
        "/telemetry": {"status": "accepted"},
    }.items():
        stub.answer(path, answer)
    script = SCRIPT.format(arguments=json.dumps(arguments), clients=json.dumps(clients))
    environment = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), stub.asked("/create_sampling_session")


def test_any_key_and_both_schemes(stub):
    checkpoints, (first, second) = run(stub, [stub.url + "/api/v1", "no-prefix"], [{}, {"api_key": "of-the-program"}])
    assert checkpoints == ["weights/x", "weights/x"]
    assert first.body["model_path"] == "tinker://run/weights/x"
    for asked, key in ((first, "no-prefix"), (second, "of-the-program")):
        assert asked.headers["x-api-key"] == key
        assert asked.headers["twinkle-authorization"] == f"Bearer {key}"


def test_our_variables_come_before_the_sdks(stub):
    ours = {"TWINKLE_SERVER_URL": stub.url, "TWINKLE_SERVER_TOKEN": "ours"}
    _, (asked,) = run(stub, [], [{}], **ours, TINKER_BASE_URL="http://127.0.0.1:9", TINKER_API_KEY="tml-theirs")
    assert asked.headers["x-api-key"] == "ours"


WITHOUT_SERVER = """
import twinkle_client
twinkle_client.init_tinker_client("http://127.0.0.1:1", "any")
import tinker
for options in ({}, {"base_url": "http://127.0.0.1:2"}):
    try:
        tinker.ServiceClient(**options).get_server_capabilities()
    except twinkle_client.ConnectionLostError as error:
        print(error)
"""


def test_a_missing_server_is_named_soon():
    """The SDK alone tries silently for five minutes."""
    environment = {**os.environ, "TWINKLE_CONNECT_DEADLINE": "0.3"}
    command = [sys.executable, "-c", WITHOUT_SERVER]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    of_init, of_client = done.stdout.splitlines()
    assert "no server answers at http://127.0.0.1:1/api/v1: tried" in of_init
    assert "no server answers at http://127.0.0.1:2/api/v1: tried" in of_client
    assert done.stderr.count("trying again for up to 0.3 s") == 2


@pytest.mark.parametrize(
    ("given", "url", "key"),
    [
        ({}, "http://127.0.0.1:8000", "EMPTY_TOKEN"),
        ({"TINKER_BASE_URL": "http://t", "TINKER_API_KEY": "tml-t"}, "http://t", "tml-t"),
        ({"TWINKLE_SERVER_URL": "http://w/api/v1/", "TINKER_API_KEY": "tml-t"}, "http://w", "tml-t"),
    ],
)
def test_variables(monkeypatch, given, url, key):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    # Set the variables, so that monkeypatch restores them after set_tinker_variables has changed them.
    monkeypatch.setenv("TINKER_BASE_URL", given.get("TINKER_BASE_URL", ""))
    monkeypatch.setenv("TINKER_API_KEY", given.get("TINKER_API_KEY", ""))
    set_tinker_variables(None, None)
    assert (os.environ["TINKER_BASE_URL"], tinker_key()) == (url, key)
