"""Locks in files, claims, seeds: what several processes of a machine agree on."""

import multiprocessing
import os
import pickle
import subprocess
import sys

import pytest

from tests.support.paths import SOURCE
from twinkle.utils import PosixFileLock, processing_lock, stable_seed, try_claim_once


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TWINKLE_SESSION_ID", "one")


def test_one_holder_at_a_time(tmp_path):
    path = tmp_path / "folder" / "x.lock"
    first, second = PosixFileLock(path), PosixFileLock(str(path))
    with first:
        assert first.is_held
        assert not second.acquire(blocking=False)
        with pytest.raises(RuntimeError, match="holds the lock already"):
            first.acquire()
        copy = pickle.loads(pickle.dumps(first))
        assert not copy.is_held
        assert not copy.acquire(blocking=False)
    assert second.acquire(blocking=False)
    second.close()
    second.release()  # no effect
    assert path.exists()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_does_not_have_its_parents_lock(tmp_path):
    lock = PosixFileLock(tmp_path / "x.lock")
    with lock:
        child = multiprocessing.get_context("fork").Process(target=_release_and_try, args=(lock,))
        child.start()
        child.join()
        assert child.exitcode == 0
        assert not PosixFileLock(tmp_path / "x.lock").acquire(blocking=False)  # still ours


def _release_and_try(lock):
    lock.release()
    os._exit(1 if lock.acquire(blocking=False) else 0)


def test_a_lock_ends_with_its_process(tmp_path):
    code = (
        "import os, sys\nfrom twinkle.utils.parallel import PosixFileLock\n"
        "PosixFileLock(sys.argv[1]).acquire()\nos._exit(0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "x.lock")], env=environment, check=True)
    assert PosixFileLock(tmp_path / "x.lock").acquire(blocking=False)


def test_the_first_process_works_alone(tmp_path):
    path = tmp_path / "cache" / "locks" / "a_dataset.lock"
    with processing_lock("a dataset"):
        assert not PosixFileLock(path).acquire(blocking=False)
    assert PosixFileLock(path).acquire(blocking=False)
    with pytest.raises(ZeroDivisionError), processing_lock("other"):
        _ = 1 / 0
    with processing_lock("other"):
        pass


def test_those_that_waited_run_without_a_lock(tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr(PosixFileLock, "acquire", lambda lock, blocking=True: waited.append(blocking) or blocking)
    with processing_lock("x"):
        assert waited == [False, True]


def test_one_process_of_a_launch_wins(monkeypatch, tmp_path):
    assert try_claim_once("key", payload="by me")
    assert not try_claim_once("key")
    assert try_claim_once("other key")
    assert try_claim_once("key", namespace="elsewhere")
    monkeypatch.setenv("TWINKLE_SESSION_ID", "two")
    assert try_claim_once("key")
    claims = list((tmp_path / "cache" / "claim").iterdir())
    assert sorted(claim.read_text() for claim in claims) == ["", "", "by me"]
    for claim in claims:
        os.utime(claim, (0, 0))
    assert try_claim_once("third")
    assert len(list((tmp_path / "cache" / "claim").iterdir())) == 1  # the old ones are gone


def test_every_process_may_claim_if_the_folder_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path / "file"))
    assert try_claim_once("key")
    assert try_claim_once("key")


def test_seeds_depend_on_their_parts_alone():
    assert stable_seed("rollout", 3, 7) == stable_seed("rollout", 3, 7)
    seeds = {stable_seed(*parts) for parts in ((), ("a",), ("a", "b"), ("ab",), ("b", "a"), (1, 23), (12, 3))}
    assert len(seeds) == 7
    assert all(0 <= seed < 2**32 for seed in seeds)
    # SHA-256 of "a" begins with ca978112
    assert stable_seed("a") == 0xCA978112
