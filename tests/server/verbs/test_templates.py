"""Templates of a served model: a tokenizer is loaded once for each template class, with any options of tenants."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from twinkle.hub import resolve
from twinkle.server.verbs.templates import TemplateChoice, Templates
from twinkle.template import Template

MESSAGES = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve("random://llama-tiny").path


def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects the folders from which tokenizers are loaded."""
    seen: list[str] = []
    load: Callable[[Template], Any] = Template._load_tokenizer

    def counted(template: Template) -> Any:
        seen.append(str(template._folder))
        return load(template)

    monkeypatch.setattr(Template, "_load_tokenizer", counted)
    return seen


def test_choices_share_one_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = loads(monkeypatch)
    model: Any = SimpleNamespace(name="demo", tokenizer_dir=str(folder), text=None)
    templates = Templates(model)
    texts = {
        templates.get(TemplateChoice(default_system=f"You are number {number}.")).batch_encode(
            [{"messages": MESSAGES}], add_generation_prompt=False
        )[0]["messages"][0]["content"]
        for number in range(100)
    }
    assert len(texts) == 100
    assert len(seen) == 1


def test_options_are_those_of_one_template_only(folder: Path) -> None:
    first = Template(str(folder), max_length=100, default_system="one")
    second = first.with_options(max_length=7, truncation_strategy="right", default_system="two")
    assert (first.max_length, first.default_system, first.truncation_strategy) == (100, "one", "raise")
    assert (second.max_length, second.default_system, second.truncation_strategy) == (7, "two", "right")
    assert second.tokenizer is first.tokenizer
    fresh = Template(str(folder), max_length=7, truncation_strategy="right", default_system="two")
    trajectory = {"messages": MESSAGES}
    assert second.encode(trajectory)["input_ids"].tolist() == fresh.encode(trajectory)["input_ids"].tolist()
