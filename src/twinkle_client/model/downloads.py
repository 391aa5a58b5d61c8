"""Download the files of a checkpoint to a folder of the client's machine, whole or not at all."""

import json
import shutil
import tarfile
import tempfile
import uuid
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import BinaryIO
from urllib.parse import quote

from twinkle_client.client.session import TwinkleClient
from twinkle_client.errors import InvalidRequestError, ServerError, invalid

__all__ = ["check_target", "download_checkpoint"]

_SCHEMES = ("twinkle://", "tinker://")
_CONFIG = "adapter_config.json"
_STATE = "trainer_state.json"  # of a checkpoint of all parameters, which it names as such


def check_target(folder: Path, field: str) -> Path:
    """Return the absolute path, without links, to which a checkpoint may be written; else raise InvalidRequestError.

    Allowed are a path where nothing is, an empty folder, and an earlier checkpoint, which is replaced with everything
    in it: a folder with a file adapter_config.json, which is PEFT's format, or with a trainer_state.json of a
    checkpoint of all parameters. ``field``: the argument that the error names.
    """
    target = folder.expanduser().resolve()
    above = next(parent for parent in target.parents if parent.exists())
    if not above.is_dir():
        problem = f"{above} is not a folder"
    elif not target.exists():
        return target
    elif not target.is_dir():
        problem = f"{target} is a file"
    elif _is_checkpoint(target) or not any(target.iterdir()):
        return target
    else:
        problem = f"{target} has other content and no {_CONFIG}"
    raise InvalidRequestError(
        f"{field}: {problem}; allowed for {target}: a new path, an empty folder, or an earlier checkpoint, that is, a "
        f"folder with {_CONFIG}, or with {_STATE} of a checkpoint of all parameters, which is replaced"
    )


def _is_checkpoint(folder: Path) -> bool:
    if (folder / _CONFIG).is_file():
        return True
    try:  # other programs write a file of this name, too
        state = json.loads((folder / _STATE).read_text())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(state, dict) and state.get("train_mode") == "full"


def download_checkpoint(
    client: TwinkleClient, address: str, folder: Path, field: str = "output_dir", form: str | None = None
) -> Path:
    """Write the files of the checkpoint at ``address`` to ``folder``, and return its absolute path.

    ``form``: the form that an adapter on experts gets: "tinker", "peft", "vllm" or "vllm-3d"; None: as it was saved.

    An earlier checkpoint there is replaced, anything else is refused: see :func:`check_target`. If ``folder`` is a
    link, it stays and the folder it points to is replaced. After a failure what was there is unchanged.
    """
    run, _, rest = address.partition("://")[2].partition("/")
    kind, _, name = rest.partition("/")
    if not address.startswith(_SCHEMES) or not name:
        raise invalid("checkpoint", address, "twinkle://<run>/<kind>/<name>")
    path = f"{client.route_prefix}/checkpoints/{quote(run, safe='')}/{quote(kind)}/{quote(name, safe='')}/archive"
    path += "" if form is None else f"?format={quote(form, safe='')}"
    try:
        target = check_target(folder, field)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as staging:
            files = Path(staging) / "files"
            files.mkdir()
            with tempfile.TemporaryFile(dir=staging) as archive:
                client.download(path, archive)
                _unpack(archive, files, client.base_url + path)
            check_target(target, field)  # again: the download may have taken long
            _put_in_place(files, target)
    except Exception as error:
        error.add_note(f"the checkpoint itself is on the server: {address}")
        raise
    return folder.expanduser().absolute()


def _put_in_place(files: Path, target: Path) -> None:
    """Rename ``files`` to ``target`` and delete the folder that was there; if this fails, the old folder stays."""
    if not target.exists():
        files.rename(target)
        return
    retired = target.with_name(f".{target.name}-{uuid.uuid4().hex}.old")
    target.rename(retired)
    try:
        files.rename(target)
    except OSError as error:
        error.add_note(f"if {target} is missing, its earlier content is {retired}")
        retired.rename(target)
        raise
    shutil.rmtree(retired, ignore_errors=True)


def _unpack(archive: BinaryIO, folder: Path, url: str) -> None:
    """Write the files of a tar archive, without the directory that holds them there."""
    archive.seek(0)
    try:
        with tarfile.open(fileobj=archive, mode="r:") as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isreg() else None
                parts = PurePosixPath(member.name).parts[1:]
                if content is None or not parts or not all(_is_plain(part) for part in parts):
                    raise ServerError(200, f"the archive of the checkpoint has an entry {member.name!r}", url)
                target = folder.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    shutil.copyfileobj(content, file)
    except tarfile.TarError as error:
        raise ServerError(200, f"the archive of the checkpoint cannot be read: {error}", url) from error


def _is_plain(part: str) -> bool:
    """Return whether a part of an entry's path is a plain name on every operating system."""
    return part not in ("..", "/") and "\\" not in part and not PureWindowsPath(part).drive
