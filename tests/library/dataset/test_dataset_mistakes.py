"""Mistakes that users make with data: each is reported at once, with its field and the allowed values."""

import pytest

from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta, PackingDataset
from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.processor import InputProcessor
from twinkle.template import Template

MODEL = "random://llama-tiny"


def rows(*values: object, kind: type[Dataset] = Dataset) -> Dataset:
    return kind(DatasetMeta(data=[{"a": value} for value in values]))


DATASET_MISTAKES = {
    "an id instead of a DatasetMeta": (lambda: Dataset("org/name"), "dataset_meta: got 'org/name'"),
    "rows instead of a DatasetMeta": (lambda: Dataset().add_dataset([{"a": 1}]), "dataset_meta: got"),
    "a file that is not there": (lambda: Dataset(DatasetMeta("./no-such.jsonl")), "dataset_id: got './no-such.jsonl'"),
    "a split of a directory": (lambda: Dataset(DatasetMeta("/", split="test")), "split: got 'test', .*'train'"),
    "a slice of letters": (lambda: DatasetMeta("x", data_slice="ab"), "data_slice: got 'ab'"),
    "a class that is no template": (lambda: rows(1).set_template(Dataset), "Template: got <class"),
    "a function as a template": (lambda: rows(1).set_template(len), "Template: got <built-in"),
    "a template without a model": (lambda: rows(1).set_template("Template"), "options of Template: .*also model_id"),
    "a class that is no preprocessor": (lambda: rows(1).map(Template), "Preprocessor: got <class"),
    "the name of the base": (lambda: rows(1).map("Preprocessor"), "unknown Preprocessor 'Preprocessor'; known: Alp"),
    "a function that returns nothing": (lambda: rows(1).map(lambda columns: None), "preprocess_func: .*NoneType"),
    "a batch size as text": (lambda: DataLoader(rows(1), batch_size="2"), "batch_size: got '2'"),
    "no dataset": (lambda: DataLoader(None, batch_size=2), "dataset: got None"),
    "a generator": (lambda: DataLoader(iter([1]), batch_size=2), "dataset: got <list_iterator"),
}


@pytest.mark.parametrize("mistake", DATASET_MISTAKES)
def test_mistakes_with_datasets_are_named(mistake):
    make, message = DATASET_MISTAKES[mistake]
    with pytest.raises((InvalidInputError, UnknownNameError), match=message):
        make()


def test_unencoded_rows_are_no_batch(chats):
    loader = DataLoader(Dataset(DatasetMeta(data=chats)), batch_size=2)
    loader.set_processor("InputProcessor")
    with pytest.raises(InvalidInputError, match=r"inputs: got .*'messages'.*, allowed: encoded rows"):
        next(iter(loader))


ENCODING_MISTAKES = {
    "a text": (lambda template: template.encode("hello"), "trajectory: got 'hello'"),
    "one of two trajectories missing": (
        lambda template: template.batch_encode(
            [{"good": {"messages": [{"role": "user", "content": "?"}]}}, {"good": None}]
        ),
        "trajectory: got None",
    ),
    "an unencoded feature": (lambda template: template.concat_input_feature({"messages": []}, [1]), "feature: got"),
    "no model": (lambda template: Template(None), "model_id: got None"),
}


@pytest.mark.parametrize("mistake", ENCODING_MISTAKES)
def test_mistakes_with_templates_are_named(mistake, template):
    make, message = ENCODING_MISTAKES[mistake]
    with pytest.raises(InvalidInputError, match=message):
        make(template)


def test_what_was_left_on_in_the_tokenizer_changes_nothing(template, chats):
    expected = template.encode(chats[0])["input_ids"].tolist()
    template.tokenizer.backend_tokenizer.enable_truncation(3)
    template.tokenizer.backend_tokenizer.enable_padding(length=200)
    assert template.encode(chats[0])["input_ids"].tolist() == expected


PROCESSOR_MISTAKES = {
    "a text": ("abc", "inputs: got 'abc'"),
    "short labels": ([{"input_ids": [1, 2, 3], "labels": [2, 3]}], "inputs.labels: got '2 entries', allowed: 3"),
    "long positions": ([{"input_ids": [1, 2], "position_ids": [0, 1, 2]}], "inputs.position_ids: got '3 entries'"),
}


@pytest.mark.parametrize("mistake", PROCESSOR_MISTAKES)
def test_mistakes_with_processors_are_named(mistake):
    inputs, message = PROCESSOR_MISTAKES[mistake]
    with pytest.raises(InvalidInputError, match=message):
        InputProcessor()(inputs)


def test_sequences_without_positions_cannot_stand_end_to_end():
    with pytest.raises(InvalidInputError, match="no position_ids"):
        InputProcessor(padding_free=True)([{"input_ids": [1, 2]}, {"input_ids": [3]}])


def test_a_row_longer_than_a_pack_has_one_of_its_own(chats):
    dataset = PackingDataset(DatasetMeta(data=chats))
    dataset.set_template("Template", model_id=MODEL)
    dataset.encode()
    dataset.template.max_length = 40  # set after encoding, which would have refused the rows
    dataset.pack_dataset()
    lengths = [dataset[n]["length"] for n in range(len(dataset))]
    longest = max(len(dataset.dataset[n]["input_ids"]) for n in range(len(chats)))
    assert max(lengths) == longest > 40
    assert sum(lengths) == sum(len(dataset.dataset[n]["input_ids"]) for n in range(len(chats)))
