"""Guard: the input rails, before a request is admitted.

Output rails run inside the gateway on its streams (deployments/generation.py); both come from the same rule packs.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from shoal.configs.app import GuardConfig
from shoal.deployments.stages import RemoteCallable
from shoal.guardrails.pipeline import load_rails
from shoal.guardrails.verdicts import ALLOWED, Verdict


class Guard(RemoteCallable):
    """Without a rule pack it lets everything pass."""

    def __init__(self, config: GuardConfig) -> None:
        """Raises ConfigError for a rule pack that cannot be used."""
        self._rails, _ = load_rails(config)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shoal-guard")

    async def check_input(self, texts: list[str]) -> Verdict:
        """The verdict on the texts of one request."""
        if not self._rails:
            return ALLOWED
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._rails.check, texts)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
