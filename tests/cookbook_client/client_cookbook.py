"""Where the scripts are, and the model that tests run them on."""

from pathlib import Path

CLIENT = Path(__file__).parents[2] / "cookbook" / "client"
MODEL = "random://llama-tiny"
