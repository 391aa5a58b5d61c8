"""Compatibility path: scripts for the tinker SDK import the functions of ``datum`` from here."""

from twinkle.server.common.datum import datum_to_input_feature, extract_rl_features_for_loss, input_feature_to_datum

__all__ = ["datum_to_input_feature", "extract_rl_features_for_loss", "input_feature_to_datum"]
