"""Sample from a server's model, with or without an adapter."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from twinkle_client.client.current import default_client
from twinkle_client.client.images import rows_with_images
from twinkle_client.client.json_body import encode
from twinkle_client.client.log_lines import left_to_server
from twinkle_client.client.session import TwinkleClient, parsed
from twinkle_client.data_format import sampling_fields
from twinkle_client.errors import invalid
from twinkle_client.model.lora_config import config_text
from twinkle_client.model.multi_lora_model import MultiLoraTransformersModel
from twinkle_client.protocol.sampling import (
    SamplerAddAdapterResponse,
    SamplerCreateResponse,
    SampleResponseModel,
    SampleResponseModelList,
    SamplerSetTemplateResponse,
)
from twinkle_client.protocol.verbs import ApplyPatchResponse, SaveResponse
from twinkle_client.remote import address_of, class_name, component, model_name, service_path
from twinkle_client.template import Template, template_named

__all__ = ["LocalSampler", "Sampler", "hand_over", "vLLMSampler"]

Inputs = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class Sampler:
    """The sampler of a model. ``model_id`` is the model's id, or a model object, whose client is then used.

    ``template`` encodes the trajectories and decodes tokens: the name of one of the library's templates, or one of
    :mod:`twinkle_client.template`. The options after ``client`` are those of the library's LocalSampler. They are
    accepted so that local scripts run unchanged, but they are not used, because the server has its engine already; a
    log line says so. ``adapter_name`` is None until :meth:`add_adapter_to_sampler`.
    """

    def __init__(
        self,
        model_id: str | os.PathLike[str] | MultiLoraTransformersModel,
        template: object = None,
        *,
        client: TwinkleClient | None = None,
        kv_budget_bytes: int | None = None,
        max_sequences: int | None = None,
        dtype: str | None = None,
        memory_budget_bytes: int | None = None,
        remote_group: str | None = None,
    ) -> None:
        left_to_server(
            "Sampler",
            kv_budget_bytes=kv_budget_bytes,
            max_sequences=max_sequences,
            dtype=dtype,
            memory_budget_bytes=memory_budget_bytes,
            remote_group=remote_group,
        )
        if isinstance(model_id, MultiLoraTransformersModel):
            client = model_id.client if client is None else client
            model_id = model_id.model_id
        self.client = default_client() if client is None else client
        self.model_id = model_name(model_id)
        self._path = service_path("sampler", self.model_id)
        self.server_url = self.client.base_url + self._path
        self._template = Template(self.model_id, client=self.client)
        self.adapter_name: str | None = None
        parsed(SamplerCreateResponse, self.client.post(f"{self._path}/create", encode({})) or {}, self.server_url)
        if template is not None:
            self.set_template(template)

    @property
    def template(self) -> Template:
        """Return the sampler's template as an object on the server, for decoding tokens."""
        return self._template

    def set_template(self, template_cls: object, adapter_name: str = "", **options: Any) -> SamplerSetTemplateResponse:
        name, options = component("template_cls", template_cls, options)
        template = template_named(name, {"model_id": self.model_id, **options}, self.client)
        body = {"template_cls": name, "adapter_name": adapter_name, **template.options}
        answer = self.client.post(f"{self._path}/set_template", encode(body))
        self._template = template
        return parsed(SamplerSetTemplateResponse, answer or {}, self.server_url)

    def sample(
        self,
        inputs: Inputs,
        sampling_params: object = None,
        adapter_name: str | None = "",
        adapter_uri: str | SaveResponse | None = None,
        num_samples: int | None = None,
    ) -> list[SampleResponseModel]:
        """Return one response for each input, in order, with the number of samples that ``sampling_params`` says.

        ``num_samples`` counts only if ``sampling_params`` is None or a mapping without that key.

        sampling_params: a SamplingParams (ours or the library's), or a mapping of its fields. adapter_uri: sample with
        the checkpoint that ``save`` returned; adapter_name: sample with the current weights of an adapter of this
        session; neither: sample from the base model.
        """
        body: dict[str, Any] = {
            # The rows themselves: a sampler's route takes no references to batches.
            "inputs": rows_with_images(dict(inputs) if isinstance(inputs, Mapping) else list(inputs)),
            "sampling_params": None if sampling_params is None else sampling_fields(sampling_params),
            "adapter_name": adapter_name or "",
        }
        if adapter_uri is not None:
            body["adapter_uri"] = address_of(adapter_uri)
        if num_samples is not None:
            body["num_samples"] = num_samples
        answer = self.client.post(f"{self._path}/sample", encode(body))
        return parsed(SampleResponseModelList, answer, self.server_url).samples

    async def asample(
        self,
        inputs: Inputs,
        sampling_params: object = None,
        adapter_name: str | None = "",
        adapter_uri: str | SaveResponse | None = None,
        num_samples: int | None = None,
    ) -> list[SampleResponseModel]:
        """Run :meth:`sample` in a thread; the server batches samples that wait at the same time."""
        call = partial(self.sample, inputs, sampling_params, adapter_name, adapter_uri, num_samples)
        return await asyncio.get_running_loop().run_in_executor(self.client.thread_pool, call)

    def add_adapter_to_sampler(self, adapter_name: str, config: object) -> SamplerAddAdapterResponse:
        """Add an adapter, on servers whose samplers have their own. Twinkle's refuses: use the model's adapters."""
        body = {"adapter_name": adapter_name, "config": config_text(config, "all-linear")}
        answer = self.client.post(f"{self._path}/add_adapter_to_sampler", encode(body))
        added = parsed(SamplerAddAdapterResponse, answer, self.server_url)
        self.adapter_name = adapter_name
        return added

    def apply_patch(self, patch_cls: object, **options: Any) -> ApplyPatchResponse:
        """Apply a patch to the server's sampler, by name. Twinkle's server refuses: tenants share its sampler."""
        body = {"patch_cls": class_name("patch_cls", patch_cls), "adapter_name": self.adapter_name, **options}
        answer = self.client.post(f"{self._path}/apply_patch", encode(body))
        return parsed(ApplyPatchResponse, answer or {}, self.server_url)


class vLLMSampler(Sampler):  # noqa: N801 - the name that scripts use
    """A :class:`Sampler` with the arguments of the library's vLLMSampler, most of which the server ignores.

    The server's sampler may be vLLM or another one; it never runs in this process.
    """

    def __init__(
        self,
        model_id: str | MultiLoraTransformersModel,
        engine_args: Mapping[str, Any] | None = None,
        device_mesh: object = None,
        *,
        template: object = None,
        client: TwinkleClient | None = None,
        dtype: str | None = None,
        memory_budget_bytes: int | None = None,
        memory_dir: object = None,
        remote_group: str | None = None,
    ) -> None:
        left_to_server(
            "vLLMSampler",
            engine_args=engine_args,
            device_mesh=device_mesh,
            dtype=dtype,
            memory_budget_bytes=memory_budget_bytes,
            memory_dir=memory_dir,
            remote_group=remote_group,
        )
        super().__init__(model_id, template, client=client)


LocalSampler = Sampler  # the name in local scripts


def hand_over(model: MultiLoraTransformersModel, sampler: Sampler, adapter_name: str) -> None:
    """Check that model and sampler belong together, and do nothing else.

    Scripts that also run without a server call this to give an adapter's weights to the sampler. A server's sampler
    uses the current weights of the model's adapters anyway.
    """
    if sampler.model_id != model.model_id:
        raise invalid("sampler", sampler.model_id, f"a sampler of the model's own base, {model.model_id}")
