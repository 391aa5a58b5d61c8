"""Personal data in texts, found and replaced with Presidio."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.extras import require
from twinkle_agentic.preprocessor.utils import (
    Result,
    Row,
    Rows,
    check_roles,
    cjk_count,
    rewrite_rows,
    rewrite_texts,
    with_user_data,
)

__all__ = ["PIIPresidioFilter", "Strategy"]


class Strategy(StrEnum):
    """What is written in the place of personal data."""

    MASK = "mask"  # stars for letters and digits; the last four of a longer value stay
    REPLACE = "replace"  # the name of the entity: <EMAIL_ADDRESS_1>
    REDACT = "redact"  # nothing
    HASH = "hash"  # 16 hexadecimal digits of the value's SHA-256


# Found by patterns and checksums. The e-mail address is replaced, the numbers get the default strategy.
_PATTERN_ENTITIES = (
    "CN_ID_CARD",
    "CREDIT_CARD",
    "CRYPTO",
    "EMAIL_ADDRESS",
    "IBAN_CODE",
    "IP_ADDRESS",
    "PHONE_NUMBER",
    "US_SSN",
)
# Left alone unless `entity_strategy` names them. All but the URL need a spaCy model that recognises names.
_NAMED_ENTITIES = ("DATE_TIME", "LOCATION", "NRP", "ORGANIZATION", "PERSON")
_ENTITIES = (*_PATTERN_ENTITIES, *_NAMED_ENTITIES, "URL")
_DEFAULT_STRATEGIES = {"EMAIL_ADDRESS": Strategy.REPLACE}

_EMAIL = r"(?<![A-Z0-9._%+-])[A-Z0-9._%+-]{1,64}@(?:[A-Z0-9-]{1,63}\.){1,8}[A-Z]{2,24}(?![A-Z0-9-])"
_CN_ID_CARD = r"(?<![A-Z0-9])[1-9]\d{5}(?:18|19|20)\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])\d{3}[\dX](?![A-Z0-9])"
_CN_MOBILE = r"(?<![\w+.-])(?:\+?86[ -]?)?1[3-9]\d[ -]?\d{4}[ -]?\d{4}(?![\w-])"
_HEX_DIGITS = 16
_VISIBLE = 4  # characters that a mask leaves


class PIIPresidioFilter:
    """Rewrites personal data in the texts of some roles; never drops a row. It needs Presidio (the extra ``pii``).

    languages: the languages of Presidio's recognizers. ``zh`` is used for texts with Chinese, Japanese or Korean
    characters, the others for all texts. spacy_models: a spaCy model (name or directory) for each language. Without
    one, ``spacy.blank`` is used: it finds everything below but names, and needs no download.

    entity_strategy: a :class:`Strategy` for single entities, None to leave one alone. Without it, e-mail addresses are
    replaced; phone, card, account and identity numbers and IP addresses get ``default_strategy``; names, places,
    organisations, dates and URLs are left alone. score_threshold: findings that Presidio rates lower are ignored.

    consistency: number the replacements, so that one value has one name in a row: ``<EMAIL_ADDRESS_1>``.
    persistent_consistency: in all rows that this object sees (in one process). hash_salt: put before a value that is
    hashed; without one, hashes of numbers can be reversed by trying all numbers. record_counts: write how often each
    entity was found to ``pii_counts`` in ``user_data``.
    """

    def __init__(
        self,
        languages: Sequence[str] = ("en", "zh"),
        spacy_models: Mapping[str, str] | None = None,
        entity_strategy: Mapping[str, str | None] | None = None,
        default_strategy: str = "mask",
        score_threshold: float = 0.5,
        roles: Sequence[str] = ("user", "assistant", "system"),
        consistency: bool = True,
        persistent_consistency: bool = False,
        hash_salt: str = "",
        record_counts: bool = False,
    ) -> None:
        for module in ("presidio_analyzer", "presidio_anonymizer"):
            require(module, "PIIPresidioFilter")
        if isinstance(languages, str) or not languages:
            raise InvalidInputError("languages", languages, "a list of language codes, such as ('en', 'zh')")
        self.languages = tuple(languages)
        self.spacy_models = dict(spacy_models or {})
        for language in self.spacy_models:
            if language not in self.languages:
                raise UnknownNameError("language in spacy_models", language, self.languages)
        self.strategies = _strategies(default_strategy, entity_strategy or {})
        self.score_threshold = score_threshold
        self.roles = check_roles("roles", [roles] if isinstance(roles, str) else roles)
        self.consistency = consistency or persistent_consistency
        self.persistent_consistency = persistent_consistency
        self.hash_salt = hash_salt
        self.record_counts = record_counts
        self._numbers = _Numbers()
        self._engines: tuple[Any, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_engines": None}  # each worker process of a dataset makes its own

    def __call__(self, rows: Rows) -> Result:
        return rewrite_rows(rows, self._rewritten)

    def _rewritten(self, row: Row) -> Row:
        numbers = self._numbers if self.persistent_consistency else _Numbers()
        counts: dict[str, int] = {}
        changed = rewrite_texts(row, self.roles, lambda text: self._anonymized(text, numbers, counts))
        return with_user_data(changed, pii_counts=counts) if self.record_counts else changed

    def _anonymized(self, text: str, numbers: "_Numbers", counts: dict[str, int]) -> str:
        from presidio_anonymizer.entities import OperatorConfig

        if not text.strip():
            return text
        if self._engines is None:
            self._engines = _make_engines(self.languages, self.spacy_models, tuple(self.strategies))
        analyzer, anonymizer = self._engines
        found: list[Any] = []
        for language in self.languages:
            if language != "zh" or cjk_count(text) or len(self.languages) == 1:
                found += analyzer.analyze(
                    text, language, entities=list(self.strategies), score_threshold=self.score_threshold
                )
        if not found:
            return text
        if self.consistency:  # numbers follow the order in the text; the anonymizer works from its end
            for each in sorted(found, key=lambda each: each.start):
                numbers.number(each.entity_type, text[each.start : each.end])
        operators = {
            entity: OperatorConfig("custom", {"lambda": self._writer(entity, strategy, numbers)})
            for entity, strategy in self.strategies.items()
        }
        result = anonymizer.anonymize(text, found, operators, merge_entities_with_spaces=False)
        for item in result.items:
            counts[item.entity_type] = counts.get(item.entity_type, 0) + 1
        return str(result.text)

    def _writer(self, entity: str, strategy: Strategy, numbers: "_Numbers") -> Callable[[str], str]:
        if strategy is Strategy.MASK:
            return _masked
        if strategy is Strategy.REDACT:
            return lambda value: ""
        if strategy is Strategy.HASH:
            return lambda value: hashlib.sha256(f"{self.hash_salt}{value}".encode()).hexdigest()[:_HEX_DIGITS]
        if self.consistency:
            return lambda value: f"<{entity}_{numbers.number(entity, value)}>"
        return lambda value: f"<{entity}>"


class _Numbers:
    """Numbers values from 1, for each entity, in the order in which they are first seen."""

    def __init__(self) -> None:
        self._by_entity: dict[str, dict[str, int]] = {}

    def number(self, entity: str, value: str) -> int:
        values = self._by_entity.setdefault(entity, {})
        return values.setdefault(value, len(values) + 1)


def _strategies(default: str, chosen: Mapping[str, str | None]) -> dict[str, Strategy]:
    """Return the strategy of each entity that is rewritten."""
    strategies: dict[str, Strategy] = dict.fromkeys(_PATTERN_ENTITIES, _strategy("default_strategy", default))
    strategies |= _DEFAULT_STRATEGIES
    for entity, strategy in chosen.items():
        if entity not in _ENTITIES:
            raise UnknownNameError("entity in entity_strategy", entity, _ENTITIES)
        if strategy is None:
            strategies.pop(entity, None)
        else:
            strategies[entity] = _strategy(f"entity_strategy of {entity}", strategy)
    return strategies


def _strategy(field: str, value: str) -> Strategy:
    try:
        return Strategy(value)
    except ValueError:
        raise UnknownNameError(field, str(value), [each.value for each in Strategy]) from None


def _masked(value: str) -> str:
    """Return the value with stars for its letters and digits; of nine or more, the last four stay."""
    count = sum(1 for character in value if character.isalnum())
    hidden = count if count <= 2 * _VISIBLE else count - _VISIBLE
    masked: list[str] = []
    for character in value:
        if character.isalnum() and hidden > 0:
            hidden -= 1
            masked.append("*")
        else:
            masked.append(character)
    return "".join(masked)


# --- Presidio's engines -----------------------------------------------------------------------------------------------


def _make_engines(languages: Sequence[str], models: Mapping[str, str], entities: Sequence[str]) -> tuple[Any, Any]:
    from presidio_analyzer import AnalyzerEngine, RecognizerRegistry
    from presidio_analyzer.nlp_engine import SpacyNlpEngine
    from presidio_anonymizer import AnonymizerEngine

    engine = SpacyNlpEngine(models=[{"lang_code": each, "model_name": models.get(each, "blank")} for each in languages])
    engine.nlp = {language: _pipeline(language, models.get(language), entities) for language in languages}
    registry = RecognizerRegistry(supported_languages=list(languages))
    registry.recognizers = []
    for language in languages:
        for recognizer in _recognizers(language, entities):
            registry.add_recognizer(recognizer)
    return AnalyzerEngine(registry, engine, supported_languages=list(languages)), AnonymizerEngine()


def _pipeline(language: str, model: str | None, entities: Sequence[str]) -> Any:
    """Return spaCy's pipeline for a language. A model is never downloaded."""
    import spacy
    from spacy.language import Language

    names = [entity for entity in entities if entity in _NAMED_ENTITIES]
    if model is None:
        if names:
            raise InvalidInputError(
                "spacy_models", None, f"a spaCy model for {language!r}, which {', '.join(names)} need"
            )
        nlp = spacy.blank(language)
        nlp.max_length = 10**9  # a tokenizer needs little memory
        Language.component("twinkle_lemmas", func=_lower_lemmas)
        nlp.add_pipe("twinkle_lemmas")
        return nlp
    if not spacy.util.is_package(model) and not Path(model).is_dir():
        raise InvalidInputError(
            "spacy_models",
            model,
            f"an installed spaCy model or its directory; to install: python -m spacy download {model}",
        )
    nlp = spacy.load(model)
    if names and "ner" not in nlp.pipe_names:
        raise InvalidInputError("spacy_models", model, f"a model that recognises names, which {', '.join(names)} need")
    return nlp


def _lower_lemmas(doc: Any) -> Any:
    """Use the words themselves, in lower case, as lemmas: Presidio compares them with words around a finding."""
    for token in doc:
        token.lemma_ = token.lower_
    return doc


def _recognizers(language: str, entities: Sequence[str]) -> list[Any]:
    """Return Presidio's recognizers for the entities, and our own for e-mail addresses and Chinese numbers.

    Presidio's own recognizer of e-mail addresses fetches a list of domains from the Internet.
    """
    import regex
    from presidio_analyzer import Pattern, PatternRecognizer
    from presidio_analyzer import predefined_recognizers as presidio

    class CnIdCardRecognizer(PatternRecognizer):  # type: ignore[misc]  # absent unless the extra is installed
        def validate_result(self, pattern_text: str) -> bool:
            return _is_cn_id(pattern_text)

    def own(kind: type[Any], entity: str, expression: str, score: float) -> Any:
        return kind(entity, patterns=[Pattern(entity, expression, score)], supported_language=language)

    makers: dict[str, Callable[[], list[Any]]] = {
        "CN_ID_CARD": lambda: [own(CnIdCardRecognizer, "CN_ID_CARD", _CN_ID_CARD, 0.5)],
        "CREDIT_CARD": lambda: [presidio.CreditCardRecognizer(supported_language=language)],
        "CRYPTO": lambda: [presidio.CryptoRecognizer(supported_language=language)],
        "EMAIL_ADDRESS": lambda: [own(PatternRecognizer, "EMAIL_ADDRESS", _EMAIL, 0.9)],
        "IBAN_CODE": lambda: [presidio.IbanRecognizer(supported_language=language)],
        "IP_ADDRESS": lambda: [presidio.IpRecognizer(supported_language=language)],
        "PHONE_NUMBER": lambda: [
            presidio.PhoneRecognizer(supported_language=language),
            own(PatternRecognizer, "PHONE_NUMBER", _CN_MOBILE, 0.7),
        ],
        "US_SSN": lambda: [presidio.UsSsnRecognizer(supported_language=language)],
        "URL": lambda: [presidio.UrlRecognizer(supported_language=language)],
        "DATE_TIME": lambda: [presidio.DateRecognizer(supported_language=language)],
    }
    made = [recognizer for entity in entities if entity in makers for recognizer in makers[entity]()]
    names = [entity for entity in entities if entity in _NAMED_ENTITIES]
    if names:
        made.append(presidio.SpacyRecognizer(supported_language=language, supported_entities=names))
    for recognizer in made:
        if isinstance(recognizer, PatternRecognizer):
            # a number that stands directly beside a Chinese character begins a word too
            recognizer.global_regex_flags |= regex.ASCII
    return made


def _is_cn_id(value: str) -> bool:
    """Check the last character of a Chinese identity number (GB 11643): the weights are powers of two, modulo 11."""
    total = sum(int(digit) * (2 ** (17 - place) % 11) for place, digit in enumerate(value[:17]))
    return "10X98765432"[total % 11] == value[17].upper()
