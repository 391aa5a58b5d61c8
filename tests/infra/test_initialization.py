"""initialize in local mode, and where a seed comes from."""

import random

import pytest

import twinkle
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.infra import current_seed, current_settings, initialization, process_lock


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(initialization, "_settings", initialization.Settings())
    monkeypatch.delenv("TWINKLE_SEED", raising=False)


def test_seeds_and_remembers():
    assert current_settings().seed is None
    twinkle.initialize("local", seed=5, name="run")
    first = random.random()
    twinkle.initialize(mode="local", seed=5, name="run")
    assert random.random() == first
    assert (current_settings().seed, current_settings().name) == (5, "run")


def test_without_a_seed_nothing_is_seeded():
    random.seed(1)
    expected = random.random()
    random.seed(1)
    twinkle.initialize(seed=None)
    assert random.random() == expected


def test_seed_of_what_was_given_none(monkeypatch):
    assert current_seed() == 42
    twinkle.initialize(seed=5)
    assert current_seed() == 5
    monkeypatch.setenv("TWINKLE_SEED", "6")
    assert current_seed() == 6
    monkeypatch.setenv("TWINKLE_SEED", "six")
    with pytest.raises(InvalidInputError, match="TWINKLE_SEED"):
        current_seed()


def test_other_modes():
    with pytest.raises(UnsupportedError, match="'ray' is not there yet"):
        twinkle.initialize("ray")
    with pytest.raises(InvalidInputError, match="mode: got 'cloud'"):
        twinkle.initialize("cloud")


def test_process_lock_is_in_the_cache_and_nowhere_else(tmp_path, monkeypatch):
    from filelock import FileLock, Timeout

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path / "cache"))
    with process_lock("data/set"):
        (lock,) = (tmp_path / "cache" / "locks").iterdir()
        assert lock.name == "data_set.lock"
        with pytest.raises(Timeout):
            FileLock(lock).acquire(timeout=0)
    FileLock(lock).acquire(timeout=0).lock.release()
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
