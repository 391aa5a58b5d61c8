"""twinkle-kit's client still sends the recorded requests (``make test-kit``), which test_kit_replay.py replays."""

import json
from typing import Any

import pytest

from tests.clients.kit.recording import PYTHON, RECORDED, conversation

pytestmark = pytest.mark.kit


@pytest.fixture(scope="module")
def spoken() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    if not PYTHON.exists():
        pytest.skip("twinkle-kit is not installed; `make test-kit` does that")
    return conversation()


def test_the_smallest_answers_satisfy_the_client(spoken: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    steps, _ = spoken
    assert [step for step in steps if "raised" in step] == []
    assert len([step for step in steps if "returned" in step]) * 2 == len(steps)


def test_the_conversation_is_the_recorded_one(spoken: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    _, said = spoken
    recorded = json.loads(RECORDED.read_text())
    assert said["headers"] == recorded["headers"]
    for now, then in zip(said["exchanges"], recorded["exchanges"], strict=True):
        assert now == then
