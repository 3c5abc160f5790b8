"""No setting is silently without effect: each is changed, and something that the run does must change."""

import asyncio
import dataclasses
from dataclasses import replace

import pytest

from configs.quickstart import quickstart
from rl.controller.config import (
    CriticConfig,
    ReferenceConfig,
    RewardConfig,
    RunConfig,
    TrainerConfig,
    WarmupConfig,
)
from rl.controller.launch import critic_config, engine_config, generator_args, processes, reference_config
from rl.controller.loop import Run
from rl.controller.problems import problems
from rl.controller.settings import override, setting_names
from rl.envs.sort_letters import SortLetters
from rl.loss.advantages.gae import GAE
from rl.loss.advantages.group_mean import GroupMean
from rl.loss.advantages.reinforce_pp import ReinforcePP
from rl.loss.advantages.rloo import RLOO
from rl.loss.cispo import CISPO
from rl.loss.clip import Clip
from rl.loss.correction import Correction
from rl.loss.cross_entropy import CrossEntropy
from rl.loss.distillation import Distillation
from rl.loss.dpo import DPO
from rl.loss.dro import DRO
from rl.loss.gspo import GSPO
from rl.loss.importance_sampling import ImportanceSampling
from rl.loss.kl import KL
from rl.loss.shaping import Shaping
from rl.models.layout import Layout
from rl.models.sources import ModelDir, TinyQwen3
from rl.models.tokenizer import HFTokenizer
from tests.controller.fakes import QuietRecorder, fake_fleet


def small(**changes) -> RunConfig:
    config = replace(
        quickstart(), env=SortLetters(num_eval=2), warmup=WarmupConfig(steps=2, batch_size=2), steps=3, prompts_per_step=4, group_size=4,
        eval_every=2, trainer=TrainerConfig(lr=1e-3, betas=(0.9, 0.99)),
    )  # fmt: skip
    return replace(config, **changes)


def everything_done(config: RunConfig, tmp_path) -> str:
    """All that the run asks of its fleet, as text: what is sampled, what gradients are computed, which steps are taken."""
    tmp_path.mkdir(parents=True)
    fleet, calls = fake_fleet(config, tmp_path)
    recorder = QuietRecorder(tmp_path)
    tokenizer = HFTokenizer(config.model.materialize(tmp_path))
    asyncio.run(Run(config, fleet, tokenizer, recorder).train())
    return repr(calls)


PPO = {"loss": Clip(), "advantages": GAE(), "minibatches": 2}
TWICE = {"minibatches": 2}
# What a run does is written down with a fleet that has no processes. (what the run is, the setting, another value)
IN_THE_LOOP = [
    ({}, "loss.low", 0.05),
    ({}, "loss.high", 0.05),
    ({}, "loss.dual", 1.1),
    ({"loss": GSPO(low=0.01, high=0.01)}, "loss.low", 0.2),
    ({"loss": GSPO(low=0.01, high=0.01)}, "loss.high", 0.2),
    ({"loss": GSPO(0.3, 0.3), "advantages": GAE()}, "loss.level", "token"),
    ({"loss": CISPO()}, "loss.low", 0.1),
    ({"loss": CISPO()}, "loss.high", 0.1),
    ({"loss": DRO()}, "loss.beta", 0.5),
    ({"loss": DPO(), "data": "preferences", "group_size": 8}, "loss.beta", 0.5),
    ({"loss": DPO(), "data": "preferences", "group_size": 8}, "loss.label_smoothing", 0.1),
    ({"loss": DPO(), "data": "preferences", "group_size": 8}, "loss.nll_coef", 0.1),
    ({}, "advantages.adv_norm", "none"),
    ({}, "advantages.eps", 0.5),
    ({"advantages": ReinforcePP()}, "advantages.discount", 0.5),
    ({"advantages": ReinforcePP()}, "advantages.baseline", "group_mean"),
    ({"advantages": ReinforcePP()}, "advantages.eps", 0.5),
    (PPO, "advantages.discount", 0.5),
    (PPO, "advantages.lam", 0.5),
    (PPO, "advantages.whiten", False),
    (PPO, "advantages.eps", 0.5),
    ({}, "loss_agg", "seq_mean"),
    ({}, "loss_agg", "constant"),
    (TWICE, "correction.old_logprobs", "trainer"),
    ({"correction": Correction(old_logprobs="trainer")}, "correction.tis_clip", 1.1),
    ({}, "correction.mask_low", 0.9),
    ({}, "correction.mask_high", 1.1),
    ({"correction": Correction(mask_high=1.1)}, "correction.level", "sequence"),
    ({}, "kl.coef", 0.1),
    ({"kl": KL(coef=0.1)}, "kl.estimator", "k1"),
    ({"kl": KL(coef=0.1)}, "kl.estimator", "k2"),
    ({"kl": KL(coef=0.1)}, "kl.into", "reward"),
    ({"kl": KL(coef=0.1)}, "reference.refresh_every", 1),
    (PPO, "critic.lr", 1.0),
    (PPO, "critic.value_clip", 0.01),
    (PPO, "critic.max_grad_norm", 0.5),
    ({}, "shaping.overlong_tokens", 4),
    ({"shaping": Shaping(overlong_tokens=4)}, "shaping.overlong_penalty", 0.5),
    ({}, "shaping.length_coef", 0.5),
    ({}, "shaping.drop_truncated", True),
    ({}, "minibatches", 2),
    ({}, "epochs", 2),
    ({}, "group_size", 3),
    ({}, "resampling_rounds", 2),
    ({}, "prompts_per_step", 2),
    ({}, "steps", 2),
    ({}, "seed", 1),
    ({}, "eval_every", 1),
    ({}, "save_every", 1),
    ({"save_every": 1}, "keep_checkpoints", 1),
    ({}, "warmup.steps", 1),
    ({}, "warmup.batch_size", 1),
    ({}, "warmup.lr", 1.0),
    ({}, "env.max_new_tokens", 7),
    ({}, "env.num_eval", 1),
    ({}, "env.min_letters", 1),
    ({}, "env.max_letters", 5),
    ({}, "env.corruption", 0.0),
    ({}, "trainer.lr", 1.0),
    ({}, "trainer.lr_warmup_steps", 1),
    ({}, "trainer.betas", (0.5, 0.5)),
    ({}, "trainer.eps", 1.0),
    ({}, "trainer.weight_decay", 1.0),
    ({}, "trainer.max_grad_norm", 0.5),
    ({}, "data", "demonstrations"),
]
# What the launcher starts.
AT_LAUNCH = [
    ({}, "trainer.layout.replicate", 2),
    ({}, "trainer.layout.shard", 2),
    ({}, "trainer.layout.context_parallel", 2),
    ({}, "trainer.layout.tensor_parallel", 2),
    ({"kl": KL(coef=0.1)}, "reference.layout.replicate", 2),
    ({"kl": KL(coef=0.1)}, "reference.layout.shard", 2),
    ({"kl": KL(coef=0.1)}, "reference.layout.context_parallel", 2),
    ({"kl": KL(coef=0.1)}, "reference.layout.tensor_parallel", 2),
    (PPO, "critic.layout.replicate", 2),
    (PPO, "critic.layout.shard", 2),
    (PPO, "critic.layout.context_parallel", 2),
    (PPO, "critic.layout.tensor_parallel", 2),
    ({}, "trainer.activation_checkpointing", "full"),
    ({}, "trainer.max_tokens", 64),
    ({}, "trainer.float8", True),
    ({}, "trainer.compile", True),
    ({}, "trainer.lora.rank", 4),
    ({}, "generator.num_replicas", 2),
    ({}, "generator.max_num_seqs", 7),
    ({}, "generator.kv_cache_gib", 0.1),
    ({}, "generator.compile", True),
    ({}, "reward.num_procs", 2),
    ({}, "dtype", "bfloat16"),
    ({}, "launch.deadline_seconds", 7.0),
    ({}, "model.hidden_size", 32),
    ({}, "model.num_layers", 1),
    ({}, "model.intermediate_size", 32),
    ({}, "model.num_heads", 4),
    ({}, "model.num_kv_heads", 2),
    ({}, "model.max_length", 64),
    ({}, "model.alphabet", "".join(reversed(quickstart().model.alphabet))),
]
# Held by tests that need processes, or the config's own checks.
ELSEWHERE = {
    "trainer.engine": "tests/integration/test_runs.py: student",
    "trainer.lora.alpha": "tests/models/test_lora.py",
    "trainer.lora.targets": "tests/models/test_lora.py",
    "weight_sync.transport": "tests/integration/test_runs.py: tp2_and_torchstore",
    "reward.limit_seconds": "tests/envs/test_envs.py",
    "env.chat": "tests/envs/test_envs.py",
    "reference.model": "test_a_teacher_is_another_model, below",
    "resume_from": "tests/integration/test_runs.py",
    "run_dir": "tests/integration/test_runs.py",
}


class NoReturns:
    needs_critic = True

    def __call__(self, groups):
        return [[0.0] * len(group) for group in groups]


def changed(base, setting, value):
    config = small(**base)
    sections = setting.split(".")
    for i in range(len(sections) - 1, -1, -1):
        owner = config
        for section in sections[:i]:
            owner = getattr(owner, section)
        value = replace(owner, **{sections[i]: value})
    return config, value


def name_of(case):
    return f"{case[1]}={case[2]}, {', '.join(type(v).__name__ if dataclasses.is_dataclass(v) else k for k, v in case[0].items())}"


@pytest.mark.parametrize("case", IN_THE_LOOP, ids=name_of)
def test_a_setting_of_the_algorithm_changes_what_the_run_does(case, tmp_path):
    before, after = changed(*case)
    assert everything_done(before, tmp_path / "a") == everything_done(
        before, tmp_path / "b"
    )  # or the comparison says nothing
    assert everything_done(before, tmp_path / "c") != everything_done(after, tmp_path / "d")


@pytest.mark.parametrize("case", AT_LAUNCH, ids=name_of)
def test_a_setting_of_the_processes_changes_what_is_started(case, tmp_path):
    def started(config):
        others = {"critic": critic_config, "reference": reference_config}
        roles = [settings(config) for role, settings in others.items() if role in processes(config)]
        tokenizer = HFTokenizer(config.model.materialize(tmp_path)).encode("abc")
        return repr(
            (
                engine_config(config),
                generator_args(config, tmp_path),
                processes(config),
                roles,
                config.model.config(),
                tokenizer,
            )
        )

    before, after = changed(*case)
    assert started(before) != started(after)


def test_every_setting_is_tested():
    tested = {setting for _, setting, _ in [*IN_THE_LOOP, *AT_LAUNCH]} | set(ELSEWHERE)
    configs = [
        small(loss=loss)
        for loss in (
            Clip(),
            GSPO(),
            CISPO(),
            ImportanceSampling(),
            DRO(),
            CrossEntropy(),
            DPO(),
            Distillation(),
        )
    ]
    configs += [small(advantages=estimator) for estimator in (GroupMean(), RLOO(), ReinforcePP(), GAE())]
    for config in configs:
        for name in set(setting_names(config)) - {"loss", "advantages"}:
            assert name in tested, name
        for part in ("loss", "advantages"):
            chosen = getattr(config, part)
            for field in dataclasses.fields(chosen):
                assert any(
                    setting == f"{part}.{field.name}"
                    and isinstance(base.get(part, getattr(small(), part)), type(chosen))
                    for base, setting, _ in IN_THE_LOOP
                ), (chosen, field.name)


def test_a_teacher_is_another_model(tmp_path):
    config = small(loss=Distillation(), reference=ReferenceConfig(model=ModelDir("somewhere")), group_size=1)
    assert "reference" in processes(config)
    done = everything_done(config, tmp_path / "a")
    assert (
        "'reference', 'forward'" in done and "'reference', 'load_weights'" not in done
    )  # it stays what it was
    follows = small(loss=Distillation())
    assert "'reference', 'load_weights'" in everything_done(follows, tmp_path / "b")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"kl": KL(estimator="k1")},
            "kl=KL(coef=0.0, estimator='k1', into='loss') has no effect with kl.coef=0",
        ),
        (
            {"reference": ReferenceConfig(refresh_every=3)},
            "has no effect with neither kl.coef nor the loss asking for a reference",
        ),
        ({"critic": CriticConfig(lr=1.0)}, "has no effect with an estimator that asks for no critic"),
        ({"shaping": Shaping(overlong_penalty=0.5)}, "shaping.overlong_penalty=0.5 has no effect"),
        ({"shaping": Shaping(overlong_tokens=9)}, "shaping.overlong_tokens=9 is over env.max_new_tokens=8"),
        ({"correction": Correction(level="sequence")}, "correction.level=sequence has no effect"),
        (
            {"correction": Correction(tis_clip=2.0)},
            "correction.tis_clip=2.0 needs correction.old_logprobs=trainer",
        ),
        (
            {"correction": Correction(mask_low=2.0, mask_high=1.0)},
            "correction.mask_high=1.0 is under correction.mask_low=2.0",
        ),
        (
            {"advantages": ReinforcePP(discount=0.9, baseline="group_mean")},
            "advantages.discount=0.9 has no effect",
        ),
        ({"advantages": GroupMean(adv_norm="none", eps=1.0)}, "advantages.eps=1.0 has no effect"),
        ({"minibatches": 3}, "minibatches=3 does not divide prompts_per_step=4"),
        ({"minibatches": 0}, "minibatches=0 must be at least 1"),
        ({"loss": DPO()}, "loss DPO learns from preferences, not from data=rollouts"),
        ({"loss": CrossEntropy()}, "loss CrossEntropy learns from demonstrations"),
        ({"data": "demonstrations"}, "loss Clip learns from rollouts, not from data=demonstrations"),
        (
            {"data": "preferences", "loss": DPO(), "loss_agg": "constant"},
            "loss_agg=constant has no effect with pairs",
        ),
        ({"data": "preferences", "loss": DPO()}, "group_size=4 has no effect with data=preferences"),
        (
            {"data": "demonstrations", "loss": CrossEntropy(), "resampling_rounds": 1},
            "resampling_rounds=1 has no effect",
        ),
        ({"loss": Distillation()}, "loss Distillation needs a teacher; set reference.model"),
        (
            {"loss": Distillation(), "kl": KL(coef=0.1, into="reward")},
            "has no effect with nothing that reads rewards",
        ),
        (
            {"loss": Distillation(), "advantages": RLOO()},
            "advantages=RLOO() has no effect with nothing that reads rewards",
        ),
        (
            {"loss": Distillation(), "shaping": Shaping(length_coef=1.0)},
            "length_coef have no effect with nothing that reads rewards",
        ),
        (
            {"shaping": Shaping(overlong_tokens=2, overlong_penalty=0)},
            "shaping.overlong_tokens=2 has no effect",
        ),
        ({"group_size": 1}, "group_size=1 gives every advantage 0"),
        (
            {"group_size": 1, "advantages": ReinforcePP(baseline="group_mean")},
            "group_size=1 gives every advantage 0",
        ),
        (
            {"group_size": 1, "advantages": GAE(), "resampling_rounds": 1},
            "resampling_rounds=1 compares the rollouts of a group",
        ),
        (
            {"group_size": 1, "advantages": GAE(), "shaping": Shaping(length_coef=0.1)},
            "shaping.length_coef=0.1 compares the rollouts",
        ),
        (
            {"advantages": GAE(), "critic": CriticConfig(layout=Layout(tensor_parallel=2))},
            "critic.layout.tensor_parallel=2 does not divide",
        ),
        (
            {"kl": KL(0.1), "reference": ReferenceConfig(layout=Layout(tensor_parallel=2))},
            "reference.layout.tensor_parallel=2 does not",
        ),
        ({"advantages": NoReturns()}, "advantages needs a critic but has no method returns(groups)"),
        (
            {"kl": KL(0.1), "reference": ReferenceConfig(model=TinyQwen3(alphabet="abc>"))},
            "has another tokenizer than the model",
        ),
        ({"loss": Clip(dual=0.5)}, "loss.dual=0.5 must be over 1"),
        ({"loss": Clip(low=1.5)}, "loss.low=1.5 must be at least 0 and at most 1"),
        ({"loss": 3}, "loss=3 cannot be called"),
        ({"advantages": GAE(lam=1.5)}, "advantages.lam=1.5 must be at least 0 and at most 1"),
        ({"kl": KL(coef=-1.0)}, "kl.coef=-1.0 must be at least 0"),
        (
            {"reference": ReferenceConfig(model=ModelDir("nowhere")), "kl": KL(coef=0.1)},
            "model directory nowhere has no config.json",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_named(changes, words):
    assert any(words in line for line in problems(small(**changes))), problems(small(**changes))


def test_the_penalty_of_a_recipe_can_be_switched_off_but_not_half():
    recipe = small(kl=KL(0.1, "k1", "reward"), reference=ReferenceConfig(refresh_every=5))
    off = override(recipe, ["--kl.coef", "0"], "rl")
    assert off == replace(recipe, kl=KL(), reference=ReferenceConfig()) and problems(off) == []
    half = override(recipe, ["--kl.coef", "0", "--kl.estimator", "k2"], "rl")
    assert any("has no effect with kl.coef=0" in line for line in problems(half))
    assert override(recipe, ["--kl.coef", "0.2"], "rl").kl == KL(0.2, "k1", "reward")


@pytest.mark.parametrize("loss", [Distillation(), Clip()])
def test_truncated_rollouts_are_dropped_from_any_loss(loss):
    config = small(
        loss=loss,
        kl=KL(0.1),
        reference=ReferenceConfig(model=small().model),
        shaping=Shaping(drop_truncated=True),
    )
    assert problems(config) == []


def test_settings_of_any_loss_can_be_given_on_the_command_line():
    config = override(
        small(loss=GSPO(), advantages=GAE()),
        ["--loss.level", "token", "--advantages.lam", "0.5", "--critic.lr", "0.1"],
        "rl",
    )
    assert (
        config.loss == GSPO(level="token") and config.advantages == GAE(lam=0.5) and config.critic.lr == 0.1
    )
    assert RewardConfig() == config.reward
