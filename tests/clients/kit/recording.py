"""Record the requests of twinkle-kit's client as data: ``python tests/clients/kit/recording.py`` writes the file again.

The kit is installed in its own environment (``make test-kit`` creates it). These tests run it and never import it.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from tests.clients.kit.recording_server import Exchange, RecordingServer
from tests.support.paths import ROOT

HERE = Path(__file__).parent
PYTHON = ROOT / ".venv-kit" / "bin" / "python"
RECORDED = HERE / "recorded_0_5_1.json"
MODEL = "Qwen/Qwen3.5-4B"

_USER_SETTINGS = re.compile(r"TWINKLE_|HF_|TRANSFORMERS_|MODELSCOPE_|PYTHONPATH$")
_LOCAL = "127.0.0.1,localhost"
# Headers of the connection, or that differ in every run.
_LEFT_OUT = {"Host", "Connection", "Content-Length", "Accept", "Accept-Encoding", "User-Agent"}


def environment() -> dict[str, str]:
    """Return the environment for the kit: without the user's settings, without a hub, and with one core."""
    kept = {name: value for name, value in os.environ.items() if not _USER_SETTINGS.match(name)}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return {**kept, **offline, "NO_PROXY": _LOCAL, "no_proxy": _LOCAL, "OMP_NUM_THREADS": "1"}


def run_kit(script: str, *arguments: str, seconds: float = 300) -> list[dict[str, Any]]:
    """Run a script of this directory in the kit's interpreter; return the lines of JSON that it printed."""
    done = subprocess.run(
        [PYTHON, HERE / script, *arguments],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def conversation() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run drive.py against a recording server.

    Return the steps that drive.py printed and the exchanges that the server saw.
    """
    with RecordingServer() as server:
        steps = run_kit("drive.py", server.url, MODEL)
    exchanges = _beating_once(server.exchanges)
    opening = exchanges[0].headers["x-request-id"]
    return steps, {
        "client": "twinkle-kit 0.5.1",
        "headers": {
            "create_session": _headers(exchanges[0], opening),
            "others": _headers(exchanges[1], opening),
        },
        "exchanges": [_plain(exchange) for exchange in exchanges],
    }


def _beating_once(exchanges: list[Exchange]) -> list[Exchange]:
    """Keep one heartbeat, right after the start of the session: a separate thread sends them at any time."""
    beats = [exchange for exchange in exchanges if exchange.path.endswith("/session_heartbeat")]
    others = [exchange for exchange in exchanges if exchange not in beats]
    return [others[0], beats[0], *others[1:]]


def _headers(exchange: Exchange, request_id: str) -> dict[str, str]:
    kept = {name: value for name, value in exchange.headers.items() if name not in _LEFT_OUT}
    return {name: value.replace(request_id, "<request id>") for name, value in kept.items()}


def _plain(exchange: Exchange) -> dict[str, Any]:
    return {
        "method": exchange.method,
        "path": exchange.path,
        "query": exchange.query,
        "body": _ordered(exchange.body),
        "status": exchange.status,
        "answer": exchange.answer,
    }


def _ordered(body: Any) -> Any:
    """Sort the keys of objects that are sent as text, because the client writes them in the random order of a set."""
    if not isinstance(body, dict):
        return body
    return {
        key: json.dumps(json.loads(value), sort_keys=True)
        if isinstance(value, str) and "_TWINKLE_TYPE_" in value
        else value
        for key, value in body.items()
    }


def _lines(said: dict[str, Any]) -> str:
    """Return JSON with one exchange per line."""
    head = json.dumps({**said, "exchanges": []}, indent=1).removesuffix("[]\n}")
    return head + "[\n" + ",\n".join(json.dumps(exchange) for exchange in said["exchanges"]) + "\n]}\n"


if __name__ == "__main__":
    RECORDED.write_text(_lines(conversation()[1]))
