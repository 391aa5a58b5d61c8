"""What was made where: the names of components, and their meshes for the drawing of :func:`get_device_placement`."""

import re
from collections import Counter
from dataclasses import dataclass

from twinkle.errors import InvalidInputError
from twinkle.infra.device_mesh import DeviceMesh

__all__ = ["Component", "components", "forget_components", "name_component", "record_component"]


@dataclass(frozen=True)
class Component:
    """An object on a worker group, or in this process (``group`` None: in the first group)."""

    name: str
    group: str | None
    mesh: DeviceMesh


_components: dict[str, Component] = {}
_counts: Counter[str] = Counter()


def name_component(class_name: str, instance_id: str | None) -> str:
    """``instance_id``, or the class's name with the number of its instances so far."""
    if instance_id is not None:
        if instance_id in _components:
            raise InvalidInputError("instance_id", instance_id, "a name that no other component has")
        return instance_id
    name = f"{re.sub('(?<=[a-z0-9])(?=[A-Z])', '_', class_name).lower()}-{_counts[class_name]}"
    _counts[class_name] += 1
    return name


def record_component(class_name: str, name: str | None, group: str | None, mesh: object) -> None:
    """Note where a component is. In one process, where nobody addresses it, its class's name will do."""
    if isinstance(mesh, DeviceMesh):  # a data loader takes other meshes too, which cannot be drawn
        name = class_name if name is None else name
        _components[name] = Component(name, group, mesh)


def components() -> tuple[Component, ...]:
    return tuple(_components.values())


def forget_components() -> None:
    _components.clear()
    _counts.clear()
