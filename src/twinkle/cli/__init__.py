"""The options of training scripts: ``args = CLI.from_args()`` at a script's head.

args        what there is to set, in groups
fields      which group and field a key means, and texts as values of a field's type
sources     where settings come from: ``.env``, the environment, a YAML file, the command line
resolver    one source after another into the groups
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
