"""The server's configuration: a strict schema, YAML files with interpolation, and an importer of the older form.

``load_config`` reads a file, ``default_config`` returns the configuration of a server without one, and ``describe``
returns a configuration as commented YAML. From the bottom: ``messages`` (words for what is allowed and what is wrong),
``sections``, ``placement`` and ``applications`` (the schema), ``rules`` between sections, ``sources`` (file and
environment), ``without_effect`` (notes on such keys), ``older`` (the older form), ``server_config``, which puts them
together, and ``reference`` (YAML and tables for readers). May import: the library's ``errors``, ``environment`` and
``hub``.
"""

from twinkle.errors import ConfigError, ConfigParseError
from twinkle.server.config.applications import (
    ApplicationSpec,
    ModelArgs,
    ProcessorArgs,
    SamplerArgs,
    ServedModelConfig,
    ServerArgs,
)
from twinkle.server.config.reference import describe
from twinkle.server.config.sections import (
    AuthConfig,
    ClientsConfig,
    HttpOptions,
    LimitsConfig,
    LoggingConfig,
    PersistenceConfig,
    TelemetryConfig,
)
from twinkle.server.config.server_config import DEFAULT_MODEL, ServerConfig, default_config, load_config

__all__ = [
    "DEFAULT_MODEL",
    "ApplicationSpec",
    "AuthConfig",
    "ClientsConfig",
    "ConfigError",
    "ConfigParseError",
    "HttpOptions",
    "LimitsConfig",
    "LoggingConfig",
    "ModelArgs",
    "PersistenceConfig",
    "ProcessorArgs",
    "SamplerArgs",
    "ServedModelConfig",
    "ServerArgs",
    "ServerConfig",
    "TelemetryConfig",
    "default_config",
    "describe",
    "load_config",
]
