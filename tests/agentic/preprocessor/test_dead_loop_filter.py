"""DeadLoopFilter: densities, windows and n-grams counted by hand."""

import pytest

from twinkle_agentic.preprocessor import DeadLoopFilter


def loops(answer, thoughts=None, **options):
    message = {"role": "assistant", "content": answer}
    if thoughts is not None:
        message["content"] = f"<think>{thoughts}</think>{answer}"
    kept, dropped = DeadLoopFilter(**options)([{"messages": [{"role": "user", "content": "?"}, message]}])
    assert [row["drop_reason"] for row in dropped] in ([], ["dead_loop"])
    return not kept


def spread(word, count, length, filler="."):
    """Return a text of ``length`` characters with ``count`` words at equal distances."""
    step = length // count
    return (word + filler * (step - len(word))) * count + filler * (length - step * count)


@pytest.mark.parametrize(
    ("count", "length", "expected"),
    [
        (14, 2000, False),  # 7.0 per 1000 characters: not more than 7
        (15, 2000, True),  # 7.5
        (7, 100, False),  # a short text counts as 1000 characters
        (8, 100, True),
    ],
)
def test_hesitation_density(count, length, expected):
    text = spread("hmm", count, length)
    assert len(text) == length
    assert loops(text) is expected
    assert not loops(text, hesitation_density_threshold=100)


def test_density_inside_thoughts_has_its_own_limit():
    text = spread("hmm", 30, 2000)  # 15 per 1000
    words = {"ngram_min_words": 1000}  # thirty equal words are a repetition too
    assert loops(text, **words)
    assert not loops("Fine.", thoughts=text, **words)
    assert loops("Fine.", thoughts=spread("hmm", 31, 2000), **words)
    reasoning = {"role": "assistant", "content": "Fine.", "reasoning_content": spread("hmm", 31, 2000)}
    assert DeadLoopFilter()([{"messages": [reasoning]}])[0] == []


def test_cascade_of_corrections():
    text = spread("wait", 5, 1000)  # at 0, 200, 400, 600, 800: four within any 800 characters
    assert not loops(text)
    assert loops(spread("wait", 5, 995))  # at 0, 199, … 796: all five
    assert not loops(spread("wait", 5, 995), cascade_window=796)
    assert not loops(spread("wait", 5, 995), cascade_threshold=6)
    thoughts = spread("wait", 19, 1900)
    assert not loops("Fine.", thoughts=thoughts)
    dense = spread("wait", 20, 799) + "." * 1201  # 10 per 1000 characters, 20 within 800
    assert loops("Fine.", thoughts=dense)


def test_chinese_corrections():
    assert loops("不对，重新计算。" * 3)  # six corrections
    assert not loops("答案是三，因为一加二等于三。")


def test_repeated_ngrams():
    words = [f"w{number}" for number in range(22)]
    once = " ".join([*words, *words[:16]])  # 38 words, 31 8-grams, of which 9 repeat: 0.29
    twice = " ".join([*words, *words])  # 44 words, 37 8-grams, of which 15 repeat: 0.405
    thrice = " ".join(words * 3)  # 66 words, 59 8-grams, 22 distinct: 0.627
    assert [loops(text) for text in (once, twice, thrice)] == [False, False, True]
    assert loops(twice, repetition_threshold=0.40)
    assert not loops("Fine.", thoughts=thrice)  # up to 0.65
    assert loops("Fine.", thoughts=" ".join(words * 4))  # 81 8-grams, 22 distinct: 0.728
    assert not loops(" ".join(["same"] * 29))
    assert loops(" ".join(["same"] * 30))  # 23 8-grams, one distinct
    assert not loops(" ".join(["same"] * 30), ngram_min_words=31)


def test_chinese_characters_are_words():
    assert loops("春眠不觉晓处处" * 8)  # 56 characters, 49 8-grams, 7 distinct: 0.857
    assert not loops("春眠不觉晓处处闻啼鸟夜来风雨声花落知多少白日依山尽黄河入海流欲穷千里目更上一层楼")


def test_agent_rows_and_users_pass():
    text = "wait " * 100
    tool = {"messages": [{"role": "assistant", "content": text}, {"role": "tool", "content": "x"}]}
    user = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]}
    assert DeadLoopFilter()([tool, user, {}, {"messages": None}])[1] == []
