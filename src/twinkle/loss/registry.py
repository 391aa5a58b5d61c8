"""Losses by name."""

from collections.abc import Mapping

from twinkle.errors import UnknownNameError
from twinkle.loss.contrastive import InfonceLoss
from twinkle.loss.cross_entropy import ChunkedCrossEntropyLoss, CrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
from twinkle.loss.distillation import GKDLoss
from twinkle.loss.interface import Loss
from twinkle.loss.mse import MSELoss
from twinkle.loss.policy import BNPOLoss, CISPOLoss, DRGRPOLoss, GRPOLoss, GSPOLoss, SAPOLoss
from twinkle.loss.ppo import PPOLoss, PPOValueLoss
from twinkle.loss.preference import CPOLoss, DPOLoss, ORPOLoss, SimPOLoss

__all__ = ["loss_by_name", "torch_loss_mapping"]

torch_loss_mapping: Mapping[str, type[Loss]] = {
    "bnpo": BNPOLoss,
    "chunked_cross_entropy": ChunkedCrossEntropyLoss,
    "cispo": CISPOLoss,
    "cpo": CPOLoss,
    "cross_entropy": CrossEntropyLoss,
    "dpo": DPOLoss,
    "dr_grpo": DRGRPOLoss,
    "gkd": GKDLoss,
    "grpo": GRPOLoss,
    "gspo": GSPOLoss,
    "infonce": InfonceLoss,
    "liger_fused_linear_cross_entropy": LigerFusedLinearCrossEntropyLoss,
    "mse": MSELoss,
    "orpo": ORPOLoss,
    "ppo": PPOLoss,
    "ppo_value": PPOValueLoss,
    "sapo": SAPOLoss,
    "simpo": SimPOLoss,
}


def loss_by_name(name: str) -> type[Loss]:
    """Return the class of a loss, by its key in ``torch_loss_mapping`` or by the name of the class."""
    known = {**torch_loss_mapping, **{loss.__name__: loss for loss in torch_loss_mapping.values()}}
    if name not in known:
        raise UnknownNameError("loss", name, known)
    return known[name]
