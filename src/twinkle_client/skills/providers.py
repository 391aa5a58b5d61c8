"""Where skills come from: a folder of this machine, or a repository that is cloned into one."""

import logging
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from twinkle_client.environment import git_variables
from twinkle_client.errors import TwinkleClientError

__all__ = ["FETCH_SECONDS", "LocalSkillProvider", "ModelScopeSkillProvider", "Skill", "SkillError", "SkillProvider"]

FETCH_SECONDS = 10.0  # what a provider may take
_SKILLS = Path("~/.cache/twinkle/auto/skills")
_NO_SKILLS = ("license", "licence", "readme", "contributing", "changelog")
_log = logging.getLogger(__name__)


class SkillError(TwinkleClientError, RuntimeError):
    """A provider's skills could not be fetched."""


@dataclass(frozen=True)
class Skill:
    """One skill: a name, the Markdown text, and where it comes from (the provider and the file)."""

    name: str
    content: str
    source: str


class SkillProvider(ABC):
    """A source of skills."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the provider's name, by which messages and sources call it."""

    @abstractmethod
    def fetch(self) -> None:
        """Bring the skills to this machine. Raise SkillError if that is not possible."""

    @abstractmethod
    def load_skills(self) -> list[Skill]:
        """Return the skills that are on this machine."""


class LocalSkillProvider(SkillProvider):
    """The Markdown files of a folder and of the folders in it. A folder that does not exist has no skills."""

    def __init__(self, dir: str | Path | None = None) -> None:
        self.directory = Path(dir or _SKILLS / "local").expanduser()

    @property
    def name(self) -> str:
        return "local"

    def fetch(self) -> None:
        """Do nothing: the files are here."""

    def load_skills(self) -> list[Skill]:
        return skills_in(self.directory, self.name)


class ModelScopeSkillProvider(SkillProvider):
    """The skills of the repository modelscope/modelscope-skills, cloned by git, or brought up to date.

    If that fails and there is an older clone, its skills are used. url: another repository; dir: another place for the
    clone.
    """

    def __init__(
        self,
        url: str = "https://github.com/modelscope/modelscope-skills.git",
        dir: str | Path | None = None,
    ) -> None:
        if not url or url.startswith("-"):
            raise SkillError(f"url: got {url!r}, allowed: the address of a git repository")
        self.url = url
        self.directory = Path(dir or _SKILLS / "modelscope" / "repo").expanduser()

    @property
    def name(self) -> str:
        return "modelscope"

    def fetch(self) -> None:
        if (self.directory / ".git").is_dir():
            try:
                self._git("-C", str(self.directory), "pull", "--quiet", "--ff-only")
            except SkillError as error:
                _log.warning("skills: %s; an older clone is used", error)
            return
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        self._git("clone", "--quiet", "--depth", "1", "--", self.url, str(self.directory))

    def load_skills(self) -> list[Skill]:
        return skills_in(self.directory, self.name)

    def _git(self, *arguments: str) -> None:
        try:
            subprocess.run(
                ["git", *arguments],
                check=True,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=FETCH_SECONDS,
                env=git_variables(),
            )
        except FileNotFoundError:
            raise SkillError("the command git is not installed") from None
        except subprocess.TimeoutExpired:
            raise SkillError(f"{self.url} did not answer within {FETCH_SECONDS:.0f} s") from None
        except subprocess.CalledProcessError as error:
            raise SkillError(f"git {arguments[0]} of {self.url} failed: {error.stderr.strip()}") from None


def skills_in(directory: Path, provider: str) -> list[Skill]:
    """Return the Markdown files of a folder as skills, in the order of their paths.

    Hidden folders are skipped, and so are files about the repository itself, such as its readme.
    """
    return [
        Skill(
            _name(path), path.read_text(encoding="utf-8", errors="replace"), f"{provider}:{path.relative_to(directory)}"
        )
        for path in sorted(_markdown(directory))
    ]


def _markdown(directory: Path) -> Iterator[Path]:
    for path in directory.rglob("*.md"):
        hidden = any(part.startswith(".") for part in path.relative_to(directory).parts)
        if not hidden and path.is_file() and not path.stem.lower().startswith(_NO_SKILLS):
            yield path


def _name(path: Path) -> str:
    """Return a skill's name: the file's, or the folder's for the common file name SKILL.md."""
    return path.parent.name if path.stem.lower() == "skill" else path.stem
