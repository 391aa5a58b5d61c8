"""Steps that filter and rewrite conversations before training, and ``QualityPreprocessor``, which runs them.

A step is called with rows (a list of dicts, or a dict of columns) and returns (kept, dropped). The steps import
the library and, of this package, only ``data_format`` and ``protocol``.
"""

from twinkle_agentic.preprocessor.dead_loop_filter import DeadLoopFilter
from twinkle_agentic.preprocessor.dedup_filter import DedupFilter
from twinkle_agentic.preprocessor.fix_unicode_filter import FixUnicodeFilter
from twinkle_agentic.preprocessor.hard_filter import HardFilter
from twinkle_agentic.preprocessor.intent_classifier import IntentClassifier
from twinkle_agentic.preprocessor.message_normalizer import MessageNormalizer
from twinkle_agentic.preprocessor.message_sanity_filter import MessageSanityFilter
from twinkle_agentic.preprocessor.model_filter import ModelFilter
from twinkle_agentic.preprocessor.pii_presidio_filter import PIIPresidioFilter
from twinkle_agentic.preprocessor.quality_preprocessor import QualityPreprocessor
from twinkle_agentic.preprocessor.refuse_filter import RefuseFilter
from twinkle_agentic.preprocessor.remove_repeat_sentences_filter import RemoveRepeatSentencesFilter
from twinkle_agentic.preprocessor.scoring import (
    ChrMinScorer,
    LLMBackend,
    OpenAIBackend,
    ParaphraseScorer,
    PassNScorer,
    SamplerBackend,
    ScoreFilter,
    SIFDScorer,
)
from twinkle_agentic.preprocessor.special_chars_filter import SpecialCharsFilter
from twinkle_agentic.preprocessor.token_num_filter import TokenNumFilter
from twinkle_agentic.preprocessor.token_soup import TokenSoupFilter

__all__ = [
    "ChrMinScorer",
    "DeadLoopFilter",
    "DedupFilter",
    "FixUnicodeFilter",
    "HardFilter",
    "IntentClassifier",
    "LLMBackend",
    "MessageNormalizer",
    "MessageSanityFilter",
    "ModelFilter",
    "OpenAIBackend",
    "PIIPresidioFilter",
    "ParaphraseScorer",
    "PassNScorer",
    "QualityPreprocessor",
    "RefuseFilter",
    "RemoveRepeatSentencesFilter",
    "SIFDScorer",
    "SamplerBackend",
    "ScoreFilter",
    "SpecialCharsFilter",
    "TokenNumFilter",
    "TokenSoupFilter",
]
