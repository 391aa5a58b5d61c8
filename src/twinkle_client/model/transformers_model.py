"""A server's model through the verbs of the library's TransformersModel: a LoRA adapter on it, or all parameters."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinkle_client.client.log_lines import left_to_server
from twinkle_client.client.session import TwinkleClient
from twinkle_client.errors import InvalidRequestError, invalid
from twinkle_client.model.multi_lora_model import Inputs, MultiLoraTransformersModel
from twinkle_client.protocol.verbs import AddAdapterResponse, ForwardResponse, RemoveAdapterResponse

__all__ = ["TransformersModel"]

_ADAPTERS_ONLY = (
    "there is no adapter yet, and this server trains LoRA adapters, not all parameters of a model: call "
    "add_adapter_to_model first, train all parameters locally with twinkle.model.TransformersModel, or serve the model "
    "with train_mode: full"
)
_ALL = "default"  # name of the run that trains all parameters, where the script names none


class TransformersModel(MultiLoraTransformersModel):
    """A model with the arguments and defaults of the library's TransformersModel; its adapters are on the server.

    Verbs without ``adapter_name`` use the adapter that was added last. Without an adapter they train all parameters, if
    the server serves the model with ``train_mode: full``: the first verb begins that run, which holds the model until
    :meth:`remove_adapter` or the end of the session. The options from ``model_cls`` on, except ``model_id``, are
    accepted and not used, because the server has the model already; a log line says so.
    """

    def __init__(
        self,
        model_cls: object = None,
        model_id: str | os.PathLike[str] | None = None,
        config: object = None,
        device_mesh: object = None,
        mixed_precision: str | None = None,
        strategy: str | None = None,
        ddp_config: Mapping[str, Any] | None = None,
        fsdp_config: Mapping[str, Any] | None = None,
        grad_scaler_config: Mapping[str, Any] | None = None,
        memory_efficient_init: bool | None = None,
        *,
        client: TwinkleClient | None = None,
        tokenizer_id: str | None = None,
        device: object = None,
        gradient_checkpointing: bool | None = None,
        enable_router_replay: bool | None = None,
        remote_group: str | None = None,
        **load_options: Any,
    ) -> None:
        if model_id is None:
            raise invalid("model_id", None, "the id of a model that the server has")
        left_to_server(
            "TransformersModel",
            model_cls=model_cls,
            config=config,
            device_mesh=device_mesh,
            mixed_precision=mixed_precision,
            strategy=strategy,
            ddp_config=ddp_config,
            fsdp_config=fsdp_config,
            grad_scaler_config=grad_scaler_config,
            memory_efficient_init=memory_efficient_init,
            tokenizer_id=tokenizer_id,
            device=device,
            gradient_checkpointing=gradient_checkpointing,
            enable_router_replay=enable_router_replay,
            remote_group=remote_group,
            **load_options,
        )
        super().__init__(model_id, client=client)

    def add_adapter_to_model(
        self,
        adapter_name: str,
        config_or_dir: object = None,
        is_trainable: bool = True,
        *,
        gradient_accumulation_steps: int = 1,
        seed: int | None = None,
        save_dir: str | os.PathLike[str] | None = None,
    ) -> AddAdapterResponse:
        """Create an adapter on the server; it is measured with the metric Accuracy too, as the library's are.

        config_or_dir: a LoraConfig, or a mapping of its fields; the server does not read folders of this machine. None:
        train all parameters, with ``train_mode: full``.
        """
        if isinstance(config_or_dir, str | Path):
            allowed = "a LoraConfig; then load() takes the weights of a checkpoint on the server"
            raise invalid("config_or_dir", config_or_dir, allowed)
        if not is_trainable:
            raise invalid("is_trainable", is_trainable, "True: an adapter on a server is there to be trained")
        added = super().add_adapter_to_model(
            adapter_name,
            config_or_dir,
            gradient_accumulation_steps=gradient_accumulation_steps,
            seed=seed,
            save_dir=save_dir,
        )
        self.add_metric("Accuracy", adapter_name=adapter_name)
        return added

    def forward_only(self, inputs: Inputs, *, adapter_name: str | None = None, **kwargs: Any) -> ForwardResponse:
        """Return the model's outputs for evaluation, without gradients.

        The base model answers with ``disable_lora=True``, and also as long as there is no adapter. Where all parameters
        are trained, the model itself answers.
        """
        if self.train_mode == "full":
            adapter_name = self._adapter(adapter_name)
        return super().forward_only(inputs, adapter_name=adapter_name, **kwargs)

    def remove_adapter(self, adapter_name: str = _ALL) -> RemoveAdapterResponse:
        """End an adapter, or the run of all parameters, which frees the model; see MultiLoraTransformersModel."""
        return super().remove_adapter(adapter_name or _ALL)

    def _adapter(self, adapter_name: str | None) -> str:
        if adapter_name == "" or (adapter_name is None and self.adapter_name is None):
            if self.train_mode != "full":
                raise InvalidRequestError(f"adapter_name: {_ADAPTERS_ONLY}")
            adapter_name = self.adapter_name or _ALL
            if adapter_name not in self._adapters:
                self.add_adapter_to_model(adapter_name)
        return super()._adapter(adapter_name)
