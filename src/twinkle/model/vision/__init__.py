"""Vision models: the vision tower, which is frozen, and the features that it makes of images."""
