"""The options of training scripts: ``args = CLI.from_args()`` at the start of a script.

args        the options and their defaults, in groups
fields      find the group and field of a key, and convert texts to the field's type
sources     the sources of settings: ``.env``, the environment, a YAML file, the command line
resolver    apply one source after another to the groups
"""

from twinkle.cli.args import (
    Args,
    CheckpointArgs,
    DatasetArgs,
    InfraArgs,
    LoraArgs,
    LossArgs,
    ModelArgs,
    OptimizerArgs,
    RLArgs,
    SamplerArgs,
    SamplingArgs,
    SchedulerArgs,
    ServerArgs,
    TemplateArgs,
    TrainingArgs,
)
from twinkle.cli.fields import ConfigRegistry, ValueCaster
from twinkle.cli.resolver import CLI, ConfigResolver
from twinkle.cli.sources import CLISource, ConfigSource, DotEnvSource, EnvVarSource, YamlSource

__all__ = [
    "CLI",
    "Args",
    "CLISource",
    "CheckpointArgs",
    "ConfigRegistry",
    "ConfigResolver",
    "ConfigSource",
    "DatasetArgs",
    "DotEnvSource",
    "EnvVarSource",
    "InfraArgs",
    "LoraArgs",
    "LossArgs",
    "ModelArgs",
    "OptimizerArgs",
    "RLArgs",
    "SamplerArgs",
    "SamplingArgs",
    "SchedulerArgs",
    "ServerArgs",
    "TemplateArgs",
    "TrainingArgs",
    "ValueCaster",
    "YamlSource",
]
