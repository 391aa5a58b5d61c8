"""Check whether an optional package is installed, and in the right version."""

from functools import cache

__all__ = ["exists", "requires"]


@cache
def requires(package: str) -> None:
    """Raise ImportError unless ``package`` is installed; ``"peft>=0.11"`` asks for a version as well."""
    from importlib.metadata import PackageNotFoundError, version

    from packaging.requirements import InvalidRequirement, Requirement

    from twinkle.errors import InvalidInputError

    try:
        wanted = Requirement(package)
    except InvalidRequirement as error:
        raise InvalidInputError("package", package, "a requirement such as 'ray' or 'peft>=0.11'") from error
    try:
        found = version(wanted.name)
    except PackageNotFoundError as error:
        raise ImportError(f"the package {wanted.name!r} is not installed: pip install '{package}'") from error
    if not wanted.specifier.contains(found, prereleases=True):
        raise ImportError(f"{wanted.name} {found} is installed, wanted: pip install '{package}'")


def exists(package: str) -> bool:
    """Return False if :func:`requires` raises ImportError for ``package``, else True."""
    try:
        requires(package)
    except ImportError:
        return False
    return True
