"""Reads the configuration of a new adapter, and checks it against the limits of a multi-LoRA model."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from twinkle.errors import CapacityError, InvalidInputError
from twinkle.infra import adapter_seed
from twinkle.model.adapters.peft_config import spec_from_peft
from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.targets import select_targets
from twinkle.model.types import LoraSpec

__all__ = ["AdapterLimits", "check_limit", "check_name", "config_fields", "seeded"]


@dataclass(frozen=True)
class AdapterLimits:
    """How many adapters a model may have, their largest rank, and the target modules of configs that name none."""

    max_loras: int
    max_r: int
    target_modules: Any

    @staticmethod
    def read(lora_config: Any, max_loras: int, max_r: int, target_modules: Any) -> "AdapterLimits":
        """Check the limits. ``lora_config``, where given, sets ``max_r`` and ``target_modules``."""
        shared = {} if lora_config is None else config_fields("lora_config", lora_config)
        return AdapterLimits(
            check_limit("max_loras", max_loras),
            check_limit("max_r", shared.get("r", max_r)),
            shared.get("target_modules") or target_modules,
        )

    def adapter(
        self, adapter_name: str, config_or_dir: Any, present: Collection[str], architecture: Architecture
    ) -> tuple[dict[str, Any], LoraSpec]:
        """Return the fields of a new adapter's config, and its spec. ``present``: the adapters that exist."""
        check_name(adapter_name)
        if isinstance(config_or_dir, str | Path):
            raise InvalidInputError("config_or_dir", config_or_dir, "a LoraConfig; load() then reads a directory")
        if len(present) >= self.max_loras and adapter_name not in present:
            raise CapacityError(f"max_loras: {self.max_loras} adapters exist; remove one, or construct with more")
        config = config_fields("config_or_dir", config_or_dir)
        if config.get("target_modules") is None and not config.get("target_parameters"):
            config["target_modules"] = self.target_modules
        spec = spec_from_peft(config)
        allowed = f"at most {self.max_r}; construct the model with a larger max_r"
        if spec.rank > self.max_r:
            raise InvalidInputError("r", spec.rank, allowed)
        names = [target.name for target in select_targets(spec, architecture)] if spec.rank_pattern else []
        for name, rank in zip(names, spec.module_ranks(names), strict=True):
            if rank > self.max_r:
                raise InvalidInputError(f"the rank of {name}", rank, allowed)
        return config, spec


def seeded(spec: LoraSpec, adapter_name: str, seed: int | None, model_seed: int | None = None) -> LoraSpec:
    """Return the spec with the seed of its initial weights.

    By default it is made of the seed of the model, else of ``initialize``, and the adapter's name. Without any of them
    it is drawn from torch's generator, so that a program that seeds the generator gets the same adapter every time.
    """
    if seed is None:
        seed = adapter_seed(adapter_name, model_seed)
    return replace(spec, seed=int(torch.randint(2**62, ())) if seed is None else seed)


def check_name(adapter_name: object) -> None:
    if not isinstance(adapter_name, str) or not adapter_name:
        raise InvalidInputError("adapter_name", adapter_name, "a name")


def check_limit(field: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidInputError(field, value, "an integer ≥ 1")
    return value


def config_fields(field: str, config: Any) -> dict[str, Any]:
    """Return the fields of PEFT's LoraConfig (PEFT itself is not imported), or of a mapping like it."""
    if isinstance(config, Mapping):
        return dict(config)
    if not is_dataclass(config) or isinstance(config, type):
        raise InvalidInputError(field, config, "a LoraConfig, or its fields as a mapping")
    fields: dict[str, Any] = config.to_dict()  # type: ignore[attr-defined]
    return fields
