"""Run a local script of this folder under torchrun and record what it calls.

    python run_local.py RECORD SCRIPT ARGUMENTS…

RECORD is as in run_scripts.py; the first process writes it. The initial weights of an adapter are
saved beside it, in a folder ``initial``. Models compute in fp32, whatever this CPU has instructions for.
"""

import functools
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from run_scripts import Recorder

RECORDED = ("calculate_metric", "save")


def record_model(recorder: Recorder, owner: type, folder: Path) -> None:
    """Record the calls of a model's class."""
    add, save = owner.add_adapter_to_model, owner.save

    @functools.wraps(add)
    def add_adapter_to_model(it: Any, adapter_name: str, *arguments: Any, **keywords: Any) -> Any:
        added = add(it, adapter_name, *arguments, **keywords)
        save(it, "initial", output_dir=str(folder), adapter_name=adapter_name)
        return added

    for name in RECORDED:
        recorder.wrap(owner, name)
    owner.add_adapter_to_model = add_adapter_to_model


def models_in_fp32() -> list[type]:
    """Return the classes of models that scripts here construct. Their instances compute in fp32."""
    from twinkle.model import TransformersModel
    from twinkle.model.transformers import model as model_module

    model_module.choose_precision = lambda *_: "fp32"
    if not find_spec("megatron"):
        return [TransformersModel]
    from twinkle.model import MegatronModel
    from twinkle.model.megatron.library import strategy

    strategy.choose_precision = lambda *_: "fp32"
    return [TransformersModel, MegatronModel]


def main() -> None:
    record, script, *arguments = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parents[1] / "stand_ins"))
    recorder = Recorder()
    for owner in models_in_fp32():
        record_model(recorder, owner, Path(record).parent)
    code = compile(Path(script).read_text(), script, "exec")
    sys.argv = [script, *arguments]
    exec(code, {"__name__": "__main__", "__file__": script})

    from twinkle import is_master

    if is_master():
        recorder.write(Path(record))


if __name__ == "__main__":
    main()
