"""Import paths of other versions of Twinkle, and how Python finds them.

Scripts and documents of other versions import modules from places where they are not here, and scripts for the library
import names that the client does not have. Each such path is a line of a table: ``PATHS`` below for ``twinkle_client``,
and ``PATHS`` of ``twinkle.compatibility`` for ``twinkle``, which uses this module because the client may not import the
library. Importing a moved path works and warns with the new path; importing an absent one is an error that says what to
use instead. A name that does not exist yet can be imported, and using it is an error: a script that offers it as one of
several choices runs with the others.

``import a.b.c`` and ``from a.b.c import name`` need a module ``a.b.c``, so a ``__getattr__`` of ``a.b`` is not enough.
A file for each path would be plainest, but there are many paths, and folders would show more of those than of code. So
each package puts one finder at the end of ``sys.meta_path``. It is asked only for modules that no other finder has
found, and answers only for those of its table: it cannot hide a module, and costs other imports nothing.

A module that is made for a path holds no objects of its own. Classes belong to the module that defines them, so they
are pickled by their real names; other processes, also Ray's, find the old path once they import the package.

:func:`warn_of_twinkle_kit` tells users that they have installed the existing Twinkle into the same environment.
"""

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["PATHS", "Absent", "Moved", "NotYet", "OlderImportPaths", "Table", "missing", "warn_of_twinkle_kit"]


@dataclass(frozen=True)
class Moved:
    """A module whose public names are those of the module ``to``.

    ``more`` has names that ``to`` lacks, each with its place: ``module`` for a module, ``module:name`` for an object.
    ``warns`` is False where the old path is as good as the new one.
    """

    to: str
    more: Mapping[str, str] = field(default_factory=dict)
    warns: bool = True


@dataclass(frozen=True)
class Absent:
    """A module that does not exist here, with its submodules, or a name of an existing module (``module:name``)."""

    why: str


@dataclass(frozen=True)
class NotYet:
    """A module that does not exist yet, with the ``names`` that scripts import from it, separated by spaces.

    Or one name of an existing module (``module:name``); then ``names`` is empty. ``why`` says what is missing.
    """

    why: str
    names: str = ""


Table = Mapping[str, Moved | Absent | NotYet]


class OlderImportPaths:
    """The finder for the older paths of one package. Python calls ``find_spec`` for modules that it did not find.

    ``unusable`` is the error that is raised when a script uses a name that does not exist yet.
    """

    def __init__(self, package: str, table: Table, unusable: type[Exception] = NotImplementedError) -> None:
        self.package = package
        self._table = table
        self._unusable = unusable
        self._placeholders: dict[str, type] = {}

    def install(self) -> None:
        """Put this finder at the end of ``sys.meta_path``, in the place of an earlier one for the same package.

        There is an earlier one if the package is reloaded.
        """
        others = [finder for finder in sys.meta_path if getattr(finder, "package", None) != self.package]
        sys.meta_path[:] = [*others, self]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        entry = self._table.get(fullname)
        if entry is None:
            return None
        if isinstance(entry, Absent):
            # Without name=: if it were this module's, `from twinkle.server import model` would lose the text.
            raise ModuleNotFoundError(f"{fullname}: {entry.why}")
        # All are packages, so that a path may have another one below it.
        if isinstance(entry, NotYet):
            return ModuleSpec(fullname, _Placeholders(self, entry), origin="does not exist yet", is_package=True)
        return ModuleSpec(fullname, _Forwarding(entry), origin=f"names of {entry.to}", is_package=True)

    def find_name(self, module: str, name: str) -> object:
        """Return the placeholder of a name that an existing module does not have yet, or raise :func:`missing`."""
        entry = self._table.get(f"{module}:{name}")
        if not isinstance(entry, NotYet):
            raise missing(self._table, module, name)
        return self.placeholder(module, name, entry.why)

    def placeholder(self, module: str, name: str, why: str) -> type:
        """Return the class that stands for a name that does not exist yet: the same one for every import."""
        return self.unusable(module, name, self._unusable(f"{module}.{name}: {why}"))

    def unusable(self, module: str, name: str, error: Exception) -> type:
        """Return the class that stands for a name that can be imported, and whose use is this error."""
        path = f"{module}.{name}"
        made = _PlaceholderType(name, (), {"__module__": module, "_unusable": error})
        return self._placeholders.setdefault(path, made)  # the first one stays, also if two threads import at once


class _PlaceholderType(type):
    """The type of placeholders. Calling one, or reading an attribute such as a member of an enum, is an error.

    A placeholder is a class, so that ``isinstance(model, MegatronModel)`` is False and the class can be pickled.
    """

    _unusable: Exception

    def __call__(cls, *args: object, **kwargs: object) -> object:
        raise cls._unusable.with_traceback(None)

    def __getattr__(cls, name: str) -> object:
        raise AttributeError(f"{name}: {cls._unusable}")

    def __repr__(cls) -> str:
        return f"<{cls._unusable}>"  # so that errors about a wrong argument, such as of set_loss, say why it is wrong


class _Placeholders(Loader):
    """Fills a module that does not exist yet with placeholders."""

    def __init__(self, finder: OlderImportPaths, entry: NotYet) -> None:
        self._finder = finder
        self._entry = entry

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # Python makes an ordinary module

    def exec_module(self, module: ModuleType) -> None:
        names = self._entry.names.split()
        why = self._entry.why
        vars(module).update({name: self._finder.placeholder(module.__name__, name, why) for name in names})
        vars(module).update(__doc__=f"Not yet: {why}.", __all__=names)


class _Forwarding(Loader):
    """Fills the module of a moved path. Its names are looked up when they are used, because some need torch."""

    def __init__(self, entry: Moved) -> None:
        self._entry = entry

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # Python makes an ordinary module

    def exec_module(self, module: ModuleType) -> None:
        entry, old = self._entry, module.__name__
        if entry.warns:
            # importlib's frames are not counted, so this points at the script's import statement
            warnings.warn(f"{old} is an older import path, use {entry.to}", DeprecationWarning, stacklevel=2)
        new = import_module(entry.to)
        names = sorted({*new.__all__, *entry.more})

        def find(name: str) -> object:
            if name not in names:
                raise AttributeError(f"module {old!r} has no attribute {name!r}; see {entry.to}")
            if name not in entry.more:
                return getattr(new, name)
            home, _, attribute = entry.more[name].partition(":")
            return getattr(import_module(home), attribute) if attribute else import_module(home)

        vars(module).update(__doc__=new.__doc__, __all__=names, __getattr__=find, __dir__=lambda: names)


def missing(table: Table, module: str, name: str) -> AttributeError | ImportError:
    """Return the error for a name that a module does not have: with the reason if the table has one."""
    entry = table.get(f"{module}:{name}")
    if isinstance(entry, Absent):
        return ImportError(f"{module}.{name}: {entry.why}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}")


def warn_of_twinkle_kit() -> None:
    """Warn if the distribution ``twinkle-kit`` is in this environment: it has the same import names as ours.

    ``import twinkle_client`` calls it, and ``import twinkle`` imports that. It reads the names of the metadata folders,
    which takes less than a millisecond; importing importlib.metadata takes tens of them. If twinkle-kit was installed
    last, its files have replaced this one, and nothing can warn.
    """
    found = next(filter(None, map(_version_of_twinkle_kit, sys.path)), None)
    if found is None:
        return
    warnings.warn(
        f"twinkle-kit {found} and twinkle-posttrain are installed in the same environment. Both have the packages "
        "twinkle, twinkle_client and twinkle_agentic, and the one installed last has overwritten files of the other. "
        "Use separate environments, or keep one: "
        "pip uninstall twinkle-kit twinkle-posttrain twinkle-posttrain-client, then install the one that you want",
        stacklevel=3,  # the statement that imports the package
    )


def _version_of_twinkle_kit(folder: str) -> str | None:
    """Return the version of the twinkle-kit whose metadata is in this folder of ``sys.path``."""
    try:
        names = os.listdir(folder or os.curdir)
    except OSError:  # not a folder: a zip file, or a path that does not exist
        return None
    found = [name for name in names if name.startswith("twinkle_kit-") and name.endswith(".dist-info")]
    return found[0].removeprefix("twinkle_kit-").removesuffix(".dist-info") if found else None


_PLACES = "the server decides which processes and devices run its components"
_ERRORS = "the library raises it in its own process; the client raises the errors of twinkle_client.errors"
_CODE = "it loads code from outside, and the client never sends code to a server"
_HELPER = "it does not concern a server; import it from twinkle, or use Python's own modules"
_HUBS = "the server reads hubs by itself; hub.resolve and hub.load_tokenizer find files for this machine"
_PARSERS = "tool calls are parsed by the server: template.parse_tool_call(text)"
_ENGINE = "it is a type inside the server's sampler; a sampler of the client returns SampleResponse"
_LOADING = "rows are loaded in the server's process; DataLoader has the options for it"
_TRAINER = "it is a type inside the server's trainer, which needs torch"
_FULL = "a server trains all parameters of a model with train_mode: full: model.add_adapter_to_model(name, None)"
_CRITIC = (
    "a server has no critics; use a TransformersValueModel of twinkle.model, and GAEAdvantage of twinkle.advantage"
)
_MEGATRON = (
    "how a model is divided is the server's configuration; MultiLoraTransformersModel is the client's model, whatever "
    "the server runs"
)
_TORCH = "it works on torch's tensors and devices, which are the server's; import it from twinkle where both are here"

# Modules that are not here, and modules that are elsewhere.
_MODULES: Table = {
    "twinkle_client.cli": Absent("it reads options for the library's own classes; a script for a server reads its own"),
    "twinkle_client.framework_util": Absent(_TORCH),
    "twinkle_client.http.heartbeat": Moved("twinkle_client.client.heartbeat"),
    "twinkle_client.http.http_utils": Moved("twinkle_client.http"),
    "twinkle_client.http.utils": Moved("twinkle_client.http"),
    "twinkle_client.kernel": Absent("the layers of a served model are the server's, which chooses its kernels itself"),
    "twinkle_client.loss": Absent(
        "losses run on the server, which knows them by name: model.set_loss('GRPOLoss', epsilon=0.2)"
    ),
    "twinkle_client.metric": Absent(
        "metrics run on the server, which knows them by name: model.add_metric('GRPOMetric')"
    ),
    "twinkle_client.module": Absent(
        "schedulers run on the server, which knows them by name: model.set_lr_scheduler('CosineWarmupScheduler', …)"
    ),
    "twinkle_client.notifier": Absent(
        "the client notifies nobody; catch the exception in the script, or use twinkle.notifier"
    ),
    "twinkle_client.patch": Absent("tenants share a served model, and nobody may change it for the others"),
    "twinkle_client.skills.base": Moved("twinkle_client.skills"),
    "twinkle_client.skills.local_provider": Moved("twinkle_client.skills"),
    "twinkle_client.skills.modelscope_provider": Moved("twinkle_client.skills"),
    "twinkle_client.torch_util": Absent(_TORCH),
    "twinkle_client.types.checkpoint": Moved("twinkle_client.types.training", warns=False),
}


def _absent(module: str, names: str, why: str) -> dict[str, Absent]:
    return {f"{module}:{name}": Absent(why) for name in names.split()}


# Names of the library that a module of the client does not have.
_NAMES: Table = {
    **_absent("twinkle_client.advantage", "GAEAdvantage", _CRITIC),
    **_absent(
        "twinkle_client.dataloader",
        "DataMesh DeviceMeshIterableFetcher DeviceMeshSampler RetrySampler",
        _LOADING,
    ),
    **_absent(
        "twinkle_client.hub",
        "MODEL_ID_ALIASES_ENV HFHub HubOperation HuggingFaceId LocalFolderId MSHub ModelId ModelScopeId PypiId "
        "RandomId build_model_alias_map load_model_alias_map parse_model_id resolve_model_id_alias",
        _HUBS,
    ),
    **_absent(
        "twinkle_client.infra",
        "LazyResult Settings adapter_seed collect_tensor_dict current_seed current_settings driver_function "
        "get_device_placement initialize process_lock remote_class remote_function shutdown",
        f"{_PLACES}; initialize and shutdown are in twinkle_client",
    ),
    **_absent(
        "twinkle_client.model",
        "AdapterSnapshot ObjectiveValue TokenValues adopt_model",
        _TRAINER,
    ),
    **_absent("twinkle_client.model", "FullSpec FullTrainer", _FULL),
    **_absent("twinkle_client.model", "TransformersValueModel", _CRITIC),
    **_absent("twinkle_client.model", "MegatronModel MultiLoraMegatronModel", _MEGATRON),
    **_absent(
        "twinkle_client.model",
        "TwinkleModel",
        "it is the base class of models that compute in this process; MultiLoraTransformersModel is the client's model",
    ),
    **_absent(
        "twinkle_client.sampler",
        "DrawnTokens Finished Progress SampleFailure SampleRequest SampleResult SampledSequence SamplingParams "
        "TopLogprobs TorchSampler",
        f"{_ENGINE}; SamplingParams and SampledSequence are in twinkle_client.data_format",
    ),
    **_absent(
        "twinkle_client.template",
        "ClineParser HermesQwenParser ReActParser ToolCallParser ToolCallRegistry VCPParser",
        _PARSERS,
    ),
    **_absent(
        "twinkle_client",
        "AdapterExistsError AdapterNotFoundError CapacityError CheckpointError DataError DownloadError "
        "InvalidInputError MissingDependencyError NoOptimizerStateError NonFiniteError RankFailedError "
        "ResourcesError StreamError TwinkleError UnknownNameError UnsupportedError UploadError UserError "
        "WorkerDiedError WorkerTimeoutError",
        _ERRORS,
    ),
    **_absent(
        "twinkle_client",
        "Plugin check_unsafe trust_remote_code",
        _CODE,
    ),
    **_absent(
        "twinkle_client",
        "get_device_placement remote_class remote_function",
        _PLACES,
    ),
    **_absent(
        "twinkle_client",
        "exists find_free_port find_node_ip get_logger requires",
        _HELPER,
    ),
}

PATHS: Table = {**_MODULES, **_NAMES}
