"""A model and a sampler that exchange weights as those on GPUs do, with gloo instead of NCCL. Workers import this.

And samplers that fail on one worker.
"""

from typing import Any

from tests.support.models.gloo_engine import GlooCheckpointEngine
from twinkle.environment import read_launch
from twinkle.errors import UserError
from twinkle.infra import remote_class, remote_function
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


@remote_class()
class FailingSampler(LocalSampler):
    """A sampler whose second worker raises in the method that :meth:`fail_in` names."""

    fails = ""

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def fail_in(self, method: str) -> None:
        self.fails = method

    @remote_function(dispatch="all", collect="none", lazy_collect=False)
    def version_or_refusal(self) -> str:
        """Return what this worker alone would draw with."""
        try:
            self._receiver.require_usable()
        except UserError as error:
            return str(error)
        return self._receiver.base_name

    def prepare_weights(self, *args: Any) -> Any:
        wanted = super().prepare_weights(*args)
        self._fail("prepare_weights")
        return wanted

    def receive_bucket(self, *args: Any) -> None:
        self._fail("receive_bucket")
        super().receive_bucket(*args)

    def finish_weights(self) -> str:
        self._fail("finish_weights")
        return super().finish_weights()

    def _fail(self, method: str) -> None:
        if self.fails == method and read_launch().rank == 1:
            raise ConnectionError("cut")
