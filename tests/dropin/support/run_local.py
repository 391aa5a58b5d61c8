"""Run a local script of this folder under torchrun and record what it calls.

    python run_local.py RECORD SCRIPT ARGUMENTS…

RECORD is as in run_scripts.py; the first process writes it. The initial weights of an adapter are
saved beside it, in a folder ``initial``. Models compute in fp32, whatever this CPU has instructions for.
"""

import functools
import sys
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


def main() -> None:
    record, script, *arguments = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parents[1] / "stand_ins"))
    from twinkle.model import TransformersModel
    from twinkle.model.transformers import model as model_module

    model_module.choose_precision = lambda *_: "fp32"
    recorder = Recorder()
    record_model(recorder, TransformersModel, Path(record).parent)
    code = compile(Path(script).read_text(), script, "exec")
    sys.argv = [script, *arguments]
    exec(code, {"__name__": "__main__", "__file__": script})

    from twinkle import is_master

    if is_master():
        recorder.write(Path(record))


if __name__ == "__main__":
    main()
