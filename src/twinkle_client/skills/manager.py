"""The skills of several providers, and their text for a system prompt."""

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime

from twinkle_client.skills.providers import FETCH_SECONDS, Skill, SkillProvider

__all__ = ["SkillManager"]

_log = logging.getLogger(__name__)


class SkillManager:
    """Collects skills. A name that two providers have belongs to the provider that was registered last."""

    def __init__(self, providers: Iterable[SkillProvider] = ()) -> None:
        self._providers: list[SkillProvider] = []
        self._skills: dict[str, Skill] = {}
        for provider in providers:
            self.register(provider)

    def register(self, provider: SkillProvider) -> None:
        """Add a provider. Its skills are there after the next :meth:`load_all`."""
        self._providers.append(provider)

    def load_all(self) -> list[Skill]:
        """Fetch and load the skills of all providers and return them.

        A provider that fails, or takes more than ten seconds, is left out with a warning.
        """
        self._skills = {}
        for provider in self._providers:
            for skill in _skills_of(provider):
                self._skills[skill.name] = skill
        return list(self._skills.values())

    def get_skill_names(self) -> list[str]:
        return list(self._skills)

    def format_for_prompt(self) -> str:
        """Return all skills as one text: a heading with the name, then the content. "" without skills."""
        return "\n\n".join(f"## Skill: {skill.name}\n\n{skill.content.strip()}" for skill in self._skills.values())


def _skills_of(provider: SkillProvider) -> list[Skill]:
    def fetched() -> list[Skill]:
        provider.fetch()
        return provider.load_skills()

    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="skills")
    try:
        # git has the same limit: the second more lets its own message come through
        return pool.submit(fetched).result(timeout=FETCH_SECONDS + 1)
    except NotInTime:
        _log.warning("skills: the provider %s takes more than %.0f s and is left out", provider.name, FETCH_SECONDS)
    except Exception as error:  # noqa: BLE001 - providers are other people's code; an agent works without skills, too
        _log.warning("skills: the provider %s is left out: %s: %s", provider.name, type(error).__name__, error)
    finally:
        pool.shutdown(wait=False)
    return []
