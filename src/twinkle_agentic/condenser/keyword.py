"""A condenser without a model: the first sentence, who did what, and the most frequent words, found by spaCy."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinkle.errors import DownloadError
from twinkle.extras import missing
from twinkle_agentic.condenser.base import SKIPPED_ROLES, Condenser, condensed, may_condense, require_ratio
from twinkle_agentic.data_format import Chunks

if TYPE_CHECKING:
    from spacy.language import Language
    from spacy.tokens import Doc, Token

__all__ = ["KeywordCondenser", "ParsedText", "summary_lines"]

_SUBJECTS = {"nsubj", "nsubjpass", "nsubj:pass"}
_OBJECTS = {"dobj", "obj", "attr", "oprd", "iobj", "dative"}


@dataclass(frozen=True)
class ParsedText:
    """What a summary is made of. ``words``: the text's content words, the most frequent first."""

    first_sentence: str
    relations: Sequence[str]
    words: Sequence[str]


class KeywordCondenser(Condenser):
    """Replaces a chunk by at most three lines, together at most ``ceil(length / compression_ratio)`` characters.

    ``Open:`` has the first sentence, cut at ``max_first_sentence_chars``; ``Rel:`` up to ``num_relations`` relations of
    subject, verb and object; ``More:`` up to ``num_keywords`` frequent words that the lines above do not have. What
    does not fit is left out, from the end.

    spacy_model: a pipeline that is installed, or a folder with one. A pipeline without a parser finds no relations.
    min_chars, skip_roles, rounds: which chunks may be condensed, see :class:`ModelCondenser`.
    """

    def __init__(
        self,
        num_relations: int = 3,
        max_first_sentence_chars: int = 160,
        num_keywords: int = 8,
        compression_ratio: float = 4.0,
        spacy_model: str = "en_core_web_sm",
        min_chars: int = 200,
        skip_roles: Collection[str] = SKIPPED_ROLES,
        rounds: Collection[int] | None = None,
    ) -> None:
        self.num_relations = num_relations
        self.max_first_sentence_chars = max_first_sentence_chars
        self.num_keywords = num_keywords
        self.compression_ratio = require_ratio(compression_ratio)
        self.min_chars = min_chars
        self.skip_roles = skip_roles
        self.rounds = rounds
        self._pipeline = _load(spacy_model)

    def condense(self, conversations: list[Chunks], *, rounds: Collection[int] | None = None) -> list[Chunks]:
        """Return the conversations with condensed chunks. ``rounds`` replaces the constructor's for this call."""
        chosen = self.rounds if rounds is None else rounds
        return [
            Chunks(
                [
                    condensed(chunk, self.summary(chunk["content"]))
                    if may_condense(chunk, self.min_chars, self.skip_roles, chosen)
                    else chunk
                    for chunk in conversation
                ]
            )
            for conversation in conversations
        ]

    def summary(self, text: str) -> str:
        """Return the lines for one text."""
        parsed = _parsed(self._pipeline(text))
        return summary_lines(
            parsed,
            math.ceil(len(text) / self.compression_ratio),
            self.max_first_sentence_chars,
            self.num_relations,
            self.num_keywords,
        )


def summary_lines(
    parsed: ParsedText, budget: int, max_first_sentence_chars: int, num_relations: int, num_keywords: int
) -> str:
    """Return the lines ``Open:``, ``Rel:`` and ``More:`` with at most ``budget`` characters."""
    opening = _cut(parsed.first_sentence, max_first_sentence_chars)
    text = _cut(f"Open: {opening}", budget)
    text = _with_line(text, "Rel: ", "; ", parsed.relations[:num_relations], budget)
    used = set(text.lower().split())
    more = [word for word in parsed.words if word.lower() not in {part.strip(".,;:!?") for part in used}]
    return _with_line(text, "More: ", ", ", more[:num_keywords], budget)


def _with_line(text: str, label: str, separator: str, items: Sequence[str], budget: int) -> str:
    """Return the text with a line of as many items, from the first, as fit."""
    line = ""
    for item in items:
        longer = f"{line}{separator}{item}" if line else f"\n{label}{item}"
        if len(text) + len(longer) > budget:
            break
        line = longer
    return text + line


def _cut(text: str, size: int) -> str:
    """Return the text, or its first ``size − 1`` characters and an ellipsis."""
    return text if len(text) <= size else text[: max(size - 1, 0)].rstrip() + "…"


def _load(name: str) -> "Language":
    try:
        import spacy
    except ImportError as error:
        raise missing("spacy", "KeywordCondenser") from error
    try:
        pipeline = spacy.load(name)
    except OSError as error:
        raise DownloadError(
            f"spacy_model: spaCy has no pipeline {name!r}. Install it (python -m spacy download {name}), or name a "
            "folder with one"
        ) from error
    if not {"parser", "senter", "sentencizer"} & set(pipeline.pipe_names):
        pipeline.add_pipe("sentencizer", first=True)
    return pipeline


def _parsed(document: "Doc") -> ParsedText:
    first = next((sentence.text.strip() for sentence in document.sents if sentence.text.strip()), "")
    relations = list(dict.fromkeys(_relations(document))) if document.has_annotation("DEP") else []
    return ParsedText(" ".join(first.split()), relations, _frequent_words(document))


def _relations(document: "Doc") -> Iterator[str]:
    """Yield "subject verb object" for each verb that has both. A subject that is a pronoun says too little alone."""
    for verb in document:
        subjects = [child for child in verb.children if child.dep_ in _SUBJECTS and child.pos_ != "PRON"]
        objects = [child for child in verb.children if child.dep_ in _OBJECTS]
        for preposition in (child for child in verb.children if child.dep_ in {"prep", "agent"}):
            objects += [child for child in preposition.children if child.dep_ == "pobj"]
        if subjects and objects:
            yield f"{_phrase(subjects[0])} {verb.text} {_phrase(objects[0])}"


def _phrase(noun: "Token") -> str:
    """Return a noun with the names and numbers in front of it that belong to it."""
    parts = [child for child in noun.lefts if child.dep_ in {"compound", "nummod", "flat", "amod"}]
    return " ".join(token.text for token in [*parts, noun])


def _frequent_words(document: "Doc") -> list[str]:
    """Return the content words as they are first written, the most frequent first, equals in the order of the text."""
    tagged = document.has_annotation("POS")
    shown: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for token in document:
        if not token.is_alpha or token.is_stop or len(token.text) < 3:
            continue
        if tagged and token.pos_ not in {"NOUN", "PROPN"}:
            continue
        form = (token.lemma_ or token.text).lower()
        shown.setdefault(form, token.text)
        counts[form] += 1
    return [shown[form] for form, _ in counts.most_common()]
