"""The server's configuration: a strict schema, YAML files with interpolation, and what became of the older form.

``load_config`` reads a file, ``default_config`` is what is served without one, ``describe`` prints what is in effect.
"""

from twinkle.errors import ConfigError, ConfigParseError
from twinkle.server.config.applications import ApplicationSpec, ModelArgs, ProcessorArgs, SamplerArgs, ServerArgs
from twinkle.server.config.loading import default_config, load_config
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
from twinkle.server.config.server_config import DEFAULT_MODEL, ServerConfig
from twinkle.server.config.serving import ServedModelConfig

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
