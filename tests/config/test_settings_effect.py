"""No setting is silently without effect: each is changed, and something that the run does must change."""

import ast
import asyncio
import dataclasses
import json
import re
from contextlib import asynccontextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest

from configs.quickstart import quickstart
from rl.config import (
    CriticConfig,
    GeneratorConfig,
    JudgeConfig,
    ReferenceConfig,
    RewardConfig,
    RunConfig,
    TrainerConfig,
    WarmupConfig,
)
from rl.config.flags import override, setting_names
from rl.config.settle import model_dirs, settle
from rl.config.validate import validate
from rl.controller import run as run_module
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
from rl.loss.entropy import EntropyBonus
from rl.loss.gspo import GSPO
from rl.loss.importance_sampling import ImportanceSampling
from rl.loss.kl import KL
from rl.loss.shaping import Shaping
from rl.models.layout import Layout
from rl.models.sources import ModelDir, TinyQwen3
from rl.observability.recorder import Recorder
from rl.observability.sinks import TrackingConfig
from rl.plan.cluster import Cluster
from rl.types import LoRA
from tests.controller.fakes import fake_actors, no_picture, run_fakes
from tests.plans import AMPLE, cluster

ROOT = Path(__file__).parent.parent.parent


def small(**changes) -> RunConfig:
    config = replace(
        quickstart(), env=SortLetters(num_eval=2), warmup=WarmupConfig(steps=2, batch_size=2), steps=3, prompts_per_step=4, group_size=4,
        eval_every=2, trainer=TrainerConfig(lr=1e-3, betas=(0.9, 0.99)),
    )  # fmt: skip
    return replace(config, **changes)


# Kinds of what a run does, by whom and by what it is asked.
KINDS = {
    ("generators", None): "samples",
    ("trainer", "learn"): "gradients",
    ("critic", "learn"): "critic's gradients",
    ("trainer", "step"): "optimizer",
    ("critic", "step"): "critic's optimizer",
    ("trainer", "forward"): "old logprobs",
    ("reference", "forward"): "reference",
    ("reference", "load_weights"): "refreshed",
    ("trainer", "save_checkpoint"): "checkpoints",
}


def everything_done(config: RunConfig, tmp_path) -> dict[str, list]:
    """All that the run asks of its actors, by kind, from the first RL step on; the warm-up is a kind of its own."""
    tmp_path.mkdir(parents=True)
    calls, _ = run_fakes(config, tmp_path)
    done = {kind: [] for kind in [*KINDS.values(), "warm-up"]}
    begun = next(i for i, call in enumerate(calls) if call[1] == "publish_weights")
    for i, call in enumerate(calls):
        kind = KINDS.get((call[0], None)) or KINDS.get(call[:2])
        if kind is not None:
            done["warm-up" if i < begun else kind].append(repr(call))
    return done


PPO = {"loss": Clip(), "advantages": GAE(), "minibatches": 2}
TWICE = {"minibatches": 2}
DECAYING = TrainerConfig(lr_schedule="wsd", lr_warmup_steps=0, lr_decay_ratio=0.4)
# (what the run is, the setting, another value, the kinds of what a run does that it changes)
IN_THE_LOOP = [
    ({}, "loss.low", 0.05, "gradients"),
    ({}, "loss.high", 0.05, "gradients"),
    ({}, "loss.dual", 1.1, "gradients"),
    ({"loss": GSPO(low=0.01, high=0.01)}, "loss.low", 0.2, "gradients"),
    ({"loss": GSPO(low=0.01, high=0.01)}, "loss.high", 0.2, "gradients"),
    ({"loss": GSPO(0.3, 0.3), "advantages": GAE()}, "loss.level", "token", "gradients"),
    ({"loss": CISPO()}, "loss.low", 0.1, "gradients"),
    ({"loss": CISPO()}, "loss.high", 0.1, "gradients"),
    ({"loss": DRO()}, "loss.beta", 0.5, "gradients"),
    ({"loss": DPO(), "data": "preferences", "group_size": 8}, "loss.beta", 0.5, "gradients"),
    ({"loss": DPO(), "data": "preferences", "group_size": 8}, "loss.label_smoothing", 0.1, "gradients"),
    ({"loss": DPO(), "data": "preferences", "group_size": 8}, "loss.nll_coef", 0.1, "gradients"),
    ({}, "advantages.adv_norm", "none", "gradients"),
    ({}, "advantages.eps", 0.5, "gradients"),
    ({"advantages": ReinforcePP()}, "advantages.discount", 0.5, "gradients"),
    ({"advantages": ReinforcePP()}, "advantages.baseline", "group_mean", "gradients"),
    ({"advantages": ReinforcePP()}, "advantages.eps", 0.5, "gradients"),
    (PPO, "advantages.discount", 0.5, "gradients, critic's gradients"),
    (PPO, "advantages.lam", 0.5, "gradients, critic's gradients"),
    (PPO, "advantages.whiten", False, "gradients"),
    (PPO, "advantages.eps", 0.5, "gradients"),
    ({}, "loss_agg", "seq_mean", "gradients, optimizer"),
    ({}, "loss_agg", "constant", "optimizer"),
    (TWICE, "correction.old_logprobs", "trainer", "gradients, old logprobs"),
    ({"correction": Correction(old_logprobs="trainer")}, "correction.tis_clip", 1.1, "gradients"),
    ({}, "correction.mask_low", 0.9, "gradients"),
    ({}, "correction.mask_high", 1.1, "gradients"),
    ({"correction": Correction(mask_high=1.1)}, "correction.level", "sequence", "gradients"),
    ({}, "kl.coef", 0.1, "gradients, reference, warm-up"),
    ({"kl": KL(coef=0.1)}, "kl.estimator", "k1", "gradients"),
    ({"kl": KL(coef=0.1)}, "kl.estimator", "k2", "gradients"),
    ({"kl": KL(coef=0.1)}, "kl.into", "reward", "gradients"),
    ({"kl": KL(coef=0.1)}, "reference.refresh_every", 1, "refreshed"),
    (PPO, "critic.lr", 1.0, "critic's optimizer"),
    (PPO, "critic.value_clip", 0.01, "critic's gradients"),
    (PPO, "critic.max_grad_norm", 0.5, "critic's optimizer"),
    ({}, "shaping.overlong_tokens", 4, "gradients"),
    ({"shaping": Shaping(overlong_tokens=4)}, "shaping.overlong_penalty", 0.5, "gradients"),
    ({}, "shaping.length_coef", 0.5, "gradients"),
    ({}, "shaping.drop_truncated", True, "gradients, optimizer"),
    ({}, "minibatches", 2, "gradients, optimizer"),
    ({}, "stream_groups", 2, "gradients"),
    ({}, "epochs", 2, "gradients, optimizer"),
    ({}, "group_size", 3, "samples, gradients, optimizer"),
    ({}, "resampling_rounds", 2, "samples, gradients, optimizer"),
    ({}, "prompts_per_step", 2, "samples, gradients, optimizer"),
    ({}, "steps", 2, "samples, gradients, optimizer, checkpoints"),
    ({}, "seed", 1, "samples, gradients, optimizer, warm-up"),
    ({}, "eval_every", 1, "samples"),
    ({}, "save_every", 1, "checkpoints"),
    ({}, "save_every_minutes", 1e-9, "checkpoints"),
    ({"save_every": 1}, "keep_checkpoints", 1, "checkpoints"),
    ({}, "warmup.steps", 1, "gradients, warm-up"),
    ({}, "warmup.batch_size", 1, "warm-up"),
    ({}, "warmup.lr", 1.0, "warm-up"),
    ({}, "env.max_new_tokens", 7, "samples, gradients, optimizer"),
    ({}, "env.num_eval", 1, "samples"),
    ({}, "env.min_letters", 1, "samples, gradients, optimizer, warm-up"),
    ({}, "env.max_letters", 5, "samples, gradients, optimizer, warm-up"),
    ({}, "env.corruption", 0.0, "warm-up"),
    ({}, "trainer.lr", 1.0, "optimizer"),
    ({}, "trainer.lr_warmup_steps", 1, "optimizer"),
    ({"trainer": TrainerConfig(lr_warmup_steps=0)}, "trainer.lr_schedule", "linear", "optimizer"),
    (
        {"trainer": TrainerConfig(lr_schedule="cosine", lr_warmup_steps=0)},
        "trainer.lr_min_ratio",
        0.5,
        "optimizer",
    ),
    ({"trainer": DECAYING}, "trainer.lr_decay_ratio", 0.9, "optimizer"),
    ({}, "entropy.coef", 0.1, "gradients"),
    ({}, "entropy.target", 9.0, "gradients"),
    ({"entropy": EntropyBonus(target=9.0)}, "entropy.adapt", 0.1, "gradients"),
    ({}, "trainer.betas", (0.5, 0.5), "optimizer"),
    ({}, "trainer.eps", 1.0, "optimizer"),
    ({}, "trainer.weight_decay", 1.0, "optimizer"),
    ({"trainer": TrainerConfig(weight_decay=0.1)}, "trainer.decay_all", False, "optimizer"),
    ({}, "trainer.max_grad_norm", 0.5, "optimizer"),
    ({}, "data", "demonstrations", "samples, gradients, optimizer"),
]
# What the launcher starts: (what the run is, the setting, another value, where it arrives in the Plan: the role's first
# replica, or, of counts, how many it has).
LAYOUT = ("replicate", "shard", "context_parallel", "tensor_parallel")
REFERENCE = {"kl": KL(coef=0.1)}
LORA = {"trainer": TrainerConfig(lora=LoRA(rank=4))}
JUDGED = {"judge": JudgeConfig(model=TinyQwen3("abc"))}
ON_HOSTS = {
    "trainer": {"trainer": TrainerConfig(layout=Layout(shard=2))},
    "critic": {**PPO, "critic": CriticConfig(layout=Layout(shard=2))},
    "reference": {**REFERENCE, "reference": ReferenceConfig(layout=Layout(shard=2))},
    "generator": {"generator": GeneratorConfig(num_replicas=2)},
    "judge": {"judge": replace(JUDGED["judge"], num_replicas=2)},
    "reward": {"reward": RewardConfig(num_procs=2)},
}
AT_LAUNCH = [
    *(({}, f"trainer.layout.{axis}", 2, f"trainer.spec.config.layout.{axis}") for axis in LAYOUT),
    *((REFERENCE, f"reference.layout.{axis}", 2, f"reference.spec.config.layout.{axis}") for axis in LAYOUT),
    *((PPO, f"critic.layout.{axis}", 2, f"critic.spec.config.layout.{axis}") for axis in LAYOUT),
    ({}, "trainer.engine", "hf", "trainer.spec.kind"),
    ({}, "trainer.activation_checkpointing", "full", "trainer.spec.config.activation_checkpointing"),
    ({}, "trainer.micro_batch_tokens", 4096, "trainer.spec.config.micro_batch_tokens"),
    ({}, "max_seq_len", 64, "trainer.spec.config.max_seq_len"),
    ({}, "max_seq_len", 64, "generator.spec.config.max_model_len"),
    ({}, "trainer.share_prefixes", False, "trainer.spec.config.share_prefixes"),
    ({}, "trainer.float8", True, "trainer.spec.config.float8"),
    ({}, "trainer.dropout", True, "trainer.spec.config.dropout"),
    ({}, "trainer.compile", True, "trainer.spec.config.compile"),
    ({}, "trainer.lora.rank", 4, "generator.spec.config.max_lora_rank"),
    ({}, "generator.num_replicas", 2, "generator.count"),
    ({"max_offpolicy_steps": 1}, "generator.updates", "drain", "generator.spec.updates"),
    ({}, "generator.tensor_parallel", 2, "generator.spec.config.tensor_parallel"),
    ({}, "trainer.num_threads", 7, "trainer.threads"),
    ({}, "generator.num_threads", 7, "generator.threads"),
    ({}, "generator.max_num_seqs", 7, "generator.spec.config.max_num_seqs"),
    ({}, "generator.kv_cache_gib", 0.1, "generator.spec.config.kv_cache_gib"),
    ({}, "generator.block_size", 64, "generator.spec.config.block_size"),
    ({}, "generator.compile", True, "generator.spec.config.compile"),
    *((base, f"{role}.hosts", (2, 1), f"{role}.hosts") for role, base in ON_HOSTS.items()),
    ({}, "trainer.max_restarts", 7, "trainer.max_restarts"),
    ({}, "generator.max_restarts", 7, "generator.max_restarts"),
    (JUDGED, "judge.num_replicas", 2, "judge.count"),
    (JUDGED, "judge.tensor_parallel", 2, "judge.spec.config.tensor_parallel"),
    (JUDGED, "judge.max_tokens", 64, "judge.spec.config.max_model_len"),
    (JUDGED, "judge.kv_cache_gib", 0.1, "judge.spec.config.kv_cache_gib"),
    ({}, "reward.num_procs", 2, "reward.count"),
    ({}, "reward.limit_seconds", 7.0, "reward.spec.limit_seconds"),
    ({}, "reward.max_restarts", 7, "reward.max_restarts"),
    ({}, "weight_sync.transport", "torchstore", "transport"),
    ({}, "dtype", "bfloat16", "trainer.spec.config.dtype"),
    (LORA, "trainer.lora.alpha", 7.0, "trainer.adapter.alpha"),
    (LORA, "trainer.lora.targets", ("q_proj",), "trainer.adapter.targets"),
    *(
        ({}, f"deadlines.{kind}", 7.0, f"deadlines.{kind}")
        for kind in ("start", "load", "progress", "train", "sync", "checkpoint")
    ),
    ({}, "deadlines.train", 7.0, "trainer.spec.config.timeout_seconds"),
    ({}, "deadlines.checkpoint", 7.0, "trainer.spec.config.save_seconds"),
]
ON_A_GPU = ("trainer.compile",)
# What the model is: (the setting, another value, its name in config.json).
OF_THE_MODEL = [
    ("model.hidden_size", 32, "hidden_size"),
    ("model.num_layers", 1, "num_hidden_layers"),
    ("model.intermediate_size", 32, "intermediate_size"),
    ("model.num_heads", 4, "num_attention_heads"),
    ("model.num_kv_heads", 2, "num_key_value_heads"),
    ("model.max_length", 64, "max_position_embeddings"),
]
# Held by other tests: those of what the setting is for, those that need processes, and the config's own checks.
ELSEWHERE = {
    "hosts": "tests/cluster/test_hosts.py::test_a_run_is_planned_on_the_hosts_that_it_names",
    "trainer.min_hosts": "tests/plan/test_fallback.py::test_fewer_hosts_have_fewer_shards_or_copies_and_as_many_ranks_each",
    "trainer.spare_hosts": "tests/plan/test_fallback.py::test_a_spare_host_takes_the_place_of_a_lost_one",
    "weight_sync.delta": "tests/plan/test_links.py::test_a_difference_goes_over_a_slow_link",
    "joining_hosts": "tests/plan/test_hosts.py::test_generators_alone_are_on_hosts_that_may_join",
    "max_offpolicy_steps": "tests/integration/test_async.py::test_an_asynchronous_run_keeps_its_bound_and_measures_one_version",
    "trace": "tests/config/test_settings_effect.py::test_a_setting_of_what_is_written_changes_the_files",
    "model.alphabet": "tests/config/test_bad_input.py::test_a_model_that_cannot_read_the_task",
    "env.chat": "tests/envs/test_envs.py::test_a_prompt_is_prefix_and_question_or_turns_of_them",
    "env.prompt_prefix": "tests/envs/test_envs.py::test_a_prompt_is_prefix_and_question_or_turns_of_them",
    "env.stop": "tests/envs/test_envs.py::test_a_completion_ends_at_eos_or_at_a_text_of_the_env",
    "placement": "tests/plan/test_resolve.py::test_a_default_gives_way_to_a_setting",
    "max_logprob_diff": "tests/controller/test_parity.py::test_the_limit_is_the_setting_or_the_dtypes",
    "generator.cuda_graphs": "tests/models/test_vllm_arguments.py::test_graphs_are_captured_where_they_are_asked_for_and_prompts_are_cut_on_gpus_alone",
    "judge.model": "tests/config/test_judge_rules.py::test_a_judge_is_a_role_with_weights_of_its_own",
    "reference.model": "tests/config/test_settings_effect.py::test_a_teacher_is_another_model",
    "resume": "tests/integration/test_runs.py::test_a_run_goes_on_from_a_checkpoint_with_the_same_numbers",
    "tracking.sinks": "tests/config/test_settings_effect.py::test_a_setting_of_what_is_written_changes_the_files",
    "tracking.project": "tests/observability/test_sinks.py::test_wandb_goes_on_in_its_run_and_has_each_step_once",
    "run_dir": "tests/integration/test_runs.py::test_a_run_leaves_its_artefacts",
    "record_batches": "tests/config/test_settings_effect.py::test_a_setting_of_what_is_written_changes_the_files",
    "record_rollouts": "tests/config/test_settings_effect.py::test_a_setting_of_what_is_written_changes_the_files",
}


@dataclasses.dataclass(frozen=True)
class OwnPairs:
    """A user's loss of pairs, which is no DPO."""

    learns_from = "preferences"

    def __call__(self, logprobs, inputs):
        raise NotImplementedError


class CloserPairs(DPO):
    """A user's DPO."""


class OwnTeaching(Clip):
    """A user's loss of rollouts, with a teacher."""

    needs_reference = needs_teacher = True


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
    names = [type(v).__name__ if dataclasses.is_dataclass(v) else k for k, v in case[0].items()]
    return f"{case[1]}={case[2]}, {', '.join(names)}"


@pytest.mark.parametrize("case", IN_THE_LOOP, ids=name_of)
def test_a_setting_changes_these_kinds_of_what_the_run_does_and_no_others(case, tmp_path):
    base, setting, value, kinds = case
    before, after = changed(base, setting, value)
    first, second = everything_done(before, tmp_path / "a"), everything_done(after, tmp_path / "b")
    assert [kind for kind in first if first[kind] != second[kind]] == kinds.split(", ")
    if setting == "loss.low":  # once is enough: without it the comparison would say nothing
        assert everything_done(before, tmp_path / "c") == first


@pytest.mark.parametrize("case", AT_LAUNCH, ids=name_of)
def test_a_setting_of_the_processes_arrives_where_they_are_started(case, tmp_path):
    base, setting, value, where = case
    before, after = changed(base, setting, value)

    def arrives(config):
        if setting.endswith("tensor_parallel"):  # two ranks need two key heads
            config = replace(config, model=replace(config.model, num_kv_heads=2))
        role, _, rest = where.partition(".")
        if rest == "hosts":
            of_role = settle(config, cluster=Cluster(AMPLE.hosts * 3)).of(role)
            return tuple(process.host for replica in of_role for process in replica.processes)
        plan = settle(config, cluster=AMPLE if setting not in ON_A_GPU else cluster("8xH100-80"))
        if not rest or role == "deadlines":
            return attrgetter(where)(plan)
        replicas = plan.of(role)
        if rest == "count":
            return len(replicas)
        if rest.startswith("adapter."):
            return attrgetter(rest.removeprefix("adapter."))(replicas[0].spec.adapters[0].lora)
        return replicas[0].processes[0].threads if rest == "threads" else attrgetter(rest)(replicas[0])

    assert arrives(before) != value == arrives(after)


@pytest.mark.parametrize(("setting", "value", "name"), OF_THE_MODEL)
def test_a_setting_of_the_model_is_in_its_config(setting, value, name):
    before, after = changed({}, setting, value)
    assert before.model.config()[name] != after.model.config()[name] == value


def test_every_setting_is_tested():
    tested = {case[1] for case in [*IN_THE_LOOP, *AT_LAUNCH]} | set(ELSEWHERE)
    tested |= {setting for setting, _, _ in OF_THE_MODEL}
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
                    for base, setting, _, _ in IN_THE_LOOP
                ), (chosen, field.name)


@pytest.mark.parametrize("setting", ELSEWHERE)
def test_who_holds_a_setting_elsewhere_knows_it(setting):
    path, _, function = ELSEWHERE[setting].partition("::")
    source = (ROOT / path).read_text()
    functions = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)}
    if path.startswith("tests/integration/"):  # whose recipes have it
        assert function in functions
        return
    text = ast.unparse(functions[function])
    for statement in ast.parse(source).body:  # what it takes from its module
        if not isinstance(statement, ast.FunctionDef | ast.Import | ast.ImportFrom):
            targets = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            text += ast.unparse(statement) * any(re.search(rf"\b{name}\b", text) for name in targets)
    assert re.search(rf"\b{setting.rpartition('.')[2]}\b", text), setting


FILES = [
    ({}, []),
    ({"trace": True}, ["trace.json"]),
    ({"record_batches": 2}, ["batches/step-2.pkl", "batches/step-3.pkl"]),
    ({"tracking": TrackingConfig()}, ["tensorboard"]),
    *(({"record_rollouts": number}, []) for number in (0, 3, 16)),
]


@pytest.mark.parametrize(("changes", "files"), FILES, ids=[str(changes) for changes, _ in FILES])
def test_a_setting_of_what_is_written_changes_the_files(changes, files, tmp_path, monkeypatch):
    """A whole run, but for its processes."""

    @asynccontextmanager
    async def launch(plan, models, run_dir, env, timeline, **_):
        yield fake_actors(config, run_dir)[0]

    monkeypatch.setattr(run_module, "launch", launch)
    monkeypatch.setattr(run_module, "give_way_often", lambda: None)
    monkeypatch.setattr(Recorder, "draw_curve", no_picture)
    config = small(**{"tracking": TrackingConfig(sinks=()), **changes})
    asyncio.run(run_module.run_recipe("small", config, tmp_path))
    for name in (
        "trace.json",
        "batches/step-1.pkl",
        "batches/step-2.pkl",
        "batches/step-3.pkl",
        "tensorboard",
    ):
        assert (tmp_path / name).exists() == (name in files), name
    rows = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    for step in (1, 2, 3):  # of 16 rollouts; those that failed are recorded beside them
        of_step = [row for row in rows if (row["split"], row["step"]) == ("train", step)]
        good = [row for row in of_step if row["error"] is None]
        assert len(good) <= config.record_rollouts <= len(of_step)


def test_a_teacher_is_another_model(tmp_path):
    config = small(loss=Distillation(), reference=ReferenceConfig(model=small().model), group_size=1)
    assert settle(config, cluster=AMPLE).of("reference")
    done = everything_done(config, tmp_path / "a")
    assert done["reference"] and not any("load_weights" in call for call in done["warm-up"])  # it stays
    follows = everything_done(small(loss=Distillation()), tmp_path / "b")
    assert any("load_weights" in call for call in follows["warm-up"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"kl": KL(estimator="k1")},
            "kl.estimator=k1 has no effect with kl.coef=0",
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
            {"advantages": ReinforcePP(discount=0.9, baseline="group_mean")},
            "advantages.discount=0.9 has no effect",
        ),
        ({"advantages": GroupMean(adv_norm="none", eps=1.0)}, "advantages.eps=1.0 has no effect"),
        ({"minibatches": 3}, "minibatches=3 does not divide prompts_per_step=4"),
        ({"minibatches": 0}, "minibatches=0 must be at least 1"),
        ({"stream_groups": 3}, "stream_groups=3 does not divide prompts_per_step=4"),
        ({"stream_groups": 4}, "stream_groups=4 has no effect with prompts_per_step=4"),
        ({"stream_groups": 2, "minibatches": 2}, "stream_groups=2 needs minibatches=1 and epochs=1"),
        ({"stream_groups": 2, "advantages": GAE()}, "needs advantages that depend on one group alone"),
        (
            {"stream_groups": 2, "advantages": ReinforcePP()},
            "needs advantages that depend on one group alone",
        ),
        ({"stream_groups": 2, "resampling_rounds": 1}, "does not go with resampling_rounds=1"),
        (
            {"stream_groups": 2, "data": "demonstrations", "loss": CrossEntropy()},
            "stream_groups=2 has no effect with data=demonstrations",
        ),
        ({"loss": DPO()}, "loss DPO learns from preferences, not from data=rollouts"),
        ({"loss": OwnPairs()}, "loss OwnPairs learns from preferences, not from data=rollouts"),
        ({"loss": CloserPairs()}, "loss CloserPairs learns from preferences, not from data=rollouts"),
        (
            {"data": "preferences", "loss": OwnTeaching()},
            "loss OwnTeaching learns from rollouts, not from data=preferences",
        ),
        ({"loss": OwnTeaching()}, "loss OwnTeaching needs a teacher; set reference.model"),
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
        ({"loss": 3}, "loss=3 cannot be called"),
        (
            {"reference": ReferenceConfig(model=ModelDir("nowhere")), "kl": KL(coef=0.1)},
            "model directory nowhere has no config.json",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_named(changes, words):
    assert any(words in line for line in validate(small(**changes))), validate(small(**changes))


@pytest.mark.parametrize("data", ["rollouts", "demonstrations", "preferences"])
def test_a_loss_that_says_nothing_of_its_data_may_have_any(data):
    of_loss = [
        line for line in validate(small(data=data, loss=lambda logprobs, inputs: None)) if "learns" in line
    ]
    assert not of_loss
    if data == "preferences":
        assert not any("learns from" in line for line in validate(small(data=data, loss=OwnPairs())))


@pytest.mark.parametrize(
    ("changes", "flags", "words"),
    [
        (
            {},
            ["--correction.tis_clip", "2"],
            "correction.tis_clip=2.0 needs correction.old_logprobs=trainer",
        ),
        (
            {},
            ["--correction.mask_low", "2", "--correction.mask_high", "1"],
            "correction.mask_high=1.0 is under correction.mask_low=2.0",
        ),
        ({}, ["--loss.dual", "0.5"], "loss.dual=0.5 must be over 1"),
        ({}, ["--loss.low", "1.5"], "loss.low=1.5 must be at least 0 and at most 1"),
        (
            {"advantages": GAE()},
            ["--advantages.lam", "1.5"],
            "advantages.lam=1.5 must be at least 0 and at most 1",
        ),
        ({}, ["--kl.coef", "-1"], "kl.coef=-1.0 must be at least 0"),
    ],
)
def test_values_that_a_part_refuses_are_named_by_their_setting(changes, flags, words):
    config, wrong = override(small(**changes), flags, "rl")
    (line,) = validate(config, wrong)
    assert words in line


def test_the_penalty_of_a_recipe_can_be_switched_off_but_not_half():
    recipe = small(kl=KL(0.1, "k1", "reward"), reference=ReferenceConfig(refresh_every=5))
    off, _ = override(recipe, ["--kl.coef", "0"], "rl")
    assert off == replace(recipe, kl=KL(), reference=ReferenceConfig()) and validate(off) == []
    half, _ = override(recipe, ["--kl.coef", "0", "--kl.estimator", "k2"], "rl")
    assert any("has no effect with kl.coef=0" in line for line in validate(half))
    assert override(recipe, ["--kl.coef", "0.2"], "rl")[0].kl == KL(0.2, "k1", "reward")


def test_a_warm_up_or_an_adapter_of_a_recipe_can_be_switched_off_but_not_half():
    recipe = replace(quickstart(), trainer=TrainerConfig(lora=LoRA(rank=4, alpha=8)))
    off, _ = override(recipe, ["--warmup.steps", "0", "--trainer.lora.rank", "0"], "rl")
    assert off == replace(quickstart(), warmup=WarmupConfig(), trainer=TrainerConfig())
    assert validate(off) == []
    fewer, _ = override(recipe, ["--warmup.steps", "7", "--trainer.lora.rank", "2"], "rl")
    assert (fewer.warmup, fewer.trainer.lora) == (replace(recipe.warmup, steps=7), LoRA(rank=2, alpha=8))
    half, _ = override(recipe, ["--warmup.steps", "0", "--warmup.lr", "0.1"], "rl")
    assert "warmup.lr=0.1 has no effect with warmup.steps=0; set warmup.steps" in validate(half)
    assert any("warmup.batch_size" in line for line in validate(small(warmup=WarmupConfig(batch_size=8))))


@pytest.mark.parametrize("loss", [Distillation(), Clip()])
def test_truncated_rollouts_are_dropped_from_any_loss(loss):
    config = small(
        loss=loss,
        kl=KL(0.1),
        reference=ReferenceConfig(model=small().model),
        shaping=Shaping(drop_truncated=True),
    )
    assert validate(config) == []


def test_settings_of_any_loss_can_be_given_on_the_command_line():
    config, _ = override(
        small(loss=GSPO(), advantages=GAE()),
        ["--loss.level", "token", "--advantages.lam", "0.5", "--critic.lr", "0.1"],
        "rl",
    )
    assert (
        config.loss == GSPO(level="token") and config.advantages == GAE(lam=0.5) and config.critic.lr == 0.1
    )
    assert RewardConfig() == config.reward


def test_a_teacher_has_a_directory_of_its_own_and_another_reference_has_the_models(tmp_path):
    def dirs_of(config, name):
        return model_dirs(config, settle(config, cluster=AMPLE), tmp_path / name)

    def width(directory):
        return json.loads((directory / "config.json").read_text())["hidden_size"]

    assert dirs_of(small(), "a").keys() == {"model"}
    own = small(kl=KL(coef=0.1))
    dirs = dirs_of(own, "b")
    assert dirs.keys() == {"model", "reference"} and dirs["reference"] == dirs["model"]
    taught = replace(own, reference=ReferenceConfig(model=replace(own.model, hidden_size=32)))
    dirs = dirs_of(taught, "c")
    assert {name: width(path) for name, path in dirs.items()} == {"model": 64, "reference": 32}
    assert all(path.is_relative_to(tmp_path / "c") for path in dirs.values())
