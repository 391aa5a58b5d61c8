"""The library's logger: levels, messages logged once, conditions, files."""

import logging

import pytest

import twinkle
from twinkle.errors import InvalidInputError
from twinkle.utils.logger import note_once


@pytest.fixture
def logger(monkeypatch):
    """The logger without any setup; its state is restored afterwards."""
    monkeypatch.delenv("LOG_LEVEL", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    logger = twinkle.get_logger()
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers.clear()
    logger._said.clear()
    yield logger
    for handler in logger.handlers:
        handler.close()
    logger.handlers[:], logger.level, logger.propagate = before


def test_one_handler_however_often_it_is_asked_for(logger, capsys):
    assert twinkle.get_logger() is logger is twinkle.get_logger()
    assert logger.name == "twinkle"
    assert isinstance(logger, logging.Logger)
    logger.info("step %d", 3)
    assert capsys.readouterr().err.strip().endswith("[INFO:twinkle] step 3")


def test_once_and_if(logger, capsys):
    twinkle.get_logger()
    for _ in range(3):
        logger.info_once("one")
        logger.warning_once("two", hash_id="same")
        logger.warning_once("three", hash_id="same")
        logger.info_if("four", False)
    logger.warning_if("five", True)
    said = [line.split("] ")[1] for line in capsys.readouterr().err.splitlines()]
    assert said == ["one", "two", "five"]


def test_other_processes_of_a_machine_log_errors_only(logger, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    twinkle.get_logger()
    logger.info("quiet")
    logger.info("from everyone", ranks="all")
    logger.error("wrong")
    said = [line.split("] ")[1] for line in capsys.readouterr().err.splitlines()]
    assert said == ["from everyone", "wrong"]
    with pytest.raises(InvalidInputError, match="ranks"):
        logger.info("x", ranks="some")


def test_level_from_the_environment_and_a_file(logger, tmp_path, monkeypatch):
    monkeypatch.setenv("LOG_LEVEL", "warning")
    path = tmp_path / "logs" / "run.log"
    for _ in range(2):
        twinkle.get_logger(log_file=path)
    logger.info("no")
    logger.warning("yes")
    assert path.read_text().count("yes") == 1
    assert "no" not in path.read_text()
    monkeypatch.setenv("LOG_LEVEL", "loud")
    with pytest.raises(InvalidInputError, match="LOG_LEVEL"):
        twinkle.get_logger()


def test_notes_are_logged_once():
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("twinkle.options")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        for _ in range(2):
            note_once("an option of test_notes_are_logged_once: no effect")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert [record.getMessage() for record in records] == ["an option of test_notes_are_logged_once: no effect"]
