"""Run the client scripts against one server, with our client or with twinkle-kit's, and read what they recorded."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.dropin.support.hub_folder import MODEL
from tests.support.paths import ROOT
from tests.support.servers.forked_servers import fork_script, run_forked
from tests.support.servers.running import Server, environment, torch_config

SUPPORT = Path(__file__).parent
DROPIN = SUPPORT.parent
KIT_PYTHON = ROOT / ".venv-kit" / "bin" / "python"
UPLOAD = "you/your-model"

# The constants of the scripts that get other values here: smaller numbers, so that all scripts take seconds, and what a
# user fills in. The scripts start in this order.
_UPLOAD = {"HUB_MODEL_ID": UPLOAD, "HUB_TOKEN": "ms-token"}
CONSTANTS: dict[str, dict[str, Any]] = {
    "twinkle/self_cognition": {"ROWS": 60},
    "twinkle/dpo": {"ROWS": 24},
    "twinkle/short_math_grpo": {"ROWS": 8, "MAX_NEW_TOKENS": 24},
    "twinkle/multi_turn_rollout": {"MAX_NEW_TOKENS": 24},
    "twinkle/embedding": {},
    "tinker/lora": {},
    "tinker/self_cognition": {"ROWS": 16},
    "tinker/dpo": {"ROWS": 12},
    "tinker/short_math_grpo": {"ROWS": 8, "MAX_NEW_TOKENS": 24},
    "twinkle/upload_to_hub": _UPLOAD,
    "tinker/upload_to_hub": _UPLOAD,
    "twinkle/sample": {},
    "tinker/sample": {},
}
# Constants with the address of a checkpoint, and the script that saves it.
ADDRESSES = {
    "twinkle/sample": {"ADAPTER_URI": "twinkle/dpo"},
    "twinkle/upload_to_hub": {"CHECKPOINT": "twinkle/dpo"},
    "tinker/sample": {"WEIGHT_PATH": "tinker/self_cognition"},
    "tinker/upload_to_hub": {"CHECKPOINT": "tinker/self_cognition"},
}


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
            command = [SUPPORT / "serve.py", self.directory / "config.yaml"]
            self.process = fork_script(command, {**environment(), "DROPIN_HUB": str(self.hub)}, log)
        return self

    def checkpoint(self, address: str) -> Path:
        """Return the folder of a checkpoint's files."""
        run, kind, name = address.partition("://")[2].split("/")
        (folder,) = (self.data_dir / "checkpoints" / run.replace(":", "-") / kind / name).iterdir()
        return folder


def run_all(server: HubServer, folder: Path, hub: Path, python: Path | None = None) -> dict[str, Run]:
    """Run all client scripts, a few at once, and return what each of them did.

    hub: the folder in the place of ModelScope. python: the interpreter of another environment; by default the scripts
    run with our packages.
    """
    jobs = {name: _job(name, folder) for name in CONSTANTS}
    file = folder / "jobs.json"
    file.write_text(json.dumps(list(jobs.values())))
    variables = {
        **environment(),
        "DROPIN_HUB": str(hub),
        "TMPDIR": str(server.tmp),
        "TWINKLE_MODEL_ID": MODEL,
        "TWINKLE_SERVER_URL": server.url,
        "TWINKLE_SERVER_TOKEN": "EMPTY_TOKEN",
    }
    command = [str(SUPPORT / "run_scripts.py"), str(file)]
    if python is None:
        done = run_forked(command, variables, cwd=folder, timeout=800)
    else:
        del variables["PYTHONPATH"]  # it leads to our packages
        variables["PYTHONWARNINGS"] = "ignore"  # a warning shows the line of the source that it is about
        done = subprocess.run(
            [python, *command], env=variables, cwd=folder, capture_output=True, text=True, timeout=800
        )
    assert done.returncode == 0, done.stderr
    ended = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"script"')]
    codes = {end["script"]: end["code"] for end in ended}
    return {name: _read(job, codes[job["script"]]) for name, job in jobs.items()}


def _job(name: str, folder: Path) -> dict[str, Any]:
    def record(script: str) -> str:
        return str(folder / f"{script.replace('/', '-')}.jsonl")

    return {
        "script": str(DROPIN / "client" / f"{name}.py"),
        "settings": CONSTANTS[name],
        "addresses": {constant: record(script) for constant, script in ADDRESSES.get(name, {}).items()},
        "record": record(name),
        "log": str(folder / f"{name.replace('/', '-')}.txt"),
    }


def _read(job: Mapping[str, str], code: int) -> Run:
    record = Path(job["record"])
    lines: Sequence[str] = record.read_text().splitlines() if record.exists() else ()
    calls = [Call(entry["call"], entry["given"], entry["result"]) for entry in map(json.loads, lines)]
    return Run(code, Path(job["log"]).read_text(), calls)
