"""Scores of rounds by a model: the filter, its scorers, and the backends that they ask.

It may import the step helpers of ``preprocessor/utils.py`` and the library; no other step.
"""

from twinkle_agentic.preprocessor.scoring.backend import LLMBackend, OpenAIBackend, SamplerBackend
from twinkle_agentic.preprocessor.scoring.score_filter import ScoreFilter
from twinkle_agentic.preprocessor.scoring.scorers import ChrMinScorer, ParaphraseScorer, PassNScorer, SIFDScorer

__all__ = [
    "ChrMinScorer",
    "LLMBackend",
    "OpenAIBackend",
    "ParaphraseScorer",
    "PassNScorer",
    "SIFDScorer",
    "SamplerBackend",
    "ScoreFilter",
]
