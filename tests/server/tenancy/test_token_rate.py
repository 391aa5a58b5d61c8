"""Tokens per minute on a simulated clock: exact at any time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.errors import RateLimitError
from twinkle.server.tenancy.rate_limit import TokenRate


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def taken(rate: TokenRate, tokens: int, limit: int | None = 60, tenant: str = "t") -> bool:
    try:
        rate.charge(tenant, tokens, limit)
    except RateLimitError:
        return False
    return True


def test_a_minutes_worth_at_once_then_as_it_fills_up() -> None:
    clock = Clock()
    rate = TokenRate("training tokens per minute", "max_training_tokens_per_minute", clock)
    assert [taken(rate, 20) for _ in range(5)] == [True, True, True, False, False]
    with pytest.raises(RateLimitError, match="training tokens per minute: the limit of 60 is reached") as caught:
        rate.charge("t", 20, 60)
    assert caught.value.retry_after == 20
    clock.now += 19.5
    assert not taken(rate, 20)
    clock.now += 0.5
    assert taken(rate, 20)
    assert taken(rate, 60, tenant="another")
    assert taken(rate, 10**9, limit=None)
    clock.now += 1000  # idle time earns at most one minute's worth
    assert [taken(rate, 60) for _ in range(2)] == [True, False]


def test_what_was_not_used_comes_back_and_what_was_used_beyond_is_owed() -> None:
    clock = Clock()
    rate = TokenRate("x", "max_x", clock)
    rate.charge("t", 60, 60)
    rate.give_back("t", 50, 60)
    assert taken(rate, 50)
    rate.give_back("t", -30, 60)
    clock.now += 30
    with pytest.raises(RateLimitError):
        rate.check("t", 60)
    clock.now += 1
    rate.check("t", 60)


def test_a_request_larger_than_a_minutes_worth_needs_all_and_leaves_a_debt() -> None:
    clock = Clock()
    rate = TokenRate("x", "max_x", clock)
    assert taken(rate, 1)
    assert not taken(rate, 600)
    clock.now += 1
    assert taken(rate, 600)
    clock.now += 540
    assert not taken(rate, 1)
    clock.now += 1
    assert taken(rate, 1)


@settings(deadline=None)
@given(asked=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 60)), min_size=1, max_size=50))
def test_no_window_sees_more_than_the_rate_and_a_minutes_worth(asked: list[tuple[float, int]]) -> None:
    clock = Clock()
    rate = TokenRate("x", "max_x", clock)
    got: list[tuple[float, int]] = []
    for pause, tokens in asked:
        clock.now += pause
        if taken(rate, tokens):
            got.append((clock.now, tokens))
    for first in range(len(got)):
        for last in range(first, len(got)):
            within = sum(tokens for _, tokens in got[first : last + 1])
            assert within <= 60 + (got[last][0] - got[first][0]) + 1e-6
