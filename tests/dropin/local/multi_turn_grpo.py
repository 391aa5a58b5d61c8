"""GRPO on rollouts of several turns, on Ray: the call sequence of the existing script multi_turn/multi_turn_grpo.py.

Environments are in a pool on a group of CPU processes. The prompt advertises a tool ``play``, while the environments of
the pool name no tools. With ``--strategy native_fsdp`` the model is a TransformersModel, else a MegatronModel.
"""

import os
from typing import Any

from peft import LoraConfig

import twinkle
from twinkle import DeviceGroup, DeviceMesh, get_device_placement, get_logger
from twinkle.advantage import GRPOAdvantage
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.cli import CLI
from twinkle.data_format import SamplingParams, Trajectory
from twinkle.metric import CompletionRewardMetric
from twinkle.model import MegatronModel, TransformersModel
from twinkle.processor import InputProcessor
from twinkle.sampler import vLLMSampler
from twinkle.template import Qwen3_5Template
from twinkle_agentic.envs import EnvPool, EnvTool
from twinkle_agentic.rollout.multi_turn import MultiTurnRollout
from twinkle_agentic.tools.tool_manager import ToolManager

logger = get_logger()
args = CLI.from_args()

MODEL_ID = args.model.model_id or "ms://Qwen/Qwen3.5-4B"
USE_MEGATRON = args.model.strategy != "native_fsdp"
MODEL_GPUS = args.infra.model_gpus or 4
SAMPLER_GPUS = args.infra.sampler_gpus or 4
NUM_GPUS = MODEL_GPUS + SAMPLER_GPUS
MODEL_RANKS = list(range(MODEL_GPUS))
SAMPLER_RANKS = list(range(MODEL_GPUS, NUM_GPUS))
DEVICE_TYPE = "GPU"
NUM_GENERATIONS = args.rl.num_generations
MAX_NEW_TOKENS = args.sampling.max_tokens or 1024
BATCH_SIZE = args.training.batch_size
MINI_BATCH_SIZE = args.training.mini_batch_size or BATCH_SIZE * NUM_GENERATIONS
MAX_STEPS = args.training.max_steps
ENV_NAME = os.environ.get("OPENENV_NAME", "openspiel_env")
GAME = os.environ.get("ENV_GAME", "catch")
ENV_NUM_WORKERS = int(os.environ.get("ENV_NUM_WORKERS", "4"))
ENV_POOL_SIZE = int(os.environ.get("ENV_POOL_SIZE", "32"))
MAX_TURNS = int(os.environ.get("MAX_TURNS", "4"))
ADAPTER_NAME = "default"
SYSTEM_PROMPT = "You play a game. Call the tool for each move."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "play",
            "description": "Play one move.",
            "parameters": {
                "type": "object",
                "properties": {"action_id": {"type": "integer", "description": "the number of a legal action"}},
                "required": ["action_id"],
            },
        },
    }
]


def action_mapper(tool_name: str, arguments: dict[str, Any]) -> Any:
    from openspiel_env import OpenSpielAction

    return OpenSpielAction(action_id=int(arguments.get("action_id", 0)), game_name=GAME)


def create_model(mesh: DeviceMesh) -> Any:
    lora_config = LoraConfig(
        target_modules="all-linear",
        r=args.lora.lora_r,
        lora_alpha=args.lora.lora_alpha,
        lora_dropout=args.lora.lora_dropout,
    )
    rate = args.optimizer.learning_rate
    model_class = MegatronModel if USE_MEGATRON else TransformersModel
    model = model_class(model_id=MODEL_ID, device_mesh=mesh, remote_group="model")
    model.add_adapter_to_model(ADAPTER_NAME, lora_config, gradient_accumulation_steps=1)
    if USE_MEGATRON:
        model.set_optimizer("default", lr=rate)
        model.set_lr_scheduler("default", lr_decay_steps=MAX_STEPS, max_lr=rate)
    else:
        model.set_optimizer("AdamW", lr=rate)
        model.set_lr_scheduler("CosineAnnealingLR", T_max=MAX_STEPS, eta_min=0)
    model.set_loss("GRPOLoss", epsilon=args.loss.epsilon)
    model.set_processor(InputProcessor)
    model.set_template("Qwen3_5Template", model_id=MODEL_ID)
    return model


def main() -> None:
    device_groups = [
        DeviceGroup(name="model", ranks=MODEL_RANKS, device_type=DEVICE_TYPE),
        DeviceGroup(name="sampler", ranks=SAMPLER_RANKS, device_type=DEVICE_TYPE),
        DeviceGroup(name="env", ranks=ENV_NUM_WORKERS, device_type="CPU"),
    ]
    if USE_MEGATRON:
        model_mesh = DeviceMesh.from_sizes(world_size=MODEL_GPUS, dp_size=MODEL_GPUS // 2, pp_size=2)
    else:
        model_mesh = DeviceMesh.from_sizes(world_size=MODEL_GPUS, fsdp_size=MODEL_GPUS)
    sampler_mesh = DeviceMesh.from_sizes(world_size=SAMPLER_GPUS, dp_size=SAMPLER_GPUS)
    env_mesh = DeviceMesh.from_sizes(world_size=ENV_NUM_WORKERS, dp_size=ENV_NUM_WORKERS)
    twinkle.initialize(mode="ray", nproc_per_node=NUM_GPUS, groups=device_groups, lazy_collect=False)

    model = create_model(model_mesh)
    sampler = vLLMSampler(
        model_id=MODEL_ID,
        engine_args={
            "gpu_memory_utilization": args.sampler.gpu_memory_utilization,
            "max_model_len": args.sampler.max_model_len or 8192,
            "max_lora_rank": args.sampler.max_lora_rank,
            "enable_lora": True,
        },
        device_mesh=sampler_mesh,
        remote_group="sampler",
    )
    sampler.set_template("Qwen3_5Template", model_id=MODEL_ID, enable_thinking=False)
    ckpt_manager = CheckpointEngineManager(model=model, sampler=sampler)
    env_pool = EnvPool(
        pool_size=ENV_POOL_SIZE,
        env_kwargs={"env_name": ENV_NAME, "env_kwargs": {"game_name": GAME}, "action_mapper": action_mapper},
        device_mesh=env_mesh,
        remote_group="env",
    )
    template = Qwen3_5Template(MODEL_ID, max_length=args.template.max_length, enable_thinking=False)
    template.truncation_strategy = "delete"
    rollout = MultiTurnRollout(
        sampler=sampler,
        template=template,
        sampling_params=SamplingParams(max_tokens=MAX_NEW_TOKENS, num_samples=1, logprobs=1),
        max_turns=MAX_TURNS,
    )
    advantage_fn = GRPOAdvantage()
    metrics = CompletionRewardMetric()

    logger.info(get_device_placement())
    optim_step = 0
    while optim_step < MAX_STEPS:
        metrics.reset()
        adapters = env_pool.get_adapters(BATCH_SIZE * NUM_GENERATIONS)
        trajectories, managers = [], []
        for adapter in adapters:
            observation = adapter.reset().observation
            managers.append(ToolManager(EnvTool.from_env(adapter)))
            messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": observation}]
            trajectories.append(Trajectory(messages=messages, tools=TOOLS))

        ckpt_manager.sync_weights(merge_and_sync=False)
        sampler.reset_prefix_cache()
        inputs = rollout(trajectories, tool_manager=managers)

        old_logps = [[logprob[0][1] for logprob in trajectory["logprobs"]] for trajectory in inputs]
        lengths = [sum(label != -100 for label in trajectory["labels"]) for trajectory in inputs]
        rewards = [adapter.episode_reward for adapter in adapters]
        metrics.accumulate(completion_lengths=lengths, rewards={"total": rewards})
        advantages = advantage_fn(rewards, num_generations=NUM_GENERATIONS, scale="group").tolist()
        for start in range(0, len(inputs), MINI_BATCH_SIZE):
            part = slice(start, start + MINI_BATCH_SIZE)
            model.forward_backward(
                inputs=inputs[part],
                old_logps=old_logps[part],
                advantages=advantages[part],
                micro_batch_size=args.training.micro_batch_size,
            )
            model.clip_grad_and_step()
            optim_step += 1
        log = metrics.calculate()
        log.update(model.calculate_metric(is_training=True))
        turns = sum(trajectory["turns"] for trajectory in inputs) / len(inputs)
        logger.info(f"[Step {optim_step}/{MAX_STEPS}] turns={turns:.2f} {log}")
    env_pool.close()
    model.save("multi-turn-grpo-final", output_dir=args.training.output_dir)


if __name__ == "__main__":
    main()
