"""Records as rows: the stored form is fixed to the byte, because existing rows have checksums over it."""

from dataclasses import replace

import pytest

from twinkle.model.types import LoraSpec
from twinkle.server.state.database.mapper import RecordMapper
from twinkle.server.state.database.tables import CHECKPOINTS, CUSTOM_LOSSES, OPS, RUNS, SESSIONS
from twinkle.server.state.integrity.row_checksums import CHECKSUM, checked_columns
from twinkle.server.types import (
    BlobRef,
    CheckpointRecord,
    CustomLossRecord,
    Encoding,
    Ending,
    OpKind,
    OpRecord,
    RunRecord,
    SessionRecord,
)

SESSION = SessionRecord("s", "t", 1.5, 2.0, tags=("a", "é"), user_metadata={"x": {"y": [1, 2.5, None]}})
RUN = RunRecord("r", "s", 1, "t", "base", "served", LoraSpec(rank=8, target_modules=("q", "k")), 1.0, 2.0)
OP = OpRecord("r", 3, OpKind.FORWARD_BACKWARD, b"digest", BlobRef(1, 2, 3), accepted_at=4.0)
DONE = replace(OP, outcome=BlobRef(4, 5, 6), encoding=Encoding.JSON, failed=True, ending=Ending.RAN)
CHECKPOINT = CheckpointRecord("r", "weights", "c", "t", "r:1", "checkpoints/c", 1.0, 10, public=True)
LOSS = CustomLossRecord("l", "s", 0, "t", b"\x00digest", b"body\xff", None, 3.0)
OLD_SPEC = (
    '{"rank": 8, "alpha": 32.0, "seed": null, "train_attn": true, "train_mlp": true, "train_unembed": false, '
    '"target_modules": ["q", "k"]}'
)
SPEC = OLD_SPEC.removesuffix("}") + (
    ', "dropout": 0.0, "use_rslora": false, "rank_pattern": {}, "alpha_pattern": {}, "exclude_modules": null, '
    '"layers_to_transform": null, "layers_pattern": null, "init_weights": true, "experts": "shared_outer", '
    '"target_parameters": null}'
)

CASES = {
    "session": (SESSION, SESSIONS, {"tags": '["a", "\\u00e9"]', "user_metadata": '{"x": {"y": [1, 2.5, null]}}'}),
    "run": (RUN, RUNS, {"spec": SPEC, "user_metadata": "{}", "note": None, "state": "live"}),
    "checkpoint": (CHECKPOINT, CHECKPOINTS, {"public": 1, "expires_at": None, "user_metadata": "{}"}),
    "loss": (LOSS, CUSTOM_LOSSES, {"digest": b"\x00digest", "body": b"body\xff"}),
    "op": (OP, OPS, {"kind": "forward_backward", "body_offset": 2, "outcome_segment": None, "failed": 0}),
    "done": (DONE, OPS, {"outcome_segment": 4, "outcome_length": 6, "encoding": "application/json", "failed": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_record_is_stored_as_ever_and_comes_back(name: str) -> None:
    record, table, stored = CASES[name]
    mapper = RecordMapper(type(record), table)
    row = mapper.row(record)
    assert {column: row[column] for column in stored} == stored
    assert set(row) - {CHECKSUM} == {column.name for column in checked_columns(table)}
    assert mapper.record(row) == record


def test_a_spec_without_options_of_later_versions_is_read() -> None:
    mapper = RecordMapper(RunRecord, RUNS)
    assert mapper.record(mapper.row(RUN) | {"spec": OLD_SPEC}) == RUN


def test_options_come_back_in_their_order() -> None:
    options = {"rank_pattern": {"z": 1, "a": 2}, "alpha_pattern": {"z": 1.5}, "exclude_modules": ("o",), "dropout": 0.1}
    record = replace(RUN, spec=LoraSpec(rank=1, target_modules=("q",), layers_to_transform=(0, 1), **options))
    mapper = RecordMapper(RunRecord, RUNS)
    spec = mapper.record(mapper.row(record)).spec
    assert spec == record.spec
    assert list(spec.rank_pattern) == ["z", "a"], "the first pattern that matches counts"


def test_a_mode_of_target_modules_stays_text() -> None:
    record = replace(RUN, spec=LoraSpec(rank=1, target_modules="all-linear"))
    mapper = RecordMapper(RunRecord, RUNS)
    assert mapper.record(mapper.row(record)).spec == record.spec


def test_other_buffers_become_bytes_and_other_columns_are_ignored() -> None:
    """PostgreSQL's driver may return buffers, and queries may return more columns than a record needs."""
    mapper = RecordMapper(CustomLossRecord, CUSTOM_LOSSES)
    row = mapper.row(LOSS) | {"digest": memoryview(LOSS.digest), "more": 1}
    assert mapper.record(row) == LOSS
