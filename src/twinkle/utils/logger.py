"""The library's logger: one console handler, one format; processes of a machine but the first log only errors."""

import logging
from pathlib import Path
from typing import Any, Literal, TextIO

from twinkle.environment import read_environment
from twinkle.errors import InvalidInputError

__all__ = ["TwinkleLogger", "get_logger", "note_once"]

_NAME = "twinkle"
_FORMAT = "[%(asctime)s][%(levelname)s:%(name)s] %(message)s"

Ranks = Literal["master", "all"]


class TwinkleLogger(logging.Logger):
    """A logger that can also log a message once, on a condition, or on every process of a machine (``ranks="all"``)."""

    def __init__(self, name: str, level: int = logging.NOTSET) -> None:
        super().__init__(name, level)
        self._said: set[str] = set()

    def info(self, msg: object, *args: object, ranks: Ranks = "master", **kwargs: Any) -> None:
        self._log_on(ranks, logging.INFO, msg, args, kwargs)

    def warning(self, msg: object, *args: object, ranks: Ranks = "master", **kwargs: Any) -> None:
        self._log_on(ranks, logging.WARNING, msg, args, kwargs)

    def info_once(self, msg: str, hash_id: str | None = None) -> None:
        """Log a message the first time only. Messages with the same ``hash_id`` (default: the text) count as one."""
        self._once(logging.INFO, msg, hash_id)

    def warning_once(self, msg: str, hash_id: str | None = None) -> None:
        self._once(logging.WARNING, msg, hash_id)

    def info_if(self, msg: str, cond: bool) -> None:
        if cond:
            self.log(logging.INFO, msg, stacklevel=2)

    def warning_if(self, msg: str, cond: bool) -> None:
        if cond:
            self.log(logging.WARNING, msg, stacklevel=2)

    def _once(self, level: int, msg: str, hash_id: str | None) -> None:
        key = msg if hash_id is None else hash_id
        if key not in self._said:
            self._said.add(key)
            self.log(level, msg, stacklevel=3)

    def _log_on(self, ranks: Ranks, level: int, msg: object, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if ranks not in ("master", "all"):
            raise InvalidInputError("ranks", ranks, "'master' or 'all'")
        if ranks == "all" or self.isEnabledFor(level):
            self._log(level, msg, args, stacklevel=options.pop("stacklevel", 1) + 2, **options)


class _Console(logging.StreamHandler[TextIO]):
    """The handler that we add; a class of its own tells it apart from handlers that others add."""


def get_logger(
    log_file: str | Path | None = None,
    log_level: int | None = None,
    file_mode: Literal["a", "w"] = "w",
    only_local_master: bool = True,
) -> TwinkleLogger:
    """Return the logger ``twinkle``. Each call sets its level (default: LOG_LEVEL) and may add a file.

    All processes of a machine but the first log errors only, unless ``only_local_master`` is False.
    """
    environment = read_environment()
    logger = _the_logger()
    if not any(isinstance(handler, _Console) for handler in logger.handlers):
        logger.propagate = False  # our handler prints the records; the root's handler would print them again
        _add_handler(logger, _Console())
    if log_file is not None and str(Path(log_file).absolute()) not in _files(logger):
        Path(log_file).parent.mkdir(parents=True, exist_ok=True)
        _add_handler(logger, logging.FileHandler(log_file, file_mode, encoding="utf-8"))
    level = environment.log_level if log_level is None else log_level
    logger.setLevel(logging.ERROR if only_local_master and environment.local_rank > 0 else level)
    return logger


_notes: set[str] = set()  # that note_once has logged


def note_once(message: str) -> None:
    """Log a message the first time only, for example that an option has no effect.

    It sets up no handlers, unlike :func:`get_logger`: a server, which has a log of its own, logs such notes too.
    """
    if message not in _notes:
        _notes.add(message)
        logging.getLogger(f"{_NAME}.options").info(message)


def _the_logger() -> TwinkleLogger:
    manager = logging.Logger.manager
    before = manager.loggerClass
    manager.setLoggerClass(TwinkleLogger)
    try:
        logger = logging.getLogger(_NAME)
    finally:
        manager.loggerClass = before
    if not isinstance(logger, TwinkleLogger):  # logging.getLogger was called with this name first
        raise TypeError(f"the logger {_NAME!r} exists already as a {type(logger).__name__}: call get_logger() earlier")
    return logger


def _add_handler(logger: logging.Logger, handler: logging.Handler) -> None:
    handler.setFormatter(logging.Formatter(_FORMAT))
    logger.addHandler(handler)


def _files(logger: logging.Logger) -> set[str]:
    return {handler.baseFilename for handler in logger.handlers if isinstance(handler, logging.FileHandler)}
