"""What one replica of a model serves: the model, here or in a group of processes, and its sampler, here or apart."""

from dataclasses import replace

from twinkle import hub
from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.loading import load_served_model
from twinkle.server.backends.text_codec import HubTextCodec
from twinkle.server.config import ServerConfig
from twinkle.server.config.applications import ServedModelConfig
from twinkle.server.runtime.ray.remote_sampler import RemoteSampler
from twinkle.server.runtime.ray.sampler_engine import devices_of, start_engine
from twinkle.server.runtime.ray.trainer_group import load_group


def load_replica(config: ServerConfig, served: ServedModelConfig) -> ServedModel:
    """Blocks, for as long as loading takes and other processes need to start."""
    devices = devices_of(config, served)
    if devices is None:
        return load_group(served) if served.model.processes > 1 else load_served_model(served)
    starting = start_engine(served, devices)  # it loads while the trainer does
    alone = replace(served, sampler=None)
    model = load_group(alone) if served.model.processes > 1 else load_served_model(alone)
    engine, memory = starting.ready()
    return replace(
        model,
        sampler=RemoteSampler(engine, lambda: start_engine(served, devices).ready()[0], model.trainer),
        memory=f"{model.memory}; in a process of its own: {memory}",
        text=HubTextCodec(hub.load_tokenizer(served.model.model_id)),
    )
