"""The components with a device mesh that this program has made: their names, groups and meshes, which the drawing of
:func:`get_device_placement` shows."""

import re
from collections import Counter
from dataclasses import dataclass

from twinkle.errors import InvalidInputError
from twinkle.infra.device_mesh import DeviceMesh

__all__ = ["Component", "components", "forget_components", "name_component", "record_component"]


@dataclass(frozen=True)
class Component:
    """One object on a worker group, or in this process. With ``group`` None it is drawn in every group."""

    name: str
    group: str | None
    mesh: DeviceMesh


_components: dict[str, Component] = {}
_counts: Counter[str] = Counter()


def name_component(class_name: str, instance_id: str | None) -> str:
    """Return ``instance_id``, or without one the class's name with a running number, such as ``data_loader-0``."""
    if instance_id is not None:
        if instance_id in _components:
            raise InvalidInputError("instance_id", instance_id, "a name that no other component has")
        return instance_id
    name = f"{re.sub('(?<=[a-z0-9])(?=[A-Z])', '_', class_name).lower()}-{_counts[class_name]}"
    _counts[class_name] += 1
    return name


def record_component(class_name: str, name: str | None, group: str | None, mesh: object) -> None:
    """Record where a component with a DeviceMesh runs; without a ``name`` (in one process), under its class's name."""
    if isinstance(mesh, DeviceMesh):  # a data loader also accepts other kinds of mesh, which cannot be drawn
        name = class_name if name is None else name
        _components[name] = Component(name, group, mesh)


def components() -> tuple[Component, ...]:
    return tuple(_components.values())


def forget_components() -> None:
    _components.clear()
    _counts.clear()
