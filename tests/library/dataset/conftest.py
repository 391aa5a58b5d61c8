"""Fixtures for tests of datasets: conversations, and a template on the tiny model's byte tokenizer."""

import pytest

pytest.importorskip("datasets")
pytest.importorskip("transformers")


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="session")
def chats() -> list[dict[str, object]]:
    """Twelve conversations of growing length."""
    return [{"messages": conversation("?" * n, "!" * (n + 1)), "number": n} for n in range(1, 13)]


@pytest.fixture
def template():
    """A template on the tiny model's byte tokenizer."""

    from twinkle.template import Template

    return Template("random://llama-tiny")


@pytest.fixture(autouse=True)
def no_bars_and_own_cache(tmp_path_factory, monkeypatch):
    """Switches progress bars off and gives each test an empty cache."""

    import datasets

    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf-datasets"))
