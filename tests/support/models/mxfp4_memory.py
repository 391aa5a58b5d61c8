"""Prints as JSON how far loading a model from mxfp4 raises the memory of a process, three times.

All in MiB; the argument is the model's folder. A program of its own: a process that has run other tests keeps freed
memory, and what of it is used again decides what is measured.
"""

import json
import sys

import torch

from tests.support.models.peak_memory import measured
from twinkle import hub
from twinkle.model.decoder.loading import load_model


def main() -> None:
    local, cpu = hub.resolve(sys.argv[1]), torch.device("cpu")
    rises: list[float] = []
    for _ in range(4):
        with measured(rises):
            model = load_model(local, torch.bfloat16, cpu)
        size = sum(parameter.nbytes for parameter in model.parameters()) / 2**20
        del model
    print(json.dumps({"rises": rises[1:], "size": size}))  # the first load needs memory for the code itself


if __name__ == "__main__":
    main()
