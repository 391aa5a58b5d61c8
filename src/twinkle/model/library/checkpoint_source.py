"""Where a checkpoint is read from, and what of the base model goes beside one."""

import shutil
from pathlib import Path

from twinkle import hub
from twinkle.errors import CheckpointError
from twinkle.hub import HubOperation

_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
)


def find_checkpoint(name: str, output_dir: str | None, token: str | None) -> Path:
    """``name`` in ``output_dir``; without one a directory, here or in output/, or else a repository on a hub."""
    places = [Path(output_dir) / name] if output_dir is not None else [Path(name), Path("output") / name]
    for place in places:
        if place.is_dir():
            return place
    if output_dir is None and "/" in name and not name.startswith(("/", ".")):
        return Path(HubOperation.download_file(name, token=token))
    raise CheckpointError(f"name: no checkpoint {name!r}; looked for {', '.join(map(str, places))}")


def copy_tokenizer(tokenizer_id: str, directory: Path) -> None:
    """Those files of a model that its tokenizer needs, as far as it has them."""
    folder = hub.resolve(tokenizer_id).path
    for pattern in _TOKENIZER_FILES:
        for path in folder.glob(pattern):
            if path.is_file() and not (directory / path.name).exists():
                shutil.copyfile(path, directory / path.name)
