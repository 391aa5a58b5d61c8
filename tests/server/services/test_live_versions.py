"""Versions sampled from a live adapter leave the sampler's memory with the adapter, not half an hour later."""

import asyncio
import time
from pathlib import Path

from twinkle.server import ids
from twinkle.server.app import make_app
from twinkle.server.backends.loading import load_served_model
from twinkle.server.config import default_config
from twinkle.server.runtime.assembly import Process
from twinkle.server.types import SessionRecord
from twinkle.server.wire.requests import CreateModelRequest, LoraConfig

TENANT = "tenant-a"


def test_versions_end_with_their_session(tmp_path: Path) -> None:
    async def main() -> None:
        config = default_config("mock", backend="mock", data_dir=tmp_path)
        process, model = await Process.open(config), load_served_model(config.served_models[0])
        entry = process.add_model(model, merge=True)
        gateway = process.open_gateway(make_app())
        assert model.sampler is not None
        await process.start()
        session = await gateway.create_session(SessionRecord("s-1", TENANT, time.time(), time.time()), None)
        wanted = CreateModelRequest(
            session_id=session.session_id, model_seq_id=0, base_model="mock", lora_config=LoraConfig(rank=8)
        )
        run_id, request_id = await gateway.create_model(TENANT, wanted, b"{}")
        assert run_id == ids.run_id("s-1", 0)
        await entry.training.wait(ids.RequestId.parse(request_id), run_id, 10)
        live = await entry.training.adapters.live_version(run_id)
        assert live is not None
        assert model.sampler.version_ids() == [live.version_id]
        await gateway.finish_session(session.session_id, TENANT)
        deadline = time.monotonic() + 120
        while model.sampler.version_ids():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        process.cancel_tasks()
        await process.stop()
        await process.close()

    asyncio.run(main())
