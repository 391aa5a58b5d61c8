"""Environments of the OpenEnv project with its own library, on a local server and in this process.

They run in ``make test-environments``.
"""

import threading

import pytest

from twinkle_agentic.envs import EnvTool, OpenEnv, OpenEnvClient
from twinkle_agentic.tools import ToolManager

pytest.importorskip("openenv", reason="needs the extra openenv: make test-environments")

PACKAGE = "tests.agentic.services.python_env"


@pytest.fixture(scope="module")
def url():
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app

    from tests.agentic.services.python_env import PythonAction, PythonObservation
    from tests.agentic.services.python_env.server.python_environment import PythonEnvironment

    app = create_fastapi_app(PythonEnvironment, PythonAction, PythonObservation, max_concurrent_envs=8)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    listening = config.bind_socket()
    listening.listen()  # connections wait from now on until the server runs
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    listening.close()


def call(name, **arguments):
    return {"function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("options", [{}, {"env_name": PACKAGE}, {"env_cls": f"{PACKAGE}:PythonEnv"}], ids=str)
def test_the_default_tool_runs_python(url, options, monkeypatch):
    monkeypatch.setenv("OPENENV_BASE_URL", url)
    if "env_cls" in options:
        options = {**options, "action_cls": f"{PACKAGE}:PythonAction"}
    with OpenEnvClient(**options, reset_kwargs={"x": 20}) as env:
        assert env.client is None
        assert env.reset().observation == "ready"
        tools = ToolManager(EnvTool.from_env(env))
        assert tools.names() == ["run_python"]
        assert tools(call("run_python", code="x += 1; print(x)")) == "21"  # reset_kwargs reached the server
        assert tools(call("run_python", code="1 / 0")) == "ZeroDivisionError: division by zero\nexit code: 1"
        assert env.episode_reward == pytest.approx((16 + 5) / 100)
        assert tools(call("run_python", code="done = True")) == ""
        assert (env.last_result.done, env.last_result.reward) == (True, 0.11)
        env.reset()
        assert (env.episode_reward, env.last_result.done) == (0.0, False)
    assert env.client is None


def test_two_sessions_do_not_meet(url):
    first, second = OpenEnvClient(base_url=url), OpenEnvClient(base_url=url)
    with first, second:
        first.reset()
        second.reset()
        first.step("run_python", {"code": "secret = 7"})
        assert "NameError" in second.step("run_python", {"code": "print(secret)"}).observation


def test_tools_of_ones_own(url):
    def submit(env, arguments):
        env.submitted_code = arguments["code"]
        results = [env.execute({"code": f"print({n})"}) for n in (1, 2)]
        return " ".join(result.observation["stdout"].strip() for result in results)

    info = {"type": "function", "function": {"name": "submit", "description": "", "parameters": {}}}
    with OpenEnvClient(
        base_url=url, tools=[], action_mapper=lambda name, given: {"code": f"print({given['n']})"}
    ) as env:
        assert env.register_tool(info, submit) is env
        assert env.tools() == [info]
        env.reset()
        result = env.step("submit", {"code": "x"})
        assert (result.observation, env.submitted_code) == ("1 2", "x")
        assert result.reward == env.episode_reward == pytest.approx(0.16)
        assert env.step("show", {"n": 5}).observation == "5"


def test_failures_are_observations(url):
    with OpenEnvClient(base_url=url) as env:
        failed = env.step("run_python", {"code": "1"})
        assert "call reset() first" in failed.observation
        env.reset()
        broken = env.step("run_python", {"code": "crash"})
        assert broken.observation.startswith("Error: ")
        assert (broken.reward, broken.done) == (0.0, False)
        assert env.step("run_python", {"wrong": 1}).observation.startswith("Error: ")
    with pytest.raises(Exception, match=r"(?i)connect"):
        OpenEnvClient(base_url="http://127.0.0.1:9", connect_timeout_s=5).reset()


def test_the_environment_in_this_process():
    env = OpenEnv(PACKAGE)
    assert env.reset().observation == "ready"
    result = env.step("run_python", {"code": "print(3)"})
    assert (result.observation, result.reward, result.done) == ("3", 0.08, False)
