"""Skills: Markdown files of folders and of a git repository, and their text for a prompt."""

import logging
import subprocess

import pytest

from twinkle_client.skills import (
    LocalSkillProvider,
    ModelScopeSkillProvider,
    Skill,
    SkillError,
    SkillManager,
    SkillProvider,
    providers,
)


@pytest.fixture
def folder(tmp_path):
    """A folder with three skills and some files that are none."""
    texts = {
        "lora.md": "Use rank 16.",
        "deep/data.md": "Look at rows.",
        "eval/SKILL.md": "Measure.",
        "README.md": "no",
        "Changelog.md": "no",
        "LICENSE.md": "no",
        "contributing.md": "no",
        ".git/notes.md": "no",
        "notes.txt": "no",
    }
    for name, text in texts.items():
        path = tmp_path / "skills" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "skills"


def test_markdown_files_are_skills(folder):
    provider = LocalSkillProvider(folder)
    provider.fetch()
    assert provider.load_skills() == [
        Skill("data", "Look at rows.", "local:deep/data.md"),
        Skill("eval", "Measure.", "local:eval/SKILL.md"),
        Skill("lora", "Use rank 16.", "local:lora.md"),
    ]
    assert LocalSkillProvider(folder / "nowhere").load_skills() == []


def test_the_default_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert LocalSkillProvider().directory == tmp_path / ".cache/twinkle/auto/skills/local"
    assert ModelScopeSkillProvider().directory == tmp_path / ".cache/twinkle/auto/skills/modelscope/repo"
    assert ModelScopeSkillProvider().url.endswith("modelscope/modelscope-skills.git")


def git(folder, *arguments):
    named = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", folder, *named, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "one.md").write_text("One.")
    git(origin, "init", "-q")
    git(origin, "add", ".")
    git(origin, "commit", "-qm", "one")
    return origin


def test_a_repository_is_cloned_and_brought_up_to_date(repository, tmp_path):
    provider = ModelScopeSkillProvider(str(repository), tmp_path / "cache" / "repo")
    provider.fetch()
    assert [skill.source for skill in provider.load_skills()] == ["modelscope:one.md"]
    (repository / "two.md").write_text("Two.")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "two")
    provider.fetch()
    assert [skill.name for skill in provider.load_skills()] == ["one", "two"]


def test_an_older_clone_is_used_if_the_origin_is_gone(repository, tmp_path, caplog):
    provider = ModelScopeSkillProvider(str(repository), tmp_path / "repo")
    provider.fetch()
    repository.rename(tmp_path / "elsewhere")
    provider.fetch()
    assert [skill.name for skill in provider.load_skills()] == ["one"]
    assert "an older clone is used" in caplog.text


def test_a_repository_that_is_not_there(tmp_path):
    with pytest.raises(SkillError, match=r"git clone of /nowhere failed: .*"):
        ModelScopeSkillProvider("/nowhere", tmp_path / "repo").fetch()
    with pytest.raises(SkillError, match="url: got '--upload-pack=x', allowed: the address of a git repository"):
        ModelScopeSkillProvider("--upload-pack=x")


def test_git_that_takes_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(providers, "FETCH_SECONDS", 0.2)
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 30\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SkillError, match="did not answer within 0 s"):
        ModelScopeSkillProvider("https://example.org/x.git", tmp_path / "repo").fetch()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(SkillError, match="the command git is not installed"):
        ModelScopeSkillProvider("https://example.org/x.git", tmp_path / "repo").fetch()


class Fixed(SkillProvider):
    def __init__(self, name, *skills, error=None):
        self._name, self._skills, self._error = name, skills, error

    @property
    def name(self):
        return self._name

    def fetch(self):
        if self._error is not None:
            raise self._error

    def load_skills(self):
        return [Skill(name, content, self._name) for name, content in self._skills]


def test_a_manager_collects(caplog):
    manager = SkillManager()
    assert manager.format_for_prompt() == ""
    manager.register(Fixed("first", ("a", "A."), ("b", "B.\n")))
    manager.register(Fixed("broken", ("c", "C."), error=RuntimeError("no network")))
    manager.register(Fixed("last", ("a", "A, better.")))
    with caplog.at_level(logging.WARNING):
        assert [(skill.name, skill.source) for skill in manager.load_all()] == [("a", "last"), ("b", "first")]
    assert manager.get_skill_names() == ["a", "b"]
    assert manager.format_for_prompt() == "## Skill: a\n\nA, better.\n\n## Skill: b\n\nB."
    assert "the provider broken is left out: RuntimeError: no network" in caplog.text


def test_a_provider_that_hangs_is_left_out(monkeypatch, caplog):
    import threading

    from twinkle_client.skills import manager as module

    release = threading.Event()

    class Hangs(Fixed):
        def fetch(self):
            release.wait(60)

    monkeypatch.setattr(module, "FETCH_SECONDS", -0.9)  # the manager waits one second more
    try:
        assert SkillManager([Hangs("slow", ("a", "A."))]).load_all() == []
    finally:
        release.set()
    assert "the provider slow takes more than" in caplog.text
