"""Import paths of other versions of the library and the server: a line for each, and where it leads.

A path of a module is either moved, and works with a warning that names the new path, or absent, and importing it is an
error that says what to use instead. ``module:name`` is a name that an existing module does not have; that module's
``__getattr__`` raises :func:`missing`. How Python finds these paths is in :mod:`twinkle_client.compatibility`.
docs/compatibility.md lists all of them for users.
"""

from twinkle_client import compatibility
from twinkle_client.compatibility import Absent, Moved, OlderImportPaths, Table

__all__ = ["PATHS", "install", "missing"]

_APPLICATIONS = (
    "the applications of a server share its state and reach each other by handles, so they are not built one by one; "
    "twinkle.server.launch_server starts all that a configuration names"
)
_STATE = "the server's state is a database; twinkle_client.TwinkleClient lists runs and checkpoints"
_ENGINE = "engines have one interface, Sampler; vLLM's is twinkle.sampler.vllm.VllmSampler"
_PATCH = "models run as transformers defines them; a model's apply_patch raises an error"
_LAZY = "packages import their names on first use, by the __getattr__ of Python modules"

PATHS: Table = {
    # the library
    "twinkle.checkpoint_engine": Absent(
        "weights reach samplers through hand_over or as checkpoints, without an engine"
    ),
    "twinkle.hub.hub": Moved("twinkle.hub"),
    "twinkle.infra._ray": Absent("how groups are placed on Ray is internal; twinkle.initialize(mode='ray') does it"),
    "twinkle.infra:RayHelper": Absent("how groups are placed on Ray is internal"),
    "twinkle.infra:ResourceManager": Absent("how groups are placed on Ray is internal"),
    "twinkle.kernel": Absent("kernels are chosen by the trainer itself"),
    "twinkle.model.multi_lora_target_parameters": Absent("fused experts are not trained yet"),
    "twinkle.model.multi_lora_transformers": Moved("twinkle.model"),
    "twinkle.model:MultiAdapter": Absent("the Trainer keeps adapters in its own store, beside the base model"),
    "twinkle.patch": Absent(_PATCH),
    "twinkle.sampler.vllm_engine": Absent(_ENGINE),
    "twinkle.sampler.vllm_sampler": Moved("twinkle.sampler"),
    "twinkle.sampler.vllm_sampler.vllm_engine": Absent(_ENGINE),
    "twinkle.sampler.vllm_sampler.vllm_sampler": Moved("twinkle.sampler"),
    "twinkle.sampler:BaseSamplerEngine": Absent(_ENGINE),
    "twinkle.sampler:VLLMEngine": Absent(_ENGINE),
    "twinkle.utils.framework": Moved(
        "twinkle.framework_util", {"Framework": "twinkle.framework_util", "Torch": "twinkle.torch_util"}
    ),
    "twinkle.utils.import_utils": Absent(_LAZY),
    "twinkle.utils.platform": Moved("twinkle.infra"),
    "twinkle.utils.platforms": Moved("twinkle.infra"),
    "twinkle.utils:_LazyModule": Absent(_LAZY),
    # the server
    "twinkle.server.common.checkpoint_base": Absent(_STATE),
    "twinkle.server.common.checkpoint_factory": Absent(_STATE),
    "twinkle.server.common.io_utils": Absent(_STATE),
    "twinkle.server.common.router": Absent(
        "a request goes to the replica that owns its adapter; the number of replicas is set in the configuration"
    ),
    "twinkle.server.common.serialize": Moved("twinkle_client.common.serialize"),
    "twinkle.server.gateway:build_server_app": Absent(_APPLICATIONS),
    "twinkle.server.model": Absent(_APPLICATIONS),
    "twinkle.server.processor": Absent(_APPLICATIONS),
    "twinkle.server.sampler": Absent(_APPLICATIONS),
    "twinkle.server.state:ServerStateProxy": Absent(_STATE),
    "twinkle.server.tinker": Absent("one server speaks both protocols; twinkle.server.launch_server starts it"),
    "twinkle.server.twinkle": Absent("one server speaks both protocols; twinkle.server.launch_server starts it"),
    "twinkle.server.utils": Absent(
        "how the server queues, journals and keeps its work is internal; see docs/architecture.md"
    ),
}


def install() -> None:
    """Let Python find the older paths of the library. ``import twinkle`` calls it."""
    OlderImportPaths("twinkle", PATHS).install()


def missing(module: str, name: str) -> AttributeError | ImportError:
    """Return the error to raise for a name that a module of the library does not have."""
    return compatibility.missing(PATHS, module, name)
