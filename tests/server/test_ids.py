"""Small types that the whole server shares: request ids, and counts by name."""

import pytest

from twinkle.errors import NotFoundError
from twinkle.server.ids import SEQ_IDS_PER_CLIENT, RequestId, custom_loss_id
from twinkle.server.types import Tally


@pytest.mark.parametrize(
    "text", ["s:train:0:7", "session_0-adapter:12", "s:sample:0:0", "s:loss:3", "x:9223372036854775807"]
)
def test_an_id_is_its_text_again(text: str) -> None:
    assert str(RequestId.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", ":", "7", ":7", "s:", "s:x", "s:-1", "s:1 ", "s:\u0661", "s:9223372036854775808", "s:" + "0" * 20]
)
def test_what_is_no_id_of_ours_is_not_found(text: str) -> None:
    assert RequestId.parse_or_none(text) is None
    with pytest.raises(NotFoundError):
        RequestId.parse(text)


def test_what_an_id_names() -> None:
    op, sample = RequestId.parse("s:train:0:7"), RequestId.parse(f"s:sample:0:{2 * SEQ_IDS_PER_CLIENT + 5}")
    assert (op.owner, op.number) == ("s:train:0", 7)
    assert sample.client == ("s:sample:0", 2)
    assert RequestId.parse(custom_loss_id("s", 3)).is_custom_loss
    assert [each.is_sample for each in (op, sample)] == [False, True]


def test_requests_without_a_place_have_numbers_beyond_all_others() -> None:
    unload, refusals = RequestId.for_unload("s:train:0"), [RequestId.for_refusal("s:train:0", n) for n in range(2)]
    assert unload.is_unload
    assert not unload.is_refusal
    assert all(each.is_refusal and not each.is_unload for each in refusals)
    assert len({unload, *refusals}) == 3
    assert not RequestId("s:train:0", 10**17).is_unload


def test_a_tally_keeps_no_name_without_a_count() -> None:
    tally = Tally()
    with tally.counting("a"), tally.counting("b", 3):
        tally["a"] += 2
        assert (tally["a"], tally["b"], tally["c"], tally.total()) == (3, 3, 0, 6)
    assert dict(tally) == {"a": 2}
    tally["a"] -= 2
    tally["d"] += 0
    assert not tally
