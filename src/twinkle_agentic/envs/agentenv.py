"""An environment in a sandbox of E2B, or of a service that speaks its protocol, through the package ``e2b``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from twinkle.data_format import Tool
from twinkle.errors import InvalidInputError
from twinkle.extras import require
from twinkle.utils.logger import get_logger
from twinkle_agentic.environment import read_environment
from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.command_template import CommandTemplate
from twinkle_agentic.envs.openenv_classes import program_output
from twinkle_agentic.tools.base import tool_name as name_of

__all__ = ["AgentEnv", "CommandText"]

Handler = Callable[["AgentEnv", Mapping[str, Any]], str]

_MOST_BYTES = 32 * 1024  # of an observation, in UTF-8
_CUT = "\n[cut at 32 KiB]"


class CommandText(str):
    """What a command wrote, as a text for the model, with the parts as attributes."""

    stdout: str
    stderr: str
    exit_code: int

    def __new__(cls, stdout: str, stderr: str, exit_code: int) -> "CommandText":
        made = super().__new__(cls, program_output(stdout, stderr, exit_code))
        made.stdout, made.stderr, made.exit_code = stdout, stderr, exit_code
        return made


class AgentEnv(Env):
    """A sandbox in which a model runs commands and reads and writes files. Each episode has a new sandbox.

    template: the sandbox's template at the service. api_url: the address of a service other than E2B's; it is also used
    for the sandboxes themselves. api_key: its key (default: the variable E2B_API_KEY; ``dummy`` for another service
    without one). sandbox_timeout: seconds after which the service ends a sandbox; with ``refresh_timeout`` each step
    starts this time anew. command_timeout: seconds for one command. setup_commands: commands that reset runs first.
    sandbox_envs, metadata: variables in the sandbox, and labels of it. include_default_tools: whether there are the
    tools run_command, write_file and read_file.

    Nothing is written to this process's environment. An action that fails becomes an observation that begins with
    ``Error:``, and the episode goes on. Observations are cut at 32 KiB.
    """

    def __init__(
        self,
        template: str,
        api_url: str | None = None,
        api_key: str | None = None,
        sandbox_timeout: int = 300,
        command_timeout: float = 120,
        setup_commands: Sequence[str] | None = None,
        sandbox_envs: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        refresh_timeout: bool = True,
        include_default_tools: bool = True,
    ) -> None:
        require("e2b", "AgentEnv")
        self._template = template
        self._connection = _connection(api_url, api_key)
        self._sandbox_timeout = sandbox_timeout
        self._command_timeout = command_timeout
        self._setup_commands = list(setup_commands or ())
        self._sandbox_envs = dict(sandbox_envs or {})
        self._metadata = dict(metadata or {})
        self._refresh_timeout = refresh_timeout
        self._tools: dict[str, tuple[Tool, Handler]] = {}
        self._sandbox: Any = None
        if include_default_tools:
            self.register_tool(_RUN_COMMAND, lambda env, given: env.run_command(_text(given, "command")))
            self.register_tool(_WRITE_FILE, _write_file)
            self.register_tool(_READ_FILE, lambda env, given: env.sandbox.files.read(_text(given, "path")))

    @property
    def sandbox(self) -> Any:
        """Return the e2b package's object of the running sandbox."""
        if self._sandbox is None:
            raise RuntimeError("there is no sandbox: call reset() first")
        return self._sandbox

    @property
    def sandbox_id(self) -> str | None:
        """Return the id of the running sandbox; None if there is none."""
        return None if self._sandbox is None else str(self._sandbox.sandbox_id)

    def register_tool(self, info: Tool, handler: Handler) -> Self:
        """Add a tool that ``handler(env, arguments)`` answers with a text. Return this object."""
        name = name_of(info)
        if not name:
            raise InvalidInputError("info", info, "the description of a tool, with function.name")
        self._tools[name] = (info, handler)
        return self

    def register_command_tool(self, info: Tool, command_template: str) -> Self:
        """Add a tool that runs a command, such as ``grep -n {pattern} notes.txt``. Return this object.

        The arguments of a call are quoted for the shell, also in placeholders that the template puts in quotes. A
        template in which a shell would still read them as code is refused.
        """
        template = CommandTemplate(command_template)
        return self.register_tool(info, lambda env, arguments: env.run_command(template.fill(arguments)))

    def tools(self) -> list[Tool]:
        return [info for info, _ in self._tools.values()]

    def reset(self, trajectory: Mapping[str, Any] | None = None) -> StepResult:
        """End the old sandbox, make a new one and run the setup commands; raise RuntimeError if one of them fails."""
        self.close()
        from e2b import Sandbox

        self._sandbox = Sandbox.create(
            self._template,
            timeout=self._sandbox_timeout,
            metadata=self._metadata,
            envs=self._sandbox_envs,
            **self._connection,
        )
        for command in self._setup_commands:
            done = self.run_command(command)
            if done.exit_code:
                self.close()
                raise RuntimeError(f"setup command {command!r} failed: {done}")
        return StepResult()

    def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        if tool_name not in self._tools:
            known = ", ".join(self._tools) or "(none)"
            return StepResult(f"Error: unknown tool {tool_name!r}; available: {known}")
        try:
            if self._refresh_timeout:
                self.sandbox.set_timeout(self._sandbox_timeout)
            return StepResult(_cut(str(self._tools[tool_name][1](self, arguments))))
        except Exception as error:  # noqa: BLE001 - a handler may raise anything; the model gets the error
            get_logger().debug("tool %r failed", tool_name, exc_info=True)
            return StepResult(_cut(f"Error: {type(error).__name__}: {error}"))

    def run_command(self, command: str) -> CommandText:
        """Run a shell command in the sandbox and return what it wrote, with ``stdout``, ``stderr`` and ``exit_code``.

        The whole text is a command: to put a model's text into one, use :meth:`register_command_tool`.
        """
        from e2b import CommandExitException

        try:
            done = self.sandbox.commands.run(str(command), timeout=self._command_timeout)
        except CommandExitException as exited:  # the e2b package raises it for every exit code but 0
            done = exited
        return CommandText(done.stdout, done.stderr, done.exit_code)

    def close(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            sandbox.kill()


def _connection(api_url: str | None, api_key: str | None) -> dict[str, Any]:
    """Return the arguments of the e2b package for the service; it reads variables for those that are not given."""
    variables = read_environment()
    found: dict[str, Any] = {} if api_url is None else {"api_url": api_url, "sandbox_url": api_url}
    key = api_key or variables.e2b_api_key
    if key is None and (api_url or variables.e2b_api_url):
        key = "dummy"  # a service of one's own need not check keys, but the e2b package sends one always
    return found if key is None else {**found, "api_key": key}


def _write_file(env: AgentEnv, arguments: Mapping[str, Any]) -> str:
    path, content = _text(arguments, "path"), _text(arguments, "content")
    env.sandbox.files.write(path, content)
    return f"wrote {len(content.encode())} bytes to {path}"


def _text(arguments: Mapping[str, Any], name: str) -> str:
    if not isinstance(arguments.get(name), str):
        raise InvalidInputError(name, arguments.get(name), "a text")
    return str(arguments[name])


def _cut(text: str) -> str:
    data = text.encode("utf-8", "replace")
    return text if len(data) <= _MOST_BYTES else data[:_MOST_BYTES].decode("utf-8", "ignore") + _CUT


def _default_tool(name: str, description: str, **parameters: str) -> Tool:
    properties = {each: {"type": "string", "description": text} for each, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_RUN_COMMAND = _default_tool("run_command", "Run a shell command and return its output.", command="The command.")
_WRITE_FILE = _default_tool(
    "write_file", "Write a text file.", path="The path of the file.", content="The whole text of the file."
)
_READ_FILE = _default_tool("read_file", "Return the text of a file.", path="The path of the file.")
