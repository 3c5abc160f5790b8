"""Environments of verifiers' v0 API (verifiers 0.3.1: `load_environment`), unmodified."""

import importlib.util
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rl.envs.adapters.verifiers_base import KEY_VARIABLE, VerifiersBase
from rl.envs.chat.episode import Episode
from rl.envs.variables import clean_environment
from rl.types import Problem


@dataclass(frozen=True)
class Verifiers(VerifiersBase):
    """Its metrics are in rollouts.jsonl."""

    def prepare(self) -> None:
        super().prepare()
        _loaded(self)

    def generate(self, seed: int) -> Problem:
        rows = _loaded(self).get_dataset()
        index = seed % len(rows)
        row = rows[index]
        asked = [str(message["content"]) for message in row["prompt"] if message["role"] == "user"]
        return Problem(str(index), asked[-1] if asked else f"row {index}", str(row.get("answer", "")))

    async def agent(self, episode: Episode, base_url: str, api_key: str) -> None:
        with clean_environment(self.variables):
            os.environ[KEY_VARIABLE] = api_key
            await self._run(episode, base_url)

    async def _run(self, episode: Episode, base_url: str) -> None:
        import verifiers as vf

        client = vf.ClientConfig(
            client_type="openai_chat_completions",
            api_base_url=base_url,
            api_key_var=KEY_VARIABLE,
            max_retries=0,
        )
        env = _loaded(self)
        row = env.get_dataset()[int(episode.problem.id)]
        output = await env.run_rollout(vf.RolloutInput(**row), client, "policy", {})
        if output.get("error"):
            raise RuntimeError(str(output["error"]))
        episode.state["reward"] = float(output["reward"])
        episode.notes["metrics"] = dict(output.get("metrics") or {})

    def validate(self) -> list[str]:
        if not _is_installed():
            return ["verifiers 0.3.1, the last with the v0 API, is missing; run: make environments"]
        rows = len(_loaded(self).get_dataset())
        if rows <= self.num_eval:
            return [f"{self.environment} has {rows} rows; lower env.num_eval={self.num_eval}"]
        return []


def _is_installed() -> bool:
    return bool(importlib.util.find_spec("verifiers")) and bool(importlib.util.find_spec("verifiers.legacy"))


@lru_cache(maxsize=4)
def _loaded(env: Verifiers) -> Any:
    import verifiers as vf

    return vf.load_environment(env.environment, **dict(env.options))
