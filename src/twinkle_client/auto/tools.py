"""What the agent's model may ask for. Everything that runs, changes or ends something is confirmed by the person."""

import difflib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import httpx

from twinkle_client.auto.runs import Run, Runs
from twinkle_client.auto.runtime import check_run_id
from twinkle_client.client.transport import needs_certificates
from twinkle_client.environment import read_environment
from twinkle_client.errors import TwinkleClientError, invalid, unknown

__all__ = ["AutoTools"]

_log = logging.getLogger(__name__)

_HUB = "https://huggingface.co"
_SECONDS = 10.0
_MOST_TEXT = 16_000  # characters of a tool's answer

_TEXT = {"type": "string"}
_RUN = {"run_id": {**_TEXT, "description": "the run; default: the selected one"}}
# name → what it does, its parameters, and which of them are needed
_TOOLS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "list_training_runs": ("List all runs with their states.", {}, []),
    "get_training_status": ("Show a run's state, last metrics and log.", _RUN, []),
    "select_run": ("Choose the run that other tools mean.", {"run_id": _TEXT}, ["run_id"]),
    "start_training": (
        "Start a new run with a Python script. The user sees the script and must agree.",
        {"name": {**_TEXT, "description": "letters, digits and dashes"}, "script": _TEXT},
        ["name", "script"],
    ),
    "update_script": (
        "Replace a run's script. The user sees the difference and must agree. It takes effect at the next start.",
        {"script": _TEXT, **_RUN},
        ["script"],
    ),
    "pause_training": ("Kill a run's script at once; resume_training starts it again.", _RUN, []),
    "resume_training": ("Start a run's script again.", _RUN, []),
    "stop_training": ("Ask a run's script to save a checkpoint and end.", _RUN, []),
    "start_server": (
        "Start a Twinkle server on this machine.",
        {"model_id": _TEXT, "port": {"type": "integer"}},
        ["model_id"],
    ),
    "shutdown_server": ("Stop the server that start_server started.", {}, []),
    "list_supported_models": ("List the models of the Twinkle server.", {}, []),
    "get_cluster_info": ("Show the server's address and health, and this machine's processors and GPUs.", {}, []),
    "search_models": ("Search models on Hugging Face.", {"query": _TEXT}, ["query"]),
    "search_datasets": ("Search datasets on Hugging Face.", {"query": _TEXT}, ["query"]),
}


class AutoTools:
    """The tools of one session. ``confirm`` shows a text to the person and returns whether they agree.

    The selected run and the server's process belong to the session; runs go on without it.
    """

    def __init__(self, runs: Runs, confirm: Callable[[str], bool], run_id: str | None = None) -> None:
        self.runs = runs
        self._confirm = confirm
        self._selected = None if run_id is None else runs.get(run_id)
        self._server: subprocess.Popen[bytes] | None = None
        self._server_url = read_environment().server_url.rstrip("/").removesuffix("/api/v1")

    def infos(self) -> list[dict[str, Any]]:
        """Return the descriptions of the tools for the model."""
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": description,
                    "parameters": {"type": "object", "properties": parameters, "required": needed},
                },
            }
            for name, (description, parameters, needed) in _TOOLS.items()
        ]

    def call(self, name: str, arguments: str) -> str:
        """Run a tool with arguments in JSON, and return a text for the model: ``Error: …`` if it failed."""
        try:
            given = _arguments(name, arguments)
            result = getattr(self, name)(**given)
        except Exception as error:  # noqa: BLE001 - whatever a tool meets, the model reads it and the session goes on
            _log.debug("tool %s failed", name, exc_info=True)
            return f"Error: {error or type(error).__name__}"
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        return text[:_MOST_TEXT]

    # --- runs ---------------------------------------------------------------------------------------------------------

    def list_training_runs(self) -> list[dict[str, Any]]:
        return [{"run_id": run.run_id, "state": self.runs.state(run)} for run in self.runs.all()]

    def get_training_status(self, run_id: str | None = None) -> dict[str, Any]:
        run = self._run(run_id)
        state = self.runs.state(run)
        return {"run_id": run.run_id, "state": state, "metrics": run.metrics(), "log": run.log_tail()}

    def select_run(self, run_id: str) -> str:
        self._selected = self.runs.get(run_id)
        return f"selected {self._selected.run_id}"

    def start_training(self, name: str, script: str) -> str:
        check_run_id(name)
        if not self._confirm(f"Start a new run {name!r} with this script?\n\n{script}"):
            return _DECLINED
        run = self._selected = self.runs.create(name, script)
        return f"started {run.run_id}, process {self.runs.launch(run, self._server_url)}"

    def update_script(self, script: str, run_id: str | None = None) -> str:
        run = self._run(run_id)
        before = run.script.read_text(encoding="utf-8").splitlines(keepends=True)
        after = script.splitlines(keepends=True)
        lines = difflib.unified_diff(before, after, "now", "new")
        changed = "".join(line if line.endswith("\n") else f"{line}\n(no line break at the end)\n" for line in lines)
        if not self._confirm(f"Change the script of {run.run_id}?\n\n{changed}"):
            return _DECLINED
        kept = self.runs.replace_script(run, script)
        return f"changed; the earlier script is {kept.name}. A running script goes on unchanged until it is restarted"

    def pause_training(self, run_id: str | None = None) -> str:
        run = self._run(run_id)
        if not self._confirm(f"Kill the script of {run.run_id}? What it has not saved is lost."):
            return _DECLINED
        self.runs.pause(run)
        return f"paused {run.run_id}"

    def resume_training(self, run_id: str | None = None) -> str:
        run = self._run(run_id)
        script = run.script.read_text(encoding="utf-8")
        if not self._confirm(f"Start the script of {run.run_id} again?\n\n{script}"):
            return _DECLINED
        return f"started {run.run_id}, process {self.runs.launch(run, self._server_url)}"

    def stop_training(self, run_id: str | None = None) -> str:
        run = self._run(run_id)
        if not self._confirm(f"Ask the script of {run.run_id} to end?"):
            return _DECLINED
        return f"stopped {run.run_id}" if self.runs.stop(run) else f"{run.run_id} was asked to end and is still running"

    def _run(self, run_id: str | None) -> Run:
        if run_id:
            return self.runs.get(run_id)
        if self._selected is None:
            raise invalid("run_id", run_id, "the id of a run; none is selected")
        return self._selected

    # --- the server ---------------------------------------------------------------------------------------------------

    def start_server(self, model_id: str, port: int = 8000) -> str:
        if self._server is not None and self._server.poll() is None:
            return f"Error: a server is running already, process {self._server.pid}"
        if find_spec("twinkle") is None:
            return "Error: the server is not installed here: pip install 'twinkle-posttrain[server]'"
        config = _server_config(model_id, port)
        if not self._confirm(f"Start a server with this configuration?\n\n{json.dumps(config, indent=2)}"):
            return _DECLINED
        folder = self.runs.base_dir / "auto" / "server"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(json.dumps(config, indent=2), encoding="utf-8")  # JSON is YAML
        with (folder / "server.log").open("ab") as output:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "twinkle.server", "launch", "-c", str(folder / "config.yaml")],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._server_url = f"http://127.0.0.1:{port}"
        return f"starting {self._server_url}, log {folder / 'server.log'}; get_cluster_info shows when it is up"

    def shutdown_server(self) -> str:
        if self._server is None or self._server.poll() is not None:
            return "Error: this session has started no server that is running"
        if not self._confirm(f"Stop the server, process {self._server.pid}?"):
            return _DECLINED
        self._server.send_signal(signal.SIGTERM)
        try:
            self._server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            return f"the server, process {self._server.pid}, was asked to end and is still running"
        return "stopped"

    def list_supported_models(self) -> Any:
        return _get(f"{self._server_url}/api/v1/twinkle/get_server_capabilities").get("supported_models", [])

    def get_cluster_info(self) -> dict[str, Any]:
        url = self._server_url
        try:
            health: Any = _get(f"{url}/api/v1/healthz")
        except (TwinkleClientError, httpx.HTTPError) as error:
            health = f"no answer: {error or type(error).__name__}"
        return {"server": url, "health": health, "processors": os.cpu_count(), "gpus": _gpus()}

    # --- the hub ------------------------------------------------------------------------------------------------------

    def search_models(self, query: str) -> list[str]:
        return _search("models", query)

    def search_datasets(self, query: str) -> list[str]:
        return _search("datasets", query)


_DECLINED = "Error: the user declined. Ask what they want instead"


def _arguments(name: str, arguments: str) -> dict[str, Any]:
    """Return the arguments of a call by name. Raise an error for a tool, an argument or a type that is not known."""
    if name not in _TOOLS:
        raise unknown("tool", name, _TOOLS)
    try:
        given = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise invalid("arguments", arguments[:200], f"a JSON object ({error})") from None
    _, parameters, needed = _TOOLS[name]
    if not isinstance(given, Mapping):
        raise invalid("arguments", arguments, "a JSON object")
    for key, value in given.items():
        if key not in parameters:
            raise unknown(f"argument of {name}", key, parameters)
        kind = int if parameters[key]["type"] == "integer" else str
        if not isinstance(value, kind) or isinstance(value, bool):
            raise invalid(key, value, f"a value of the type {parameters[key]['type']}")
    for key in needed:
        if key not in given:
            raise invalid(key, None, f"a value: {name} needs it")
    return dict(given)


def _server_config(model_id: str, port: int) -> dict[str, Any]:
    if not 0 < port < 65536:
        raise invalid("port", port, "1 to 65535")
    return {
        "runtime": "embedded",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {"name": "server", "import_path": "server"},
            {"name": "model", "import_path": "model", "args": {"model_id": model_id, "backend": "transformers"}},
            {"name": "sampler", "import_path": "sampler", "args": {"model_id": model_id, "sampler_type": "torch"}},
            {"name": "processor", "import_path": "processor"},
        ],
    }


def _get(url: str, params: Mapping[str, str | int] | None = None, with_key: bool = True) -> Any:
    headers = {"Authorization": f"Bearer {read_environment().server_token}"} if with_key else {}
    with httpx.Client(timeout=_SECONDS, verify=needs_certificates(url), headers=headers) as http:
        response = http.get(url, params=params)
        response.raise_for_status()
        try:
            return response.json()
        except ValueError:
            return {"text": response.text[:200]}


def _search(kind: str, query: str) -> list[str]:
    found = _get(f"{_HUB}/api/{kind}", {"search": query, "limit": 10}, with_key=False)
    return [str(each.get("id")) for each in found if isinstance(each, Mapping)]


def _gpus() -> list[str]:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()
