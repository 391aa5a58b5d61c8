"""``twinkle-auto``: what its model may do, what the person confirms, and the conversation itself."""

import io
import json
import logging
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.support.agents.chat_endpoint import ChatEndpoint
from tests.support.paths import SOURCE
from twinkle.server.config import load_config
from twinkle_client.auto import agent as agent_module
from twinkle_client.auto import cli
from twinkle_client.auto import tools as tools_module
from twinkle_client.auto.agent import Agent, converse, printable
from twinkle_client.auto.chat import ChatModel
from twinkle_client.auto.cli import main
from twinkle_client.auto.runs import Runs
from twinkle_client.auto.tools import AutoTools
from twinkle_client.errors import InvalidRequestError, TwinkleClientError

WAITS = "import time\nprint('hello', flush=True)\nwhile True:\n    time.sleep(0.05)\n"
ENDS = "import os\nprint('over', os.environ['TWINKLE_RUN_ID'], os.environ.get('TWINKLE_LLM_API_KEY'))\n"


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("TWINKLE_SERVER_URL", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    for name in ("RUN_ID", "AUTO_RUN_ID", "LLM_BASE_URL", "LLM_MODEL", "LLM_API_KEY", "AUTO_VERBOSE"):
        monkeypatch.delenv(f"TWINKLE_{name}", raising=False)


@pytest.fixture
def runs(tmp_path):
    runs = Runs(tmp_path / "runs")
    yield runs
    for run in runs.all():
        if runs.is_running(run):
            runs.pause(run)


class Person:
    """Agrees or not, and remembers what was shown."""

    def __init__(self, agrees=True):
        self.agrees, self.shown = agrees, []

    def __call__(self, text):
        self.shown.append(text)
        return self.agrees


def call(tools, tool, /, **arguments):
    return tools.call(tool, json.dumps(arguments))


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_is_started_paused_resumed_changed_and_stopped(runs):
    person = Person()
    tools = AutoTools(runs, person)
    assert call(tools, "get_training_status") == "Error: run_id: got None, allowed: the id of a run; none is selected"
    assert call(tools, "start_training", name="first", script=WAITS).startswith("started first_20")
    assert WAITS in person.shown[0]
    (run,) = runs.all()
    wait_for(lambda: "hello" in run.log_tail())
    status = json.loads(call(tools, "get_training_status"))
    assert (status["state"], status["log"], status["metrics"]) == ("running", "hello", [])
    assert call(tools, "resume_training").endswith("allowed: a run whose script is not running")
    assert call(tools, "pause_training") == f"paused {run.run_id}"
    assert json.loads(call(tools, "list_training_runs")) == [{"run_id": run.run_id, "state": "paused"}]
    assert call(tools, "update_script", script=ENDS).startswith("changed; the earlier script is train_v1.py")
    assert "-while True:" in person.shown[-1]
    assert "+print('over'" in person.shown[-1]
    assert (run.directory / "train_v1.py").read_text() == WAITS
    assert call(tools, "resume_training", run_id="first").startswith(f"started {run.run_id}")
    wait_for(lambda: not runs.is_running(run))
    assert f"over {run.run_id} None" in run.log_tail()
    assert runs.state(run) == "ended"
    assert call(tools, "stop_training").endswith("allowed: a run whose script is running")


def test_stopping_is_sigterm(runs):
    tools = AutoTools(runs, Person())
    call(tools, "start_training", name="a", script=WAITS)
    (run,) = runs.all()
    wait_for(lambda: "hello" in run.log_tail())
    assert call(tools, "stop_training") == f"stopped {run.run_id}"
    assert runs.state(run) == "stopped"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("start_training", {"name": "a", "script": WAITS}),
        ("update_script", {"script": ENDS}),
        ("pause_training", {}),
        ("stop_training", {}),
    ],
)
def test_nothing_happens_without_consent(runs, name, arguments):
    agreeing = AutoTools(runs, Person())
    call(agreeing, "start_training", name="own", script=WAITS)
    (run,) = runs.all()
    person = Person(agrees=False)
    answer = call(AutoTools(runs, person, run.run_id), name, **arguments)
    assert answer == "Error: the user declined. Ask what they want instead"
    assert len(person.shown) == 1
    assert runs.is_running(run)
    assert [each.run_id for each in runs.all()] == [run.run_id]
    assert run.script.read_text() == WAITS


def test_a_process_of_somebody_else_is_never_signalled(runs):
    """The number in meta.json may have been given to another process."""
    run = runs.create("a", WAITS)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        (run.directory / "meta.json").write_text(json.dumps({"pid": other.pid, "status": "running"}))
        assert runs.state(run) == "ended"
        with pytest.raises(InvalidRequestError, match="a run whose script is running"):
            runs.pause(run)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_runs_of_another_agent_are_found(runs):
    run = runs.create("a", WAITS)
    runs.launch(run, "http://127.0.0.1:9")
    other = Runs(runs.base_dir)
    wait_for(lambda: other.is_running(run))  # the child has become the script
    assert other.get("a").run_id == run.run_id
    other.pause(run)
    wait_for(lambda: not runs.is_running(run))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("rm", "{}", "Error: unknown tool 'rm', known: get_cluster_info, "),
        ("__init__", "{}", "Error: unknown tool '__init__'"),
        ("select_run", "{", "Error: arguments: got '{', allowed: a JSON object"),
        ("select_run", "[]", "Error: arguments: got '[]', allowed: a JSON object"),
        ("select_run", "{}", "Error: run_id: got None, allowed: a value: select_run needs it"),
        ("select_run", '{"run_id": 3}', "Error: run_id: got 3, allowed: a value of the type string"),
        ("select_run", '{"run_id": "x"}', "Error: unknown run 'x', known: none"),
        ("select_run", '{"run_id": "../x"}', "Error: run_id: got '../x'"),
        ("select_run", '{"run_id": "x", "sudo": "1"}', "Error: unknown argument of select_run 'sudo', known: run_id"),
        ("start_training", '{"name": "a/../b", "script": ""}', "Error: run_id: got 'a/../b'"),
        ("start_server", '{"model_id": "m", "port": 70000}', "Error: port: got 70000"),
        ("list_supported_models", "{}", "Error: "),
        ("select_run", "[" * 100_000, "Error: arguments: got '[[["),
        ("shutdown_server", "{}", "Error: this session has started no server that is running"),
    ],
)
def test_wrong_calls_are_told_to_the_model(runs, name, arguments, message):
    person = Person()
    assert AutoTools(runs, person).call(name, arguments).startswith(message)
    assert person.shown == []


def test_an_address_that_is_none_is_told_to_the_model(runs, monkeypatch):
    monkeypatch.setenv("TWINKLE_SERVER_URL", "http://127.0.0.1:port")
    assert call(AutoTools(runs, Person()), "list_supported_models").startswith("Error: Invalid port")


def test_a_server_is_started_with_a_valid_configuration(runs, monkeypatch):
    started = []

    class Process:
        pid = 4242

        def __init__(self, command, **options):
            started.append(command)

        def poll(self):
            return None

    monkeypatch.setattr(tools_module.subprocess, "Popen", Process)
    monkeypatch.setattr(tools_module, "_gpus", list)
    person = Person()
    tools = AutoTools(runs, person)
    answer = call(tools, "start_server", model_id="Qwen/Qwen3-0.6B", port=8123)
    assert answer.startswith("starting http://127.0.0.1:8123, log ")
    ((python, *module, path),) = started
    assert (python, module) == (sys.executable, ["-m", "twinkle.server", "launch", "-c"])
    config, notes = load_config(path)
    assert config.runtime == "embedded"
    assert [served.names[0] for served in config.served_models] == ["Qwen/Qwen3-0.6B"]
    assert not notes
    assert '"model_id": "Qwen/Qwen3-0.6B"' in person.shown[0]
    assert call(tools, "start_server", model_id="x").startswith("Error: a server is running already, process 4242")
    assert json.loads(call(tools, "get_cluster_info"))["server"] == "http://127.0.0.1:8123"


def test_what_the_machine_has(runs):
    info = json.loads(call(AutoTools(runs, Person()), "get_cluster_info"))
    assert info["server"] == "http://127.0.0.1:9"
    assert info["health"].startswith("no answer")
    assert info["processors"] == os.cpu_count()


def test_searching_without_a_network(runs, monkeypatch):
    monkeypatch.setattr(tools_module, "_HUB", "http://127.0.0.1:9")
    assert call(AutoTools(runs, Person()), "search_models", query="qwen").startswith("Error: ")


# --- conversations ----------------------------------------------------------------------------------------------------


def calls(name, arguments="{}", count=1):
    one = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"content": "", "tool_calls": [{"id": f"c{n}", **one} for n in range(count)], "finish_reason": "tool_calls"}


def talk(endpoint, runs, *lines, skills=""):
    """Return what is shown, and the agent."""
    waiting = iter(lines)
    agent = Agent(ChatModel(f"{endpoint.url}/v1", "m", "key"), AutoTools(runs, Person()), skills)

    def read():
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    out = io.StringIO()
    converse(agent, read, out)
    return out.getvalue(), agent


def test_a_question_with_tools(runs):
    with ChatEndpoint(calls("list_training_runs", count=2), {"content": "There are none."}) as endpoint:
        shown, agent = talk(endpoint, runs, "Which runs are there?", "", "exit", "never asked", skills="Be kind.")
        first, second = endpoint.bodies
    assert shown == "\n[list_training_runs]\n\n[list_training_runs]\nThere are none.\n"
    assert endpoint.requests[0][0] == "/v1/chat/completions"
    assert endpoint.requests[0][1]["Authorization"] == "Bearer key"
    assert (first["model"], first["stream"], len(first["tools"])) == ("m", True, 14)
    assert first["messages"][0]["content"].endswith("Be kind.")
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "tool", "tool"]
    assert second["messages"][2]["tool_calls"][1]["function"] == {"name": "list_training_runs", "arguments": "{}"}
    assert second["messages"][4] == {"role": "tool", "tool_call_id": "c1", "content": "[]"}
    assert agent.history[-1] == {"role": "assistant", "content": "There are none."}


def test_tool_calls_do_not_go_on_for_ever(runs):
    with ChatEndpoint(calls("list_training_runs")) as endpoint:
        shown, _ = talk(endpoint, runs, "Which?")
        assert len(endpoint.requests) == 10
    assert "(stopped after 10 rounds of tool calls)" in shown


def test_old_messages_are_forgotten(runs, monkeypatch):
    monkeypatch.setattr(agent_module, "MAX_HISTORY", 4)
    answers = [calls("list_training_runs"), {"content": "1"}, {"content": "2"}, {"content": "3"}]
    with ChatEndpoint(*answers) as endpoint:
        talk(endpoint, runs, "a", "b", "c")
        last = endpoint.bodies[-1]["messages"]
    # of a, call, result, 1, b, 2, c the last four are kept, from the first question on
    assert [message["content"] for message in last[1:]] == ["b", "2", "c"]


def test_failures_are_shown_and_the_question_can_be_repeated(runs):
    with ChatEndpoint(500, {"content": "Yes."}) as endpoint:
        shown, agent = talk(endpoint, runs, "Really?", "Really?", "quit")
    assert shown.startswith("\nError: ")
    assert shown.endswith("Yes.\n")
    assert [message["content"] for message in agent.history] == ["Really?", "Yes."]
    with pytest.raises(TwinkleClientError, match=r"no answer from http://127\.0\.0\.1:9/v1/chat/completions"):
        ChatModel("http://127.0.0.1:9/v1", "m").answer([], [], print)
    with pytest.raises(InvalidRequestError, match="llm_base_url: got 'localhost', allowed: an address"):
        ChatModel("localhost", "m")


def test_a_long_answer_keeps_its_question(runs, monkeypatch):
    monkeypatch.setattr(agent_module, "MAX_HISTORY", 4)
    rounds = [calls("list_training_runs", count=3), calls("list_training_runs", count=3), 500, {"content": "2"}]
    with ChatEndpoint({"content": "1"}, *rounds) as endpoint:
        _, agent = talk(endpoint, runs, "a", "b", "c")
        third = endpoint.bodies[3]["messages"]
    assert [message["role"] for message in third] == ["system", "user", *["assistant", "tool", "tool", "tool"] * 2]
    assert third[1]["content"] == "b"
    assert [message["content"] for message in agent.history] == ["a", "1", "c", "2"]  # b failed, and is not asked again


def test_an_interrupted_question_leaves_no_call_without_an_answer(runs):
    def interrupt(text):
        raise KeyboardInterrupt

    with ChatEndpoint(
        calls("start_training", json.dumps({"name": "a", "script": ENDS})), {"content": "Hi."}
    ) as endpoint:
        lines = iter(["Train", "Hello"])
        agent = Agent(ChatModel(f"{endpoint.url}/v1", "m"), AutoTools(runs, interrupt))

        def read():
            try:
                return next(lines)
            except StopIteration:
                raise KeyboardInterrupt from None  # at the prompt it ends the conversation

        out = io.StringIO()
        converse(agent, read, out)
        assert [message["role"] for message in endpoint.bodies[1]["messages"]] == ["system", "user"]
    assert out.getvalue() == "\n[start_training]\n\n(interrupted)\nHi.\n\n"


@pytest.mark.parametrize(
    "event",
    [{"choices": [[]]}, {"choices": [{"delta": [1]}]}, {"choices": [{"delta": {"content": {"a": 1}}}]}, {"choices": 3}]
    + [{"choices": [{"delta": {"tool_calls": calls}}]} for calls in (["x"], 3, [{"function": {"name": 7}}])],
)
def test_events_of_another_form_are_errors_of_the_server(runs, event):
    with ChatEndpoint(f"data: {json.dumps(event)}\n\n", {"content": "Hi."}) as endpoint:
        shown, _ = talk(endpoint, runs, "a", "b")
    assert shown.startswith("\nError: ")
    assert "an event of another form" in shown
    assert shown.endswith("Hi.\n\n")


def test_halves_of_characters_end_no_conversation(runs):
    """JSON can name half of a character, and a terminal's input can hold one; no request can be sent with it."""
    half = calls("start_training", '{"name": "a", "script": "#\\ud800"}')
    with ChatEndpoint({"content": "a\ud800"}, half, {"content": "Hi."}) as endpoint:
        shown, _ = talk(endpoint, runs, "\udcff", "b")
        assert [message["content"] for message in endpoint.bodies[1]["messages"][1:]] == ["?", "a?", "b"]
    assert shown == "a?\n\n[start_training]\nHi.\n\n"


def test_a_terminal_obeys_no_text():
    assert printable("a\tb\nc\x1b[2Jd\r\u202ee") == "a\tb\nc\\u001b[2Jd\\u000d\\u202ee"


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command(monkeypatch, capsys, tmp_path):
    lines = iter(["Hello", "q"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    with ChatEndpoint({"content": "Hi."}) as endpoint:
        monkeypatch.setenv("TWINKLE_LLM_BASE_URL", f"{endpoint.url}/v1")
        monkeypatch.setenv("TWINKLE_LLM_API_KEY", "very-secret")
        assert main(["--llm-model", "mine"]) == 0
        (body,) = endpoint.bodies
    assert body["model"] == "mine"
    assert "## Skill: twinkle-training" in body["messages"][0]["content"]
    assert "## Skill: autoresearch" in body["messages"][0]["content"]
    assert "Hi." in capsys.readouterr().out
    assert "very-secret" not in "".join(path.read_text() for path in tmp_path.glob("auto.log*"))


def test_a_script_is_shown_before_it_runs(monkeypatch, capsys):
    lines = iter(["Train", "n", "exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    script = json.dumps({"name": "a", "script": "print('\x1b[8mhidden')"})
    with ChatEndpoint(calls("start_training", script), {"content": "As you like."}) as endpoint:
        assert main(["--llm-base-url", f"{endpoint.url}/v1"]) == 0
        assert endpoint.bodies[1]["messages"][-1]["content"].startswith("Error: the user declined")
    assert r"print('\u001b[8mhidden')" in capsys.readouterr().out


def test_a_log_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "auto.log").mkdir()
    assert main([]) == 1
    assert "twinkle-auto: the log cannot be written: " in capsys.readouterr().err


def test_the_lines_of_a_difference_stay_apart(runs):
    """Without a line break at its end, the last old line would stand in one line with the first new one."""
    person = Person()
    tools = AutoTools(runs, person)
    runs.create("a", "print(1)")
    call(tools, "update_script", script="print(2)", run_id="a")
    assert person.shown[0].endswith("-print(1)\n(no line break at the end)\n+print(2)\n(no line break at the end)\n")


def test_options(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("twinkle-auto ")
    assert main(["--run-id", "nothing"]) == 1
    assert "twinkle-auto: unknown run 'nothing', known: none" in capsys.readouterr().err


def test_options_come_from_variables(monkeypatch):
    names = ("run_id", "llm_base_url", "llm_model", "llm_api_key", "verbose")

    def read(*arguments):
        given = cli._parser().parse_args(arguments)
        return tuple(getattr(given, name) for name in names)

    assert read() == (None, "http://localhost:11434/v1", "qwen3.5", "", False)
    values = {
        "AUTO_RUN_ID": "r1",
        "LLM_BASE_URL": "http://h/v1",
        "LLM_MODEL": "m",
        "LLM_API_KEY": "k",
        "AUTO_VERBOSE": "1",
    }
    for name, value in values.items():
        monkeypatch.setenv(f"TWINKLE_{name}", value)
    assert read() == ("r1", "http://h/v1", "m", "k", True)
    assert read("-r", "r2", "--llm-model", "other")[:3] == ("r2", "http://h/v1", "other")


def test_the_log_is_rotated(tmp_path):
    handler = cli._log_to_file(verbose=False)
    try:
        assert (handler.maxBytes, handler.backupCount) == (5_000_000, 3)
        assert Path(handler.baseFilename) == tmp_path / "auto.log"
    finally:
        logging.getLogger("twinkle_client").removeHandler(handler)
        handler.close()


def test_the_tools_of_the_agent(runs):
    names = {info["function"]["name"] for info in AutoTools(runs, lambda text: False).infos()}
    assert names == {
        "list_training_runs",
        "get_training_status",
        "start_server",
        "shutdown_server",
        "start_training",
        "select_run",
        "pause_training",
        "resume_training",
        "stop_training",
        "update_script",
        "list_supported_models",
        "search_datasets",
        "search_models",
        "get_cluster_info",
    }


def test_it_is_a_module_and_needs_no_torch():
    variables = {"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin", "COLUMNS": "200", "TWINKLE_LLM_API_KEY": "secret"}
    code = """
        import runpy, sys
        sys.argv = ["x", "--help"]
        try:
            runpy.run_module("twinkle_client.auto", run_name="__main__")
        except SystemExit as end:
            assert end.code == 0
        assert not {"torch", "twinkle", "transformers"} & sys.modules.keys()
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(arguments, env=variables, capture_output=True, text=True, check=True)
    assert "(TWINKLE_LLM_MODEL; now qwen3.5)" in done.stdout
    assert "secret" not in done.stdout
