"""Apply the sources of settings to the groups, one after another; later sources override earlier ones."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from twinkle.cli.args import Args
from twinkle.cli.fields import ConfigRegistry, ValueCaster, normalized
from twinkle.cli.sources import CLISource, DotEnvSource, EnvVarSource, YamlSource
from twinkle.environment import set_among
from twinkle.errors import InvalidInputError
from twinkle.utils.logger import get_logger

__all__ = ["CLI", "ConfigResolver"]

_MEANT_OTHERWISE = {"log_level", "world_size"}  # variables of the logger and of torchrun, which have their own meaning


class ConfigResolver:
    """Sets the fields of ``args``. Settings that match no field go to ``args.extra``; ``use_megatron`` sets a field."""

    def __init__(self, args: Args) -> None:
        self.args = args
        self.registry = ConfigRegistry(args.groups)

    def apply(self, mapping: Mapping[str, Any], cast_strings: bool = False, warn: bool = True) -> None:
        """Set the fields that ``mapping`` names; raise if a field does not take its value.

        ``cast_strings``: texts that go to ``extra``, where no type is declared, are read with
        :meth:`ValueCaster.auto_cast`. ``warn``: log a warning for an unknown key that resembles a known one.
        """
        for key, value in mapping.items():
            found = self.registry.resolve(key)
            if normalized(key) == "use_megatron":
                self._choose_backend(value)
            elif found is not None:
                group = self.args.groups[found[0]]
                hint = get_type_hints(type(group))[found[1]]
                setattr(group, found[1], ValueCaster.coerce_to_field(key, value, hint))
            else:
                if warn:
                    self._warn_of_near_miss(key)
                cast = ValueCaster.auto_cast(value) if cast_strings and isinstance(value, str) else value
                self.args.extra[normalized(key)] = cast

    def _choose_backend(self, value: Any) -> None:
        """Apply ``use_megatron``: if false, set ``strategy`` to native_fsdp, with which scripts do not use Megatron."""
        if not ValueCaster.coerce_to_field("use_megatron", value, bool):
            self.args.model.strategy = "native_fsdp"

    def _warn_of_near_miss(self, key: str) -> None:
        near = difflib.get_close_matches(normalized(key), self.registry.all_keys(), n=1, cutoff=0.85)
        if near:
            get_logger().warning(f"option {key!r} is unknown and goes to args.extra; did you mean {near[0]!r}?")


class CLI:
    """The entry point for training scripts."""

    @staticmethod
    def from_args(
        argv: Sequence[str] | None = None,
        env_file: str | Path | None = None,
        config_file: str | Path | None = None,
    ) -> Args:
        """Return the options: defaults, overridden in this order by ``.env``, ``TWINKLE_…`` variables, a YAML file and
        the command line.

        argv: by default this program's arguments. config_file: a YAML file, unless ``--config`` names another one.
        (The option ``config`` of the server's group is ``--server-config``.)
        """
        args = Args()
        resolver = ConfigResolver(args)
        said = CLISource(argv).load()
        yaml_file = said.pop("config", config_file)
        if isinstance(yaml_file, bool):
            raise InvalidInputError("config", yaml_file, "--config followed by the path of a YAML file")
        known = resolver.registry
        dot_env = {key: value for key, value in DotEnvSource(env_file).load().items() if known.resolve(key) is not None}
        resolver.apply(dot_env)
        # Most variables that no field has are those of other parts of the library: no warnings.
        resolver.apply(EnvVarSource(known).load(), cast_strings=True, warn=False)
        _tell_of_unread_variables(known)
        if yaml_file is not None:
            resolver.apply(YamlSource(yaml_file, known).load())
        resolver.apply(said, cast_strings=True)
        return args


def _tell_of_unread_variables(known: ConfigRegistry) -> None:
    """Log the variables that have the name of an option without the prefix. Other programs set some of them (HOST)."""
    unread = set_among(sorted(key.upper() for key in known.all_keys() if key not in _MEANT_OTHERWISE))
    if unread:
        options = ", ".join(f"TWINKLE_{name}" for name in unread)
        get_logger().warning(f"environment: {', '.join(unread)} not read as an option; set {options} instead")
