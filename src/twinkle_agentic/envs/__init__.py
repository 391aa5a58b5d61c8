"""Environments, in which a model acts and gets rewards."""

from twinkle_agentic.envs.env import Env, StepResult
from twinkle_agentic.envs.env_pool import EnvPool, EnvPoolAdapter
from twinkle_agentic.envs.env_tool import EnvTool
from twinkle_agentic.envs.open_env import OpenEnv

__all__ = ["Env", "EnvPool", "EnvPoolAdapter", "EnvTool", "OpenEnv", "StepResult"]
