"""The import path under which scripts for the tinker SDK look for these three; none of the server is loaded with it."""

from twinkle.server.feature_datums import (
    datum_to_input_feature,
    extract_rl_features_for_loss,
    input_feature_to_datum,
)

__all__ = ["datum_to_input_feature", "extract_rl_features_for_loss", "input_feature_to_datum"]
