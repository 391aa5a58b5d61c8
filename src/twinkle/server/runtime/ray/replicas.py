"""Several replicas of one base model, each with adapters and sampling sessions of its own."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Replicas:
    """Of one base model, by name. Every process of a server knows the same ones."""

    names: tuple[str, ...]

    def owner(self, identifier: str, recorded: str) -> str:
        """Who has a run or a sampling session that is on record as ``recorded``'s.

        Where that one is not there any more, because the configuration has changed, another takes its place: all find
        the same one, and what it needs is in the state that they share.
        """
        return recorded if recorded in self.names else self.chosen(identifier)

    def chosen(self, identifier: str) -> str:
        """The same one for the same identifier, and all alike often."""
        number = int.from_bytes(hashlib.blake2b(identifier.encode(), digest_size=8).digest())
        return self.names[number % len(self.names)]

    def emptiest(self, identifier: str, runs: Mapping[str, int]) -> str:
        """Where a new run is to go, given how many each has."""
        fewest = min(runs.get(name, 0) for name in self.names)
        return Replicas(tuple(name for name in self.names if runs.get(name, 0) == fewest)).chosen(identifier)
