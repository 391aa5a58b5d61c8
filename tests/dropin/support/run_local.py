"""Run a local script of this folder and record what it calls, in one process, under torchrun or on Ray.

    python run_local.py RECORD SETTINGS SCRIPT ARGUMENTS…

SETTINGS and RECORD are as in run_scripts.py; the first process writes the record. The initial weights of an adapter are
saved beside it, in a folder ``initial``. Models compute in fp32, whatever this CPU has instructions for.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

from run_scripts import Recorder, with_settings

RECORDED = ("calculate_metric", "save")


def record_model(recorder: Recorder, owner: type, folder: Path) -> None:
    """Record the calls of a model's class, or of the class of its proxies on a Ray cluster."""
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
    record, settings, script, *arguments = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parents[1] / "stand_ins"))
    from twinkle.infra.proxy import _proxy_class
    from twinkle.model import TransformersModel
    from twinkle.model.transformers import model as model_module

    model_module.choose_precision = lambda *_: "fp32"
    recorder = Recorder()
    for owner in (TransformersModel, _proxy_class(TransformersModel)):
        record_model(recorder, owner, Path(record).parent)
    code = compile(with_settings(Path(script).read_text(), json.loads(settings)), script, "exec")
    sys.argv = [script, *arguments]
    exec(code, {"__name__": "__main__", "__file__": script})

    from twinkle import is_master

    if is_master():
        recorder.write(Path(record))


if __name__ == "__main__":
    main()
