"""Run the client scripts against one server, with our client or with twinkle-kit's, and read what they recorded."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.dropin.hub_folder import MODEL
from tests.support.paths import ROOT
from tests.support.servers.forked_servers import fork_script
from tests.support.servers.running import Server, environment, torch_config

HERE = Path(__file__).parent
KIT_PYTHON = ROOT / ".venv-kit" / "bin" / "python"
UPLOAD = "you/your-model"

# Constants of the scripts that get smaller numbers here, so that all scripts take seconds.
SIZES: dict[str, dict[str, Any]] = {
    "twinkle/self_cognition": {"ROWS": 60},
    "twinkle/dpo": {"ROWS": 24},
    "twinkle/short_math_grpo": {"ROWS": 8, "MAX_NEW_TOKENS": 24},
    "twinkle/multi_turn_rollout": {"MAX_NEW_TOKENS": 24},
    "twinkle/embedding": {},
    "tinker/lora": {},
    "tinker/self_cognition": {"ROWS": 24},
    "tinker/dpo": {"ROWS": 12},
    "tinker/short_math_grpo": {"ROWS": 8, "MAX_NEW_TOKENS": 24},
}
# Scripts with the address of a checkpoint that a user fills in.
LATER = ("twinkle/sample", "twinkle/upload_to_hub", "tinker/sample", "tinker/upload_to_hub")


@dataclass(frozen=True)
class Call:
    name: str
    given: dict[str, Any]
    result: Any


@dataclass(frozen=True)
class Run:
    """What a script did: its exit code, its output, and its calls in order."""

    code: int
    output: str
    calls: list[Call]

    def named(self, *names: str) -> list[Call]:
        return [call for call in self.calls if call.name in names]


class HubServer(Server):
    """A server whose ModelScope is the stand-in."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.hub = model.parents[2]
        self.tmp = directory / "tmp"
        (self.tmp / "twinkle_sft_output").mkdir(parents=True)  # the script expects it on the server's machine
        config = torch_config(str(model), aliases=[MODEL])
        super().__init__(directory, {**config, "allowed_dirs": [str(self.tmp)]})

    def spawn(self) -> Server:
        with (self.directory / "server.log").open("ab") as log:
            command = [HERE / "serve.py", self.directory / "config.yaml"]
            self.process = fork_script(command, {**environment(), "DROPIN_HUB": str(self.hub)}, log)
        return self

    def checkpoint(self, address: str) -> Path:
        """Return the folder of a checkpoint's files."""
        run, kind, name = address.partition("://")[2].split("/")
        (folder,) = (self.data_dir / "checkpoints" / run.replace(":", "-") / kind / name).iterdir()
        return folder


def run_all(server: HubServer, folder: Path, python: str = sys.executable) -> dict[str, Run]:
    """Run all client scripts, first those that train. Returns what each of them did."""
    runs = _run(server, folder, SIZES, python)
    trained, taught = _saved(runs["twinkle/dpo"]), _saved(runs["tinker/self_cognition"])
    upload = {"CHECKPOINT": trained, "HUB_MODEL_ID": UPLOAD, "HUB_TOKEN": "ms-token"}
    addresses = {
        "twinkle/sample": {"ADAPTER_URI": trained},
        "twinkle/upload_to_hub": upload,
        "tinker/sample": {"WEIGHT_PATH": taught},
        "tinker/upload_to_hub": {**upload, "CHECKPOINT": taught},
    }
    return runs | _run(server, folder, addresses, python)


def _saved(run: Run) -> str:
    """Return the address of the last checkpoint of a run; "none" if it failed, and then the later scripts fail too."""
    saved = run.named("initial", "save", "save_state")
    if not saved:
        return "none"
    result = saved[-1].result
    address = result if isinstance(result, str) else result.get("twinkle_path") or result["path"]
    return f"twinkle://{address.partition('://')[2]}"


def _run(server: HubServer, folder: Path, settings: Mapping[str, dict[str, Any]], python: str) -> dict[str, Run]:
    jobs = [
        {
            "script": str(HERE / "client" / f"{name}.py"),
            "settings": constants,
            "record": str(folder / f"{name.replace('/', '-')}.jsonl"),
            "log": str(folder / f"{name.replace('/', '-')}.txt"),
        }
        for name, constants in settings.items()
    ]
    file = folder / "jobs.json"
    file.write_text(json.dumps(jobs))
    variables = {
        **environment(),
        "DROPIN_HUB": str(server.hub),
        "TMPDIR": str(server.tmp),
        "TWINKLE_MODEL_ID": MODEL,
        "TWINKLE_SERVER_URL": server.url,
        "TWINKLE_SERVER_TOKEN": "EMPTY_TOKEN",
    }
    if python != sys.executable:
        del variables["PYTHONPATH"]  # it leads to our packages
    command = [python, str(HERE / "run_scripts.py"), str(file)]
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    ended = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"script"')]
    return {name: _read(job, end["code"]) for (name, job, end) in zip(settings, jobs, ended, strict=True)}


def _read(job: Mapping[str, str], code: int) -> Run:
    record = Path(job["record"])
    lines: Sequence[str] = record.read_text().splitlines() if record.exists() else ()
    calls = [Call(entry["call"], entry["given"], entry["result"]) for entry in map(json.loads, lines)]
    return Run(code, Path(job["log"]).read_text(), calls)
