"""Passwords in values of the configuration are not for people to see: not in errors, not in printed configurations."""

import re

__all__ = ["without_passwords"]

# Up to the last @: whoever forgot to quote one in a password does not get the rest of it printed.
_IN_ADDRESS = re.compile(r"(://[^:@]*:).*@", re.S)
_IN_QUERY = re.compile(r"(password=)[^&\s'\"]+", re.I)


def without_passwords(text: str) -> str:
    """``text`` with *** for the password of a URL in it."""
    return _IN_QUERY.sub(r"\1***", _IN_ADDRESS.sub(r"\1***@", text))
