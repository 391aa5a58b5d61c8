"""QualityPreprocessor: steps in order, both forms of rows, Dataset.map in two processes, and its log."""

import json
from importlib import import_module

import pytest

from twinkle.dataset import Dataset, DatasetMeta, LazyDataset
from twinkle.errors import InvalidInputError
from twinkle.utils.logger import get_logger
from twinkle_agentic.preprocessor import (
    HardFilter,
    IntentClassifier,
    MessageNormalizer,
    MessageSanityFilter,
    QualityPreprocessor,
    RefuseFilter,
)

LONG = "Because the sum of two even numbers is even, the answer is even as well, whichever numbers you take."

REFUSAL = "I'm sorry, but I can't help with that. Please ask a locksmith, who can show it to you in a lesson."


def row(question, answer=LONG, **more):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


ROWS = [
    row("Is the sum of two even numbers even?", name="good"),
    row("hi", name="greeting"),
    row("Tell me how to pick a lock, please.", REFUSAL, name="refused"),
    row("Why is the sum of even numbers even?", name="good too"),
]


def names_of_log(path):
    return [(line["step"], line["row"]["name"]) for line in map(json.loads, path.read_text().splitlines())]


@pytest.mark.parametrize("form", ["rows", "columns"])
def test_steps_run_in_order_and_drops_are_logged(tmp_path, monkeypatch, form):
    lines = []
    monkeypatch.setattr(get_logger(), "info", lines.append)
    log = tmp_path / "logs" / "dropped.jsonl"
    quality = QualityPreprocessor([HardFilter(), RefuseFilter()], dropped_log_path=str(log))
    before = json.dumps(ROWS)
    given = ROWS if form == "rows" else {key: [each[key] for each in ROWS] for key in ("messages", "name")}
    columns = quality(given)
    assert columns["name"] == ["good", "good too"]
    assert list(columns) == ["messages", "name"]
    assert names_of_log(log) == [("HardFilter", "greeting"), ("RefuseFilter", "refused")]
    first = json.loads(log.read_text().splitlines()[0])
    assert first == {"step": "HardFilter", "row": {**ROWS[1], "drop_reason": "trivial_single_turn"}}
    assert json.dumps(ROWS) == before, "the rows given were changed"
    assert lines == ["HardFilter: 4 rows, kept 3, dropped 1", "RefuseFilter: 3 rows, kept 2, dropped 1"]


def test_an_older_log_is_moved_aside(tmp_path):
    log = tmp_path / "dropped.jsonl"
    for _ in range(3):
        QualityPreprocessor([HardFilter()], str(log))([ROWS[1]])
    files = sorted(path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock"))
    assert files == ["dropped.jsonl", "dropped.jsonl.1", "dropped.jsonl.2"]
    assert all(names_of_log(tmp_path / name) == [("HardFilter", "greeting")] for name in files)


@pytest.mark.parametrize("workers", [None, 2])
def test_in_dataset_map(tmp_path, workers):
    """Two processes share the log; new columns, and a batch without kept rows, do not disturb the table."""
    log = tmp_path / "dropped.jsonl"
    data = [
        row(f"{each['messages'][0]['content']}{' ' * number}", each["messages"][1]["content"], name=f"{number}")
        for number, each in enumerate([ROWS[1], ROWS[1], *ROWS, *ROWS])
    ]
    dataset = Dataset(DatasetMeta(data=data))
    classifier = IntentClassifier(drop_no_key_rounds=False)
    steps = [MessageNormalizer(), HardFilter(), MessageSanityFilter(), RefuseFilter(), classifier]
    options = {} if workers is None else {"num_proc": workers}
    dataset.map(QualityPreprocessor(steps, log), batch_size=2, **options)
    assert [each["name"] for each in dataset] == ["2", "5", "6", "9"]
    assert [each["intent"] for each in dataset] == ["other"] * 4
    assert [list(map(tuple, each["user_data"])) for each in dataset] == [[("key_rounds", "[]"), ("intents", "[]")]] * 4
    assert sorted(names_of_log(log)) == sorted(
        [("HardFilter", name) for name in ("0", "1", "3", "7")] + [("RefuseFilter", name) for name in ("4", "8")]
    )


def test_by_name_of_the_class_and_on_lazy_rows(tmp_path):
    dataset = Dataset(DatasetMeta(data=ROWS))
    dataset.map(QualityPreprocessor, init_args={"pipeline": [HardFilter()]})
    assert [each["name"] for each in dataset] == ["good", "refused", "good too"]
    lazy = LazyDataset(DatasetMeta(data=ROWS))
    lazy.map(QualityPreprocessor([HardFilter()]))
    assert [bool(lazy[number]) for number in range(4)] == [True, False, True, True]


def test_rows_without_columns_and_without_steps():
    assert QualityPreprocessor([])([]) == {}
    assert QualityPreprocessor([HardFilter()])({"messages": [], "name": []}) == {"messages": [], "name": []}
    assert QualityPreprocessor([HardFilter()])([{"name": "x"}]) == {"name": []}


def test_values_that_json_does_not_know_are_logged(tmp_path):
    log = tmp_path / "log"
    QualityPreprocessor([HardFilter()], log)([{"messages": [], "name": "a\ud800b", "at": {1}}])
    assert json.loads(log.read_text())["row"]["name"] == "a\ud800b"


def test_each_class_is_a_name_of_the_package_and_of_its_module():
    package = import_module("twinkle_agentic.preprocessor")
    for name in package.__all__:
        made = getattr(package, name)
        assert getattr(import_module(made.__module__), name) is made
    own = {"pii_presidio_filter": "PIIPresidioFilter", "refuse_filter": "RefuseFilter", "token_soup": "TokenSoupFilter"}
    for module, name in own.items():
        assert getattr(import_module(f"twinkle_agentic.preprocessor.{module}"), name) is getattr(package, name)


def test_mistakes_are_named(tmp_path):
    with pytest.raises(InvalidInputError, match="instances of steps"):
        QualityPreprocessor([HardFilter])
    with pytest.raises(InvalidInputError, match="a list of steps"):
        QualityPreprocessor(HardFilter())
    with pytest.raises(InvalidInputError, match="this is a folder"):
        QualityPreprocessor([], tmp_path)
    with pytest.raises(InvalidInputError, match=r"a list from wrong.*\(kept, dropped\)"):
        QualityPreprocessor([wrong])(ROWS)


def wrong(rows):
    return list(rows)
