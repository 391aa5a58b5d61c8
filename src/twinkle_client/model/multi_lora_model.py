"""LoRA adapters on a server's model, through the verbs of the library's MultiLoraTransformersModel.

Every verb is one request that returns when the server has done it. Verbs of one adapter run in the order in which they
are called, even if requests or answers are lost: see :mod:`twinkle_client.client.adapter_sequence`.
"""

import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_client.client.current import default_client
from twinkle_client.client.images import rows_with_images
from twinkle_client.client.json_body import encode
from twinkle_client.client.log_lines import left_to_server
from twinkle_client.client.session import AnswerT, TwinkleClient, parsed
from twinkle_client.errors import InvalidRequestError, ServerError, invalid, unknown
from twinkle_client.model.downloads import check_target, download_checkpoint
from twinkle_client.model.lora_config import config_text, modules_of
from twinkle_client.protocol.verbs import (
    AdapterOptions,
    AddAdapterResponse,
    AddMetricResponse,
    ApplyPatchResponse,
    BackwardResponse,
    CalculateLossResponse,
    CalculateMetricResponse,
    ClipGradAndStepResponse,
    ClipGradNormResponse,
    CreateResponse,
    ForwardBackwardResponse,
    ForwardResponse,
    GetStateDictResponse,
    GetTrainConfigsResponse,
    LoadResponse,
    LrStepResponse,
    RemoveAdapterResponse,
    SaveResponse,
    SetLossResponse,
    SetLrSchedulerResponse,
    SetOptimizerResponse,
    SetProcessorResponse,
    SetTemplateResponse,
    StepOptions,
    StepResponse,
    TrainingProgressResponse,
    UploadStatusResponse,
    UploadToHubResponse,
    WindowOptions,
    ZeroGradResponse,
)
from twinkle_client.remote import address_of, class_name, component, model_name, service_path
from twinkle_client.template import template_named

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["MultiLoraTransformersModel"]

logger = logging.getLogger(__name__)

Inputs = Any  # features or trajectories, one or several, or a RemoteBatch
_NO_NORM = (None, "", "None")  # what servers send if they clipped nothing


class MultiLoraTransformersModel:
    """The adapters of this session on the model ``model_id`` (with or without a prefix such as ``ms://``).

    Verbs without ``adapter_name`` use the adapter that was added last. An adapter whose config names no target modules
    gets those of ``lora_config``, else ``target_modules``. The options after ``lora_config`` are those of the library's
    class. They are accepted so that local scripts run unchanged, but they are not used, because the server decides
    about devices and memory; a log line says so.
    """

    def __init__(
        self,
        model_id: str | os.PathLike[str],
        *,
        client: TwinkleClient | None = None,
        target_modules: str | Iterable[str] = "all-linear",
        lora_config: object = None,
        model_cls: object = None,
        config: object = None,
        device_mesh: object = None,
        mixed_precision: str | None = None,
        strategy: str | None = None,
        ddp_config: Mapping[str, Any] | None = None,
        fsdp_config: Mapping[str, Any] | None = None,
        grad_scaler_config: Mapping[str, Any] | None = None,
        memory_efficient_init: bool | None = None,
        max_loras: int | None = None,
        max_r: int | None = None,
        max_length: int | None = None,
        tokenizer_id: str | None = None,
        device: object = None,
        memory_budget_bytes: int | None = None,
        max_tokens_per_batch: int | None = None,
        compiled: bool | None = None,
        max_logits_per_request: int | None = None,
        enable_router_replay: bool | None = None,
        remote_group: str | None = None,
    ) -> None:
        left_to_server(
            "MultiLoraTransformersModel",
            model_cls=model_cls,
            config=config,
            device_mesh=device_mesh,
            mixed_precision=mixed_precision,
            strategy=strategy,
            ddp_config=ddp_config,
            fsdp_config=fsdp_config,
            grad_scaler_config=grad_scaler_config,
            memory_efficient_init=memory_efficient_init,
            max_loras=max_loras,
            max_r=max_r,
            max_length=max_length,
            tokenizer_id=tokenizer_id,
            device=device,
            memory_budget_bytes=memory_budget_bytes,
            max_tokens_per_batch=max_tokens_per_batch,
            compiled=compiled,
            max_logits_per_request=max_logits_per_request,
            enable_router_replay=enable_router_replay,
            remote_group=remote_group,
        )
        self.client = default_client() if client is None else client
        self.model_id = model_name(model_id)
        self.target_modules = target_modules if lora_config is None else modules_of(lora_config, target_modules)
        self.adapter_name: str | None = None
        self._adapters: dict[str, str] = {}  # the id of each adapter's run, by the adapter's name
        self._path = service_path("model", self.model_id)
        self.server_url = self.client.base_url + self._path
        created = parsed(CreateResponse, self.client.post(f"{self._path}/create", encode({})) or {}, self.server_url)
        self.train_mode = created.train_mode  # what the server trains: adapters ("lora"), or all parameters ("full")

    # --- adapters -----------------------------------------------------------------------------------------------------

    def add_adapter_to_model(
        self,
        adapter_name: str,
        config: object = None,
        *,
        gradient_accumulation_steps: int = 1,
        seed: int | None = None,
        save_dir: str | os.PathLike[str] | None = None,
    ) -> AddAdapterResponse:
        """Create an adapter on the server. The answer's ``adapter_name`` is the id of the adapter's training run.

        config: a ``peft.LoraConfig``, a ``twinkle_client.LoraConfig``, or a mapping of the same fields; None: train all
        parameters, of a model that the server serves with ``train_mode: full``. seed: the seed of the adapter's initial
        weights, by default derived from the client's seed. save_dir: a directory of the server, which its
        ``allowed_dirs`` must allow; checkpoints are copied there. A relative path is taken from this process's
        directory.
        """
        if not isinstance(adapter_name, str) or not adapter_name:
            raise invalid("adapter_name", adapter_name, "a name")
        if (self.model_id, adapter_name) in self.client.adapters:  # the server would go on with that adapter
            raise invalid("adapter_name", adapter_name, "a name that no adapter of this session has")
        if seed is None:
            seed = self.client.adapter_seed(adapter_name)
        body: dict[str, Any] = {
            "adapter_name": adapter_name,
            "config": None if config is None else config_text(config, self.target_modules),
            **_given(AdapterOptions(gradient_accumulation_steps=gradient_accumulation_steps, seed=seed)),
        }
        if save_dir is not None:
            body["save_dir"] = os.path.abspath(save_dir)
        answer = self.client.post(f"{self._path}/add_adapter_to_model", encode(body))
        added = parsed(AddAdapterResponse, answer, self.server_url)
        self._adapters[adapter_name] = added.adapter_name
        self.client.adapters.add((self.model_id, adapter_name))
        self.adapter_name = adapter_name
        return added

    def remove_adapter(self, adapter_name: str) -> RemoveAdapterResponse:
        """End an adapter, which makes room for others; the server keeps its last state as a checkpoint for a while.

        Its name cannot be used for another adapter of this session.
        """
        name = self._adapter(adapter_name)
        answer = self.client.post(f"{self._path}/remove_adapter", encode({"adapter_name": name}))
        removed = parsed(RemoveAdapterResponse, answer or {}, self.server_url)
        del self._adapters[name]
        self.client.adapters.discard((self.model_id, name))
        if self.adapter_name == name:
            self.adapter_name = next(reversed(self._adapters), None)
        return removed

    # --- computing ----------------------------------------------------------------------------------------------------

    def forward(self, inputs: Inputs, *, adapter_name: str | None = None, **kwargs: Any) -> ForwardResponse:
        """Return the model's outputs. Further keywords are temperature, return_logits, task, and those of the loss."""
        answer = self._verb("forward", adapter_name, _with_inputs("forward", inputs, kwargs))
        return parsed(ForwardResponse, answer, self.server_url)

    def forward_only(self, inputs: Inputs, *, adapter_name: str | None = None, **kwargs: Any) -> ForwardResponse:
        """Return the model's outputs for evaluation, without gradients.

        The base model answers with ``disable_lora=True``, and also as long as there is no adapter.
        """
        body = _with_inputs("forward_only", inputs, kwargs)
        if adapter_name is None and self.adapter_name is None:
            answer = self.client.post(f"{self._path}/forward_only", encode(body))
        else:
            answer = self._verb("forward_only", adapter_name, body)
        return parsed(ForwardResponse, answer, self.server_url)

    def forward_backward(
        self, inputs: Inputs, *, adapter_name: str | None = None, **kwargs: Any
    ) -> ForwardBackwardResponse:
        """Run forward, calculate_loss and backward, and return the outputs; their "loss" is a number."""
        answer = self._verb("forward_backward", adapter_name, _with_inputs("forward_backward", inputs, kwargs))
        return parsed(ForwardBackwardResponse, answer, self.server_url)

    def calculate_loss(self, *, adapter_name: str | None = None, **kwargs: Any) -> CalculateLossResponse:
        answer = self._verb("calculate_loss", adapter_name, kwargs)
        return parsed(CalculateLossResponse, answer, self.server_url)

    def backward(
        self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None
    ) -> BackwardResponse:
        options = WindowOptions(gradient_accumulation_steps=gradient_accumulation_steps)
        return self._done(BackwardResponse, "backward", adapter_name, _given(options))

    def clip_grad_norm(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2,
        *,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
    ) -> ClipGradNormResponse | None:
        """Return the gradient's norm before clipping, or None if more backward passes must come before a step."""
        body = {"max_grad_norm": max_grad_norm, "norm_type": norm_type}
        options = WindowOptions(gradient_accumulation_steps=gradient_accumulation_steps)
        answer = self._verb("clip_grad_norm", adapter_name, {**body, **_given(options)})
        norm = parsed(ClipGradNormResponse, answer or {"result": ""}, self.server_url)
        return None if norm.result in _NO_NORM else norm

    def step(
        self,
        *,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
        optim_params: Mapping[str, Any] | None = None,
    ) -> StepResponse:
        options = StepOptions(gradient_accumulation_steps=gradient_accumulation_steps, optim_params=optim_params)
        return self._done(StepResponse, "step", adapter_name, _given(options))

    def zero_grad(
        self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None
    ) -> ZeroGradResponse:
        options = WindowOptions(gradient_accumulation_steps=gradient_accumulation_steps)
        return self._done(ZeroGradResponse, "zero_grad", adapter_name, _given(options))

    def lr_step(
        self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None
    ) -> LrStepResponse:
        options = WindowOptions(gradient_accumulation_steps=gradient_accumulation_steps)
        return self._done(LrStepResponse, "lr_step", adapter_name, _given(options))

    def clip_grad_and_step(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2,
        *,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
        optim_params: Mapping[str, Any] | None = None,
    ) -> ClipGradAndStepResponse | None:
        """Run clip_grad_norm, step, zero_grad and lr_step, and return the norm before clipping.

        Return None if more backward passes must come before a step, or if the server does not send the norm.
        """
        body = {"max_grad_norm": max_grad_norm, "norm_type": norm_type}
        options = StepOptions(gradient_accumulation_steps=gradient_accumulation_steps, optim_params=optim_params)
        answer = self._verb("clip_grad_and_step", adapter_name, {**body, **_given(options)})
        norm = parsed(ClipGradAndStepResponse, answer or {}, self.server_url)
        return None if norm.result in _NO_NORM else norm

    # --- setting up ---------------------------------------------------------------------------------------------------

    def set_loss(self, loss_cls: object, *, adapter_name: str | None = None, **options: Any) -> SetLossResponse:
        """Choose one of the library's losses by name, with the options of its constructor."""
        body = {"loss_cls": class_name("loss_cls", loss_cls), **options}
        return self._done(SetLossResponse, "set_loss", adapter_name, body)

    def set_optimizer(
        self,
        optimizer_cls: object,
        lr: float | None = None,
        weight_decay: float | None = None,
        *,
        adapter_name: str | None = None,
        **options: Any,
    ) -> SetOptimizerResponse:
        """Choose an optimizer by its name in ``torch.optim``. The defaults of lr and weight_decay are 1e-5 and 0.01."""
        given = {name: value for name, value in (("lr", lr), ("weight_decay", weight_decay)) if value is not None}
        body = {"optimizer_cls": class_name("optimizer_cls", optimizer_cls), **given, **options}
        return self._done(SetOptimizerResponse, "set_optimizer", adapter_name, body)

    def set_lr_scheduler(
        self, scheduler_cls: object, *, adapter_name: str | None = None, **options: Any
    ) -> SetLrSchedulerResponse:
        body = {"scheduler_cls": class_name("scheduler_cls", scheduler_cls), **options}
        return self._done(SetLrSchedulerResponse, "set_lr_scheduler", adapter_name, body)

    def set_template(
        self, template_cls: object, *, adapter_name: str | None = None, **options: Any
    ) -> SetTemplateResponse:
        """Choose the template that encodes trajectories: a name, or a template of :mod:`twinkle_client.template`."""
        name, options = component("template_cls", template_cls, options)
        template = template_named(name, {"model_id": self.model_id, **options}, self.client)
        body = {"template_cls": name, **template.options}
        return self._done(SetTemplateResponse, "set_template", adapter_name, body)

    def set_processor(
        self, processor_cls: object, *, adapter_name: str | None = None, **options: Any
    ) -> SetProcessorResponse:
        name, options = component("processor_cls", processor_cls, options)
        return self._done(SetProcessorResponse, "set_processor", adapter_name, {"processor_cls": name, **options})

    def add_metric(
        self, metric_cls: object, is_training: bool | None = None, *, adapter_name: str | None = None, **options: Any
    ) -> AddMetricResponse:
        """Add a metric to training (``is_training`` True), to evaluation (False), or to both (None)."""
        body = {"metric_cls": class_name("metric_cls", metric_cls), "is_training": is_training}
        return self._done(AddMetricResponse, "add_metric", adapter_name, {**body, **options})

    def apply_patch(self, patch_cls: object, *, adapter_name: str | None = None, **options: Any) -> ApplyPatchResponse:
        body = {"patch_cls": class_name("patch_cls", patch_cls), **options}
        return self._done(ApplyPatchResponse, "apply_patch", adapter_name, body)

    # --- asking -------------------------------------------------------------------------------------------------------

    def calculate_metric(self, is_training: bool = True, *, adapter_name: str | None = None) -> CalculateMetricResponse:
        """Return the values of all metrics, accumulated since the last call."""
        answer = self._verb("calculate_metric", adapter_name, {"is_training": is_training})
        return parsed(CalculateMetricResponse, answer, self.server_url)

    def get_train_configs(self, *, adapter_name: str | None = None) -> GetTrainConfigsResponse:
        answer = self._verb("get_train_configs", adapter_name, {})
        return parsed(GetTrainConfigsResponse, answer, self.server_url)

    def get_state_dict(self, *, adapter_name: str | None = None) -> GetStateDictResponse:
        answer = self._verb("get_state_dict", adapter_name, {})
        return parsed(GetStateDictResponse, answer, self.server_url)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(
        self,
        name: str | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        interval: int = 1,
        *,
        adapter_name: str | None = None,
        save_optimizer: bool = False,
        consumed_train_samples: int = 0,
        is_sampler: bool = False,
        format: str | None = None,
    ) -> SaveResponse | None:
        """Save a checkpoint on the server and return its address; see :class:`~twinkle_client.types.SaveResponse`.

        Return None without saving if the number of backward passes so far is not a multiple of ``interval``.
        is_sampler: save weights for a sampler; of those with one name the server keeps only the last two. output_dir:
        a directory of this machine, to which the files are downloaded, as ``<output_dir>/<name>`` in PEFT's format, or
        as a Hugging Face folder if all parameters are trained; the text of the result is then that folder. If it is an
        earlier checkpoint, that is, a folder with adapter_config.json or with a trainer_state.json of all parameters,
        it is replaced with everything in it. A file, or a folder with other content, is refused before anything is
        saved (with a name that the server chooses: before anything is downloaded). format: the form of the
        downloaded adapter, which matters on models with experts: "tinker", "peft", "vllm" or "vllm-3d"; None: as it was
        saved, with what is needed to resume the training.
        """
        if format is not None and output_dir is None:
            raise invalid("format", format, "None without output_dir: it is the form of the files that are downloaded")
        if output_dir is not None and name:
            check_target(Path(output_dir) / name, "output_dir")
        body: dict[str, Any] = {"name": name, "save_optimizer": save_optimizer}
        if is_sampler:
            body["is_sampler"] = True
        if consumed_train_samples:
            body["consumed_train_samples"] = consumed_train_samples
        if interval != 1:
            body["interval"] = interval
        answer = self._verb("save", adapter_name, body)
        if answer is None or not answer.get("twinkle_path"):
            return None
        saved = parsed(SaveResponse, answer, self.server_url)
        if output_dir is None:
            return saved
        folder = Path(output_dir) / (name or saved.twinkle_path.rpartition("/")[2])
        return saved.model_copy(
            update={"output_dir": str(download_checkpoint(self.client, saved.twinkle_path, folder, form=format))}
        )

    def load(
        self, name: str | SaveResponse, *, adapter_name: str | None = None, load_optimizer: bool = False
    ) -> LoadResponse:
        """Load weights; ``name`` is a checkpoint's address, or a path in a directory that the server allows."""
        return self._done(
            LoadResponse, "load", adapter_name, {"name": address_of(name), "load_optimizer": load_optimizer}
        )

    def resume_from_checkpoint(
        self, name: str | SaveResponse, *, resume_only_model: bool = False, adapter_name: str | None = None
    ) -> TrainingProgressResponse:
        """Continue from a checkpoint of ``save(save_optimizer=True)``. resume_only_model: load only the weights.

        Returns cur_step, consumed_train_samples and gradient_accumulation_steps. State that the checkpoint does not
        have is named in one line of the log, and starts anew.
        """
        body = {"name": address_of(name), "resume_only_model": resume_only_model}
        answer = self._verb("resume_from_checkpoint", adapter_name, body)
        progress = parsed(TrainingProgressResponse, answer, self.server_url)
        if progress.missing:
            logger.warning("%s has no %s; that state starts anew", body["name"], " and no ".join(progress.missing))
        return progress

    def upload_to_hub(
        self,
        checkpoint_dir: str | SaveResponse | Mapping[str, Any],
        hub_model_id: str,
        hub_token: str | None = None,
        async_upload: bool = True,
        poll_interval: float = 5.0,
    ) -> None:
        """Upload a checkpoint to a hub repository and wait for it, asking the server every ``poll_interval`` seconds.

        checkpoint_dir: an address, or what :meth:`save` returned. hub_token: Twinkle's server refuses None.
        async_upload: Twinkle's server ignores it; this call returns after the upload in either case, or raises
        ServerError.
        """
        body = {
            "checkpoint_dir": dict(checkpoint_dir)
            if isinstance(checkpoint_dir, Mapping)
            else address_of(checkpoint_dir),
            "hub_model_id": hub_model_id,
            "hub_token": hub_token,
            "async_upload": async_upload,
        }
        answer = self.client.post(f"{self._path}/upload_to_hub", encode(body), once=True)
        request_id = parsed(UploadToHubResponse, answer, self.server_url).request_id
        logger.info("upload of %s to %s has begun", checkpoint_dir, hub_model_id)
        while True:
            answer = self.client.get(f"{self._path}/upload_status/{request_id}")
            status = parsed(UploadStatusResponse, answer, self.server_url)
            if status.status == "failed":
                raise ServerError(200, f"upload_to_hub failed: {status.error}", self.server_url)
            if status.status == "completed":
                return
            time.sleep(poll_interval)

    def log_metrics(
        self, values: Mapping[str, float], step: int | None = None, *, adapter_name: str | None = None
    ) -> None:
        """Add numbers, such as a reward, to the metrics of the adapter's run; see ``TwinkleClient.log_metrics``."""
        self.client.log_metrics(self._adapters[self._adapter(adapter_name)], values, step)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _verb(self, verb: str, adapter_name: str | None, body: Mapping[str, Any]) -> Any:
        name = self._adapter(adapter_name)
        content = encode({**body, "adapter_name": name})
        sequence = self.client.sequence(self.model_id, name)
        return sequence.send(f"{self._path}/{verb}", content, self.client.post)

    def _done(self, kind: type[AnswerT], verb: str, adapter_name: str | None, body: Mapping[str, Any]) -> AnswerT:
        """Send a verb that has no result; some servers answer it with null, others with an OkResponse."""
        return parsed(kind, self._verb(verb, adapter_name, body) or {}, self.server_url)

    def _adapter(self, adapter_name: str | None) -> str:
        name = self.adapter_name if adapter_name is None else adapter_name
        if name is None:
            raise InvalidRequestError("adapter_name: there is no adapter yet, call add_adapter_to_model first")
        if name not in self._adapters:
            raise unknown("adapter", name, self._adapters)
        return name


def _given(options: "DataclassInstance") -> dict[str, Any]:
    """Return the options that are not None: an older server may not know the others."""
    return {name: value for name, value in vars(options).items() if value is not None}


def _with_inputs(verb: str, inputs: Inputs, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if "inputs" in kwargs:
        raise TypeError(f"{verb}: inputs are given twice")
    return {"inputs": rows_with_images(inputs), **kwargs}
