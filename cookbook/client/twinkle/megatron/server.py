"""Run a server with server_config.yaml of this folder until Ctrl-C. Options are those of `twinkle-server launch`."""

import sys
from pathlib import Path

from twinkle.server.cli import main

sys.exit(main(["launch", "-c", str(Path(__file__).with_name("server_config.yaml")), *sys.argv[1:]]))
