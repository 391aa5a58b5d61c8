"""KeywordCondenser with spaCy itself: a blank pipeline, and one whose tags and relations are set by hand.

The package indexes have no language model, so nothing here depends on one. Without spaCy the tests skip themselves;
test_condensers.py has the lines that do not need it.
"""

import sys

import pytest

from twinkle.errors import MissingDependencyError
from twinkle_agentic.condenser import KeywordCondenser
from twinkle_agentic.data_format import Chunks

TEXT = (
    "Marie Curie discovered radium in Paris. The radium glowed. Curie studied radium and polonium for years, and the "
    "polonium was named after Poland. Students visited the laboratory and the laboratory grew from year to year."
)


def test_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(MissingDependencyError, match=r"KeywordCondenser needs .*twinkle-posttrain\[spacy\]"):
        KeywordCondenser()


@pytest.fixture(scope="module")
def blank(tmp_path_factory):
    spacy = pytest.importorskip("spacy")
    folder = tmp_path_factory.mktemp("spacy") / "blank"
    spacy.blank("en").to_disk(folder)
    return str(folder)


@pytest.fixture(scope="module")
def parsing(tmp_path_factory):
    """A pipeline that finds the relations of TEXT's first sentence, as a parser would."""
    spacy = pytest.importorskip("spacy")
    tags = {"Marie": "PROPN", "Curie": "PROPN", "radium": "NOUN", "Paris": "PROPN", "discovered": "VERB"}
    relations = {"Marie": ("compound", "Curie"), "Curie": ("nsubj", "discovered"), "radium": ("dobj", "discovered")}

    @spacy.Language.component("by_hand")
    def by_hand(document):
        first = next(document.sents)
        places = {token.text: token for token in first}
        for token in document:
            token.pos_ = tags.get(token.text, "X")
            token.dep_ = "dep"
        for name, (relation, head) in relations.items():
            places[name].dep_, places[name].head = relation, places[head]
        return document

    pipeline = spacy.blank("en")
    pipeline.add_pipe("sentencizer")
    pipeline.add_pipe("by_hand")
    folder = tmp_path_factory.mktemp("spacy") / "parsing"
    pipeline.to_disk(folder)
    return str(folder)


def chunk(content, role="user", turn=1):
    return {"type": "text", "content": content, "role": role, "round": turn}


def test_a_blank_pipeline_finds_sentences_and_words(blank):
    """Words by their number: radium 3; Curie, polonium, laboratory, year 2; the others 1. Stop words do not count."""
    found = KeywordCondenser(spacy_model=blank, compression_ratio=2.0, num_keywords=3).summary(TEXT)
    assert found == "Open: Marie Curie discovered radium in Paris.\nMore: polonium, laboratory, year"


def test_relations_of_a_parser(parsing):
    found = KeywordCondenser(spacy_model=parsing, compression_ratio=2.0).summary(TEXT)
    assert found == "Open: Marie Curie discovered radium in Paris.\nRel: Marie Curie discovered radium"


def test_the_summary_is_short_enough(blank):
    condenser = KeywordCondenser(spacy_model=blank)
    assert len(TEXT) == 219
    found = condenser.summary(TEXT)
    assert found == "Open: Marie Curie discovered radium in Paris."  # 45 of ceil(219 / 4) = 55 characters
    assert len(condenser.summary("word " * 50)) <= 63  # ceil(250 / 4)


def test_which_chunks_are_replaced(blank):
    before = [chunk(TEXT), chunk("short"), chunk(TEXT, "assistant"), chunk(TEXT, turn=2)]
    after = KeywordCondenser(spacy_model=blank, rounds=[1])(Chunks(before))
    assert after.chunks[1:] == before[1:]
    assert after[0]["raw"] == {"condensed": True, "original": TEXT}
    assert after[0]["content"].startswith("Open: Marie Curie")
    both = KeywordCondenser(spacy_model=blank)([Chunks(before), Chunks(before[1:2])])
    assert [[bool(each.get("raw")) for each in chunks] for chunks in both] == [[True, False, False, True], [False]]


def test_a_language_model_that_is_not_there():
    pytest.importorskip("spacy")
    with pytest.raises(OSError, match=r"spaCy has no pipeline 'en_core_web_sm'\. Install it \(python -m spacy down"):
        KeywordCondenser()
    with pytest.raises(ValueError, match="compression_ratio: got 1"):
        KeywordCondenser(compression_ratio=1)
