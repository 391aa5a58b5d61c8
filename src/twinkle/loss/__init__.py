"""Losses. What a name needs (torch, above all) is imported when the name is first used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinkle.loss.token_losses import TOKEN_LOSSES, TokenLoss, coefficients, get_loss, resolve_config

__all__ = ["TOKEN_LOSSES", "TokenLoss", "coefficients", "get_loss", "resolve_config"]

_HOME = {
    "TOKEN_LOSSES": "twinkle.loss.token_losses",
    "TokenLoss": "twinkle.loss.token_losses",
    "coefficients": "twinkle.loss.token_losses",
    "get_loss": "twinkle.loss.token_losses",
    "resolve_config": "twinkle.loss.token_losses",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
