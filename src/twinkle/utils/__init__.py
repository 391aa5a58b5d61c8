"""Small utilities for all packages: logging, ports, locks, calls, tensors and their files, and trust in remote code.

Scripts import these names, and some that are defined in other packages, from here. Each is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from twinkle.compatibility import find_name
from twinkle.extras import load

if TYPE_CHECKING:
    from twinkle import framework_util, torch_util
    from twinkle.hub.construction import construct_class
    from twinkle.hub.plugin import Plugin
    from twinkle.images.sources import load_image, load_mm_file
    from twinkle.infra import GPU, MPS, NPU, DeviceGroup, DeviceMesh, Platform, is_master
    from twinkle.infra.platform import ensure_hccl_socket_env, is_last_rank
    from twinkle.loss import align_logps_to_mask
    from twinkle.utils.calls import (
        call_with_supported_kwargs,
        deep_getattr,
        filter_from_config_kwargs,
        has_signature_parameter,
        signature_info,
    )
    from twinkle.utils.logger import get_logger
    from twinkle.utils.network import find_free_port, find_node_ip, is_valid_ipv6_address
    from twinkle.utils.parallel import PosixFileLock, processing_lock, stable_seed, try_claim_once
    from twinkle.utils.requirements import exists, requires
    from twinkle.utils.safetensors import (
        LazyTensor,
        SafetensorLazyLoader,
        StreamingSafetensorSaver,
        copy_files_by_pattern,
    )
    from twinkle.utils.torch_utils import (
        clone_state_dict_to_cpu,
        pad_and_stack_tensors,
        pad_sequence_to_length,
        selective_log_softmax,
        to_device,
    )
    from twinkle.utils.unsafe import check_unsafe, trust_remote_code

__all__ = [
    "GPU",
    "MPS",
    "NPU",
    "DeviceGroup",
    "DeviceMesh",
    "LazyTensor",
    "Platform",
    "Plugin",
    "PosixFileLock",
    "SafetensorLazyLoader",
    "StreamingSafetensorSaver",
    "align_logps_to_mask",
    "call_with_supported_kwargs",
    "check_unsafe",
    "clone_state_dict_to_cpu",
    "construct_class",
    "copy_files_by_pattern",
    "deep_getattr",
    "ensure_hccl_socket_env",
    "exists",
    "filter_from_config_kwargs",
    "find_free_port",
    "find_node_ip",
    "framework_util",
    "get_logger",
    "has_signature_parameter",
    "is_last_rank",
    "is_master",
    "is_valid_ipv6_address",
    "load_image",
    "load_mm_file",
    "pad_and_stack_tensors",
    "pad_sequence_to_length",
    "processing_lock",
    "requires",
    "selective_log_softmax",
    "signature_info",
    "stable_seed",
    "to_device",
    "torch_util",
    "trust_remote_code",
    "try_claim_once",
]

_HOME = {
    "DeviceGroup": "twinkle.infra",
    "DeviceMesh": "twinkle.infra",
    "GPU": "twinkle.infra",
    "LazyTensor": "twinkle.utils.safetensors",
    "MPS": "twinkle.infra",
    "NPU": "twinkle.infra",
    "Platform": "twinkle.infra",
    "Plugin": "twinkle.hub.plugin",
    "PosixFileLock": "twinkle.utils.parallel",
    "SafetensorLazyLoader": "twinkle.utils.safetensors",
    "StreamingSafetensorSaver": "twinkle.utils.safetensors",
    "align_logps_to_mask": "twinkle.loss",
    "call_with_supported_kwargs": "twinkle.utils.calls",
    "check_unsafe": "twinkle.utils.unsafe",
    "clone_state_dict_to_cpu": "twinkle.utils.torch_utils",
    "construct_class": "twinkle.hub.construction",
    "copy_files_by_pattern": "twinkle.utils.safetensors",
    "deep_getattr": "twinkle.utils.calls",
    "ensure_hccl_socket_env": "twinkle.infra.platform",
    "exists": "twinkle.utils.requirements",
    "filter_from_config_kwargs": "twinkle.utils.calls",
    "find_free_port": "twinkle.utils.network",
    "find_node_ip": "twinkle.utils.network",
    "get_logger": "twinkle.utils.logger",
    "has_signature_parameter": "twinkle.utils.calls",
    "is_last_rank": "twinkle.infra.platform",
    "is_master": "twinkle.infra",
    "is_valid_ipv6_address": "twinkle.utils.network",
    "load_image": "twinkle.images.sources",
    "load_mm_file": "twinkle.images.sources",
    "pad_and_stack_tensors": "twinkle.utils.torch_utils",
    "pad_sequence_to_length": "twinkle.utils.torch_utils",
    "processing_lock": "twinkle.utils.parallel",
    "requires": "twinkle.utils.requirements",
    "selective_log_softmax": "twinkle.utils.torch_utils",
    "signature_info": "twinkle.utils.calls",
    "stable_seed": "twinkle.utils.parallel",
    "to_device": "twinkle.utils.torch_utils",
    "trust_remote_code": "twinkle.utils.unsafe",
    "try_claim_once": "twinkle.utils.parallel",
}


def __getattr__(name: str) -> object:
    if name in ("framework_util", "torch_util"):
        return import_module(f"twinkle.{name}")
    if name not in _HOME:
        return find_name(__name__, name)
    return load(_HOME[name], name)
