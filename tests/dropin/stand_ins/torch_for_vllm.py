"""The torch sampler under the name and with the arguments of vLLMSampler, for an environment without vLLM."""

from collections.abc import Mapping
from typing import Any

from twinkle import DeviceMesh, remote_class
from twinkle.sampler import LocalSampler
from twinkle.sampler.script.vllm_options import VllmOptions


@remote_class()
class vLLMSampler(LocalSampler):  # noqa: N801 - the name that scripts use
    """A LocalSampler with a base model of its own. ``engine_args`` must be ones that vLLMSampler accepts."""

    def __init__(
        self,
        model_id: str,
        engine_args: Mapping[str, Any] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        dtype: str | None = None,
    ) -> None:
        VllmOptions.read(engine_args or {})
        super().__init__(model_id, dtype=dtype)
        self.device_mesh = device_mesh
