"""Ops that write files, if the disk is full or another op interferes."""

import asyncio
import errno
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.servers import state_samples as samples
from twinkle.model.types import LoraSpec
from twinkle.server.backends.compute_thread import Compute
from twinkle.server.backends.mock import mock_model
from twinkle.server.services.checkpoints.save_and_load import Checkpoints
from twinkle.server.services.training.run_kind import RunKinds
from twinkle.server.state.errors import StorageFullError
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.state.store import Store
from twinkle.server.tenancy.tenants import Tenants
from twinkle.server.types import Op, OpKind, Outcome, PublishSampler, SaveWeights

RUN = samples.run()
SAVE = Op(RUN.run_id, 3, OpKind.SAVE, SaveWeights("ck", None, overwrite=False), b"")
PUBLISH = Op(RUN.run_id, 4, OpKind.PUBLISH, PublishSampler(0), b"")


def with_checkpoints(root: Path, check: Callable[[Checkpoints, Store], Awaitable[None]]) -> None:
    async def main(store: Store) -> None:
        model, compute = mock_model(), Compute()
        model.trainer.create_adapter(RUN.run_id, LoraSpec(8, seed=1))
        try:
            context = SimpleNamespace(
                model=model, kinds=RunKinds(), store=store, compute=compute, files=DataDir(root), tenants=Tenants()
            )
            await check(Checkpoints(context), store)
        finally:
            compute.close()

    samples.with_store(root, main)


def files(root: Path) -> list[Path]:
    return [path for place in ("checkpoints", "samplers") for path in (root / place).rglob("*") if path.is_file()]


@pytest.mark.parametrize("op", [SAVE, PUBLISH], ids=["save", "publish"])
def test_what_is_not_on_record_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: Op) -> None:
    """The disk is full when the record is written, so the files that were written before are deleted."""

    async def full(*_record: object, **_options: object) -> None:
        raise StorageFullError(errno.ENOSPC, f"{tmp_path}: no space left")

    async def check(checkpoints: Checkpoints, store: Store) -> None:
        monkeypatch.setattr(store.checkpoints, "add", full)
        monkeypatch.setattr(store.sampling_sessions, "create", full)
        outcome: Outcome = await asyncio.wait_for(checkpoints.run(op, RUN), 10)
        answer = json.loads(outcome.body)
        assert answer["category"] == "server"
        assert str(tmp_path) not in answer["error"]  # the tenant must not see the server's directories

    with_checkpoints(tmp_path, check)
    assert files(tmp_path) == []
