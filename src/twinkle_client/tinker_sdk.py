"""Use the tinker SDK, versions 0.16 to 0.36, with a Twinkle server.

The SDK reads the server's address and the API key from environment variables. Methods that accept less than our server
does, or wait too long, are wrapped, not replaced, so that each version of the SDK keeps the rest of its behaviour:

- a key need not begin with ``tml-``. The SDK's check gets a key with that prefix; requests carry the real key, and an
  additional header that tells a server which issues no keys to accept any key;
- addresses of checkpoints may begin with ``twinkle://``, which means the same as ``tinker://``;
- ``ServiceClient`` has two more methods, ``create_full_training_client`` and its async form. They train all parameters
  of a model that is served with ``train_mode: full``. Its methods that continue from a checkpoint also take checkpoints
  of all parameters;
- a new client that no server answers raises ConnectionLostError within 30 seconds. The SDK itself tries silently for
  five minutes. Once a server has answered, the SDK's own retries apply.
"""

import functools
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from twinkle_client.client.retries import RetryPolicy, read_seconds
from twinkle_client.client.transport import HttpCall, Transport
from twinkle_client.environment import read_environment, set_tinker_variables, tinker_key, tinker_url
from twinkle_client.errors import InvalidRequestError, MissingPackageError, ResponseError

__all__ = ["init_tinker_client", "patch_tinker"]

logger = logging.getLogger(__name__)

_KEY_PREFIXES = ("tml-", "eyJ")
_MARK = "_twinkle_wrapped"
_PROBE_SECONDS = 10.0  # without an answer, before the server is asked again
_LOADS = "_create_training_client_via_load_weights_submit"  # in newer versions; takes checkpoints of either kind
_WEIGHTS_REST = "_get_rest_client_for_weights"  # in newer versions, where create_rest_client warns
_AUTH_MODULE = "tinker.lib._auth_token_provider"  # since 0.18; in earlier versions the client class checks the key


def init_tinker_client(base_url: str | None = None, api_key: str | None = None, **unused: object) -> None:
    """Prepare the tinker SDK, before ``tinker.ServiceClient()``. A second call changes the server and the key.

    Without arguments the server is that of TWINKLE_SERVER_URL and TWINKLE_SERVER_TOKEN, else of TINKER_BASE_URL and
    TINKER_API_KEY, else one on this machine that issues no keys. Other keywords of ``init_twinkle_client`` are
    accepted, so that scripts can pass the same keywords to both functions; a log line says that they are not used.
    """
    patch_tinker()
    set_tinker_variables(base_url, api_key)
    if unused:
        logger.info("init_tinker_client does not use %s", ", ".join(sorted(unused)))


def patch_tinker() -> None:
    """Wrap the methods of the installed SDK, once. Does not change the server's address or the key."""
    if find_spec("tinker") is None:
        raise MissingPackageError("init_tinker_client needs the tinker SDK: pip install 'tinker>=0.16,<0.37'")
    if find_spec(_AUTH_MODULE) is not None:
        _wrap_key_provider(import_module(_AUTH_MODULE))
    else:
        _wrap_client(import_module("tinker._client"))
    holders = import_module("tinker.lib.internal_client_holder")
    _wrap_holder(holders)
    _wrap_sampling(holders)
    _wrap_paths(import_module("tinker.types.checkpoint"))
    services = import_module("tinker.lib.public_interfaces.service_client")
    _add_full_training(services)
    _wrap_from_state(services)


def _wrap_key_provider(module: ModuleType) -> None:
    """Wrap the class that adds the key to each request, for SDK versions from 0.18 on."""
    provider = module.ApiKeyAuthProvider
    if _is_wrapped(provider.__init__):
        return
    check: Callable[..., None] = provider.__init__
    flow: Callable[..., AsyncIterator[Any]] = provider.async_auth_flow

    @functools.wraps(check)
    def init(self: Any, api_key: str | None = None) -> None:
        key = api_key or tinker_key()
        check(self, _acceptable(key))
        self._token = key

    async def async_auth_flow(self: Any, request: Any) -> AsyncIterator[Any]:
        request.headers["Twinkle-Authorization"] = f"Bearer {self._token}"
        async for sent in flow(self, request):
            yield sent

    provider.__init__ = _wrapped(init)
    provider.async_auth_flow = async_auth_flow


def _wrap_client(module: ModuleType) -> None:
    """Wrap the client class, which holds the key, for SDK versions before 0.18."""
    client = module.AsyncTinker
    if _is_wrapped(client.__init__):
        return
    original: Callable[..., None] = client.__init__

    @functools.wraps(original)
    def init(
        self: Any, *, api_key: str | None = None, default_headers: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        key = api_key or tinker_key()
        headers = {**(default_headers or {}), "X-API-Key": key, "Twinkle-Authorization": f"Bearer {key}"}
        original(self, api_key=_acceptable(key), default_headers=headers, **options)
        self.api_key = key

    client.__init__ = _wrapped(init)


def _wrap_holder(module: ModuleType) -> None:
    """Wrap the constructor of the object that every client of the SDK makes first, with its server's address."""
    holder = module.InternalClientHolder
    if _is_wrapped(holder.__init__):
        return
    original: Callable[..., None] = holder.__init__

    @functools.wraps(original)
    def init(self: Any, *given: Any, **options: Any) -> None:  # the SDK's versions have different arguments
        # A copy of an existing client, perhaps in another process, has a session or a configuration of the server.
        if options.get("session_id") is None and options.get("_client_config") is None:
            _check_answers(str(options.get("base_url") or tinker_url()))
        original(self, *given, **options)

    holder.__init__ = _wrapped(init)


def _check_answers(address: str) -> None:
    """Raise ConnectionLostError if no server answers. Any answer will do, also an error."""
    text = read_environment().connect_deadline
    seconds = read_seconds(None, "connect_deadline", text, "TWINKLE_CONNECT_DEADLINE")
    policy = RetryPolicy(deadline=seconds, statuses=frozenset(), connect_deadline=seconds)
    transport = Transport(address, tinker_key(), policy, timeout=_PROBE_SECONDS)
    try:
        transport.send(HttpCall("GET", "/healthz"))
    except ResponseError:
        return
    except InvalidRequestError as error:
        if error.status is None:  # the address is not valid
            raise
    finally:
        transport.close()


def _wrap_sampling(module: ModuleType) -> None:
    holder = module.InternalClientHolder
    if _is_wrapped(holder._create_sampling_session):
        return
    original: Callable[..., Awaitable[str]] = holder._create_sampling_session

    @functools.wraps(original)
    async def create(self: Any, model_path: str | None = None, base_model: str | None = None) -> str:
        path = None if model_path is None else _tinker_path(model_path)
        return await original(self, model_path=path, base_model=base_model)

    holder._create_sampling_session = _wrapped(create)


def _wrap_paths(module: ModuleType) -> None:
    parsed = module.ParsedCheckpointTinkerPath
    if _is_wrapped(parsed.from_tinker_path):
        return
    original: Callable[[str], Any] = parsed.from_tinker_path

    def from_tinker_path(tinker_path: str) -> Any:
        return original(_tinker_path(tinker_path))

    parsed.from_tinker_path = staticmethod(_wrapped(from_tinker_path))


def _add_full_training(module: ModuleType) -> None:
    """Add methods that create a training client for all parameters, unless the SDK has its own."""
    service = module.ServiceClient
    if hasattr(service, "create_full_training_client"):
        return
    training = import_module("tinker.lib.public_interfaces.training_client")

    def submit(self: Any, base_model: str, user_metadata: dict[str, str] | None) -> Any:
        """Send the SDK's request for a new model, without a LoRA configuration; return a future of its client."""
        number, types, holder = self.holder.get_training_client_id(), module.types, self.holder
        request = types.CreateModelRequest(
            session_id=holder.get_session_id(),
            model_seq_id=number,
            base_model=base_model,
            user_metadata=user_metadata,
        )

        async def create() -> Any:
            began = time.time()
            with holder.aclient(module.ClientConnectionPoolType.TRAIN) as client:
                sent = await client.models.create(request=request)
            created = await module._APIFuture(
                types.CreateModelResponse,
                holder,
                sent,
                request_start_time=began,
                request_type="CreateModel",
                queue_state_observer=module.QueueStateLogger(base_model, "Model creation"),
            ).result_async()
            return training.TrainingClient(holder, model_seq_id=number, model_id=created.model_id)

        return holder.run_coroutine_threadsafe(create())

    def create_full_training_client(
        self: Any, base_model: str, seed: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> Any:
        """Create a TrainingClient that trains all parameters of a model served with ``train_mode: full``.

        ``seed`` has no effect: no weights are drawn at random, training begins with those of the base model.
        """
        return submit(self, base_model, user_metadata).result()

    async def create_full_training_client_async(
        self: Any, base_model: str, seed: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> Any:
        """Do the same as :meth:`create_full_training_client` in a coroutine."""
        return await submit(self, base_model, user_metadata).result_async()

    service.create_full_training_client = module.sync_only(create_full_training_client)
    service.create_full_training_client_async = create_full_training_client_async


def _wrap_from_state(module: ModuleType) -> None:
    """Wrap the methods that create a training client from a checkpoint: the SDK expects those of adapters only."""
    service = module.ServiceClient
    for name, optimizer in (
        ("create_training_client_from_state", False),
        ("create_training_client_from_state_with_optimizer", True),
    ):
        if not _is_wrapped(getattr(service, name)):
            setattr(service, name, _wrapped(module.sync_only(_from_state(getattr(service, name), optimizer))))
            in_coroutine = f"{name}_async"
            setattr(service, in_coroutine, _wrapped(_from_state_async(getattr(service, in_coroutine), optimizer)))


def _from_state(original: Callable[..., Any], optimizer: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def create(self: Any, *given: Any, **options: Any) -> Any:
        call = _named(original, self, given, options)
        info = _weights_rest(self, call).get_weights_info_by_tinker_path(call["path"]).result()
        if info.is_lora:
            return original(self, *given, **options)
        if hasattr(self, _LOADS):
            return _submit_load(self, call, optimizer).result()
        training = self.create_full_training_client(info.base_model, user_metadata=call.get("user_metadata"))
        (training.load_state_with_optimizer if optimizer else training.load_state)(call["path"]).result()
        return training

    return create


def _from_state_async(original: Callable[..., Awaitable[Any]], optimizer: bool) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(original)
    async def create(self: Any, *given: Any, **options: Any) -> Any:
        call = _named(original, self, given, options)
        info = await _weights_rest(self, call).get_weights_info_by_tinker_path(call["path"])
        if info.is_lora:
            return await original(self, *given, **options)
        if hasattr(self, _LOADS):
            return await _submit_load(self, call, optimizer).result_async()
        metadata = call.get("user_metadata")
        training = await self.create_full_training_client_async(info.base_model, user_metadata=metadata)
        load = training.load_state_with_optimizer_async if optimizer else training.load_state_async
        await (await load(call["path"])).result_async()
        return training

    return create


def _named(original: Callable[..., Any], service: Any, given: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Return the arguments of a call by name: the SDK's versions have different ones after the path."""
    return inspect.signature(original).bind(service, *given, **options).arguments


def _weights_rest(service: Any, call: Mapping[str, Any]) -> Any:
    """Return the SDK's REST client with the account that may read the checkpoint."""
    if not hasattr(service, _WEIGHTS_REST):
        return service.create_rest_client()
    return getattr(service, _WEIGHTS_REST)(call.get("weights_access_token"))


def _submit_load(service: Any, call: Mapping[str, Any], optimizer: bool) -> Any:
    """Send the one request with which newer versions of the SDK create a model from a checkpoint."""
    return getattr(service, _LOADS)(
        call["path"],
        optimizer=optimizer,
        optimizer_config=call.get("optimizer"),
        base_model=call.get("base_model"),
        user_metadata=call.get("user_metadata"),
        weights_access_token=call.get("weights_access_token"),
    )


def _acceptable(key: str) -> str:
    return key if key.startswith(_KEY_PREFIXES) else f"tml-{key}"


def _tinker_path(path: str) -> str:
    return f"tinker://{path.removeprefix('twinkle://')}" if path.startswith("twinkle://") else path


def _wrapped(function: Any) -> Any:
    setattr(function, _MARK, True)
    return function


def _is_wrapped(function: Any) -> bool:
    return hasattr(function, _MARK)
