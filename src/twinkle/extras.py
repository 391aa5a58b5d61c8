"""Which of our extras installs an optional package, and the error for one that is not installed.

The distribution ``twinkle-posttrain`` alone installs what ``import twinkle`` needs. Everything else is in an extra of
``pyproject.toml``. ``_PACKAGES`` is the only place that maps modules to extras: code that needs an optional package
calls :func:`require`, :func:`missing` or :func:`load`, so that the error names the command that installs it.
"""

from importlib import import_module
from importlib.util import find_spec

from twinkle.errors import MissingDependencyError

__all__ = ["extra_of", "load", "missing", "require"]

# extra → the modules that we import from it → the package of each. A module that two extras install is listed once, in
# the smaller one: `server` includes `transformers`.
_PACKAGES = {
    "agentic": {"nltk": "nltk", "openai": "openai"},
    "datajuicer": {"aiohttp": "aiohttp", "data_juicer": "py-data-juicer", "ftfy": "ftfy"},
    "demo": {"tinker": "tinker"},
    "e2b": {"e2b": "e2b"},
    "fla": {"fla": "fla-core"},
    "liger": {"liger_kernel": "liger-kernel"},
    "math": {"math_verify": "math-verify"},
    "megatron": {"megatron": "megatron-core"},
    "modelscope": {"modelscope": "modelscope"},
    "openenv": {"openenv": "openenv"},
    "pii": {
        "presidio_analyzer": "presidio-analyzer",
        "presidio_anonymizer": "presidio-anonymizer",
        "regex": "regex",
    },
    "postgres": {"psycopg": "psycopg[binary]"},
    "ray": {"ray": "ray[serve]"},
    "server": {
        "fastapi": "fastapi",
        "google.protobuf": "protobuf",
        "jwt": "pyjwt",
        "opentelemetry": "opentelemetry-api",
        "prometheus_client": "prometheus_client",
        "pyrage": "pyrage",
        "sqlalchemy": "sqlalchemy",
        "starlette": "fastapi",
        "uvicorn": "uvicorn",
        "uvloop": "uvloop",
        "yaml": "pyyaml",
        "zstandard": "zstandard",
    },
    "spacy": {"spacy": "spacy"},
    "telemetry": {
        "opentelemetry.exporter": "opentelemetry-exporter-otlp-proto-grpc",
        "opentelemetry.sdk": "opentelemetry-sdk",
    },
    "transformers": {
        "PIL": "pillow",
        "datasets": "datasets",
        "gguf": "gguf",
        "huggingface_hub": "huggingface_hub",
        "jinja2": "jinja2",
        "omegaconf": "omegaconf",
        "peft": "peft",
        "pyarrow": "datasets",
        "safetensors": "safetensors",
        "tokenizers": "tokenizers",
        "torch": "torch",
        "transformers": "transformers",
        "triton": "torch",
    },
    "vllm": {"vllm": "vllm"},
}
_HOMES = {module: (package, extra) for extra, modules in _PACKAGES.items() for module, package in modules.items()}


def extra_of(module: str) -> tuple[str, str] | None:
    """Return the package that has the module or a package around it, and our extra for it; None if we have none."""
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((_HOMES[name] for name in names if name in _HOMES), None)


def missing(module: str, purpose: str, extra: str | None = None) -> MissingDependencyError:
    """Return the error for an optional module that is not installed.

    ``purpose`` says what needs it. ``extra``: an extra that installs more for the purpose than the smallest one.
    """
    package, smallest = extra_of(module) or (module, None)
    return MissingDependencyError(package, extra or smallest, purpose)


def require(module: str, purpose: str) -> None:
    """Raise MissingDependencyError if an optional module is not installed. Does not import it."""
    if find_spec(module) is None:
        raise missing(module, purpose)


def load(module: str, name: str) -> object:
    """Return ``name`` of one of our modules; raise MissingDependencyError if importing it needs an absent package.

    Packages whose names are imported on first use call it in their ``__getattr__``.
    """
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or extra_of(error.name) is None:
            raise
        raise missing(error.name, name) from error
