"""Environments of verifiers' v0 API (verifiers 0.3.1: `load_environment`), unmodified."""

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rl.envs.adapters.verifiers_base import KEY_VARIABLE, VerifiersBase
from rl.envs.chat.episode import Episode, ServerLost
from rl.envs.problems import digest_of
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
        return _problem("train", seed % len(rows), rows)

    def eval_problems(self) -> Sequence[Problem]:
        """The first `num_eval` rows of the environment's own set for evaluation, where it has one."""
        if not _has_eval_set(_loaded(self)):
            return super().eval_problems()
        rows = _loaded(self).get_eval_dataset()
        return [_problem("eval", index, rows) for index in range(min(self.num_eval, len(rows)))]

    def may_train_on(self, problem: Problem) -> bool:
        return not problem.id.startswith("eval")

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
        which, index = episode.problem.id.split()
        rows = env.get_eval_dataset() if which == "eval" else env.get_dataset()
        row = rows[int(index)]
        output = await env.run_rollout(vf.RolloutInput(**row), client, "policy", {})
        if error := output.get("error"):
            # A tunnel is none of the policy's doing; a sandbox may be.
            raise ServerLost(str(error)) if error["error"] == "TunnelError" else RuntimeError(str(error))
        episode.state["reward"] = float(output["reward"])
        episode.notes["metrics"] = dict(output.get("metrics") or {})

    def validate(self) -> list[str]:
        if not _is_installed():
            return ["verifiers 0.3.1, the last with the v0 API, is missing; run: make environments"]
        env = _loaded(self)
        if _scores_groups(env):
            return [
                f"{self.environment} scores the rollouts of a task together; here verifiers runs them one by "
                f"one: score each by itself in its rubric"
            ]
        if env.dataset is None and env.dataset_source is None:
            return [f"{self.environment} has no dataset to train on; give it one beside its eval_dataset"]
        rows = len(env.get_dataset())
        if rows <= self.num_eval and not _has_eval_set(env):
            return [f"{self.environment} has {rows} rows; lower env.num_eval={self.num_eval}"]
        return []


def _scores_groups(env: Any) -> bool:
    """Whether it, or one of those that an EnvGroup has, rewards rollouts together."""
    return env.requires_group_rollouts or any(map(_scores_groups, getattr(env, "envs", ())))


def _has_eval_set(env: Any) -> bool:
    return env.eval_dataset is not None or env.eval_dataset_source is not None


def _problem(which: str, index: int, rows: Any) -> Problem:
    """A row of the set to train on, or to evaluate on."""
    row = rows[index]
    asked = [str(message["content"]) for message in row["prompt"] if message["role"] == "user"]
    content = {name: value for name, value in row.items() if name not in ("example_id", "id")}
    return Problem(
        f"{which} {index}",
        asked[-1] if asked else f"row {index}",
        str(row.get("answer", "")),
        {"row": digest_of(content)},
    )


def _is_installed() -> bool:
    return bool(importlib.util.find_spec("verifiers")) and bool(importlib.util.find_spec("verifiers.legacy"))


@lru_cache(maxsize=4)
def _loaded(env: Verifiers) -> Any:
    import verifiers as vf

    return vf.load_environment(env.environment, **dict(env.options))
