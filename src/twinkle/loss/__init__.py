"""Losses. The module behind a name is imported when the name is first used, and with it, for most names, torch."""

from typing import TYPE_CHECKING

from twinkle.compatibility import find_name
from twinkle.extras import load

if TYPE_CHECKING:
    from twinkle.loss.alignment import align_logps_to_mask
    from twinkle.loss.contrastive import InfonceLoss
    from twinkle.loss.cross_entropy import ChunkedCrossEntropyLoss, CrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
    from twinkle.loss.distillation import GKDLoss
    from twinkle.loss.interface import Loss, LossOutput, check_call_arguments
    from twinkle.loss.mse import MSELoss
    from twinkle.loss.policy import BNPOLoss, CISPOLoss, DRGRPOLoss, GRPOLoss, GSPOLoss, SAPOLoss
    from twinkle.loss.ppo import PPOLoss, PPOValueLoss
    from twinkle.loss.preference import CPOLoss, DPOLoss, ORPOLoss, SimPOLoss
    from twinkle.loss.registry import loss_by_name, torch_loss_mapping
    from twinkle.loss.token_losses import TOKEN_LOSSES, TokenLoss, coefficients, get_loss, resolve_config

__all__ = [
    "TOKEN_LOSSES",
    "BNPOLoss",
    "CISPOLoss",
    "CPOLoss",
    "ChunkedCrossEntropyLoss",
    "CrossEntropyLoss",
    "DPOLoss",
    "DRGRPOLoss",
    "GKDLoss",
    "GRPOLoss",
    "GSPOLoss",
    "InfonceLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "Loss",
    "LossOutput",
    "MSELoss",
    "ORPOLoss",
    "PPOLoss",
    "PPOValueLoss",
    "SAPOLoss",
    "SimPOLoss",
    "TokenLoss",
    "align_logps_to_mask",
    "check_call_arguments",
    "coefficients",
    "get_loss",
    "loss_by_name",
    "resolve_config",
    "torch_loss_mapping",
]

_HOME = {
    "BNPOLoss": "twinkle.loss.policy",
    "CISPOLoss": "twinkle.loss.policy",
    "CPOLoss": "twinkle.loss.preference",
    "ChunkedCrossEntropyLoss": "twinkle.loss.cross_entropy",
    "CrossEntropyLoss": "twinkle.loss.cross_entropy",
    "DPOLoss": "twinkle.loss.preference",
    "DRGRPOLoss": "twinkle.loss.policy",
    "GKDLoss": "twinkle.loss.distillation",
    "GRPOLoss": "twinkle.loss.policy",
    "GSPOLoss": "twinkle.loss.policy",
    "InfonceLoss": "twinkle.loss.contrastive",
    "LigerFusedLinearCrossEntropyLoss": "twinkle.loss.cross_entropy",
    "Loss": "twinkle.loss.interface",
    "LossOutput": "twinkle.loss.interface",
    "MSELoss": "twinkle.loss.mse",
    "ORPOLoss": "twinkle.loss.preference",
    "PPOLoss": "twinkle.loss.ppo",
    "PPOValueLoss": "twinkle.loss.ppo",
    "SAPOLoss": "twinkle.loss.policy",
    "SimPOLoss": "twinkle.loss.preference",
    "TOKEN_LOSSES": "twinkle.loss.token_losses",
    "TokenLoss": "twinkle.loss.token_losses",
    "align_logps_to_mask": "twinkle.loss.alignment",
    "check_call_arguments": "twinkle.loss.interface",
    "coefficients": "twinkle.loss.token_losses",
    "get_loss": "twinkle.loss.token_losses",
    "loss_by_name": "twinkle.loss.registry",
    "resolve_config": "twinkle.loss.token_losses",
    "torch_loss_mapping": "twinkle.loss.registry",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        return find_name(__name__, name)
    return load(_HOME[name], name)
