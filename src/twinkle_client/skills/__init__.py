"""Skills: Markdown files that tell an agent how something is done. They are read into its system prompt."""

from twinkle_client.skills.manager import SkillManager
from twinkle_client.skills.providers import (
    LocalSkillProvider,
    ModelScopeSkillProvider,
    Skill,
    SkillError,
    SkillProvider,
)

__all__ = ["LocalSkillProvider", "ModelScopeSkillProvider", "Skill", "SkillError", "SkillManager", "SkillProvider"]
