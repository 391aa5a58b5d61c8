"""What one replica of a model serves: the model, here or in a group of processes, and its sampler, here or apart."""

from dataclasses import replace
from typing import Any

from twinkle import hub
from twinkle.server.backend import ServedModel
from twinkle.server.config import ServerConfig
from twinkle.server.config.serving import ServedModelConfig
from twinkle.server.loading import load_served_model
from twinkle.server.ray_serve.remote_sampler import RemoteSampler
from twinkle.server.ray_serve.sampler_engine import EngineDevices, devices_of, start_engine
from twinkle.server.ray_serve.trainer_group import load_group
from twinkle.server.text_codec import HubTextCodec


def load_replica(config: ServerConfig, served: ServedModelConfig) -> ServedModel:
    """Blocks, for as long as loading takes and other processes need to start."""
    apart = devices_of(config, served)
    here = served if apart is None else replace(served, sampler=None)
    model = load_group(here) if served.model.processes > 1 else load_served_model(here)
    return model if apart is None else _with_sampler(model, served, apart)


def _with_sampler(model: ServedModel, served: ServedModelConfig, devices: EngineDevices) -> ServedModel:
    memory = ""

    def start() -> Any:
        nonlocal memory
        engine, memory = start_engine(served, devices)
        return engine

    sampler = RemoteSampler(start, model.trainer)
    return replace(
        model,
        sampler=sampler,
        memory=f"{model.memory}; in a process of its own: {memory}",
        text=HubTextCodec(hub.load_tokenizer(served.model.model_id)),
    )
