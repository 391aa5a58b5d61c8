"""The path of the client scripts, and the model that tests run them on."""

from tests.support.paths import ROOT

CLIENT = ROOT / "cookbook" / "client"
MODEL = "random://llama-tiny"
