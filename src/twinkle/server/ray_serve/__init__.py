"""An import path of earlier versions."""
