"""Models behind an API, called with a trajectory. ``openai`` imports the package of that name when it is used."""

from twinkle_agentic.protocol.base import API
from twinkle_agentic.protocol.openai import OpenAI

__all__ = ["API", "OpenAI"]
