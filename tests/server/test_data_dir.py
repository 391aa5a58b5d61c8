"""The data directory holds what is kept and nothing else: directories that became empty go, too."""

import time
from pathlib import Path

from running import Server, Tenant, mock_config

from twinkle.server.files import DataDir

FINISHED = {"reason": {"type": "success"}, "detail": None}


def make(root: Path, *files: str) -> None:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()


def below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_only_empty_directories_are_removed(tmp_path: Path) -> None:
    files = DataDir(tmp_path)
    make(tmp_path, "checkpoints/r-1/weights/kept/3/adapter", "checkpoints/r-1/weights/gone/4/adapter")
    files.remove("checkpoints/r-1/weights/gone/4")
    files.remove_empty("checkpoints/r-1/weights/gone/4")
    assert below(tmp_path / "checkpoints") == [
        "r-1",
        "r-1/weights",
        "r-1/weights/kept",
        "r-1/weights/kept/3",
        "r-1/weights/kept/3/adapter",
    ]
    files.remove("checkpoints/r-1/weights/kept/3")
    files.remove_empty("checkpoints/r-1/weights/gone/4")
    assert below(tmp_path) == ["checkpoints"]
    files.remove_empty("checkpoints/r-1/weights/gone/4")  # there is none, which is what was wanted


def test_a_start_clears_away_what_was_being_written_and_what_is_empty(tmp_path: Path) -> None:
    make(tmp_path, "checkpoints/r/weights/cut/.5.tmp/adapter", "samplers/.s.tmp/adapter", "samplers/s/adapter")
    make(tmp_path, "snapshots/r+/.5.tmp/meta.json", "snapshots/r/.5.partial/meta.json", "snapshots/r/4/meta.json")
    (tmp_path / "checkpoints" / "q" / "weights" / "old").mkdir(parents=True)
    DataDir(tmp_path).remove_unfinished()
    assert below(tmp_path / "snapshots") == ["r", "r+", "r/4", "r/4/meta.json"]
    assert below(tmp_path / "checkpoints") == []
    assert below(tmp_path / "samplers") == ["s", "s/adapter"]


def test_nothing_is_left_of_a_run_whose_checkpoints_are_gone(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    limits = {"parked_adapter_seconds": 0.5, "sampler_version_retention_seconds": 0.5}
    server = Server(tmp_path / "s", mock_config(limits=limits), housekeeping=0.1, snapshot=0.1).start()
    try:
        tenant = Tenant(server.url, "tml-tidy")
        session = tenant.session()
        model = tenant.model(session)
        tenant.result(tenant.forward_backward(model, 1))
        tenant.json(tenant.save(model, 2, "mine"))
        tenant.json(tenant.publish(model, 3))
        assert tenant.http.delete(f"training_runs/{model}/checkpoints/weights/mine").status_code == 200
        assert any((server.data_dir / "samplers").iterdir())
        assert tenant.post(f"sessions/{session}/finish", FINISHED).status_code == 200
        deadline = time.monotonic() + 30
        places = [server.data_dir / place for place in ("checkpoints", "snapshots", "samplers")]
        while left := [path for place in places for path in below(place)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
    finally:
        server.close()
