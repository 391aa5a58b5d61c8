"""Start a server from Python or from the command line, in this process or in the background.

``import twinkle.server`` loads this module, so heavy modules are imported only when a server is launched.
"""

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twinkle.environment import set_variable_defaults
from twinkle.errors import TwinkleServerError
from twinkle.extras import missing
from twinkle.utils.progress import NO_BARS, Progress
from twinkle.utils.requirements import exists

if TYPE_CHECKING:
    from twinkle.server.config import ServerConfig

_START_SECONDS = 600.0
NOTHING_TO_SERVE = (
    "nothing to serve: the configuration has no applications; add --model ID to serve a model with the other settings "
    "of this configuration, or leave the configuration out to serve the demo model"
)


# --- from Python ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerLauncher:
    """Launches a server from a configuration that is already loaded; :func:`launch_server` also reads files.

    ``ray_namespace`` replaces that of the configuration. ``notes`` are printed once the server serves.
    """

    config: "ServerConfig"
    ray_namespace: str | None = None
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        from twinkle.server.config import ServerConfig

        if not isinstance(self.config, ServerConfig):  # a dict would be an unchecked configuration
            raise TypeError(
                f"config: got a {type(self.config).__name__}, allowed: a ServerConfig; ServerConfig.model_validate "
                "makes one of a dict, ServerConfig.from_yaml (or config_path=) of a file"
            )

    def launch(self) -> None:
        """Serve until SIGTERM or SIGINT; return at once if nothing is configured. Call it from the main thread."""
        config = self.config
        if self.ray_namespace is not None:
            config = config.model_copy(update={"ray_namespace": self.ray_namespace})
        run_server(config, self.notes)


def launch_server(
    config: "ServerConfig | None" = None,
    config_path: str | Path | None = None,
    ray_namespace: str | None = None,
) -> None:
    """Serve ``config``, else the file ``config_path``, else the demo model, until SIGTERM or SIGINT.

    Return at once if the configuration has no applications.
    """
    from twinkle.server.config import load_config

    if config is not None:
        ServerLauncher(config, ray_namespace).launch()
        return
    loaded, notes = load_config(config_path, ray_namespace=ray_namespace)
    ServerLauncher(loaded, notes=tuple(notes)).launch()


# --- from the command line --------------------------------------------------------------------------------------------


def run_server(
    config: "ServerConfig", notes: Sequence[str] = (), log_level: str | None = None, log_format: str | None = None
) -> None:
    """Serve until SIGTERM or SIGINT; return at once if nothing is configured.

    ``log_level`` and ``log_format`` replace those of the configuration.
    """
    from twinkle.server.config.rules import require_packages
    from twinkle.server.telemetry.logs import configure_logging

    if not config.applications:
        print(NOTHING_TO_SERVE, file=sys.stderr, flush=True)
        return
    require_packages(config.applications)
    level, form = log_level or config.logging.level, log_format or config.logging.format
    configure_logging(level, form)
    if not sys.stderr.isatty():
        set_variable_defaults(NO_BARS)  # before the libraries that read them are imported
    if config.runtime == "embedded":
        from twinkle.server.runtime.embedded import serve_embedded

        serve_embedded(config, notes)
        return
    if not exists("ray"):
        raise missing("ray", "runtime: ray (runtime: embedded needs none)")
    from twinkle.server.runtime.ray.running import serve_ray

    said = config.model_copy(update={"logging": config.logging.model_copy(update={"level": level, "format": form})})
    serve_ray(said, notes)


def start_in_background(arguments: Sequence[str], log_file: Path) -> tuple[int, str]:
    """Start ``twinkle-server launch`` with these arguments, wait until it serves, and return process id and URL.

    Raises TwinkleServerError if the process ends before, or does not serve within ten minutes. Its output goes to
    ``log_file``.
    """
    from twinkle.server.runtime.process import LISTENING

    log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with log_file.open("ab") as log:
        said_before = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "twinkle.server", "launch", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline, last = time.monotonic() + _START_SECONDS, ""
    with Progress("starting the server", detail=lambda: f"its last log line: {last or 'none yet'}"):
        while time.monotonic() < deadline:
            # Wait for the new process to announce itself in its log. An answer on the port proves nothing: it may come
            # from another server.
            said = log_file.read_bytes()[said_before:].decode(errors="replace")
            last = (said.strip().splitlines() or [""])[-1]
            listening = re.search(rf"^{LISTENING} (\S+)", said, re.MULTILINE)
            if listening is not None:
                return process.pid, listening[1]
            if process.poll() is not None:
                why = last or "it logged nothing"
                raise TwinkleServerError(f"the server ended with exit code {process.returncode}: {why}")
            time.sleep(0.2)
        process.terminate()
        raise TwinkleServerError(f"the server did not start within {_START_SECONDS:.0f} s; see {log_file}")


def fetch_status(url: str) -> dict[str, object]:
    """Return the status that the server at ``url`` reports; TwinkleServerError if none answers."""
    try:
        with urllib.request.urlopen(f"{url}/api/v1/status", timeout=10) as answer:
            status: dict[str, object] = json.load(answer)
            return status
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise TwinkleServerError(f"no server answers at {url}: {error}") from error
