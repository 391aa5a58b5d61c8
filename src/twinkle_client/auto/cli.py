"""The command ``twinkle-auto``."""

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib.resources import files
from logging.handlers import RotatingFileHandler
from pathlib import Path

import twinkle_client
from twinkle_client.auto.agent import Agent, converse, printable
from twinkle_client.auto.chat import ChatModel
from twinkle_client.auto.runs import Runs
from twinkle_client.auto.tools import AutoTools
from twinkle_client.environment import read_auto_environment
from twinkle_client.errors import TwinkleClientError
from twinkle_client.skills import LocalSkillProvider, ModelScopeSkillProvider, SkillManager

__all__ = ["main"]

_LOG_BYTES, _LOGS_KEPT = 5_000_000, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        log = _log_to_file(options.verbose)
    except OSError as error:
        print(f"twinkle-auto: the log cannot be written: {error}; start it in another folder", file=sys.stderr)
        return 1
    try:
        tools = AutoTools(Runs(), _confirmed, options.run_id)
        model = ChatModel(options.llm_base_url, options.llm_model, options.llm_api_key)
        agent = Agent(model, tools, _skills(options.remote_skills))
    except TwinkleClientError as error:
        print(f"twinkle-auto: {error}", file=sys.stderr)
        return 1
    else:
        print(f"{model.model} at {model.base_url}. Type your question; exit ends.")
        converse(agent, lambda: input("> "), sys.stdout)
        return 0
    finally:
        logging.getLogger("twinkle_client").removeHandler(log)
        log.close()


def _parser() -> argparse.ArgumentParser:
    known = read_auto_environment()
    parser = argparse.ArgumentParser(
        prog="twinkle-auto",
        description="Train models on a Twinkle server by talking to an agent. It asks before it starts, changes or "
        "stops anything. Runs are kept in ~/.cache/twinkle, the log in ./auto.log.",
    )
    parser.add_argument("-r", "--run-id", default=known.run_id, help="the run to look at (TWINKLE_AUTO_RUN_ID)")
    parser.add_argument(
        "--llm-base-url",
        default=known.llm_base_url,
        help="an endpoint of OpenAI's protocol (TWINKLE_LLM_BASE_URL; now %(default)s)",
    )
    parser.add_argument(
        "--llm-model", default=known.llm_model, help="the agent's model there (TWINKLE_LLM_MODEL; now %(default)s)"
    )
    # The key is not shown as a default, and a variable keeps it out of the list of processes.
    parser.add_argument("--llm-api-key", default=known.llm_api_key, help="its key (better: TWINKLE_LLM_API_KEY)")
    parser.add_argument(
        "--remote-skills",
        action="store_true",
        help="also put the texts of github.com/modelscope/modelscope-skills into the agent's instructions",
    )
    parser.add_argument("--verbose", action="store_true", default=known.verbose, help="log more (TWINKLE_AUTO_VERBOSE)")
    parser.add_argument("--version", action="version", version=f"twinkle-auto {twinkle_client.__version__}")
    return parser


def _log_to_file(verbose: bool) -> logging.Handler:
    handler = RotatingFileHandler("auto.log", maxBytes=_LOG_BYTES, backupCount=_LOGS_KEPT, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger = logging.getLogger("twinkle_client")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    return handler


def _skills(remote: bool) -> str:
    bundled = LocalSkillProvider(Path(str(files("twinkle_client.skills"))) / "bundled")
    manager = SkillManager([bundled, LocalSkillProvider()])
    if remote:
        manager.register(ModelScopeSkillProvider())
    manager.load_all()
    return manager.format_for_prompt()


def _confirmed(text: str) -> bool:
    print(f"\n{printable(text)}\n")
    try:
        return input("Agree? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False
