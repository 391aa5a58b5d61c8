"""Shell commands with arguments of a model: every argument is quoted, so that a shell never reads it as code.

A template is a text for ``str.format``, such as ``grep -n {pattern} notes.txt``. Each placeholder becomes one literal
piece of the command line. Inside quotes of the template, those are closed before the value and opened again after it,
because quotes do not nest: ``"{pattern}"`` becomes ``""'the value'""``.
"""

import re
from collections.abc import Mapping
from string import Formatter
from typing import Any

from twinkle.errors import InvalidInputError

__all__ = ["CommandTemplate"]

_FORMATTER = Formatter()
# Where a shell would read a quoted value as code after all, or where the quotes around a placeholder cannot be told.
# A NUL character stands for a placeholder. A line break in a value would end a comment, and the rest would be code.
_REFUSED = {
    "a command substitution: $( or `": re.compile(r"\$\(|`"),
    "a here-document: <<": re.compile(r"<<"),
    "an arithmetic expression or condition: ((, [[ or $[": re.compile(r"\(\(|\[\[|\$\["),
    "a placeholder in a subscript: name[{…}]": re.compile(r"\w\[[^\]]*\0"),
    "$ before a quote or a placeholder": re.compile(r"\$['\"\0]"),
    "a parameter expansion other than ${NAME}": re.compile(r"\$\{(?!\w+\})"),
    "a comment: #": re.compile(r"(?:^|[\s;&|()<>])#"),
}

# Commands that read code from their arguments or their input. They are looked for in the text without quotes and
# backslashes (see _words), because 'eval' and \eval are eval.
_START = r"(?:^|[\s;&|()])"
_SHELL = r"(?:\S*/)?(?:(?:a|ba|c|da|fi|k|mk|rba|tc|z)?sh|\$SHELL|\$\{SHELL\})(?![\w./-])"
# Words before which there is no other command: a word behind them is the name of a program or built-in command.
_RUNNERS = r"(?:builtin|command|coproc|do|elif|else|env|exec|if|nice|nohup|sudo|then|time|until|while|xargs|!|\{)"
_COMMAND = rf"(?:^|[;&|(\n])\s*(?:(?:{_RUNNERS}|\w+=\S*)\s+)*"
_REFUSED_COMMANDS = {
    "a placeholder or variable as the name of a command": re.compile(rf"{_COMMAND}(?:\0|\$\w+\s|\$\{{\w+\}}\s)"),
    "a shell that reads code from its argument: sh -c": re.compile(rf"{_START}{_SHELL}\s(?:.*\s)?-\w*c"),
    "a shell that reads code from a command: | sh": re.compile(
        rf"\|&?\s*(?:(?:{_RUNNERS}|\w+=\S*)\s+)*{_SHELL}|{_START}(?:{_SHELL}|\.|source)\s+<\("
    ),
    "a command that evaluates its arguments, such as eval, trap or ssh": re.compile(
        rf"{_START}(?:(?:eval|let|declare|typeset|local|export|readonly|unset|trap|ssh|su|watch|parallel)\s"
        r"|env\s(?:.*\s)?-(?:\w*S|-split))"
    ),
    "a placeholder as the name of a variable: read, mapfile, printf -v, test -v": re.compile(
        rf"{_START}(?:(?:read|mapfile|readarray|getopts)\s[^;&|\n]*\0|printf\s+(?:-v|\0)"
        r"|(?:test|\[)\s[^;&|\n]*(?:-[vR]\s*\0|\0\s+\0))"
    ),
}


class CommandTemplate:
    """A command line with named placeholders. ``fill`` makes the command from the arguments of a tool call."""

    def __init__(self, template: str) -> None:
        """Check the template; raise InvalidInputError if its placeholders cannot be filled safely."""
        self._pieces: list[tuple[str, str | None, str, str | None, str]] = []  # text, name, spec, conversion, quote
        quote = ""
        for text, name, spec, conversion in _parsed(template):
            quote = _quote_after(text, quote, template)
            if name is not None:
                _check_placeholder(name, spec or "", template)
            self._pieces.append((text, name, spec or "", conversion, quote))
        if any(name is not None for _, name, *_ in self._pieces):
            plain = "".join(text + ("" if name is None else "\0") for text, name, *_ in self._pieces)
            _check_shell(plain, template)
        if quote:
            raise InvalidInputError("command_template", template, f"a template whose quote {quote} is closed")

    def fill(self, arguments: Mapping[str, Any]) -> str:
        """Return the command. Raise InvalidInputError if an argument is missing or holds a NUL character."""
        command = ""
        for text, name, spec, conversion, quote in self._pieces:
            command += text
            if name is not None:
                command += f"{quote}{_quoted(_value(name, spec, conversion, arguments))}{quote}"
        return command


def _parsed(template: str) -> list[tuple[str, str | None, str | None, str | None]]:
    try:
        return list(_FORMATTER.parse(template))
    except ValueError as error:
        raise InvalidInputError("command_template", template, f"a text for str.format ({error})") from error


def _quoted(text: str) -> str:
    """Return a text in single quotes.

    ``shlex.quote`` leaves harmless words as they are, and next to other text they are not harmless: behind ``$HOME``
    they would name another variable, and ``PATH=x`` would be an assignment.
    """
    return "'" + text.replace("'", "'\"'\"'") + "'"


def _quote_after(text: str, quote: str, template: str) -> str:
    """Return the quote that is open after ``text``, "" for none, if ``quote`` was open before it."""
    escaped = False
    for letter in text:
        if escaped:
            escaped = False
        elif letter == "\\" and quote != "'":
            escaped = True
        elif letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
    if escaped:
        raise InvalidInputError("command_template", template, "a template without a backslash before a placeholder")
    return quote


def _words(plain: str) -> str:
    """Return the text without quotes and backslashes; a letter that they make ordinary, such as ";", becomes "_"."""
    words, quote, escaped = "", "", False
    for letter in plain:
        if escaped:
            words += "" if letter == "\n" else re.sub(r"[\s;&|()<>#]", "_", letter)
            escaped = False
        elif letter == "\\" and quote != "'":
            escaped = True
        elif letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
        else:
            words += re.sub(r"[\s;&|()<>#]", "_", letter) if quote else letter
    return words


def _check_placeholder(name: str, spec: str, template: str) -> None:
    if not re.fullmatch(r"[A-Za-z_]\w*(?:[.\[].*)?", name) or "{" in spec:
        allowed = "a template whose placeholders are names of arguments, such as {path}; write {{ and }} for braces"
        raise InvalidInputError("command_template", template, allowed)


def _check_shell(plain: str, template: str) -> None:
    words = _words(plain)
    found = [what for what, pattern in _REFUSED.items() if pattern.search(plain)]
    found += [what for what, pattern in _REFUSED_COMMANDS.items() if pattern.search(words)]
    if found:
        allowed = f"a template with placeholders and without {found[0]}; put such commands into a script"
        raise InvalidInputError("command_template", template, allowed)


def _value(name: str, spec: str, conversion: str | None, arguments: Mapping[str, Any]) -> str:
    try:
        value, _ = _FORMATTER.get_field(name, (), arguments)
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        raise InvalidInputError("arguments", dict(arguments), f"arguments with {name!r}") from error
    text = format(_FORMATTER.convert_field(value, conversion), spec)
    if "\0" in text:
        raise InvalidInputError(name, text, "a text without NUL characters")
    return text
