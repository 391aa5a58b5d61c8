"""An import path of earlier versions, which older settings still name."""
