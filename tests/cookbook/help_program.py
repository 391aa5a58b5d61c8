"""Run many scripts in this process, each of which should end while it reads its arguments.

The argument is a list of command lines in JSON. For each, a line of JSON has its exit code, output and connections.
"""

import contextlib
import io
import json
import runpy
import sys
from typing import Any


def main(commands: list[list[str]]) -> None:
    connections: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.connect":
            connections.append(str(arguments[1]))

    sys.addaudithook(watch)
    for command in commands:
        connections.clear()
        sys.argv, out, code = [*command], io.StringIO(), "the script did not end"
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                runpy.run_path(command[0], run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        except Exception as error:  # noqa: BLE001 - the end of a script
            code = repr(error)
        print(json.dumps({"code": code, "out": out.getvalue(), "connections": connections}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
