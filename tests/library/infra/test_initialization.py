"""initialize in local mode, and which setting determines the seed."""

import random
import sys
from typing import ClassVar

import pytest

import twinkle
from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.infra import current_seed, current_settings, initialization, process_lock
from twinkle.notifier import Notifier


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(initialization, "_settings", initialization.Settings())
    for name in ("FULL_DETERMINISM", "MODE", "NAME", "NOTIFIER", "SEED"):
        monkeypatch.delenv(f"TWINKLE_{name}", raising=False)


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


def test_what_is_not_said_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("TWINKLE_NAME", "nightly")
    monkeypatch.setenv("TWINKLE_FULL_DETERMINISM", "1")
    monkeypatch.setattr(initialization, "seed_everything", lambda *said: seeded.append(said))
    seeded = []
    twinkle.initialize(seed=3)
    assert (current_settings().name, current_settings().full_determinism) == ("nightly", True)
    assert seeded == [(3, True)]
    twinkle.initialize(name="mine")
    assert current_settings().name == "mine"


class Told(Notifier):
    messages: ClassVar[list[str]] = []

    def __call__(self, message):
        self.messages.append(message)

    def to_dict(self):
        return {"class": "Told"}

    @classmethod
    def _from_dict_impl(cls, data):
        return cls()


def test_a_notifier_of_the_environment_hears_of_what_nobody_caught(monkeypatch, tmp_path):
    monkeypatch.setenv("TWINKLE_NOTIFIER", '{"class": "Told"}')
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    twinkle.initialize()
    try:
        sys.excepthook(RuntimeError, RuntimeError("lost"), None)
    finally:
        twinkle.shutdown()
    assert "uncaught exception: lost" in Told.messages[0]
    monkeypatch.setenv("TWINKLE_NOTIFIER", '{"class": "Nobody"}')
    with pytest.raises(UnknownNameError, match="unknown notifier 'Nobody'"):
        twinkle.initialize()


def test_the_mode_of_the_environment(monkeypatch):
    monkeypatch.setenv("TWINKLE_MODE", "ray")
    assert current_settings().mode == "ray"
    with pytest.raises(InvalidInputError, match=r"remote_group: got 'model', allowed: a group of initialize"):
        Component(remote_group="model")
    twinkle.initialize("local")
    assert current_settings().mode == "local"
    twinkle.shutdown()
    # Ray is not installed, or no groups are given
    with pytest.raises((ImportError, InvalidInputError), match=r"ray|groups"):
        twinkle.initialize()


@twinkle.remote_class()
class Component:
    pass


def test_other_modes():
    with pytest.raises(InvalidInputError, match="mode: got 'cloud'"):
        twinkle.initialize("cloud")


@pytest.mark.skipif(twinkle.exists("ray"), reason="Ray is installed")
def test_ray_mode_needs_ray():
    with pytest.raises(ImportError, match=r"needs the package 'ray\[serve\]'"):
        twinkle.initialize("ray", groups=[twinkle.DeviceGroup("model", 1, "CPU")])
    assert current_settings().mode == "local"


def test_processes_of_torchrun_share_the_rows_by_default(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    twinkle.initialize(groups=[twinkle.DeviceGroup("all", 4, "CPU")])
    mesh = current_settings().mesh
    assert (mesh.dp_world_size, mesh.data_rank, mesh.device_type) == (4, 3, "cpu")
    with pytest.raises(InvalidInputError, match="global_device_mesh: got '2 ranks', allowed: 4"):
        twinkle.initialize(global_device_mesh=twinkle.DeviceMesh.from_sizes(dp_size=2))
    with pytest.raises(InvalidInputError, match=r"ranks of group 'all': got \[0, 1\], allowed: 4"):
        twinkle.initialize(groups=[twinkle.DeviceGroup("all", 2, "CPU")])


def test_shutdown_forgets(monkeypatch):
    twinkle.initialize(seed=5)
    twinkle.shutdown()
    assert current_settings() == initialization.Settings()


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
