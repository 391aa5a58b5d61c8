"""Run a server with the configuration file in this folder until Ctrl-C. `run.sh` also takes command-line options."""

from pathlib import Path

from twinkle.server import launch_server

launch_server(config_path=Path(__file__).with_name("server_config.yaml"))
