"""Download models from the hubs, through the hubs' client libraries and into the caches of those libraries.

The libraries' caches are used, not Twinkle's, because a user's other tools may have put the same models there already.
Both libraries resume broken downloads and lock the files that they write.
"""

from pathlib import Path

from twinkle.environment import read_environment
from twinkle.errors import DownloadError
from twinkle.extras import missing
from twinkle.hub.cache import announce
from twinkle.hub.model_folder import require_model_folder
from twinkle.hub.model_id import HuggingFaceId, ModelScopeId

__all__ = ["download_from_hugging_face", "download_from_modelscope"]

# The same weights in formats that Transformers does not load, often as big as the model itself.
_DUPLICATES = [
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.onnx_data",
    "*.ot",
    "*.pth",
    "*.tflite",
    "consolidated*.safetensors",
    "onnx/*",
    "original/*",
]


def download_from_hugging_face(model: HuggingFaceId) -> Path:
    """Download a Hugging Face repository if needed, and return its folder."""
    try:
        from huggingface_hub import snapshot_download

        # The base class of the library's HTTP errors; it comes from requests or httpx, depending on the version.
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
    except ImportError as error:
        raise missing("huggingface_hub", f"hf://{model.name}") from error
    offline = read_environment().offline
    if not offline:
        announce(f"looking up {model.name} on Hugging Face")
    try:
        folder = snapshot_download(
            model.name, revision=model.revision, ignore_patterns=_DUPLICATES, local_files_only=offline
        )
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        raise _failure(f"hf://{model.name}", error, offline) from error
    return require_model_folder(Path(folder))


def download_from_modelscope(model: ModelScopeId) -> Path:
    """Download a ModelScope repository if needed, and return its folder."""
    try:
        from modelscope import snapshot_download
        from modelscope.hub.errors import HubError  # since 1.38; before that its errors had no common base
    except ImportError as error:
        raise missing("modelscope", f"ms://{model.name}") from error
    offline = read_environment().offline
    if not offline:
        announce(f"looking up {model.name} on ModelScope")
    try:
        folder = snapshot_download(
            model.name, revision=model.revision, ignore_patterns=_DUPLICATES, local_files_only=offline
        )
    except (HubError, OSError, RuntimeError, ValueError) as error:
        raise _failure(f"ms://{model.name}", error, offline) from error
    return require_model_folder(Path(folder))


def _failure(model_id: str, cause: Exception, offline: bool) -> DownloadError:
    if offline:
        return DownloadError(
            f"{model_id} is not in the local cache and TWINKLE_OFFLINE is set: {cause}; unset it to download the "
            "model, or give a local directory as model id"
        )
    return DownloadError(
        f"cannot download {model_id}: {type(cause).__name__}: {cause}; check name, revision and access rights; "
        "without a network set TWINKLE_OFFLINE=1 to use what was downloaded before, or give a local directory as "
        "model id"
    )
