"""Files encrypted to their readers with age (age-encryption.org): nobody else can read them, this server included."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyrage

from twinkle.errors import InvalidInputError

_MOST_RECIPIENTS = 20
_ALLOWED = "an age recipient (age1…) or an SSH public key (ssh-ed25519 … or ssh-rsa …)"


def check_recipients(recipients: Sequence[str], field: str) -> None:
    """Raises for the first that is none."""
    if not 1 <= len(recipients) <= _MOST_RECIPIENTS:
        raise InvalidInputError(field, f"{len(recipients)} recipients", f"1 to {_MOST_RECIPIENTS}, or null")
    for index, recipient in enumerate(recipients):
        try:
            _recipient(recipient)
        except pyrage.RecipientError as error:
            raise InvalidInputError(f"{field}[{index}]", recipient, f"{_ALLOWED}: {error}") from None


def encrypt_files(directory: Path, recipients: Sequence[str]) -> None:
    """Each file of the directory becomes ``<file>.age``."""
    readers = [_recipient(recipient) for recipient in recipients]
    for file in sorted(directory.iterdir()):
        pyrage.encrypt_file(str(file), str(file.with_name(f"{file.name}.age")), readers)
        file.unlink()


def _recipient(text: str) -> Any:
    kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
    return kind.Recipient.from_str(text)
