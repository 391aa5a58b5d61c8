"""The data directory holds only what is kept: directories that became empty are deleted too."""

import json
import os
import time
from pathlib import Path

import pytest

from tests.support.servers.running import Server, Tenant, mock_config, sample_body
from twinkle.errors import TwinkleServerError
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.state.files.guards import make_data_dir

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
    files.remove_empty("checkpoints/r-1/weights/gone/4")  # it does not exist, which is fine


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
        deadline = time.monotonic() + 120
        places = [server.data_dir / place for place in ("checkpoints", "snapshots", "samplers")]
        while left := [path for place in places for path in below(place)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
    finally:
        server.close()


def test_unused_versions_make_room_for_newer_ones(tmp_path: Path) -> None:
    """The newest ones stay, and so do those that are sampled from. A restart alone makes no version unused."""
    (tmp_path / "s").mkdir()
    limits = {"max_unused_versions_per_session": 2, "unused_version_seconds": 2.5}
    server = Server(tmp_path / "s", mock_config(limits=limits), housekeeping=0.1, sample=0.02).start()
    try:
        tenant = Tenant(server.url, "tml-loop")
        model = tenant.model(tenant.session())
        versions = []
        for number in range(5):
            tenant.result(tenant.forward_backward(model, 1 + 2 * number))
            versions.append(tenant.json(tenant.publish(model, 2 + 2 * number, number))["sampling_session_id"])

        def kept() -> int:
            return len(list((server.data_dir / "samplers").iterdir()))

        tenant.submit("asample", sample_body(versions[1], sampling_params={"max_tokens": 4000, "seed": 1, "stop": []}))
        under_way = time.monotonic() + limits["unused_version_seconds"] + 1  # that sample takes longer
        deadline, samples = time.monotonic() + 120, 0
        while time.monotonic() < under_way:
            tenant.tokens(tenant.sample(versions[0], samples))
            samples += 1
        assert tenant.get(f"samplers/{versions[1]}").status_code == 200
        while any(tenant.get(f"samplers/{version}").status_code == 200 for version in versions[1:3]):  # they are unused
            assert time.monotonic() < deadline
            tenant.tokens(tenant.sample(versions[0], samples))
            samples += 1
        assert kept() == 3
        server.kill()
        time.sleep(limits["unused_version_seconds"] + 0.5)
        server.start()
        tenant.tokens(tenant.sample(versions[0], samples))
        for version in versions[3:]:
            tenant.tokens(tenant.sample(version))
        for version in versions[1:3]:
            refused = tenant.post("asample", sample_body(version))
            assert refused.status_code == 404
            assert "give a save a name to keep it" in refused.text
        assert kept() == 3
    finally:
        server.close()


def test_nobody_else_reads_what_tenants_keep(tmp_path: Path) -> None:
    """Even if the operator created the data directory readable for all."""
    (tmp_path / "data").mkdir(mode=0o755)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "rows.jsonl").write_text('{"query": "a", "response": "b"}\n')
    config = mock_config(allowed_dirs=[str(tmp_path / "rows")])
    config["applications"].append({"name": "processor", "import_path": "processor"})
    server = Server(tmp_path, config, snapshot=0.05)
    mask = os.umask(0o022)
    try:
        server.start()
    finally:
        os.umask(mask)
    try:
        tenant = Tenant(server.url, "tml-private")
        session = tenant.session()
        model = tenant.model(session)
        tenant.result(tenant.forward_backward(model, 1))
        tenant.json(tenant.save(model, 2, "mine"))
        tenant.json(tenant.publish(model, 3))
        tenant.json(tenant.submit("save_weights_external", {"model_id": model, "seq_id": 4, "path": "out"}))
        _load_rows(tenant, session, tmp_path / "rows" / "rows.jsonl")
        places = ("snapshots/*/*", "checkpoints/*/weights/*/*", "checkpoints/*/external_weights/*/*", "samplers/*")
        deadline = time.monotonic() + 120
        while missing := [
            place for place in (*places, "processors/*/cache/**/*.arrow") if not any(server.data_dir.glob(place))
        ]:
            assert time.monotonic() < deadline, missing
            time.sleep(0.02)
        assert readable(server.data_dir) == []
    finally:
        server.close()


def _load_rows(tenant: Tenant, session: str, file: Path) -> None:
    """Create a dataset in the session's worker, which keeps a table of its rows on disk."""
    meta = {"dataset_id": str(file), "_TWINKLE_TYPE_": "DatasetMeta"}
    body = {"processor_type": "dataset", "class_type": "Dataset", "dataset_meta": json.dumps(meta)}
    made = tenant.http.post("processor/twinkle/create", json=body, headers={"X-Twinkle-Session-Id": session})
    assert made.status_code == 200, made.text


def readable(root: Path) -> list[str]:
    """Return what other users than the owner may read, list or enter below the directory."""
    found: list[str] = []
    for path in root.rglob("*"):
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:  # a temporary file was just renamed
            continue
        if mode & 0o077 and not path.is_symlink():
            found.append(str(path.relative_to(root)))
    return found


def test_a_directory_that_cannot_be_used_is_named_with_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TwinkleServerError, match=r"data directory .*/file/data: Not a directory; .*--data-dir"):
        make_data_dir(tmp_path / "file" / "data")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root, who may write anywhere
    with pytest.raises(TwinkleServerError, match=r"data directory .*: user \d+ may not write there; .*--data-dir"):
        make_data_dir(tmp_path / "new")
