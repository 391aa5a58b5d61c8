"""Serve what the file beside this one says, until Ctrl-C. `run.sh` is the same with options of the command line."""

from pathlib import Path

from twinkle.server import launch_server

launch_server(config_path=Path(__file__).with_name("server_config.yaml"))
