"""Environments, in which a model acts and gets rewards, and their use as tools. They import ``tools`` and the library.

OpenEnv and E2B are used through their own packages, the extras ``openenv`` and ``e2b``.
"""

from twinkle_agentic.envs.agentenv import AgentEnv
from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.env_tool import EnvTool
from twinkle_agentic.envs.openenv import EnvPool, EnvPoolAdapter, OpenEnv, OpenEnvClient

__all__ = [
    "AgentEnv",
    "Env",
    "EnvPool",
    "EnvPoolAdapter",
    "EnvTool",
    "OpenEnv",
    "OpenEnvClient",
    "StepResult",
]
