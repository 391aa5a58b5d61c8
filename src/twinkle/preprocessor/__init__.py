"""Preprocessors, which convert rows of well-known datasets to trajectories, and the interface of row filters."""

from twinkle.preprocessor.dpo import EmojiDPOProcessor
from twinkle.preprocessor.interface import DataFilter, Preprocessor
from twinkle.preprocessor.llm import (
    AlpacaProcessor,
    CompetitionMathGRPOProcessor,
    CompetitionMathProcessor,
    CountdownProcessor,
    GSM8KProcessor,
    SelfCognitionProcessor,
)
from twinkle.preprocessor.mm import CLEVRProcessor, OlympiadBenchProcessor

__all__ = [
    "AlpacaProcessor",
    "CLEVRProcessor",
    "CompetitionMathGRPOProcessor",
    "CompetitionMathProcessor",
    "CountdownProcessor",
    "DataFilter",
    "EmojiDPOProcessor",
    "GSM8KProcessor",
    "OlympiadBenchProcessor",
    "Preprocessor",
    "SelfCognitionProcessor",
]
