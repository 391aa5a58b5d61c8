"""Multi-turn rollouts with an environment: the call sequence of client/twinkle/…/multi_turn_rollout.py."""

import os
from typing import Any

import dotenv

dotenv.load_dotenv(".env")

from peft import LoraConfig  # noqa: E402

from twinkle import get_logger, init_twinkle_client  # noqa: E402
from twinkle.advantage import GRPOAdvantage  # noqa: E402
from twinkle.data_format import SamplingParams, Trajectory  # noqa: E402
from twinkle.template import Qwen3_5Template  # noqa: E402
from twinkle_agentic.envs import EnvTool, OpenEnv  # noqa: E402
from twinkle_agentic.tools.tool_manager import ToolManager  # noqa: E402
from twinkle_client.model import MultiLoraTransformersModel  # noqa: E402
from twinkle_client.rollout import ClientMultiTurnRollout  # noqa: E402
from twinkle_client.sampler import vLLMSampler  # noqa: E402

logger = get_logger()

MODEL_ID = os.environ.get("TWINKLE_MODEL_ID", "Qwen/Qwen3.5-4B")
BASE_URL = os.environ.get("TWINKLE_SERVER_URL", "http://localhost:8000")
API_KEY = os.environ.get("TWINKLE_SERVER_TOKEN", "EMPTY_TOKEN")
ENV_NAME = os.environ.get("OPENENV_NAME", "openspiel_env")
GAME = os.environ.get("OPENENV_GAME", "catch")
NUM_GENERATIONS = 4
MAX_STEPS = 3
MAX_TURNS = 4
MAX_NEW_TOKENS = 512
TOOL_NAME = "play"
TOOL_PARAMETERS = {
    "type": "object",
    "properties": {"action_id": {"type": "integer", "description": "the number of a legal action"}},
    "required": ["action_id"],
}


def action_mapper(tool_name: str, arguments: dict[str, Any]) -> Any:
    from openspiel_env import OpenSpielAction

    return OpenSpielAction(action_id=int(arguments.get("action_id", 0)), game_name=GAME)


def make_episode() -> tuple[OpenEnv, EnvTool, ToolManager, dict[str, Any]]:
    """Return an environment after its reset, its tool, a manager of the tool, and the trajectory to begin with."""
    env = OpenEnv(env_name=ENV_NAME, env_kwargs={"game_name": GAME}, action_mapper=action_mapper)
    tool = EnvTool(env, tool_name=TOOL_NAME, description="Play one move.", parameters=TOOL_PARAMETERS)
    manager = ToolManager([tool])
    observation = env.reset().observation
    trajectory = Trajectory(
        messages=[
            {"role": "system", "content": "You play a game. Call the tool for each move."},
            {"role": "user", "content": observation},
        ],
        tools=manager.tool_infos(),
    )
    return env, tool, manager, trajectory


def main() -> None:
    init_twinkle_client(base_url=BASE_URL, api_key=API_KEY)

    model = MultiLoraTransformersModel(model_id=f"ms://{MODEL_ID}")
    model.add_adapter_to_model("default", LoraConfig(target_modules="all-linear", r=16, lora_alpha=32))
    model.set_loss("GRPOLoss", epsilon=0.2)
    model.set_optimizer("Adam", lr=1e-5)
    model.set_processor("InputProcessor")
    model.set_template("Qwen3_5Template", model_id=f"ms://{MODEL_ID}", enable_thinking=False)

    sampler = vLLMSampler(model_id=f"ms://{MODEL_ID}")
    sampler.set_template("Qwen3_5Template", model_id=f"ms://{MODEL_ID}", enable_thinking=False)

    template = Qwen3_5Template(f"ms://{MODEL_ID}", max_length=8192, enable_thinking=False)
    template.truncation_strategy = "delete"
    rollout = ClientMultiTurnRollout(
        sampler=sampler,
        template=template,
        max_turns=MAX_TURNS,
        sampling_params=SamplingParams(max_tokens=MAX_NEW_TOKENS, temperature=1.0, top_p=0.95, logprobs=1),
    )
    advantage_fn = GRPOAdvantage()

    for step in range(MAX_STEPS):
        episodes = [make_episode() for _ in range(NUM_GENERATIONS)]
        try:
            trajectories = rollout(
                [trajectory for _, _, _, trajectory in episodes],
                tool_manager=[manager for _, _, manager, _ in episodes],
            )
        finally:
            for env, _, _, _ in episodes:
                env.close()
        rewards = [tool.episode_reward for _, tool, _, _ in episodes]
        advantages = advantage_fn(rewards, num_generations=NUM_GENERATIONS, scale="group").tolist()
        old_logps = [[logprob[0][1] for logprob in trajectory["logprobs"]] for trajectory in trajectories]
        model.forward_backward(inputs=trajectories, advantages=advantages, old_logps=old_logps)
        model.clip_grad_and_step()
        metric = model.calculate_metric(is_training=True)
        turns = sum(trajectory["turns"] for trajectory in trajectories) / len(trajectories)
        average = sum(rewards) / len(rewards)
        logger.info(f"[Step {step}] avg_reward={average:.3f} avg_turns={turns:.2f} metric={metric.result}")
    logger.info("Multi-turn rollout example finished.")


if __name__ == "__main__":
    main()
