"""The hub of the stand-in for ModelScope."""
