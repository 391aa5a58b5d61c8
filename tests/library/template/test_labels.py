"""Labels, compared with a slow reference: layouts are written by hand, and each token's bytes are counted."""

import copy
import random

import pytest
from tokenizers import pre_tokenizers

from tests.support.texts.conversations import random_trajectory, save_tokenizer
from tests.support.texts.layouts import DEEPSEEK_V4, LAYOUTS, STEADY_QWEN3, Layout, Pieces
from tests.support.thorough import by_default
from twinkle.template import DeepseekV4Template, Qwen3_5Template, Qwen3Template, Template

CONVERSATIONS = 1000
GROUP = 25  # conversations that share one setting of the template
DRAWN_BY_DEFAULT = by_default(
    *(each for each in LAYOUTS if each.name in ("chatml", "qwen3", "llama3", "r1")), of=LAYOUTS
)
STRATEGIES = ["left", "right", "split", "delete", "raise"]


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        layout.name: save_tokenizer(root / layout.name, layout.special, layout.source, layout.bos, layout.eos)
        for layout in [*LAYOUTS, STEADY_QWEN3, DEEPSEEK_V4]
    }


def byte_lengths(tokenizer, ids) -> list[int]:
    """Return the number of text bytes of each token, from the vocabulary alone: a symbol is a byte."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    added = tokenizer.get_added_vocab()
    lengths = []
    for token in tokenizer.convert_ids_to_tokens(ids):
        if token in added:
            lengths.append(len(token.encode()))
        else:
            assert set(token) <= alphabet
            lengths.append(len(token))
    return lengths


def reference_labels(tokenizer, ids, pieces: Pieces) -> list[int]:
    """Return unshifted labels: a token is learned if its first byte is in a learned piece."""
    learnt = [said for text, said in pieces for _ in text.encode()]
    labels, position = [], 0
    for token, length in zip(ids, byte_lengths(tokenizer, ids), strict=True):
        labels.append(token if learnt[position] else -100)
        position += length
    assert position == len(learnt)
    return labels


def reference_features(ids, labels, max_length, strategy) -> list[tuple[list[int], list[int]]]:
    """Return the features after truncation and shifting."""
    whole = (0, len(ids))
    if len(ids) <= max_length:
        cuts = [whole]
    elif strategy == "left":
        cuts = [(len(ids) - max_length, len(ids))]
    elif strategy == "right":
        cuts = [(0, max_length)]
    elif strategy == "split":
        cuts = [(start, min(start + max_length, len(ids))) for start in range(0, len(ids), max_length)]
    else:
        cuts = []
    return [(ids[start:end], [*labels[start + 1 : end], -100]) for start, end in cuts]


def check_layout(template: Template, layout: Layout, conversations: int, seed: int) -> int:
    draw = random.Random(seed)
    learnt = 0
    for _ in range(conversations // GROUP):
        template.enable_thinking = draw.random() < 0.5
        template.truncation_strategy = draw.choice(STRATEGIES)
        template.max_length = None if template.truncation_strategy == "raise" else draw.randint(5, 120)
        rows = [random_trajectory(draw, layout.tools) for _ in range(GROUP)]
        given = copy.deepcopy(rows)
        features = template.batch_encode(rows)
        assert rows == given  # no row was changed in place
        expected = []
        for row in rows:
            pieces = layout.reference(row["messages"], row.get("tools"), template.enable_thinking)
            text = "".join(piece for piece, _ in pieces)
            assert template._encode_rows([row], False, False, {})[0][0]["prompt"] == text
            ids = template.tokenizer(text, add_special_tokens=False)["input_ids"]
            labels = reference_labels(template.tokenizer, ids, pieces)
            limit = template.max_length or len(ids)
            expected += reference_features(ids, labels, limit, template.truncation_strategy)
        assert len(features) == len(expected)
        for feature, (ids, labels) in zip(features, expected, strict=True):
            assert feature["input_ids"].tolist() == ids
            assert feature["labels"].tolist() == labels
            assert feature["length"] == len(ids) == feature["attention_mask"].sum()
            assert feature["position_ids"].tolist() == list(range(len(ids)))
            learnt += int((feature["labels"] != -100).sum())
    return learnt


@pytest.mark.parametrize("layout", DRAWN_BY_DEFAULT, ids=lambda layout: layout.name)
def test_labels_equal_the_slow_reference(layout, folders):
    template = Template(str(folders[layout.name]))
    assert check_layout(template, layout, CONVERSATIONS, seed=1) > CONVERSATIONS


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(Qwen3Template, STEADY_QWEN3), (Qwen3_5Template, STEADY_QWEN3), (DeepseekV4Template, DEEPSEEK_V4)],
)
def test_labels_of_the_templates_of_their_own(kind, layout, folders):
    assert check_layout(kind(str(folders[layout.name])), layout, CONVERSATIONS, seed=2) > CONVERSATIONS


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_text_is_what_transformers_renders(layout, folders):
    template = Template(str(folders[layout.name]), default_system="Be brief.")
    draw = random.Random(3)
    for _ in range(40):
        row = random_trajectory(draw, layout.tools)
        prompted = draw.random() < 0.5
        shown = template.format_trajectory(row, add_default_system=True)
        messages = [{k: v for k, v in m.items() if k != "tool_calls"} for m in shown["messages"]]
        if any("tool_calls" in m for m in shown["messages"]) or any(m.get("reasoning_content") for m in messages):
            continue  # these are changed before the template sees them
        text = template.tokenizer.apply_chat_template(
            messages, tools=row.get("tools"), tokenize=False, add_generation_prompt=prompted, enable_thinking=True
        )
        assert template.encode(row, add_generation_prompt=prompted, tokenize=False)["prompt"] == text


def test_a_token_that_crosses_into_the_answer_is_not_learnt(folders):
    template = Template(str(folders["chatml"]))
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "\n\nyes"}]
    feature = template.encode({"messages": messages})
    # the header's line break and the first one of the answer are a single token
    assert "\n\n" in [template.decode([token]) for token in feature["input_ids"]]
    assert template.decode(feature["labels"][feature["labels"] != -100]) == "\nyes<|im_end|>\n"
