"""Requests divided over ranks: each gets about the same number of tokens, and every sequence is assigned once."""

import numpy as np
import pytest

from tests.model.parallel.lora_programs import datum, spread
from twinkle.model import Datum, TrainItem, TrainResult
from twinkle.model.trainer.shard_requests import RequestShards
from twinkle.model.types import Image, TokenValues


def requests(*lengths: tuple[int, ...]) -> list[TrainItem]:
    return [
        TrainItem(f"tenant-{index}", [datum(length, index * 100 + k, 90) for k, length in enumerate(each)])
        for index, each in enumerate(lengths)
    ]


def tokens(items: list[TrainItem]) -> int:
    return sum(len(each.tokens) for item in items for each in item.data)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_ranks_get_about_the_same(count: int) -> None:
    generator = np.random.default_rng(count)
    items = requests(*(tuple(generator.integers(1, 200, 9)) for _ in range(7)))
    shards = RequestShards.by_tokens(items, count)
    shares = [shards.share(rank) for rank in range(count)]
    longest = max(len(each.tokens) for item in items for each in item.data)
    loads = [tokens(share) for share in shares]
    assert sum(loads) == tokens(items)
    assert max(loads) - min(loads) <= longest
    for share in shares:
        assert [item.adapter_id for item in share] == [item.adapter_id for item in items]
    for index, item in enumerate(items):
        given = sorted(id(each) for share in shares for each in share[index].data)
        assert given == sorted(id(each) for each in item.data)


def test_an_objective_stays_whole() -> None:
    (many,) = requests((50, 40, 30, 20))
    whole = TrainItem("whole", many.data, objective=spread)
    shares = [RequestShards.by_tokens([whole, *requests((10, 10))], 2).share(rank) for rank in range(2)]
    assert sorted(len(share[0].data) for share in shares) == [0, 4]


def test_what_cannot_be_measured_goes_on_to_be_refused() -> None:
    ragged = Datum([[1], [1, 2]], np.array([1]))  # type: ignore[arg-type]
    wrong = [TrainItem("a", [ragged]), TrainItem("b", 5), TrainItem("c", ["text"])]  # type: ignore[arg-type,list-item]
    shares = [RequestShards.by_tokens(wrong, 2).share(rank) for rank in range(2)]
    assert [item.data for item in shares[0]][1] == 5
    assert sum(len(share[0].data) + len(share[2].data) for share in shares) == 2


def divided(item: TrainItem, results: list[TrainResult]) -> TrainResult:
    """Return the joined result of a request whose sequences are on two ranks, one each."""
    shards = RequestShards.by_tokens([item], 2)
    assert sorted(shards.owners[0]) == [0, 1]
    (joined,) = shards.join([[result] for result in results])
    assert isinstance(joined, TrainResult)
    return joined


def test_the_loss_of_sequences_with_images_on_two_ranks() -> None:
    image = Image(1, 1, 1, "digest", np.zeros((4, 12), np.float32))
    each = Datum(np.arange(3), np.arange(3), np.array([0, 0, 2], np.float32), images=(image,))
    results = [TrainResult([np.full(3, -value, np.float32)], {"loss:sum": 2 * value}) for value in (1.0, 2.0)]
    assert divided(TrainItem("a", [each, each]), results).metrics["loss:sum"] == 6.0


def test_embeddings_of_two_ranks() -> None:
    nothing = np.zeros(0, np.float32)
    results = [
        TrainResult([nothing], {"loss:sum": 0.0}, (TokenValues(nothing, nothing, nothing, np.full((1, 4), value)),))
        for value in (1.0, 2.0)
    ]
    item = TrainItem("a", [datum(5, 0, 90), datum(5, 1, 90)], output="embeddings")
    joined = divided(item, results)
    assert sorted(float(each.output[0, 0]) for each in joined.values) == [1.0, 2.0]
    assert joined.metrics == {"loss:sum": 0.0}
