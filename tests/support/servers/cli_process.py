"""Run the SDK's console script for a series of commands, each in its own process.

Importing the SDK takes seconds, so this process imports it once and then forks a child for each command. It reads one
line of JSON a command (arguments, environment, directory, standard input) and answers with one line (exit code, output,
errors).
"""

import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPT = Path(sys.executable).with_name("tinker")


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class CliProcess:
    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def run(self, *arguments: str, directory: Path, environment: dict[str, str], stdin: str = "") -> Said:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        wanted = {"arguments": arguments, "directory": str(directory), "environment": environment, "stdin": stdin}
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        return Said(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120)


def _run_here(wanted: dict[str, Any], files: list[Any]) -> None:
    """Turn this forked child into the console script."""
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
    # The parent's stream objects may have read ahead, so new ones are needed.
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.update(wanted["environment"])
    os.chdir(wanted["directory"])
    sys.argv = [str(SCRIPT), *wanted["arguments"]]
    code: int | str | None = 0
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    except SystemExit as end:
        code = end.code
    except Exception:  # noqa: BLE001 - the end of this process
        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def main() -> None:
    import tinker.cli.commands.checkpoint
    import tinker.cli.commands.run  # noqa: F401

    for line in sys.stdin:
        wanted = json.loads(line)
        with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(wanted["stdin"])
            given.seek(0)
            child = os.fork()
            if child == 0:
                _run_here(wanted, [given, out, err])
            _, status = os.waitpid(child, 0)
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        answer = {"code": os.waitstatus_to_exitcode(status), "out": texts[0], "err": texts[1]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
