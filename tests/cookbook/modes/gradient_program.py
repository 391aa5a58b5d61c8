"""Run a cookbook script and record the loss of each pass and the gradient of each step, as the model computes them.

    python gradient_program.py FILE SCRIPT ARGUMENTS…

The first process writes {"losses": […], "gradients": [{name: tensor}]} to FILE. The gradients are whole, divided by the
tokens of their window, and not clipped.
"""

import runpy
import sys
from typing import Any
from unittest import mock

import torch
from script_program import COOKBOOK

from twinkle import is_master
from twinkle.model import TransformersModel
from twinkle.model.trainer.sharding import whole

if __name__ == "__main__":
    torch.set_num_threads(1)
    file, script, *sys.argv = sys.argv[1:2] + sys.argv[2:3] + sys.argv[2:]
    found: dict[str, list[Any]] = {"losses": [], "gradients": []}
    forward_backward, clip_grad_norm = TransformersModel.forward_backward, TransformersModel.clip_grad_norm

    def recorded_pass(model: TransformersModel, **arguments: Any) -> dict[str, Any]:
        outputs = forward_backward(model, **arguments)
        found["losses"].append(outputs["loss"])
        return outputs

    def recorded_clip(model: TransformersModel, max_grad_norm: float, *others: Any, **names: Any) -> float | None:
        norm = clip_grad_norm(model, 1e9, *others, **names)
        if norm is not None:
            named = {name: each.grad for name, each in model.model.named_parameters() if each.grad is not None}
            found["gradients"].append({name: whole(gradient).clone() for name, gradient in named.items()})
            clip_grad_norm(model, max_grad_norm, *others, **names)
        return norm

    with (
        mock.patch.object(TransformersModel, "forward_backward", recorded_pass),
        mock.patch.object(TransformersModel, "clip_grad_norm", recorded_clip),
    ):
        runpy.run_path(str(COOKBOOK / script), run_name="__main__")
    if is_master():
        torch.save(found, file)
