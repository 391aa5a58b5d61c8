"""Steps with the real data_juicer, Presidio and spaCy (make test-preprocess).

spaCy's trained models are not on the package index: ``spacy.blank`` and a rule for names take their place.
"""

import hashlib
import json

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from twinkle.data_format import user_data_get
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle_agentic.preprocessor import (
    FixUnicodeFilter,
    PIIPresidioFilter,
    QualityPreprocessor,
    RemoveRepeatSentencesFilter,
    SpecialCharsFilter,
    TokenNumFilter,
)
from twinkle_agentic.preprocessor.pii_presidio_filter import Strategy

pytestmark = pytest.mark.preprocess


def talk(*contents):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]}


def answer(step, text, **more):
    kept, dropped = step([{"messages": [{"role": "assistant", "content": text, **more}]}])
    assert dropped == []
    return kept[0]["messages"][0]["content"]


# --- data_juicer ------------------------------------------------------------------------------------------------------


def test_fix_unicode():
    step = FixUnicodeFilter()
    assert answer(step, "cafÃ© and e\u0301") == "café and \u00e9"  # wrongly decoded UTF-8; a combining accent
    assert answer(FixUnicodeFilter(normalization="nfd"), "\u00e9") == "e\u0301"
    parts = [{"type": "text", "text": "cafÃ©"}, {"type": "image", "image": "cafÃ©.png"}]
    assert answer(step, parts) == [{"type": "text", "text": "café"}, {"type": "image", "image": "cafÃ©.png"}]
    row = talk("cafÃ©", "cafÃ©")
    assert [m["content"] for m in step([row])[0][0]["messages"]] == ["cafÃ©", "café"]
    assert [m["content"] for m in FixUnicodeFilter(role="user")([row])[0][0]["messages"]] == ["café", "cafÃ©"]
    assert row == talk("cafÃ©", "cafÃ©")
    assert answer(step, None) is None
    with pytest.raises(UnknownNameError, match="NFKC"):
        FixUnicodeFilter("NFX")
    with pytest.raises(UnknownNameError, match="assistant"):
        FixUnicodeFilter(role="robot")


def test_remove_repeat_sentences():
    step = RemoveRepeatSentencesFilter()
    assert answer(step, "It rains. It is wet. It rains.").strip() == "It rains. It is wet."
    assert answer(step, "今天下雨。路很滑。今天下雨。") == "今天下雨。路很滑。"
    assert answer(step, "It rains! It rains.").strip() == "It rains!"  # punctuation is ignored
    assert answer(RemoveRepeatSentencesFilter(ignore_special_character=False), "Yes! Yes.") == "Yes! Yes."
    assert answer(step, "It rains. it rains.") == "It rains. it rains."
    assert answer(RemoveRepeatSentencesFilter(lowercase=True), "It rains. it rains.").strip() == "It rains."


def test_special_characters():
    row = {"messages": [{"role": "assistant", "content": "abc!"}]}  # 1 of 4: not more than .25
    assert SpecialCharsFilter()([row]) == ([row], [])
    worse = {"messages": [{"role": "assistant", "content": "abc!!"}]}
    assert SpecialCharsFilter()([worse]) == ([], [{**worse, "drop_reason": "special_chars_ratio"}])
    assert SpecialCharsFilter(max_ratio=0.4)([worse])[1] == []
    assert SpecialCharsFilter(role="user")([worse, {}, talk("", "!!!")])[1] == []  # no text of this role
    with pytest.raises(InvalidInputError, match="max_ratio"):
        SpecialCharsFilter(max_ratio=2)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A tokenizer with one token for each word."""
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.mark.parametrize(("count", "kept"), [(9, 0), (10, 1), (20, 1), (21, 0)])
def test_token_number(words, count, kept):
    row = {"messages": [{"role": "assistant", "content": "w " * count}]}
    found = TokenNumFilter(words, max_num=20)([row])
    assert len(found[0]) == kept
    assert [each["drop_reason"] for each in found[1]] == ["token_count_out_of_range"] * (1 - kept)


def test_token_number_of_all_messages_of_a_role(words):
    row = talk("w " * 30, "w " * 5, "w", "w " * 5)
    assert TokenNumFilter(str(words), max_num=20)([row])[1] == []
    assert len(TokenNumFilter(words, max_num=20, role="user")([row])[1]) == 1
    with pytest.raises(InvalidInputError, match="min_num"):
        TokenNumFilter(words, min_num=3, max_num=2)


# --- Presidio ---------------------------------------------------------------------------------------------------------


def rewritten(text, **options):
    kept, dropped = PIIPresidioFilter(**options)([{"messages": [{"role": "user", "content": text}]}])
    assert dropped == []
    return kept[0]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Write to jane.doe@example.com now.", "Write to <EMAIL_ADDRESS_1> now."),
        ("a@x.org, b@x.org and a@x.org", "<EMAIL_ADDRESS_1>, <EMAIL_ADDRESS_2> and <EMAIL_ADDRESS_1>"),
        ("邮箱是wang@example.cn谢谢", "邮箱是<EMAIL_ADDRESS_1>谢谢"),
        ("我的手机号是13812345678，请联系", "我的手机号是*******5678，请联系"),
        ("身份证号11010519491231002X。", "身份证号**************002X。"),  # the example of the standard
        ("身份证号110105194912310021。", "身份证号110105194912310021。"),  # a wrong check digit
        ("My credit card is 4111 1111 1111 1111.", "My credit card is **** **** **** 1111."),
        ("卡号4111111111111111吗", "卡号************1111吗"),
        ("Call me, my phone is +1 212 456 7890.", "Call me, my phone is +* *** *** 7890."),
        ("The server is at 192.168.10.254 today.", "The server is at ***.***.*0.254 today."),
        ("John Smith met Anna in Paris on 3 May 2024.", "John Smith met Anna in Paris on 3 May 2024."),
        ("See https://example.com/page for more.", "See https://example.com/page for more."),
        ("There are 1234567 stars.", "There are 1234567 stars."),
    ],
)
def test_defaults(text, expected):
    assert rewritten(text) == expected


def test_strategies():
    text = "a@x.org"
    digest = hashlib.sha256(b"salta@x.org").hexdigest()[:16]
    for strategy, expected in ((Strategy.MASK, "*@*.***"), ("replace", "<EMAIL_ADDRESS_1>"), ("redact", "")):
        assert rewritten(text, entity_strategy={"EMAIL_ADDRESS": strategy}) == expected
    assert rewritten(text, entity_strategy={"EMAIL_ADDRESS": "hash"}, hash_salt="salt") == digest
    assert rewritten(text, entity_strategy={"EMAIL_ADDRESS": None}) == text
    assert rewritten("手机13812345678", default_strategy="replace") == "手机<PHONE_NUMBER_1>"
    assert rewritten("13812345678", score_threshold=0.8) == "13812345678"
    for wrong in ({"default_strategy": "burn"}, {"entity_strategy": {"EMAIL": "mask"}}, {"roles": ["robot"]}):
        with pytest.raises(UnknownNameError, match="known: "):
            PIIPresidioFilter(**wrong)


def test_consistency():
    rows = [talk("a@x.org b@x.org", "b@x.org a@x.org"), talk("b@x.org", "c@x.org")]

    def texts(**options):
        kept, _ = PIIPresidioFilter(**options)(rows)
        return [message["content"] for row in kept for message in row["messages"]]

    one, two, three = (f"<EMAIL_ADDRESS_{number}>" for number in (1, 2, 3))
    assert texts() == [f"{one} {two}", f"{two} {one}", one, two]
    assert texts(persistent_consistency=True) == [f"{one} {two}", f"{two} {one}", two, three]
    assert texts(consistency=False)[0] == "<EMAIL_ADDRESS> <EMAIL_ADDRESS>"
    assert rows[0] == talk("a@x.org b@x.org", "b@x.org a@x.org")


def test_roles_content_lists_and_counts():
    messages = [
        {"role": "system", "content": "a@x.org"},
        {"role": "user", "content": [{"type": "text", "text": "a@x.org"}, {"type": "image", "image": "x"}]},
        {"role": "assistant", "content": "手机13812345678", "reasoning_content": "a@x.org"},
        {"role": "tool", "content": "a@x.org"},
    ]
    (row,), _ = PIIPresidioFilter(record_counts=True)([{"messages": messages, "user_data": [("id", "1")]}])
    assert [message["content"] for message in row["messages"]] == [
        "<EMAIL_ADDRESS_1>",
        [{"type": "text", "text": "<EMAIL_ADDRESS_1>"}, {"type": "image", "image": "x"}],
        "手机*******5678",
        "a@x.org",
    ]
    assert row["messages"][2]["reasoning_content"] == "<EMAIL_ADDRESS_1>"
    assert user_data_get(row["user_data"], "pii_counts") == {"EMAIL_ADDRESS": 3, "PHONE_NUMBER": 1}
    (row,), _ = PIIPresidioFilter(roles=["tool"])([{"messages": messages}])
    assert [message["content"] for message in row["messages"]][::3] == ["a@x.org", "<EMAIL_ADDRESS_1>"]


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """A spaCy model that knows two names by rule; its component is called like that of a trained model."""
    import spacy

    nlp = spacy.blank("en")
    ruler = nlp.add_pipe("entity_ruler", name="ner")
    ruler.add_patterns([{"label": "PERSON", "pattern": "Anna"}, {"label": "GPE", "pattern": "Paris"}])
    folder = tmp_path_factory.mktemp("spacy") / "model"
    nlp.to_disk(folder)
    return str(folder)


def test_names_need_a_model(named, tmp_path):
    text = "Anna lives in Paris."
    chosen = {"languages": ["en"], "entity_strategy": {"PERSON": "replace", "LOCATION": "redact"}}
    assert rewritten(text, spacy_models={"en": named}, **chosen) == "<PERSON_1> lives in ."
    assert rewritten(text, spacy_models={"en": named}, languages=["en"]) == text
    with pytest.raises(InvalidInputError, match="a spaCy model for 'en', which PERSON, LOCATION need"):
        rewritten(text, **chosen)
    with pytest.raises(InvalidInputError, match="python -m spacy download en_core_web_none"):
        rewritten(text, spacy_models={"en": "en_core_web_none"}, **chosen)
    with pytest.raises(UnknownNameError, match="spacy_models"):
        PIIPresidioFilter(languages=["en"], spacy_models={"fr": named})
    with pytest.raises(InvalidInputError, match="language codes"):
        PIIPresidioFilter(languages="en")


# --- in a dataset -----------------------------------------------------------------------------------------------------


def test_in_two_processes(words, tmp_path):
    log = tmp_path / "dropped.jsonl"
    rows = [{**talk(f"mail u{number}@x.org", "w " * number), "n": number} for number in (5, 12, 15, 25)]
    steps = [FixUnicodeFilter(), SpecialCharsFilter(0.6), TokenNumFilter(words, max_num=20), PIIPresidioFilter()]
    dataset = Dataset(DatasetMeta(data=rows))
    dataset.map(QualityPreprocessor(steps, log), num_proc=2)
    assert [(row["n"], row["messages"][0]["content"]) for row in dataset] == [
        (12, "mail <EMAIL_ADDRESS_1>"),
        (15, "mail <EMAIL_ADDRESS_1>"),
    ]
    assert sorted(json.loads(line)["row"]["n"] for line in log.read_text().splitlines()) == [5, 25]


@pytest.mark.parametrize("piece", ["a@", "a.", "1", "不"])
def test_long_texts_finish(piece):
    text = (piece * 100_000)[:100_000]
    row = talk(text, text)
    for step in (FixUnicodeFilter(), RemoveRepeatSentencesFilter(), SpecialCharsFilter(), PIIPresidioFilter()):
        kept, dropped = step([row])
        assert len(kept) + len(dropped) == 1
