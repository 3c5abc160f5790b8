"""Bad input: one clear line, exit code 2, and no process started."""

import dataclasses
import os
import pickle
import sys
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from rl import cli
from rl.config.flags import setting_names
from rl.envs.sort_letters import ALPHABET
from rl.loss.advantages.gae import GAE
from rl.loss.advantages.reinforce_pp import ReinforcePP
from rl.loss.dpo import DPO
from rl.loss.gspo import GSPO
from rl.models.sources import TinyQwen3
from rl.type_hints import type_hints
from tests.tiny import write_config, write_model

OWN_RECIPE = """
from rl.config import RunConfig
from rl.envs.question_file import QuestionFile
from rl.models.sources import ModelDir

def mine() -> RunConfig:
    return RunConfig(model=ModelDir({model!r}), env=QuestionFile(path={data!r}, chat=False, num_eval=1, max_new_tokens=8))
"""


BARE_TASK = """
from dataclasses import dataclass, replace
from rl.envs.base import Env
from rl.types import Problem

@dataclass(frozen=True)
class Bare(Env):
    def generate(self, seed):
        return Problem(str(seed), str(seed), "")
    def reward(self, problem, response, stop):
        return 0.0

def bare() -> RunConfig:
    return replace(mine(), env=Bare(num_eval=1, max_new_tokens=8))
"""


def run(capsys, monkeypatch, *arguments):
    """Returns the lines on standard error; checks the exit code and that nothing was left running."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["rl", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 2
    assert not psutil.Process().children(recursive=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def write_model_with_tokenizer(path):
    TinyQwen3(alphabet=ALPHABET + "0123456789+").materialize(
        path.parent
    )  # writes to path.parent / "model", which is `path`
    write_model(path)


@pytest.fixture
def one_line(capsys, monkeypatch):
    def check(*arguments):
        lines = run(capsys, monkeypatch, *arguments)
        assert len(lines) == 1, lines
        (line,) = lines
        assert line.startswith("rl: error: ")
        return line

    return check


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe of the user's own; its model and its data are what a test makes of them."""
    model, data = tmp_path / "model", tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"question": "{i}+1", "answer": "{i + 1}"}}\n' for i in range(3)))
    file = tmp_path / "recipe.py"
    file.write_text(OWN_RECIPE.format(model=str(model), data=str(data)))
    return f"{file}:mine", model, data


def test_unknown_command_and_recipe(one_line, tmp_path):
    assert "unknown command 'trian'" in one_line("trian")
    assert "unknown recipe 'quikstart'; did you mean 'quickstart'?" in one_line("train", "quikstart")
    assert "does not exist" in one_line("train", "nowhere.py:f")
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert "has no recipe function 'f'" in one_line("train", f"{tmp_path}/empty.py:f")


def test_a_recipe_at_fault_is_named_with_its_line(one_line, tmp_path):
    file = tmp_path / "recipe.py"
    file.write_text("x = 1\ndef f(:\n")
    assert "recipe.py line 2: SyntaxError" in one_line("train", f"{file}:f")
    file.write_text("x = 1\nimport no_such_module\n")
    assert (
        "recipe.py line 2: ModuleNotFoundError: No module named 'no_such_module'; fix the recipe"
        in one_line("train", f"{file}:f")
    )
    file.write_text("def f():\n    return {}['x']\n")
    assert "recipe.py line 2: KeyError: 'x'" in one_line("train", f"{file}:f")


def test_a_model_that_cannot_read_the_task(one_line):
    assert "characters that model.alphabet lacks: '>y'; add them" in one_line(
        "train", "quickstart", "--model.alphabet", "abcdefghijklmnopqrstuvwxz"
    )


def test_an_unknown_flag_names_the_nearest(one_line):
    assert "unknown setting --trainer.lrr; did you mean --trainer.lr?" in one_line(
        "train", "quickstart", "--trainer.lrr", "1"
    )
    assert "no setting --temperature: training samples from the policy itself, at temperature 1" in one_line(
        "train", "quickstart", "--temperature", "0.7"
    )
    assert "did you mean" not in one_line("train", "quickstart", "--no_such", "1")
    assert "did you mean --group_size?" in one_line("train", "quickstart", "--group-sizes=3")
    assert "did you mean --trainer.weight_decay?" in one_line("train", "quickstart", "--weight_decay", "1")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("num_generations", "group_size"),
        ("epsilon_high", "loss.high"),
        ("clip_ratio_low", "loss.low"),
        ("beta", "kl.coef"),
        ("ratio_clip_max", "loss.high"),
        ("overlong_buffer.len", "shaping.overlong_tokens"),
        ("tis_clip", "correction.tis_clip"),
        ("ppo_epochs", "epochs"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "generator.tensor_parallel"),
        ("policy.generation.vllm_cfg.tensor_parallel_size", "generator.tensor_parallel"),
        ("tensor_parallel_size", "trainer.layout.tensor_parallel"),
        ("actor_rollout_ref.actor.optim.lr", "trainer.lr"),
        ("max_completion_length", "env.max_new_tokens"),
    ],
)
def test_a_flag_of_another_framework_gets_our_name(one_line, theirs, ours):
    assert f"unknown setting --{theirs}; it is called --{ours} here" in one_line(
        "train", "quickstart", f"--{theirs}", "4"
    )


def test_a_loss_keeps_its_own_beta_and_a_size_is_not_taken_for_a_number(one_line):
    assert "it is called --loss.beta here" in one_line("train", "dpo", "--beta", "0.3")
    assert "called --minibatches here, and is a number of them, not their size" in one_line(
        "train", "ppo", "--ppo_mini_batch_size", "8"
    )


def test_every_foreign_name_leads_to_a_setting_that_exists():
    from configs.quickstart import quickstart
    from rl.config.flags import FOREIGN_NAMES
    from rl.models.sources import ModelDir

    parts = [
        {},
        {"model": ModelDir("")},
        {"loss": GSPO()},
        {"loss": DPO()},
        {"advantages": GAE()},
        {"advantages": ReinforcePP()},
    ]
    known = {name for part in parts for name in setting_names(dataclasses.replace(quickstart(), **part))}
    assert set(FOREIGN_NAMES.values()) <= known


def test_a_cache_that_no_host_has(one_line):
    too_large = one_line("train", "quickstart", "--generator.kv_cache_gib", "5000")
    assert "the run needs about 5001.6 GiB" in too_large and "; set --generator.kv_cache_gib " in too_large


def test_a_task_too_small_for_its_held_out_problems(one_line):
    assert "has only 26 distinct problems; lower env.num_eval=27" in one_line(
        "train", "quickstart", "--env.min_letters", "1", "--env.max_letters", "1", "--env.num_eval", "27"
    )


def test_a_task_without_demonstrations(one_line, recipe, tmp_path):
    _, model, _ = recipe
    write_model_with_tokenizer(model)
    file = tmp_path / "recipe.py"
    file.write_text(file.read_text() + BARE_TASK)
    assert (
        "Bare has no demonstrations, from which warmup.steps and data=demonstrations learn; implement"
        in one_line("train", f"{file}:bare", "--warmup.steps", "1")
    )


def test_a_checkpoint_that_cannot_be_gone_on_from(one_line, tmp_path):
    (tmp_path / "step-7").mkdir()
    assert "is not a complete checkpoint" in one_line("train", "quickstart", "--resume", tmp_path / "step-7")
    metadata = tmp_path / "step-7" / ".metadata"
    metadata.write_bytes(pickle.dumps(Metadata({}, storage_data={})))
    (tmp_path / "step-7" / "record.json").write_text('{"state": {"step": 7}, "adapters": {}}')
    resume = ["--resume", tmp_path / "step-7", "--trainer.lora.rank", "8"]
    assert "was saved with another trainer.lora: rank 0 there and 8 here; set it as it was" in one_line(
        "train", "quickstart", *resume
    )
    assert "has done all of steps=7; raise steps" in one_line(
        "train", "quickstart", "--resume", tmp_path / "step-7", "--steps", "7"
    )


def test_all_problems_are_reported_together(capsys, monkeypatch):
    lines = run(
        capsys,
        monkeypatch,
        "train",
        "quickstart",
        "--steps",
        "0",
        "--group_size",
        "1",
        "--env.max_letters",
        "9",
    )
    assert len(lines) == 3


def test_tensor_parallel_that_does_not_divide_the_heads(one_line):
    line = one_line("train", "quickstart", "--trainer.layout.tensor_parallel", "2")
    assert (
        "trainer.layout.tensor_parallel=2 does not divide the model's num_key_value_heads=1; use one of [1]"
        in line
    )


def test_a_model_directory_without_weights_or_config(one_line, recipe):
    name, model, _ = recipe
    assert "has no config.json" in one_line("train", name)
    write_config(model)
    assert "has no *.safetensors weights" in one_line("train", name)


def test_a_corrupt_safetensors_file(one_line, recipe):
    name, model, _ = recipe
    write_model(model)
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors is not a readable safetensors file" in one_line("train", name)


def test_an_unsupported_architecture(one_line, recipe):
    name, model, _ = recipe
    write_model_with_tokenizer(model)
    write_config(model, architectures=["GPT2LMHeadModel"])
    assert "architecture GPT2LMHeadModel is not supported; use one of" in one_line("train", name)


def test_a_dataset_that_is_empty_or_broken(one_line, recipe):
    name, model, data = recipe
    write_model_with_tokenizer(model)
    data.write_text("")
    assert "is empty; give it at least" in one_line("train", name)
    data.write_text('{"question": "1+1", "answer": "2"}\nnot json\n')
    assert "line 2 is not JSON" in one_line("train", name)
    data.write_text('{"question": "1+1", "answer": "2"}\n')
    assert "has 1 lines, all of them held out" in one_line("train", name)


def test_a_model_without_a_tokenizer_or_without_a_chat_template(one_line, recipe):
    name, model, _ = recipe
    write_model(model)
    assert "has no tokenizer (tokenizer.json" in one_line("train", name)
    write_model_with_tokenizer(model)
    assert "has no chat template; set --env.chat False" in one_line("train", name, "--env.chat", "True")


def test_more_processes_than_the_machine_can_hold(one_line):
    assert "use fewer" in one_line("train", "quickstart", "--generator.num_replicas", "500")


def test_a_run_directory_that_is_taken(one_line, tmp_path):
    (tmp_path / "something").touch()
    assert "exists and is not empty" in one_line("train", "quickstart", "--run_dir", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--trainer.lora.alpha", "8"],
            "trainer.lora.alpha and trainer.lora.targets have no effect with trainer.lora.rank=0",
        ),
        (
            ["--trainer.lora.rank", "8", "--trainer.lora.alpha", "0"],
            "trainer.lora.alpha=0 silences the adapter",
        ),
        (["--trainer.lora.rank", "513"], "trainer.lora.rank=513 is over 512, the most that vLLM serves"),
        (
            ["--trainer.engine", "hf", "--trainer.layout.tensor_parallel", "2"],
            "context_parallel need trainer.engine=titan",
        ),
        (
            ["--trainer.engine", "hf", "--trainer.float8", "True"],
            "trainer.float8=True needs trainer.engine=titan",
        ),
        (
            ["--keep_checkpoints", "3", "--save_every", "0", "--save_every_minutes", "0"],
            "keep_checkpoints=3 has no effect with save_every=0",
        ),
        (["--lora_rank", "8"], "unknown setting --lora_rank; it is called --trainer.lora.rank here"),
        (["--save_total_limit", "2"], "it is called --keep_checkpoints here"),
    ],
)
def test_settings_without_effect_or_of_another_engine_are_named(capsys, monkeypatch, arguments, words):
    assert any(words in line for line in run(capsys, monkeypatch, "train", "quickstart", *arguments))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the refusal is for machines without a GPU")
def test_shared_memory_that_may_not_be_written_to(one_line, monkeypatch):
    """As root, whom no permissions keep out, a tmpfs is read-only."""
    access = os.access
    may = lambda path, mode, **more: str(path) != "/dev/shm" and access(path, mode, **more)  # noqa: E731
    monkeypatch.setattr(os, "access", may)
    assert "/dev/shm may not be written to, through which weights go; mount a tmpfs" in one_line(
        "train", "quickstart"
    )


def test_compile_is_refused_without_a_gpu(one_line):
    assert "trainer.compile=True needs a GPU" in one_line("train", "quickstart", "--trainer.compile", "True")


def test_a_type_that_a_module_defines_after_the_class_is_known_once_it_is_there(monkeypatch):
    """A class may be made, and checked, while its module is still executed."""
    module = ModuleType("half_executed")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec("class Settings:\n    number: 'Later'\n    name: str\n", vars(module))
    assert type_hints(module.Settings) == {"number": Any, "name": str}
    module.Later = int
    assert type_hints(module.Settings) == type_hints(module.Settings) == {"number": int, "name": str}
