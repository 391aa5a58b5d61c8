"""Which group and field a key means."""

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

from twinkle.cli.args import PRIMARY

__all__ = ["ConfigRegistry", "normalized"]

# Other names that people use.
_ALIASES = {"lr": "learning_rate", "num_gpus": "nproc_per_node", "max_new_tokens": "max_tokens"}


class ConfigRegistry:
    """``groups``: by name, each a dataclass or an instance of one."""

    def __init__(self, groups: Mapping[str, Any]) -> None:
        owners: dict[str, list[tuple[str, Field[Any]]]] = {}
        for group, described in groups.items():
            for each in fields(described):
                owners.setdefault(each.name, []).append((group, each))
        self._by_key = {
            f"{group}_{name}": (group, name) for name, group_fields in owners.items() for group, _ in group_fields
        }
        self._by_key |= {name: (_owner(name, group_fields), name) for name, group_fields in owners.items()}

    def resolve(self, key: str) -> tuple[str, str] | None:
        """The group and field, by the field's name, an alias of it, or ``<group>_<field>``; None: nobody's."""
        name = normalized(key)
        return self._by_key.get(_ALIASES.get(name, name))

    def all_keys(self) -> list[str]:
        return sorted({*self._by_key, *_ALIASES})


def normalized(key: str) -> str:
    return key.strip().lower().replace("-", "_")


def _owner(name: str, group_fields: list[tuple[str, Field[Any]]]) -> str:
    if len(group_fields) == 1:
        return group_fields[0][0]
    primary = [group for group, each in group_fields if each.metadata.get(PRIMARY)]
    if len(primary) != 1:
        groups = ", ".join(group for group, _ in group_fields)
        raise ValueError(f"{name!r} is a field of {groups}: exactly one of them must be marked as primary")
    return primary[0]
