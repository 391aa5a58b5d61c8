"""Condensers, which replace long chunks by shorter ones. They import ``data_format``; spaCy only when it is used."""

from twinkle_agentic.condenser.base import Condenser
from twinkle_agentic.condenser.keyword import KeywordCondenser
from twinkle_agentic.condenser.model import ModelCondenser

__all__ = ["Condenser", "KeywordCondenser", "ModelCondenser"]
