"""A model and a sampler that exchange weights as those on GPUs do, with gloo instead of NCCL. Workers import this."""

from tests.support.models.gloo_engine import GlooCheckpointEngine
from twinkle.environment import read_launch
from twinkle.infra import remote_class
from twinkle.model import TransformersModel
from twinkle.model.weights.engines import CheckpointEngine
from twinkle.sampler import LocalSampler


@remote_class()
class GlooModel(TransformersModel):
    def gpu_id(self) -> str:
        return f"model {read_launch().rank}"

    def _make_checkpoint_engine(self) -> CheckpointEngine:
        return GlooCheckpointEngine()


@remote_class()
class GlooSampler(LocalSampler):
    def gpu_id(self) -> str:
        return f"sampler {read_launch().rank}"

    def _make_checkpoint_engine(self) -> CheckpointEngine:
        return GlooCheckpointEngine()
