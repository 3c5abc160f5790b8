"""A table of bad input: each row with words that its error must hold, which name what is wrong or the remedy.

Printed, with the messages that the rows get, by: python -m tests.config.test_bad_table [SECTION ...]
"""

import contextlib
import json
import logging
import os
import pickle
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import psutil
import pytest
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from configs.quickstart import quickstart
from rl import cli
from rl.config.checkpoint_rules import checkpoint_notes
from rl.config.codec import write_config
from rl.envs.sort_letters import ALPHABET
from rl.models.sources import TinyQwen3
from tests.tiny import write_model

Arguments = list[str]


class Place:
    """Where a row's files are: an empty directory of its own, and a model and a checkpoint that rows copy."""

    def __init__(self, directory: Path, shared: Path):
        self.directory, self._shared = directory, shared

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def copy(self, name: str, to: str) -> Path:
        """name: model, or step-7, a checkpoint of the quickstart."""
        return Path(shutil.copytree(self._shared / name, self.directory / to))


@dataclass(frozen=True)
class Row:
    name: str
    arguments: str | Callable[[Place], Arguments]
    """As a shell's words, or from a function that writes the files that they name."""
    words: tuple[str, ...]
    problems: int
    """How many lines the error has: one for each."""


def row(name: str, arguments: str | Callable[[Place], Arguments], *words: str, problems: int = 1) -> Row:
    return Row(name, arguments, words, problems)


def quick(name: str, flags: str, *words: str, problems: int = 1) -> Row:
    return row(name, f"train quickstart {flags}", *words, problems=problems)


_HEADER = """
import string
import threading
from dataclasses import dataclass, field, replace
from configs.quickstart import quickstart
from rl.config import *
from rl.config import ReferenceConfig, RunConfig, TrainerConfig, WarmupConfig
from rl.envs.base import Env
from rl.envs.question_file import QuestionFile
from rl.envs.sort_letters import SortLetters
from rl.errors import ConfigError
from rl.loss.advantages.gae import GAE
from rl.loss.advantages.reinforce_pp import ReinforcePP
from rl.loss.advantages.rloo import RLOO
from rl.loss.clip import Clip
from rl.loss.cross_entropy import CrossEntropy
from rl.loss.distillation import Distillation
from rl.loss.dpo import DPO
from rl.loss.kl import KL
from rl.models.layout import Layout
from rl.models.sources import ModelDir, TinyQwen3
from rl.types import LoRA, Problem
"""


def own(name: str, body: str, *words: str, function: str = "", flags: str = "", problems: int = 1) -> Row:
    """A recipe file that holds `body`."""

    def build(place: Place) -> Arguments:
        return ["train", f"{place.write('mine.py', _HEADER + body)}{function}", *shlex.split(flags)]

    return row(name, build, *words, problems=problems)


_SMOLLM2 = 'model=ModelDir("models/smollm2-135m-instruct")'  # whose own recipe needs reasoning-gym


def changed(name: str, changes: str, *words: str, flags: str = "", problems: int = 1) -> Row:
    """The quickstart with other fields."""
    body = f"def f() -> RunConfig:\n    return replace(quickstart(), {changes})\n"
    return own(name, body, *words, flags=flags, problems=problems)


_GENERATE = '    def generate(self, seed): return Problem(str(seed), f"{seed % 1000:x}", "")\n'
_REWARD = "    def reward(self, problem, response, stop): return 0.0\n"


def env(
    name: str,
    members: str,
    *words: str,
    make: str = "E(num_eval=2, max_new_tokens=8)",
    changes: str = "",
    frozen: bool = True,
    problems: int = 1,
) -> Row:
    """An Env of the user's own. members: in the places of `$generate` and `$reward` are methods that work."""
    members = members.replace("$generate\n", _GENERATE).replace("$reward\n", _REWARD)
    body = f"@dataclass(frozen={frozen})\nclass E(Env):\n{members}\ndef f() -> RunConfig:\n    return replace(quickstart(), model=TinyQwen3(alphabet=string.printable), warmup=WarmupConfig(), env={make}, {changes})\n"
    return own(name, body, *words, problems=problems)


def data(name: str, content: str | bytes, *words: str, flags: str = "", changes: str = "") -> Row:
    """A file of questions and answers, of which one is held out."""

    def build(place: Place) -> Arguments:
        path = place.write("data.jsonl", content)
        body = f"def f() -> RunConfig:\n    return replace(quickstart(), warmup=WarmupConfig(), {changes} model=TinyQwen3(alphabet=string.printable), env=QuestionFile(path={str(path)!r}, chat=False, num_eval=1, max_new_tokens=8))\n"
        return ["train", str(place.write("mine.py", _HEADER + body)), *shlex.split(flags)]

    return row(name, build, *words)


def model(
    name: str,
    change: Callable[[Path], None],
    *words: str,
    flags: str = "",
    changes: str = "",
    problems: int = 1,
) -> Row:
    """A model directory after `change`."""

    def build(place: Place) -> Arguments:
        path = place.copy("model", "model")
        change(path)
        body = f"def f() -> RunConfig:\n    return replace(quickstart(), model=ModelDir({str(path)!r}), {changes})\n"
        return ["train", str(place.write("mine.py", _HEADER + body)), *shlex.split(flags)]

    return row(name, build, *words, problems=problems)


def teacher(name: str, change: Callable[[Path], None], *words: str) -> Row:
    """A distillation from a model directory after `change`."""

    def build(place: Place) -> Arguments:
        path = place.copy("model", "teacher")
        change(path)
        flags = ["--reference.model.path", str(path)]
        return ["train", "distillation", *flags]

    return row(name, build, *words)


def config(**values: object) -> Callable[[Path], None]:
    """Set keys of a model's config.json; None removes a key."""

    def change(path: Path) -> None:
        there = json.loads((path / "config.json").read_text()) | values
        text = json.dumps({key: value for key, value in there.items() if value is not None})
        (path / "config.json").write_text(text)

    return change


def put(name: str, content: str | bytes | None) -> Callable[[Path], None]:
    """Replace a file; None removes it."""

    def change(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        if content is not None:
            (path / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def cut(name: str, last: int) -> Callable[[Path], None]:
    """Take the last bytes off a file."""

    def change(path: Path) -> None:
        (path / name).write_bytes((path / name).read_bytes()[:-last])

    return change


def resume(name: str, change: Callable[[Path], None], *words: str, flags: str = "", problems: int = 1) -> Row:
    """Go on from a checkpoint of the quickstart after `change`."""

    def build(place: Place) -> Arguments:
        path = place.copy("step-7", "step-7")
        change(path)
        return ["train", "quickstart", "--resume", str(path), *shlex.split(flags)]

    return row(name, build, *words, problems=problems)


def record(**values: object) -> Callable[[Path], None]:
    """Set keys of a checkpoint's record.json; None removes a key."""

    def change(path: Path) -> None:
        there = json.loads((path / "record.json").read_text()) | values
        put("record.json", json.dumps({k: v for k, v in there.items() if v is not None}))(path)

    return change


def state(**values: object) -> Callable[[Path], None]:
    """Set keys of the state in a checkpoint's record.json."""
    return lambda path: record(state=checkpoint_notes(quickstart()) | {"step": 7} | values)(path)


def earlier(name: str, change: Callable[[dict], object], *words: str, problems: int = 1) -> Row:
    """The config.json of an earlier run of the quickstart; change returns what to write in its place."""

    def build(place: Place) -> Arguments:
        write_config(place.directory, "quickstart", quickstart())
        path = place.directory / "config.json"
        new = change(json.loads(path.read_text()))
        path.write_text(new if isinstance(new, str) else json.dumps(new))
        return ["train", str(path)]

    return row(name, build, *words, problems=problems)


def at(path: str, value: object) -> Callable[[dict], dict]:
    """Set "section.field" of a config.json."""

    def change(there: dict) -> dict:
        *sections, leaf = path.split(".")
        inner = there
        for section in sections:
            inner = inner[section]
        inner[leaf] = value
        return there

    return change


def command(
    name: str, write: Callable[[Place], object], arguments: str, *words: str, problems: int = 1
) -> Row:
    """Any other: arguments as a shell's words, after `write`; {here} in them is the row's directory."""

    def build(place: Place) -> Arguments:
        write(place)
        return [word.replace("{here}", str(place.directory)) for word in shlex.split(arguments)]

    return row(name, build, *words, problems=problems)


def nothing(_: object) -> None:
    """No files."""


# One row, one line.
# fmt: off
FLAGS = [
    quick("unknown", "--no_such 1", "unknown setting --no_such; --help lists them"),
    quick("unknown in a section", "--trainer.no_such 1", "unknown setting --trainer.no_such"),
    quick("unknown section", "--optimizer.lr 1", "did you mean --trainer.lr?"),
    quick("misspelt", "--stepz 1", "did you mean --steps?"),
    quick("misspelt leaf", "--trainer.lrr 1", "did you mean --trainer.lr?"),
    quick("misspelt section", "--trianer.lr 1", "did you mean --trainer.lr?"),
    quick("misspelt with dashes", "--group-sizes=3", "did you mean --group_size?"),
    quick("capitals", "--Steps 3", "did you mean --steps?"),
    quick("capitals in a section", "--Trainer.LR 3", "did you mean --trainer.lr?"),
    quick("wrong section", "--generator.lr 1", "did you mean --trainer.lr?"),
    quick("no section", "--weight_decay 1", "did you mean --trainer.weight_decay?"),
    quick("another part's setting", "--loss.beta 1", "unknown setting --loss.beta; it is called --kl.coef here"),
    quick("too deep", "--steps.more 1", "unknown setting --steps.more; did you mean --steps?"),
    quick("a section", "--trainer 1", "--trainer is a section, not a setting; its settings: --trainer.engine"),
    quick("a section in a section", "--trainer.lora 8", "--trainer.lora is a section", "--trainer.lora.rank"),
    quick("a section with =", "--kl=0.1", "--kl is a section", "--kl.coef"),
    quick("a section without a value", "--env", "--env is a section", "--env.max_new_tokens"),
    quick("a loss is a section", "--loss gspo", "--loss is a section", "--loss.low"),
    quick("a model is a section", "--model Qwen/Qwen3-0.6B", "--model is a section"),
    quick("made in Python", "--reference.model x", "made in Python; set it in a recipe of your own"),
    quick("a function is made in Python", "--reference.model.path x", "--reference.model is a part that is made in Python, and not there"),
    quick("no value", "--steps", "--steps has no value; write --steps VALUE"),
    quick("no value before another flag", "--steps --seed 1", "--steps has no value"),
    quick("no value of a tuple", "--trainer.betas", "--trainer.betas has no value"),
    quick("an empty value", "--steps=", "steps", "a whole number"),
    quick("two values", "--steps 3 4", "--steps takes one value; '4' after it"),
    quick("three values", "--steps 3 4 5", "'4' after it", "'5' after it", problems=2),
    quick("a negative second value", "--steps 3 -4", "'-4' after it"),
    quick("a stray word first", "steps 3", "'steps' belongs to no setting", "'3'", problems=2),
    quick("no dashes with =", "steps=3", "'steps=3' is no flag; write --steps=3"),
    quick("one dash", "-steps 3", "'-steps'", problems=2),
    quick("one dash with =", "-steps=3", "write --steps=3"),
    quick("one letter", "-s 3", "'-s'", problems=2),
    quick("a bare --", "--", "'--' belongs to no setting"),
    quick("a bare -", "-", "'-' belongs to no setting"),
    quick("= alone", "=", "'=' belongs to no setting"),
    quick("-- and = alone", "--=3", "'--=3' belongs to no setting"),
    quick("three dashes", "---steps 3", "steps"),
    quick("+ as Hydra has it", "+steps=3", "write --steps=3"),
    quick("a stray word after =", "--steps=3 more", "'more' after it"),
    quick("an argument of spaces", "'--steps' ' '", "a whole number"),
    quick("a flag with a space in it", "'--steps 3'", "steps 3"),
    quick("a comma", "--steps,3", "steps,3"),
    quick("a colon", "--steps:3", "steps:3"),
    quick("unknown twice", "--no_such 1 --no_such_either 2", "--no_such;", "--no_such_either;", problems=2),
    quick("temperature", "--temperature 0.7", "training samples from the policy itself, at temperature 1; evaluation is greedy"),
    quick("temperature in a section", "--generator.temperature 0.7", "training samples from the policy itself"),
    quick("TRL's name", "--num_generations 4", "it is called --group_size here"),
    quick("TRL's beta", "--beta 0.1", "it is called --kl.coef here"),
    quick("TRL's learning rate", "--learning_rate 1e-6", "it is called --trainer.lr here"),
    quick("verl's name", "--actor_rollout_ref.rollout.n 4", "it is called --group_size here"),
    quick("TRL's clip", "--epsilon 0.1", "--loss.low here, and does not set loss.high, which they set, too"),
    quick("TRL's cap", "--vllm_importance_sampling_cap 2", "--correction.tis_clip here", "masks whole sequences"),
    quick("OpenRLHF's batch", "--train_batch_size 8", "--prompts_per_step here", "counts samples"),
    quick("verl's size", "--ppo_mini_batch_size 4", "--minibatches here, and is a number of them"),
    quick("verl's clip", "--actor.clip_ratio_high 0.3", "it is called --loss.high here"),
    quick("OpenRLHF's name", "--n_samples_per_prompt 4", "it is called --group_size here"),
    quick("OpenRLHF's name for KL", "--init_kl_coef 0.1", "it is called --kl.coef here"),
    quick("NeMo-RL's name", "--ratio_clip_max 0.3", "it is called --loss.high here"),
    quick("prime-rl's name", "--rollouts_per_example 4", "it is called --group_size here"),
    quick("transformers' name", "--max_steps 4", "it is called --steps here"),
    quick("transformers' report_to", "--report_to wandb", "it is called --tracking.sinks here"),
    quick("transformers' output_dir", "--output_dir x", "it is called --run_dir here"),
    quick("its name for a tuple", "--lora_target_modules q_proj", "--trainer.lora.targets here"),
    quick("a flag given twice", "--steps 3 --steps 5", "--steps is given 2 times; give it once"),
    quick("a flag given twice, with another spelling", "--trainer.lr_warmup_steps 1 --trainer.lr-warmup-steps 1", "--trainer.lr_warmup_steps is given 2 times"),
]

VALUES = [
    quick("letters for a whole number", "--steps abc", "--steps abc must be a whole number"),
    quick("a fraction for a whole number", "--steps 1.5", "--steps 1.5 must be a whole number"),
    quick("1e3 for a whole number", "--steps 1e3", "--steps 1e3 must be a whole number"),
    quick("True for a whole number", "--steps True", "--steps True must be a whole number"),
    quick("None for a whole number", "--steps None", "--steps None must be a whole number"),
    quick("nan for a whole number", "--steps nan", "--steps nan must be a whole number"),
    quick("inf for a whole number", "--steps inf", "--steps inf must be a whole number"),
    quick("hexadecimal", "--steps 0x10", "--steps 0x10 must be a whole number"),
    quick("a comma in a whole number", "--steps 1,000", "--steps 1,000 must be a whole number"),
    quick("a long string", f"--steps {'9' * 200}x", "must be a whole number"),
    quick("letters for a number", "--trainer.lr abc", "--trainer.lr abc must be a number"),
    quick("a comma in a number", "--trainer.lr 0,1", "--trainer.lr 0,1 must be a number"),
    quick("None for a number", "--kl.coef None", "--kl.coef None must be a number"),
    quick("yes for a bool", "--trace yes", "--trace yes must be True or False"),
    quick("1 for a bool", "--trace 1", "--trace 1 must be True or False"),
    quick("true for a bool", "--trainer.compile true", "--trainer.compile true must be True or False"),
    quick("no value of a bool", "--trace", "--trace has no value; write --trace VALUE"),
    quick("negated bool", "--no_trace", "unknown setting --no_trace; did you mean --trace?"),
    quick("a wrong choice", "--dtype float8", "--dtype float8 must be one of 'auto', 'float32', 'bfloat16', 'fastest'"),
    quick("a choice in capitals", "--kl.into LOSS", "must be one of 'loss', 'reward'"),
    quick("an empty choice", "--dtype ''", "must be one of 'auto', 'float32', 'bfloat16', 'fastest'"),
    quick("a wrong engine", "--trainer.engine megatron", "must be one of 'titan', 'hf'"),
    quick("a wrong estimator", "--kl.coef 1 --kl.estimator k4", "must be one of 'k1', 'k2', 'k3'"),
    quick("a wrong sink", "--tracking.sinks comet", "'tensorboard', 'wandb', 'mlflow'"),
    quick("one of two", "--trainer.betas 0.9", "--trainer.betas 0.9 must be a tuple of 2 values"),
    quick("three of two", "--trainer.betas 0.9 0.9 0.9", "must be a tuple of 2 values"),
    quick("letters in a tuple", "--trainer.betas 0.9 abc", "must be a tuple of 2 values, each a number"),
    quick("a comma in a tuple", "--trainer.betas 0.9,0.99", "must be a tuple of 2 values"),
    quick("brackets", "--trainer.betas (0.9,0.99)", "must be a tuple of 2 values"),
    quick("under its least", "--steps 0", "steps=0 must be at least 1"),
    quick("negative", "--steps -3", "steps=-3 must be at least 1"),
    quick("negative with =", "--steps=-3", "steps=-3 must be at least 1"),
    quick("negative seed", "--seed -1", "seed=-1 must be at least 0"),
    quick("a seed of 2^63", f"--seed {2**63}", "must be", "under 9223372036854775808"),
    quick("a negative number", "--trainer.lr -1", "trainer.lr=-1.0 must be at least 0"),
    quick("a number of 0", "--reward.limit_seconds 0", "reward.limit_seconds=0.0 must be over 0"),
    quick("a stop of two tokens", "--env.stop ab b", "env.stop has 'ab', which is not one token of the model's tokenizer"),
    quick("shared without GPUs", "--placement side_by_side", "placement=side_by_side has no effect without GPUs; leave it out"),
    quick("shared by its old name", "--placement shared", "it is called side_by_side now"),
    quick("by turns, asynchronous", "--placement by_turns --max_offpolicy_steps 1", "placement=by_turns does not go with max_offpolicy_steps or stream_groups"),
    quick("graphs without GPUs", "--generator.cuda_graphs on", "generator.cuda_graphs=on needs a GPU; set it to off"),
    quick("less than no cache", "--generator.kv_cache_gib -1", "generator.kv_cache_gib=-1.0 must be at least 0"),
    quick("no time", "--deadlines.start 0", "deadlines.start=0.0 must be at least 1"),
    quick("a share over 1", "--loss.low 2", "loss.low=2.0 must be at least 0 and at most 1"),
    quick("a negative share", "--loss.low -0.1", "loss.low=-0.1 must be at least 0 and at most 1"),
    quick("an env's share", "--env.corruption 1.5", "env.corruption=1.5 must be at least 0 and at most 1"),
    quick("nan", "--trainer.lr nan", "trainer.lr=nan must be finite"),
    quick("inf", "--trainer.lr inf", "trainer.lr=inf must be finite"),
    quick("a negative inf", "--loss.high -inf", "loss.high=-inf must be finite"),
    quick("too large to be finite", "--trainer.lr 1e999", "trainer.lr=inf must be finite"),
    quick("nan in a tuple", "--trainer.betas nan 0.9", "trainer.betas=(nan, 0.9) must be finite"),
    quick("a beta of 1", "--trainer.betas 0.9 1", "trainer.betas=(0.9, 1.0) must lie in [0, 1)"),
    quick("a negative beta", "--trainer.betas -1 0.9", "trainer.betas=(-1.0, 0.9) must lie in [0, 1)"),
    quick("10**11 steps", "--steps 100000000000", "steps=100000000000 must be", "at most 2147483647"),
    quick("10**23 steps", f"--steps {10**23}", "must be", "at most 2147483647"),
    quick("5000 digits", f"--steps {'9' * 5000}", "--steps"),
    quick("10**11 samples", "--group_size 100000000000", "at most 2147483647"),
    quick("10**23 prompts", f"--prompts_per_step {10**23}", "at most 2147483647"),
    quick("10**11 processes", "--trainer.layout.shard 100000000000", "at most 2147483647"),
    quick("2**31-1 processes", f"--trainer.layout.shard {2**31 - 1}", "use fewer"),
    quick("10**11 held-out problems", "--env.num_eval 100000000000", "at most 100000"),
    quick("10**11 new tokens", "--env.max_new_tokens 100000000000", "at most 2147483647"),
    quick("10**9 new tokens", "--env.max_new_tokens 1000000000", "env.max_new_tokens", "use less"),
    quick("10**9 letters", "--env.max_letters 1000000000", "leaves no room for 1000000000 letters"),
    quick("10**11 gigabytes", "--generator.kv_cache_gib 100000000000", "must be at least 0 and at most 1048576"),
    quick("10**9 of a model's width", "--model.hidden_size 1000000000", "the run needs about", "use a smaller model"),
    quick("10**11 of a model's width", "--model.hidden_size 100000000000", "the run needs about", "use a smaller model"),
    quick("10**23 of a model's layers", f"--model.num_layers {10**23}", "is less than one sequence of 128 tokens", "the run needs about", problems=2),
    quick("a negative width", "--model.hidden_size -64", "model.hidden_size=-64 must be at least 1"),
    quick("no layers", "--model.num_layers 0", "model.num_layers=0 must be at least 1"),
    quick("no heads", "--model.num_heads 0", "model.num_heads=0 must be at least 1"),
    quick("no key and value heads", "--model.num_kv_heads 0", "model.num_kv_heads=0 must be at least 1"),
    quick("heads that do not go", "--model.num_kv_heads 3", "does not divide model.num_heads=2; use a divisor"),
    quick("no alphabet", "--model.alphabet ''", "model.alphabet", "add them"),
    quick("a letter twice", f"--model.alphabet {ALPHABET}a", "repeats 'a'; name each character once"),
    quick("sampling by top_k", "--generator.top_k 20", "there is no setting --top_k: training samples from the policy itself, at temperature 1; evaluation is greedy"),
    quick("sampling by top_p", "--rollout.top_p=0.9", "there is no setting --top_p: training samples"),
    quick("a penalty of repetition", "--repetition_penalty 1.1", "there is no setting --repetition_penalty: training samples"),
    quick("an alphabet too short", "--model.alphabet bcd", "characters that model.alphabet lacks"),
    quick("a model too short", "--model.max_length 4", "leaves no room for a prompt in 4 tokens"),
    quick("too few tokens", "--max_seq_len 4", "leaves no room for a prompt in 4 tokens"),
    quick("no room for the answer", "--env.max_letters 9", "9 letters and EOS; use 10"),
    quick("min over max", "--env.min_letters 7", "must be 1 <= min <= max"),
    quick("an odd block size", "--generator.block_size 33", "is not a multiple of 32"),
    quick("a chat without a template", "--env.chat True", "no chat template; set --env.chat False"),
    quick("a wandb project for nobody", "--tracking.project x", "has no effect without wandb or mlflow"),
    quick("a path for a model", "--model.path x", "unknown setting --model.path"),
    quick("10**8 threads", "--trainer.num_threads 100000000", "trainer.num_threads=100000000 must be at least 0 and at most 1024"),
    quick("10**8 threads of a generator", "--generator.num_threads 100000000", "generator.num_threads=100000000 must be at least 0 and at most 1024"),
    quick("no time to start", "--deadlines.start 0.001", "deadlines.start=0.001 must be at least 1"),
    quick("a sink twice", "--tracking.sinks tensorboard tensorboard", "names tensorboard twice; name each once"),
]

SEVERAL = [
    quick("unknown and type", "--no_such 1 --steps abc", "--no_such", "--steps abc must be", problems=2),
    quick("unknown, type and bound", "--no_such 1 --steps abc --seed -1", "--no_such", "--steps abc", "seed=-1", problems=3),
    quick("two types", "--steps abc --trainer.lr def", "--steps abc", "--trainer.lr def", problems=2),
    quick("the same setting twice, wrong both times", "--steps abc --steps def", "--steps is given 2 times; give it once", "--steps abc must be", "--steps def must be", problems=3),
    quick("two bounds", "--steps 0 --group_size 0", "steps=0", "group_size=0", problems=2),
    quick("a bound and a rule", "--steps 0 --group_size 1", "steps=0", "group_size=1 gives", problems=2),
    quick("bound, env and machine", "--steps 0 --env.max_letters 9 --generator.num_replicas 500", "steps=0", "use 10", "use fewer", problems=3),
    quick("a stray word and no value", "more --steps", "'more'", "--steps has no value", problems=2),
    quick("a section and a foreign name", "--trainer 1 --beta 1", "is a section", "--kl.coef", problems=2),
    quick("nan and a wrong choice", "--trainer.lr nan --dtype int8", "finite", "'bfloat16'", problems=2),
    quick("a huge seed and two values", f"--seed {10**30} --trace True False", "seed=", "'False'", problems=2),
    quick("a missing checkpoint and a bound", "--resume nowhere/step-7 --steps 0", "resume", problems=2),
    quick("latest and a bound", "--resume latest --steps 0", "no complete checkpoint", "steps=0", problems=2),
    quick("latest and an unknown flag", "--resume latest --no_such 1", "latest", "--no_such", problems=2),
    changed("wrong in the recipe and on the line", 'steps="ten"', "steps=", "--seed", flags="--seed x", problems=2),
    changed("two in the recipe", "steps=True, dtype=16", "steps=True", "dtype=16", problems=2),
]

RECIPES = [
    row("no such recipe", "train quikstart", "unknown recipe 'quikstart'; did you mean 'quickstart'?"),
    row("nothing like it", "train zzzzz", "unknown recipe 'zzzzz'; recipes: "),
    row("an empty name", "train ''", "unknown recipe ''"),
    row("a flag for a recipe", "train --steps 3", "'--steps' is no recipe; write rl train RECIPE --steps ..."),
    row("a file that is missing", "train nowhere.py:f", "nowhere.py does not exist; give path/to/file.py:function"),
    row("a file that is missing, without function", "train nowhere.py", "does not exist"),
    row("a module's name", "train configs.quickstart", "unknown recipe 'configs.quickstart'"),
    row("capitals", "train QuickStart", "did you mean 'quickstart'?"),
    command("a directory", nothing, "train {here}", "unknown recipe"),
    command("a directory named .py", lambda p: (p.directory / "a.py").mkdir(), "train {here}/a.py", "a.py"),
    command("a text file", lambda p: p.write("a.txt", "x"), "train {here}/a.txt", "unknown recipe"),
    command("a YAML file", lambda p: p.write("a.yaml", "x: 1"), "train {here}/a.yaml", "unknown recipe"),
    command("a file with .py within", lambda p: p.write("a.pyc", b"\0"), "train {here}/a.pyc:f", "a.pyc"),
    command("a binary file", lambda p: p.write("a.py", b"\x7fELF\0\1\2"), "train {here}/a.py:f", "fix the recipe"),
    command("not UTF-8", lambda p: p.write("a.py", b"x = '\xff'\n"), "train {here}/a.py:f", "fix the recipe"),
    command("an empty file", lambda p: p.write("a.py", ""), "train {here}/a.py", "has no recipe"),
    own("a syntax error", "def f(:\n", "SyntaxError", "fix the recipe"),
    own("an indentation error", "def f():\nreturn 1\n", "IndentationError", "fix the recipe"),
    own("an import error", "import no_such_module\n", "No module named 'no_such_module'; fix the recipe"),
    own("a name of ours that is not there", "from rl.loss.clip import Clap\n", "cannot import name 'Clap'"),
    own("raises as it is imported", "1 / 0\n", "mine.py line 23: ZeroDivisionError", "fix the recipe"),
    own("raises an error of ours", "raise ConfigError('no luck')\n", "no luck"),
    own("raises with many lines", "raise ValueError('a\\nb\\nc')\n", "ValueError: a b c; fix the recipe"),
    own("raises without words", "raise ValueError\n", "ValueError", "fix the recipe"),
    own("leaves", "import sys; sys.exit(0)\n", "SystemExit: 0; fix the recipe"),
    own("recurses", "def f() -> RunConfig:\n    return f()\n", "RecursionError", "fix the recipe"),
    own("raises", "def f() -> RunConfig:\n    return {}['x']\n", "mine.py line 24: KeyError: 'x'"),
    own("leaves in the function", "def f() -> RunConfig:\n    raise SystemExit\n", "SystemExit", "fix the recipe"),
    own("asserts", "def f() -> RunConfig:\n    assert 1 == 2\n", "AssertionError", "fix the recipe"),
    own("a wrong argument", "def f() -> RunConfig:\n    return RunConfig(stepz=1)\n", "stepz", "fix the recipe"),
    own("missing arguments", "def f() -> RunConfig:\n    return RunConfig()\n", "'model' and 'env'"),
    own("a field set", "def f() -> RunConfig:\n    c = quickstart(); c.steps = 3; return c\n", "'steps'"),
    own("no function", "x = 1\n", "has no recipe; define a function without parameters that returns a RunConfig"),
    own("two functions", "def f() -> RunConfig: pass\ndef g() -> RunConfig: pass\n", "mine.py:NAME", "f, g"),
    own("an unknown function", "def f(): pass\n", "has no recipe function 'g'", "one of f", function=":g"),
    own("returns a number", "def f() -> RunConfig | None: return 3\n", "a recipe returns a RunConfig"),
    own("another name", "Mine = RunConfig\ndef f() -> 'Mine': pass\ndef g() -> 'str': pass\n", "returned None"),
    own("a subclass", "class Mine(RunConfig): pass\ndef f() -> Mine: pass\ndef g() -> int: pass\n", "returned None"),
    own("others' annotations", "def f() -> RunConfig: pass\ndef g() -> 'rows of it': pass\ndef h() -> 'os.Foo': pass\ndef i() -> list[RunConfig]: pass\n", "returned None"),
    own("a function that is named", "def f() -> int: pass\ndef g() -> int: pass\n", "returned None", function=":g"),
    own("a function with a parameter", "def f(x) -> RunConfig: pass\n", "has no recipe"),
    own("a private function", "def _f() -> RunConfig: pass\n", "has no recipe"),
    own("returns nothing", "def f() -> RunConfig: pass\n", "returned None; a recipe returns a RunConfig"),
    own("returns a dict", "def f() -> RunConfig: return {}\n", "returned a dict; a recipe returns a RunConfig"),
    own("returns the class", "def f() -> RunConfig: return RunConfig\n", "a recipe returns a RunConfig"),
    own("is async", "async def f() -> RunConfig: return quickstart()\n", "a recipe returns a RunConfig"),
    own("yields", "def f() -> RunConfig: yield quickstart()\n", "a recipe returns a RunConfig"),
    changed("steps a string", 'steps="ten"', "steps='ten' must be a whole number"),
    changed("steps a bool", "steps=True", "steps=True must be a whole number"),
    changed("steps a fraction", "steps=2.5", "steps=2.5 must be a whole number"),
    changed("steps 0", "steps=0", "steps=0 must be at least 1"),
    changed("no learning rate", "trainer=TrainerConfig(lr=None)", "trainer.lr=None must be a number"),
    changed("a string for one", 'trainer=TrainerConfig(lr="1e-6")', "trainer.lr='1e-6' must be a number"),
    changed("no trainer", "trainer=None", "trainer=None must be a TrainerConfig"),
    changed("trainer a dict", "trainer={'lr': 1}", "trainer={'lr': 1} must be a TrainerConfig"),
    changed("trainer a class", "trainer=TrainerConfig", "trainer=the class TrainerConfig must be a TrainerConfig; write TrainerConfig(...)"),
    changed("model a path", 'model="path"', "model='path' must be", "ModelDir"),
    changed("no model", "model=None", "model=None must be", "ModelDir"),
    changed("model a class", "model=ModelDir", "model=the class ModelDir must be a ModelDir or a TinyQwen3; write ModelDir(...)"),
    changed("no env", "env=None", "env=None must be an Env"),
    changed("env a class", "env=SortLetters", "env=the class SortLetters must be an Env; write SortLetters(...)"),
    changed("env a function", "env=lambda seed: 1", "env=the function <lambda> must be an Env"),
    changed("env the base", "env=Env()", "env Env has no generate", "no reward", problems=2),
    changed("loss a class", "loss=Clip", "loss=the class Clip cannot be called; give one of rl/loss, as loss=Clip()"),
    changed("loss a name", 'loss="grpo"', "loss='grpo' cannot be called"),
    changed("no loss", "loss=None", "loss=None cannot be called"),
    changed("advantages a number", "advantages=3", "advantages=3 cannot be called"),
    changed("advantages a class", "advantages=GAE", "advantages=the class GAE cannot be called; give one of rl/loss, as advantages=GroupMean()"),
    changed("advantages a class with rules", "advantages=ReinforcePP", "advantages=the class ReinforcePP cannot be called"),
    changed("betas a list", "trainer=TrainerConfig(betas=[0.9, 0.99])", "trainer.betas=[0.9, 0.99] must be a tuple"),
    changed("one beta", "trainer=TrainerConfig(betas=(0.9,))", "trainer.betas=(0.9,) must be a tuple of 2 values"),
    changed("beta a number", "trainer=TrainerConfig(betas=0.9)", "trainer.betas=0.9 must be a tuple of 2 values"),
    changed("kl a number", "kl=0.1", "kl=0.1 must be a KL"),
    changed("a wrong choice", 'kl=KL(coef=1, into="los")', "kl.into='los' must be one of 'loss', 'reward'"),
    changed("targets a string", 'trainer=TrainerConfig(lora=LoRA(rank=8, targets="q_proj"))', "must be a tuple"),
    changed("layout a number", "trainer=TrainerConfig(layout=2)", "trainer.layout=2 must be a Layout"),
    changed("a path object", 'run_dir=__import__("pathlib").Path("x")', "run_dir=", "must be a string"),
    changed("resume nothing", "resume=None", "resume=None must be a string"),
    changed("a teacher's path", 'reference=ReferenceConfig(model="x")', "reference.model='x' must be"),
    changed("a value of many lines", 'dtype="a\\nb"', "must be one of 'auto', 'float32', 'bfloat16', 'fastest'"),
    changed("a long value", "dtype='x' * 10000", "must be one of 'auto', 'float32', 'bfloat16', 'fastest'"),
    changed("a numpy number", "steps=__import__('numpy').int64(3)", "steps=", "must be a whole number"),
    changed("a model's width a string", 'model=replace(quickstart().model, hidden_size="x")', "model.hidden_size='x'"),
    changed("a model's path a number", "model=ModelDir(3)", "model.path=3 must be a string"),
]

ENVS = [
    env("no generate", "$reward\n", "env E has no generate(self, seed), which makes a problem; add it"),
    env("no reward", "$generate\n", "env E has no reward(self, problem, response, stop)"),
    env("neither", "    pass\n", "no generate", "no reward", problems=2),
    env("a string for a problem", "    def generate(self, seed): return 'x'\n$reward\n", "returned a str; return a Problem"),
    env("nothing for a problem", "    def generate(self, seed): pass\n$reward\n", "generate() returned", "return a Problem"),
    env("a question that is a number", "    def generate(self, seed): return Problem('x', seed, '')\n$reward\n", "question is an int; make it a string"),
    env("an answer that is a number", "    def generate(self, seed): return Problem('x', str(seed), seed)\n$reward\n", "answer is an int; make it a string"),
    env("an id that is a number", "    def generate(self, seed): return Problem(seed, str(seed), '')\n$reward\n", "id is an int; make it a string"),
    env("no question", "    def generate(self, seed): return Problem('', '', '')\n$reward\n", "empty question", make="E(num_eval=1)"),
    env("a blank question", "    def generate(self, seed): return Problem('', ' ', '')\n$reward\n", "empty question", make="E(num_eval=1)"),
    env("raises", "    def generate(self, seed): return 1 / 0\n$reward\n", "mine.py line", "ZeroDivisionError", "fix it"),
    env("raises at times", "    def generate(self, seed): return Problem('', str(1 // (seed % 2)), '')\n$reward\n", "ZeroDivision", "mine.py line"),
    env("leaves", "    def generate(self, seed): raise SystemExit(3)\n$reward\n", "SystemExit", "fix it"),
    env("wrong parameters", "    def generate(self): pass\n$reward\n", "E.generate (mine.py line", "cannot be called with (seed)", "write def generate(self, seed)"),
    env("an async generate", "    async def generate(self, seed): pass\n$reward\n", "E.generate (mine.py line", "is async, which nothing awaits"),
    env("a list for a field", "    items: list = field(default_factory=list)\n$generate\n$reward\n", "its field items is a list; use frozen=True, and tuples"),
    env("a dict for a field", "    items: dict = field(default_factory=dict)\n$generate\n$reward\n", "its field items is a dict"),
    env("not frozen", "$generate\n$reward\n", "frozen", frozen=False),
    env("a lock", "    lock: object = threading.Lock()\n$generate\n$reward\n", "cannot be sent to other processes", "prepare()"),
    env("too few problems", "    def generate(self, seed): return Problem('', str(seed % 5), '')\n$reward\n", "has only 5 distinct problems; lower env.num_eval=9", make="E(num_eval=9)"),
    env("none left to train on", "    def generate(self, seed): return Problem('', 'x', '')\n$reward\n", "lower env.num_eval", make="E(num_eval=1)"),
    env("a field of a wrong type", "    size: int = 3\n$generate\n$reward\n", "env.size='x' must be a whole number", make="E(num_eval=2, size='x')"),
    env("a path for a string", "    file: str = ''\n$generate\n$reward\n", "env.file=", "must be a string", make="E(num_eval=2, file=__import__('pathlib').Path('x'))"),
    env("validate returns a string", "    def validate(self): return 'broken'\n$generate\n$reward\n", "validate() returned 'broken'; return a list of strings"),
    env("validate returns nothing", "    def validate(self): pass\n$generate\n$reward\n", "validate() returned", "return a list"),
    env("validate returns numbers", "    def validate(self): return [1, 2]\n$generate\n$reward\n", "validate() returned", "return a list"),
    env("validate finds two", "    def validate(self): return ['one', 'two']\n$generate\n$reward\n", "one", "two", problems=2),
    env("validate raises", "    def validate(self): return {}['x']\n$generate\n$reward\n", "KeyError: 'x'", "mine.py line"),
    env("validate raises ours", "    def validate(self): raise ConfigError('no luck')\n$generate\n$reward\n", "no luck"),
    env("no demonstrations", "$generate\n$reward\n", "E has no demonstrations", changes="data='demonstrations', loss=CrossEntropy()"),
    env("no preferences", "$generate\n$reward\n", "E has no preferences", changes="data='preferences', loss=DPO()"),
    env("a demonstration that is none", "    def demonstration(self, problem, seed): return 3\n$generate\n$reward\n", "demonstration() returned an int; return a string", changes="data='demonstrations', loss=CrossEntropy()"),
    env("a preference that is one string", "    def preference(self, problem, seed): return 'ab'\n$generate\n$reward\n", "preference() returned", changes="data='preferences', loss=DPO()"),
    env("a preference of three", "    def preference(self, problem, seed): return 'a', 'b', 'c'\n$generate\n$reward\n", "preference() returned", changes="data='preferences', loss=DPO()"),
    env("unknown characters", "    def generate(self, seed): return Problem('', f'{seed} \\u00e9', '')\n$reward\n", "model.alphabet lacks"),
    env("eval_problems of none", "    def eval_problems(self): return []\n$generate\n$reward\n", "eval_problems()"),
    env("eval_problems of a None", "    def eval_problems(self): return None\n$generate\n$reward\n", "eval_problems()"),
    env("post_init raises", "    def __post_init__(self): raise ValueError('never')\n$generate\n$reward\n", "ValueError: never; fix the recipe"),
    env("a field without a type", "    num_eval = 2\n$generate\n$reward\n", "E sets num_eval without a type", "write num_eval: int = 2", make="E()"),
    env("a reward of two parameters", "    def reward(self, problem, response): return 0.0\n$generate\n", "cannot be called with (problem, response, stop)"),
    env("an async reward", "    async def reward(self, problem, response, stop): return 0.0\n$generate\n", "is async, which nothing awaits"),
    env("other problems each time", "    def generate(self, seed): return Problem('', str(__import__('random').random()), '')\n$reward\n", "makes another problem each time from one seed"),
    env("messages without a role", "    def generate(self, seed): return Problem(str(seed), messages=({'content': str(seed)},))\n$reward\n", "a message is an object with a role"),
    env("an image in a message", "    def generate(self, seed): return Problem(str(seed), messages=({'role': 'user', 'content': [{'type': 'image_url', 'image_url': {'url': 'x'}}]},))\n$reward\n", "'image_url' is not offered: the policy reads text; leave it out", make="E(num_eval=2, max_new_tokens=8, chat=True)"),
    env("unknown characters in a message", "    def generate(self, seed): return Problem(str(seed), messages=({'role': 'user', 'content': [{'type': 'text', 'text': f'{seed} \\u00e9'}]},))\n$reward\n", "model.alphabet lacks: '\u00e9'", make="E(num_eval=2, max_new_tokens=8, chat=True)"),
    env("half of a character", "    def generate(self, seed): return Problem(str(seed), str(seed) + chr(0xd800))\n$reward\n", "half of a character"),
    env("a set in metadata", "    def generate(self, seed): return Problem(str(seed), str(seed), metadata={'a': {1, 2}})\n$reward\n", "a set, whose order differs between processes"),
]

_GOOD = '{"question": "1+1", "answer": "2"}\n{"question": "1+2", "answer": "3"}\n'
DATA = [
    data("empty", "", "is empty; give it at least env.num_eval + 1 = 2 lines"),
    data("blank", "\n \n\n", "is empty"),
    data("one line", '{"question": "1+1", "answer": "2"}\n', "all of them held out; lower env.num_eval=1"),
    data("all held out", _GOOD, "has 2 lines, all of them held out", flags="--env.num_eval 2"),
    data("more held out than there are", _GOOD, "all of them held out; lower env.num_eval=9", flags="--env.num_eval 9"),
    data("the same line twice", '{"question": "1+1", "answer": "2"}\n' * 3, "is among the 1 held-out ones; lower env.num_eval"),
    data("not JSON", _GOOD + "what\n", "data.jsonl line 3 is not JSON", 'each line is an object as {"question"'),
    data("JSON cut off", _GOOD + '{"question": "1', "line 3 is not JSON"),
    data("a JSON array", json.dumps([{"question": "1", "answer": "1"}]), "line 1 is not an object"),
    data("pretty-printed JSON", '{\n "question": "1",\n "answer": "1"\n}\n', "line 1 is not JSON"),
    data("CSV", "question,answer\n1+1,2\n", "line 1 is not JSON"),
    data("two objects on a line", '{"question": "1", "answer": "1"} {"question": "2", "answer": "1"}\n', "line 1 is not JSON"),
    data("nested too deep", "[" * 100_000 + "\n", "line 1 is not JSON"),
    data("a string", _GOOD + '"x"\n', "line 3 is not an object"),
    data("null", _GOOD + "null\n", "line 3 is not an object"),
    data("a number", _GOOD + "3\n", "line 3 is not an object"),
    data("no question", _GOOD + '{"answer": "1"}\n', "line 3 has no question"),
    data("no answer", _GOOD + '{"question": "1"}\n', "line 3 has no answer"),
    data("neither", _GOOD + "{}\n", "line 3 has no question and no answer"),
    data("another's keys", '{"prompt": "1", "completion": "1"}\n', "line 1 has no question and no answer"),
    data("a question that is a number", _GOOD + '{"question": 1, "answer": "1"}\n', "line 3 has a question that is not a string (1)"),
    data("a question that is null", _GOOD + '{"question": null, "answer": "1"}\n', "line 3 has a question that is not a string (None)"),
    data("a question that is a list", _GOOD + '{"question": ["a"], "answer": "1"}\n', "line 3 has a question that is not a string"),
    data("an empty question", _GOOD + '{"question": "", "answer": "1"}\n', "line 3 has an empty question"),
    data("a blank question", _GOOD + '{"question": " ", "answer": "1"}\n', "line 3 has an empty question"),
    data("an answer that is null", _GOOD + '{"question": "1", "answer": null}\n', "line 3 has an answer that is neither"),
    data("an answer that is true", _GOOD + '{"question": "1", "answer": true}\n', "line 3 has an answer that is neither"),
    data("an answer that is an object", _GOOD + '{"question": "1", "answer": {}}\n', "line 3 has an answer that is neither"),
    data("an answer of words", _GOOD + '{"question": "1", "answer": "one"}\n', "1 answers of", "set its match to exact (--env.match exact)"),
    data("an answer that is nan", _GOOD + '{"question": "1", "answer": NaN}\n', "answers of", "data.jsonl:3"),
    data("an empty answer", _GOOD + '{"question": "1", "answer": ""}\n', "answers of", "data.jsonl:3"),
    data("a long number", _GOOD + '{"question": "1", "answer": ' + "9" * 5000 + "}\n", "line 3"),
    data("not UTF-8", _GOOD.encode() + b'{"question": "\xff", "answer": "1"}\n', "line 3 is not UTF-8"),
    data("UTF-16", _GOOD.encode("utf-16"), "is not UTF-8"),
    data("NUL bytes", b"\0" * 64, "line 1 is not JSON"),
    data("gzip", b"\x1f\x8b\x08\0\0\0\0\0", "line 1 is not UTF-8"),
    data("half a surrogate", _GOOD + '{"question": "\\ud800", "answer": "1"}\n', "line 3 holds half of a character"),
    data("characters of no alphabet", _GOOD + '{"question": "\\u00e9", "answer": "1"}\n' * 1, "model.alphabet lacks", flags="--env.num_eval 2 --env.match exact"),
    data("no preferences", _GOOD, "has no chosen and rejected", changes="data='preferences', loss=DPO(),"),
    data("half a preference", _GOOD.replace('"}', '", "chosen": "1"}'), "has no chosen and rejected", changes="data='preferences', loss=DPO(),"),
    data("one preference that is missing", _GOOD.replace('"}', '", "chosen": "1", "rejected": "2"}') + _GOOD.replace("1+", "3+"), "has no chosen and rejected", changes="data='preferences', loss=DPO(),"),
    data("a preference that is null", _GOOD.replace('"}', '", "chosen": null, "rejected": "2"}'), "chosen", changes="data='preferences', loss=DPO(),"),
    data("no path", _GOOD, "env.path='' is not a file; give a JSON-lines file", flags="--env.path ''"),
    data("a missing path", _GOOD, "env.path='nowhere.jsonl' is not a file", flags="--env.path nowhere.jsonl"),
    data("a directory", _GOOD, "env.path='/' is not a file", flags="--env.path /"),
    data("a device", _GOOD, "env.path='/dev/zero' is not a file", flags="--env.path /dev/zero"),
    data("under a file", _GOOD, "is not a file", flags="--env.path /dev/null/x"),
    data("a path too long", _GOOD, "is longer than a path may be; give a shorter one", flags=f"--env.path {'x' * 5000}"),
    data("a home that is not there", _GOOD, "is not a file", flags="--env.path ~no_such_user/x"),
    data("a Hub id without a file", _GOOD, "names no file; give hf://datasets/owner/name/file.jsonl", flags="--env.path hf://datasets/a/b"),
    data("a Hub id offline", _GOOD, "could not be fetched", flags="--env.path hf://datasets/a/b/c.jsonl"),
    data("a Hub model", _GOOD, "is not a file", flags="--env.path hf://a/b/c.jsonl"),
    data("a URL", _GOOD, "is not a file", flags="--env.path https://example.com/x.jsonl"),
    data("a wrong match", _GOOD, "must be one of 'number', 'exact'", flags="--env.match fuzzy"),
]

_DEEP = "[" * 100_000
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TITAN = "or set --trainer.engine hf"
_HF = "trainer=TrainerConfig(engine='hf')"
MODELS = [
    row("missing teacher", "train distillation --reference.model.path nowhere/at/all", "no config.json", "rl fetch smollm2"),
    row("teacher of an earlier run that was not made", "train distillation", "runs/sft/hf", "no config.json"),
    row("a Hub id offline", "train distillation --reference.model.path Qwen/no-such", "could not be fetched from the Hub", "HF_TOKEN"),
    row("a Hub id and revision offline", "train distillation --reference.model.path a/b@c", "could not be fetched from the Hub"),
    changed("SmolLM2 not fetched", _SMOLLM2, "rl fetch smollm2"),
    changed("a number for a path", _SMOLLM2, "has no config.json", flags="--model.path 3"),
    changed("no path", _SMOLLM2, "model", "rl fetch smollm2", flags="--model.path ''"),
    row("a path with NUL", lambda p: ["train", "quickstart", "--run_dir", "a\0b"], "run_dir"),
    changed("a path too long", _SMOLLM2, "model", flags=f"--model.path {'x' * 5000}"),
    changed("a device", _SMOLLM2, "has no config.json", flags="--model.path /dev/null"),
    changed("a file", "model=ModelDir(__file__)", "has no config.json"),
    changed("an empty directory", "model=ModelDir(__import__('tempfile').mkdtemp())", "has no config.json"),
    model("no config.json", put("config.json", None), "has no config.json"),
    model("an empty config.json", put("config.json", ""), "config.json is not JSON", "fetch it again"),
    model("config.json of words", put("config.json", "what"), "config.json is not JSON"),
    model("config.json not UTF-8", put("config.json", b"\xff\xfe{}"), "config.json is not JSON"),
    model("config.json a list", put("config.json", "[]"), "config.json is no JSON object; fetch it again"),
    model("config.json null", put("config.json", "null"), "config.json is no JSON object"),
    model("config.json nested too deep", put("config.json", _DEEP), "config.json is not JSON"),
    model("config.json {}", put("config.json", "{}"), "config.json", "fetch"),
    model("config.json a Git LFS pointer", put("config.json", "version https://git-lfs.github.com/spec/v1\n"), "is not JSON"),
    model("no hidden_size", config(hidden_size=None), "config.json has no hidden_size; fetch the model again"),
    model("no vocab_size", config(vocab_size=None), "config.json has no vocab_size"),
    model("no heads", config(num_attention_heads=None), "config.json has no num_attention_heads"),
    model("hidden_size a string", config(hidden_size="64"), "hidden_size='64', which is not a whole number"),
    model("hidden_size a list", config(hidden_size=[64]), "hidden_size=[64], which is not a whole number"),
    model("hidden_size negative", config(hidden_size=-64), "hidden_size=-64, which is not a whole number of at least 1"),
    model("hidden_size a fraction", config(hidden_size=0.5), "hidden_size=0.5, which is not a whole number"),
    model("layers 0", config(num_hidden_layers=0), "num_hidden_layers=0, which is not"),
    model("layers true", config(num_hidden_layers=True), "num_hidden_layers=True, which is not"),
    model("layers 10**23", config(num_hidden_layers=10**23), "num_hidden_layers="),
    model("vocab negative", config(vocab_size=-1), "vocab_size=-1, which is not"),
    model("eps a string", config(rms_norm_eps="1e-6"), "rms_norm_eps='1e-6', which is not a number over 0"),
    model("eps 0", config(rms_norm_eps=0), "rms_norm_eps=0, which is not a number over 0"),
    model("key and value heads 0", config(num_key_value_heads=0), "num_key_value_heads=0, which is not"),
    model("heads that do not go", config(num_key_value_heads=3), "num_key_value_heads=3", "num_attention_heads=4"),
    model("an odd head_dim", config(head_dim=31), "`head_dim`=31", "fetch it again"),
    model("positions a string", config(max_position_embeddings="many"), "max_position_embeddings='many'"),
    model("rope_scaling a string", config(rope_scaling="yarn"), "rope_scaling='yarn', which is not an object"),
    model("rope_parameters a list", config(rope_parameters=[1]), "rope_parameters=[1], which is not an object"),
    model("rope_theta a string", config(rope_parameters={"rope_type": "default", "rope_theta": "big"}), "rope_theta"),
    model("tied a string", config(tie_word_embeddings="yes"), "'tie_word_embeddings'", "fetch it again"),
    model("unknown model_type", config(model_type="no_such"), "no_such", "config.json"),
    model("model_type a number", config(model_type=3), "model type `3`"),
    model("no model_type", config(model_type=None), "model_type"),
    model("architectures a string", config(architectures="Qwen3ForCausalLM"), "architectures='Qwen3ForCausalLM', which is not a list"),
    model("architectures of numbers", config(architectures=[3]), "architectures=[3], which is not a list of names"),
    model("architectures empty", config(architectures=[]), "architecture none is not supported; use one of", _TITAN),
    model("no architectures", config(architectures=None), "architecture none is not supported"),
    model("unsupported architecture", config(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel is not supported; use one of", _TITAN),
    model("quantized", config(quantization_config={"quant_method": "fp8"}), "quantization_config, which is not supported"),
    model("attention bias", config(attention_bias=True), "attention_bias=True, which is not supported", _TITAN),
    model("sliding window", config(use_sliding_window=True), "use_sliding_window=True, which is not supported"),
    model("another activation", config(hidden_act="gelu"), "hidden_act='gelu', which is not supported", _TITAN),
    model("another RoPE", config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}), "rope_type='yarn', which is not supported", _TITAN),
    model("a RoPE of half a head", config(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}), "partial_rotary_factor=0.5, which is not supported", _TITAN),
    model("half a RoPE", config(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4}), "rope", "factor"),
    model("dynamic RoPE", config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "rope_type='dynamic'", "use a model with another rope_type", changes=_HF),
    model("no weights", put(_WEIGHTS, None), "has no *.safetensors weights; download them, or convert"),
    model("PyTorch weights only", lambda p: (p / _WEIGHTS).rename(p / "pytorch_model.bin"), "has no *.safetensors weights", "convert"),
    model("truncated weights", cut(_WEIGHTS, 100), "model.safetensors is not a readable safetensors file", "fetch it again"),
    model("weights of 0 bytes", put(_WEIGHTS, b""), "model.safetensors is not a readable safetensors file"),
    model("weights of 8 bytes", put(_WEIGHTS, b"\0" * 8), "model.safetensors is not a readable safetensors file"),
    model("weights a Git LFS pointer", put(_WEIGHTS, "version https://git-lfs.github.com/spec/v1\n"), "is not a readable safetensors file"),
    model("weights a directory", lambda p: (put(_WEIGHTS, None)(p), (p / _WEIGHTS).mkdir()), "model.safetensors"),
    model("weights a broken link", lambda p: (put(_WEIGHTS, None)(p), (p / _WEIGHTS).symlink_to("nowhere")), "model.safetensors"),
    model("weights without tensors", put(_WEIGHTS, (2).to_bytes(8, "little") + b"{}"), "tensor"),
    model("an index without its shard", put(_INDEX, '{"weight_map": {"a": "no.safetensors"}}'), "lacks 1 of its weight files, such as no.safetensors"),
    model("an index without its tensor", put(_INDEX, '{"weight_map": {"a": "model.safetensors"}}'), "model.safetensors has no tensor a, which model.safetensors.index.json names"),
    model("an index of words", put(_INDEX, "what"), "is not an index of weights", "fetch it again"),
    model("an index without a map", put(_INDEX, "{}"), "is not an index of weights"),
    model("an index that is a list", put(_INDEX, "[]"), "is not an index of weights"),
    model("an index of numbers", put(_INDEX, '{"weight_map": {"a": 3}}'), "model.safetensors.index.json"),
    model("an index of lists", put(_INDEX, '{"weight_map": {"a": []}}'), "is not an index of weights"),
    model("an index nested too deep", put(_INDEX, _DEEP), "is not an index of weights"),
    model("no tokenizer", put("tokenizer.json", None), "has no tokenizer (tokenizer.json", "copy tokenizer.json there"),
    model("tokenizer.json empty", put("tokenizer.json", ""), "no readable tokenizer", "copy tokenizer.json there"),
    model("tokenizer.json of words", put("tokenizer.json", "what"), "no readable tokenizer"),
    model("tokenizer.json {}", put("tokenizer.json", "{}"), "no readable tokenizer"),
    model("tokenizer.json a list", put("tokenizer.json", "[]"), "no readable tokenizer"),
    model("tokenizer.json nested too deep", put("tokenizer.json", _DEEP), "no readable tokenizer"),
    model("tokenizer.json cut off", cut("tokenizer.json", 100), "no readable tokenizer"),
    model("tokenizer.json not UTF-8", put("tokenizer.json", b"\xff\xfe"), "no readable tokenizer"),
    model("tokenizer_config.json of words", put("tokenizer_config.json", "what"), "no readable tokenizer"),
    model("tokenizer_config.json a list", put("tokenizer_config.json", "[]"), "no readable tokenizer"),
    model("a tokenizer of an unknown class", put("tokenizer_config.json", '{"tokenizer_class": "NoSuch"}'), "tokenizer"),
    model("a tokenizer without EOS", put("tokenizer_config.json", '{"tokenizer_class": "PreTrainedTokenizerFast"}'), "names no eos_token; add it to tokenizer_config.json"),
    model("a chat template that is broken", put("chat_template.jinja", "{% for %}"), "chat", flags="--env.chat True"),
    model("no chat template", nothing, "has no chat template; set --env.chat False", flags="--env.chat True"),
    model("an adapter for layers that are not there", nothing, "trainer.lora.targets names nowhere, which the model does not have; its layers: down_proj", flags="--trainer.lora.rank 8 --trainer.lora.targets q_proj nowhere"),
    model("adapters for the head's norm", nothing, "trainer.lora.targets", flags="--trainer.lora.rank 8 --trainer.lora.targets norm"),
    model("adapters for the embeddings", nothing, "trainer.lora.targets names embed_tokens", flags="--trainer.lora.rank 8 --trainer.lora.targets embed_tokens"),
    teacher("a teacher without weights", put(_WEIGHTS, None), "teacher has no *.safetensors weights"),
    teacher("a teacher with a broken config.json", put("config.json", "what"), "teacher/config.json is not JSON"),
    teacher("a teacher without a tokenizer", put("tokenizer.json", None), "teacher has no tokenizer"),
    teacher("a teacher of another architecture", config(architectures=["Made"]), "Made is not supported"),
]

_METADATA = ".metadata"


def _with_file(path: Path, size: int, needed: int) -> None:
    """A checkpoint whose metadata name a file of so many bytes."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    put("__0_0.distcp", b"\0" * size)(path)
    stored = {MetadataIndex("x"): _StorageInfo("__0_0.distcp", 0, needed)}
    put(_METADATA, pickle.dumps(Metadata({}, storage_data=stored)))(path)


CHECKPOINTS = [
    quick("missing", "--resume nowhere/step-7", "nowhere/step-7 is not a complete checkpoint"),
    quick("a wrong name", "--resume nowhere", "resume='nowhere' does not exist, and is not named step-N; give a run's directory, or runs/.../checkpoints/step-N"),
    quick("a Hub id", "--resume owner/name", "is not named step-N"),
    quick("latest without runs", "--resume latest", "a run of quickstart in runs/ has no complete checkpoint"),
    quick("latest in capitals", "--resume LATEST", "is not named step-N"),
    quick("True", "--resume True", "resume='True' does not exist, and is not named step-N; give a run's directory, or runs/.../checkpoints/step-N"),
    quick("a number", "--resume 7", "resume='7' does not exist, and is not named step-N"),
    quick("a step without a number", "--resume step-", "is not named step-N"),
    row("a path with NUL", lambda p: ["train", "quickstart", "--resume", "a\0/step-7"], "resume"),
    quick("a path too long", f"--resume {'x' * 5000}/step-7", "resume"),
    command("a run without checkpoints", lambda p: (p.directory / "run/checkpoints").mkdir(parents=True), "train quickstart --resume {here}/run", "has no complete checkpoint; leave it out"),
    command("a run that never saved", lambda p: p.write("run/config.json", "{}"), "train quickstart --resume {here}/run", "is not named step-N"),
    command("latest of runs without checkpoints", lambda p: (p.directory / "runs/quickstart-1/checkpoints").mkdir(parents=True), "train quickstart --resume latest", "no complete checkpoint; leave it out"),
    command("latest of a file", lambda p: p.write("runs", "x"), "train quickstart --resume latest", "no complete checkpoint", problems=2),
    command("a file", lambda p: p.write("step-7", "x"), "train quickstart --resume {here}/step-7", "is not a complete checkpoint"),
    command("an empty directory", lambda p: (p.directory / "step-7").mkdir(), "train quickstart --resume {here}/step-7", "not a complete checkpoint"),
    command("only half written", lambda p: p.copy("step-7", "step-7.partial"), "train quickstart --resume {here}/step-7.partial", "is not named step-N"),
    resume("no record.json", put("record.json", None), "is not a complete checkpoint"),
    resume("no .metadata", put(_METADATA, None), "is not a complete checkpoint"),
    resume("record.json empty", put("record.json", ""), "record.json is broken", "give another checkpoint"),
    resume("record.json of words", put("record.json", "what"), "record.json is broken"),
    resume("record.json not UTF-8", put("record.json", b"\xff"), "record.json is broken"),
    resume("record.json nested too deep", put("record.json", _DEEP), "record.json is broken"),
    resume("record.json a list", put("record.json", "[]"), "record.json is broken: it is no object"),
    resume("record.json a directory", lambda p: (put("record.json", None)(p), (p / "record.json").mkdir()), "is not a complete"),
    resume("record.json {}", put("record.json", "{}"), "a record.json that no checkpoint of a run has"),
    resume("no adapters", record(adapters=None), "a record.json that no checkpoint of a run has"),
    resume("no state", record(state=None), "a record.json that no checkpoint of a run has"),
    resume("adapters a list", record(adapters=[1]), "a record.json that no checkpoint of a run has"),
    resume("an adapter that is a number", record(adapters={"policy": 3}), "a record.json that no checkpoint"),
    resume("an adapter without a rank", record(adapters={"policy": {"targets": []}}), "another trainer.lora"),
    resume("an adapter without targets", record(adapters={"policy": {"rank": 3}}), "a record.json that no checkpoint"),
    resume("an adapter with more", record(adapters={"policy": {"rank": 3, "targets": [], "x": 1}}), "a record.json that no checkpoint"),
    resume("state a list", record(state=[1]), "a record.json that no checkpoint of a run has"),
    resume("state a string", record(state="x"), "a record.json that no checkpoint of a run has"),
    resume("a model that is a number", state(model=3), "a record.json that no checkpoint of a run has"),
    resume("a reference that is a number", state(reference=3), "a record.json that no checkpoint", flags="--kl.coef 1"),
    resume("a step that is another", state(step=9), "holds step 9; name it step-9"),
    resume("a step that is a string", state(step="seven"), "a record.json that no checkpoint"),
    resume(".metadata empty", put(_METADATA, b""), ".metadata is broken", "give another checkpoint"),
    resume(".metadata garbage", put(_METADATA, b"what"), ".metadata is broken"),
    resume(".metadata cut off", cut(_METADATA, 10), ".metadata is broken"),
    resume(".metadata of another class", put(_METADATA, pickle.dumps({"x": 1})), ".metadata is broken"),
    resume(".metadata of no class", put(_METADATA, b"cno_such_module\nX\n."), ".metadata is broken"),
    resume("a file that is missing", lambda p: (_with_file(p, 0, 9), put("__0_0.distcp", None)(p)), "__0_0.distcp has 0 of 9 bytes"),
    resume("a file cut off", lambda p: _with_file(p, 4, 9), "__0_0.distcp has 4 of 9 bytes; give another checkpoint"),
    resume("another model", nothing, "is of another model: hidden_size 64 there and 96 here", flags="--model.hidden_size 96"),
    resume("another number of layers", nothing, "num_hidden_layers 2 there and 3 here", flags="--model.num_layers 3"),
    resume("another engine", state(engine="hf"), "was saved with trainer.engine=hf; set --trainer.engine hf"),
    resume("an engine that is none", state(engine=3), "record.json"),
    resume("an adapter, there none", nothing, "another trainer.lora: rank 0 there and 8 here; set it as it was", flags="--trainer.lora.rank 8"),
    resume("none, there an adapter", record(adapters={"policy": {"rank": 4, "alpha": 32.0, "targets": ["q_proj"]}}), "another trainer.lora: rank 4 there and 0 here"),
    resume("a reference, there none", nothing, "was saved with reference: none, but the run has: policy", flags="--kl.coef 0.1"),
    resume("a reference that is gone", state(reference=["policy", "/nowhere"]), "the reference's weights /nowhere, which are gone", flags="--kl.coef 0.1"),
    resume("another seed", nothing, "was saved with seed=0, and the run has 7", "set --seed 0", flags="--seed 7"),
    resume("fewer prompts a step", nothing, "prompts would come twice or never; set --prompts_per_step", flags="--prompts_per_step 3"),
    resume("prompts that follow from a number", state(prompts_follow_from=3), "a record.json that no checkpoint"),
    resume("all its steps are done", nothing, "has done all of steps=7; raise steps", flags="--steps 7"),
    resume("more steps than that are done", nothing, "has done all of steps=3; raise steps", flags="--steps 3"),
    resume("another model and its steps done", nothing, "another model", "raise steps", flags="--steps 7 --model.hidden_size 96", problems=2),
]

EARLIER = [
    earlier("empty", lambda c: "", "is not the config.json of a run", "give a recipe"),
    earlier("of words", lambda c: "what", "is not the config.json of a run"),
    earlier("cut off", lambda c: json.dumps(c)[:-9], "is not the config.json of a run"),
    earlier("nested too deep", lambda c: _DEEP, "is not the config.json of a run"),
    earlier("a list", lambda c: [], "is not the config.json of a run"),
    earlier("null", lambda c: "null", "is not the config.json of a run"),
    earlier("{}", lambda c: "{}", "it names no recipe"),
    earlier("a model's", lambda c: {"architectures": [], "hidden_size": 3}, "it names no recipe"),
    earlier("of a class that is gone", at("type", "rl.config.run:Gone"), "names 'rl.config.run:Gone', which is not there"),
    earlier("of a module that is gone", at("loss.type", "rl.loss.gone:Gone"), "names 'rl.loss.gone:Gone', which is not there"),
    earlier("of another class", at("type", "rl.loss.clip:Clip"), "which this version does not"),
    earlier("of a class that is none", at("loss.type", "json:loads"), "which is no dataclass"),
    earlier("of a name that is none", at("loss.type", "x"), "names 'x', which is not there"),
    earlier("of an empty name", at("loss.type", ""), "which is not there"),
    earlier("of a relative name", at("loss.type", ".x:Y"), "which is not there"),
    earlier("with a type that is a number", at("loss.type", 3), "cannot be read back; give a recipe"),
    earlier("without a type", lambda c: {k: v for k, v in c.items() if k != "type"}, "cannot be read back"),
    earlier("with the words of an object", at("loss", {"repr": "<lambda>"}), "cannot be read back; give a recipe"),
    earlier("with an unknown setting", at("stepz", 3), "has the setting stepz of rl.config.run:RunConfig, which this version does not; remove it there"),
    earlier("with an unknown setting of a part", at("trainer.lrr", 3), "has the setting lrr of"),
    earlier("without its model", lambda c: {k: v for k, v in c.items() if k != "model"}, "cannot be made again", "model"),
    earlier("with steps a string", at("steps", "ten"), "steps='ten' must be a whole number"),
    earlier("with steps null", at("steps", None), "steps=None must be a whole number"),
    earlier("with nan", at("trainer.lr", float("nan")), "trainer.lr=nan must be finite"),
    earlier("with one beta", at("trainer.betas", [0.9]), "trainer.betas=(0.9,) must be a tuple of 2 values"),
    earlier("with the trainer a number", at("trainer", 3), "trainer=3 must be a TrainerConfig"),
    earlier("with the model a string", at("model", "x"), "model='x' must be"),
    earlier("of a recipe that is gone", at("recipe", "/nowhere/mine.py:f"), "was written for /nowhere/mine.py:f, which is gone; give a recipe"),
    earlier("of a recipe that is a number", at("recipe", 3), "it names no recipe); mend it, or give a recipe"),
    earlier("wrong twice", lambda c: at("steps", 0)(at("seed", -1)(c)), "steps=0", "seed=-1", problems=2),
    row("missing", "train nowhere.json", "nowhere.json is not the config.json of a run", "give a recipe"),
    row("missing in a directory", "train runs/gone/config.json", "is not the config.json of a run"),
    row("a run that is missing", "train runs/gone", "unknown recipe 'runs/gone'"),
    command("a directory named so", lambda p: (p.directory / "config.json").mkdir(), "train {here}/config.json", "is not the config.json of a run"),
    command("not UTF-8", lambda p: p.write("config.json", b"\xff\xfe"), "train {here}/config.json", "is not the config.json of a run"),
    command("of a directory", lambda p: p.write("config.json", "what"), "train {here}", "is not the config.json of a run"),
    row("a run that is not there", "train runs/none", "unknown recipe 'runs/none': it is no run either, for it has no config.json"),
    command("a run without config.json", lambda p: p.write("run/x", ""), "train {here}/run", "it is no run either, for it has no config.json"),
]

RUN_DIRECTORIES = [
    command("not empty", lambda p: p.write("x/y", ""), "train quickstart --run_dir {here}/x", "exists and is not empty; give another directory"),
    command("a file", lambda p: p.write("x", ""), "train quickstart --run_dir {here}/x", "x is a file; give another directory"),
    command("under a file", lambda p: p.write("x", ""), "train quickstart --run_dir {here}/x/y/z", "x is a file; give another directory"),
    command("runs is a file", lambda p: p.write("runs", ""), "train quickstart", "the directory runs/ cannot be made", "runs is a file"),
    command("a broken link", lambda p: (p.directory / "x").symlink_to("nowhere"), "train quickstart --run_dir {here}/x/y", "run_dir"),
    command("a link to itself", lambda p: (p.directory / "x").symlink_to("x"), "train quickstart --run_dir {here}/x/y", "run_dir"),
    quick("a device", "--run_dir /dev/null", "/dev/null is a file; give another directory"),
    quick("under a device", "--run_dir /dev/null/x", "/dev/null is a file"),
    quick("the root", "--run_dir /", "exists and is not empty"),
    quick("under /proc", "--run_dir /proc/x", "the run's directory /proc/x cannot be made", "give another run_dir"),
    quick("a name too long", f"--run_dir {'x' * 300}", "is longer than a path may be; give a shorter one"),
    quick("a path too long", f"--run_dir {'x/' * 3000}", "is longer than a path may be"),
    quick("a name too long in bytes", f"--run_dir {'é' * 200}", "is longer than a path may be"),
    row("NUL", lambda p: ["train", "quickstart", "--run_dir", "a\0b"], "run_dir='a\\x00b'", "NUL"),
    row("a control character", lambda p: ["train", "quickstart", "--run_dir", "a\x1b[31mb"], "holds a control character"),
    row("a line break", lambda p: ["train", "quickstart", "--run_dir", "a\nb"], "holds a control character"),
    row("resume from a run that is none", "train quickstart --resume runs/none", "resume='runs/none' does not exist, and is not named step-N; give a run's directory, or runs/.../checkpoints/step-N"),
]

ALGORITHMS = [
    quick("groups of one", "--group_size 1", "group_size=1 gives every advantage 0; use 2 or more"),
    quick("minibatches that do not divide", "--minibatches 3", "minibatches=3 does not divide prompts_per_step=64; use a divisor"),
    quick("minibatches over prompts", "--minibatches 128", "does not divide prompts_per_step=64"),
    quick("parts that do not divide", "--stream_groups 3", "stream_groups=3 does not divide prompts_per_step=64"),
    quick("parts of the whole", "--stream_groups 64", "stream_groups=64 has no effect with prompts_per_step=64; use a smaller divisor"),
    quick("parts and minibatches", "--stream_groups 8 --minibatches 2", "needs minibatches=1 and epochs=1"),
    quick("parts and epochs", "--stream_groups 8 --epochs 2", "needs minibatches=1 and epochs=1"),
    quick("parts and resampling", "--stream_groups 8 --resampling_rounds 1", "set one of them to 0"),
    row("parts and a critic", "train ppo --stream_groups 8 --minibatches 1", "use GroupMean or RLOO"),
    row("parts and a whitened batch", "train reinforce_pp --stream_groups 8", "use GroupMean or RLOO"),
    quick("preferences and a clip", "--data preferences", "loss Clip learns from rollouts, not from data=preferences"),
    quick("demonstrations and a clip", "--data demonstrations", "loss Clip learns from rollouts", problems=1),
    row("rollouts and DPO", "train dpo --data rollouts", "loss DPO learns from preferences, not from data=rollouts"),
    row("rollouts and cross entropy", "train sft --data rollouts", "loss CrossEntropy learns from demonstrations"),
    row("demonstrations and KL", "train sft --kl.coef 0.1", "kl.coef=0.1 has no effect with data=demonstrations"),
    row("demonstrations and groups", "train sft --group_size 4", "group_size=4 has no effect with data=demonstrations"),
    row("demonstrations and lag", "train sft --max_offpolicy_steps 1", "max_offpolicy_steps=1 has no effect with data=demonstrations"),
    row("preferences and entropy", "train dpo --entropy.coef 0.01", "entropy does not go with data=preferences"),
    row("preferences and an aggregate", "train dpo --loss_agg seq_mean", "loss_agg=seq_mean has no effect with pairs"),
    quick("a KL estimator without KL", "--kl.estimator k1", "kl.estimator=k1 has no effect with kl.coef=0; set kl.coef"),
    changed("a whitening's eps without it", "advantages=GAE(whiten=False, eps=1e-3)", "advantages.eps=0.001 has no effect with advantages.whiten=False"),
    changed("a value's clip in one update", "advantages=GAE(), critic=replace(quickstart().critic, value_clip=0.1)", "critic.value_clip=0.1 has no effect with one update a step"),
    quick("no decay of adapters' vectors", "--trainer.lora.rank 8 --trainer.weight_decay 0.1 --trainer.decay_all False", "trainer.decay_all=False has no effect with trainer.lora.rank"),
    quick("a critic's rate without a critic", "--critic.lr 1", "critic.lr=1.0 has no effect", "use GAE"),
    quick("a critic's layout without a critic", "--critic.layout.shard 2", "critic.layout.shard=2 has no effect", "use GAE"),
    quick("a reference without KL", "--reference.refresh_every 2", "reference.refresh_every=2 has no effect", "set kl.coef"),
    quick("draining in step", "--generator.updates drain", "generator.updates=drain has no effect with max_offpolicy_steps=0"),
    quick("a target's step without a target", "--entropy.adapt 0.1", "entropy.adapt=0.1 has no effect with entropy.target=0"),
    quick("a least rate without a schedule", "--trainer.lr_min_ratio 0.1", "no effect with trainer.lr_schedule=constant; set a schedule"),
    quick("a decay without wsd", "--trainer.lr_decay_ratio 0.1", "no effect without trainer.lr_schedule=wsd; set it"),
    quick("truncation without the trainer's", "--correction.tis_clip 2", "needs correction.old_logprobs=trainer; set it"),
    quick("masks the wrong way round", "--correction.mask_low 2 --correction.mask_high 1", "swap them"),
    quick("a level of nothing", "--correction.level sequence", "correction.level=sequence has no effect without"),
    quick("a penalty of nothing", "--shaping.overlong_penalty 2", "no effect with shaping.overlong_tokens=0; set it"),
    quick("a punishment of nothing", "--shaping.overlong_tokens 2 --shaping.overlong_penalty 0", "no effect with shaping.overlong_penalty=0"),
    quick("a cache over the response", "--shaping.overlong_tokens 20", "is over env.max_new_tokens=8; use less"),
    quick("dual clip under 1", "--loss.dual 0.5", "loss.dual=0.5 must be over 1, or 0 for none"),
    quick("an eps of nothing", "--advantages.adv_norm none --advantages.eps 1", "has no effect with advantages.adv_norm=none"),
    quick("checkpoints of none", "--save_every 0 --save_every_minutes 0 --keep_checkpoints 3", "keep_checkpoints=3 has no effect with save_every=0 and save_every_minutes=0", "set save_every"),
    quick("a warm-up's rate without steps", "--warmup.steps 0 --warmup.lr 0.1", "warmup.lr=0.1 has no effect with warmup.steps=0; set warmup.steps"),
    quick("an adapter's scale without a rank", "--trainer.lora.alpha 8", "no effect with trainer.lora.rank=0; set a rank"),
    quick("a silent adapter", "--trainer.lora.rank 8 --trainer.lora.alpha 0", "trainer.lora.alpha=0 silences the adapter; use more"),
    quick("an adapter that is too large", "--trainer.lora.rank 513", "trainer.lora.rank=513 is over 512, the most that vLLM serves; use less"),
    quick("an adapter for nothing", "--trainer.lora.rank 8 --trainer.lora.targets x", "names x, which the model does not have; its layers: "),
    quick("dropout of a model without", "--trainer.engine hf --trainer.dropout True", "trainer.dropout=True has no effect, because the model has no dropout; leave it out"),
    quick("dropout of torchtitan's", "--trainer.dropout True", "trainer.dropout=True needs trainer.engine=hf"),
    quick("float8 of transformers'", "--trainer.engine hf --trainer.float8 True", "trainer.float8=True needs trainer.engine=titan"),
    row("a discount of nothing", "train reinforce_pp --advantages.baseline group_mean --advantages.discount 0.5", "has no effect with advantages.baseline=group_mean"),
    changed("a teacher that is refreshed", "loss=Distillation(), group_size=8, reference=ReferenceConfig(model=TinyQwen3(alphabet=SortLetters().generate(1).question), refresh_every=1)", "set one of them", problems=2),
    changed("distillation without a teacher", "loss=Distillation()", "loss Distillation needs a teacher; set reference.model", flags="--group_size 1"),
    changed("a teacher of another alphabet", "loss=Distillation(), reference=ReferenceConfig(model=TinyQwen3(alphabet='abc'))", "another tokenizer than the model; use a teacher that reads the same tokens"),
    changed("a critic without returns", "advantages=type('A', (), {'needs_critic': True, '__call__': lambda s, g: g})()", "has no method returns(groups)", "as in GAE"),
    changed("a loss of the wrong form", "loss=lambda logprobs: 0", "loss", "(logprobs, inputs)"),
    changed("a loss that cannot be sent", "loss=(lambda lock: lambda logprobs, inputs: lock)(threading.Lock())", "loss", "cannot be sent to other processes"),
    changed("two of GAE's", "advantages=GAE(lam=2, discount=-1)", "advantages.lam=2", "advantages.discount=-1", problems=2),
]

LAYOUTS = [
    quick("hosts that join nobody", "--joining_hosts 1", "joining_hosts=1 has no effect without --hosts; name those that are there"),
    quick("heads split in two", "--trainer.layout.tensor_parallel 2", "does not divide the model's num_key_value_heads=1; use one of [1]"),
    quick("heads split in three", "--trainer.layout.tensor_parallel 3", "trainer.layout.tensor_parallel=3 does not divide", problems=2),
    quick("the generator's heads", "--generator.tensor_parallel 3", "generator.tensor_parallel=3 does not divide the model's num_attention_heads=2"),
    row("the critic's heads", "train ppo --critic.layout.tensor_parallel 2", "critic.layout.tensor_parallel=2 does not divide"),
    row("the reference's heads", "train grpo --reference.layout.tensor_parallel 2", "reference.layout.tensor_parallel=2 does not divide"),
    quick("tensor parallel of transformers'", "--trainer.engine hf --trainer.layout.context_parallel 2", "need trainer.engine=titan; use trainer.layout.shard"),
    row("an adapter's reference", "train grpo --trainer.lora.rank 8 --reference.layout.shard 2", "reference.layout.shard=2 has no effect with a reference that is an adapter"),
    quick("more replicas than fit", "--generator.num_replicas 500", "more than this machine can hold", "use fewer"),
    quick("more shards than fit", "--trainer.layout.shard 500", "use fewer"),
    quick("more rewards than fit", "--reward.num_procs 500", "use fewer"),
    quick("a product that does not fit", "--trainer.layout.shard 100 --trainer.layout.replicate 100", "use fewer"),
    quick("no shards", "--trainer.layout.shard 0", "trainer.layout.shard=0 must be at least 1"),
    quick("negative shards", "--trainer.layout.shard -1", "trainer.layout.shard=-1 must be at least 1"),
    quick("no split", "--trainer.layout.tensor_parallel 0", "trainer.layout.tensor_parallel=0 must be at least 1"),
    quick("no generator", "--generator.num_replicas 0", "generator.num_replicas=0 must be at least 1"),
    quick("a generator split in none", "--generator.tensor_parallel 0", "generator.tensor_parallel=0 must be at least 1"),
]

COMMANDS = [
    row("replay without a step", "replay runs/x", "--step is missing"),
    row("replay of a step that is none", "replay runs/x --step first", "--step first must be a step, at least 1"),
    row("replay of no run", "replay runs/x --step 3", "runs/x is not the directory of a run"),
    row("unknown", "trian", "unknown command 'trian'; use train, check, eval, replay, serve, worker, plan, doctor, gpu-check or fetch, as rl train quickstart (rl --help)"),
    row("capitals", "TRAIN quickstart", "unknown command 'TRAIN'"),
    row("empty", "''", "unknown command ''"),
    row("a flag", "--steps 3", "unknown command '--steps'"),
    row("a recipe without train", "quickstart", "unknown command 'quickstart'", "rl train quickstart"),
    row("evaluate", "eval quickstart", "no recipe is named; usage: rl eval MODEL RECIPE"),
    row("doctor with more", "doctor now", "rl doctor takes directories of runs, which 'now' is not"),
    row("plan for eight of nothing", "plan quickstart --cluster 8", "--cluster '8' is not understood; write 8xH100-80"),
    row("plan without a value", "plan quickstart --cluster", "--cluster has no value; write --cluster 8xH100-80"),
    command("plan of a part of another type", lambda p: p.write("mine.py", "from dataclasses import replace\nfrom rl.configs.quickstart import quickstart\ndef mine():\n    return replace(quickstart(), kl=0.1)\n"), "plan {here}/mine.py:mine", "kl=0.1 must be a KL"),
    row("plan with a value for a switch", "plan quickstart --json=1", "--json=1: --json takes no value; write --json"),
    row("doctor of hosts and runs", "doctor --hosts 127.0.0.1:1 runs/one", "rl doctor --hosts takes no runs beside it ('runs/one'); ask for them apart"),
    row("doctor of no host", "doctor --hosts", "--hosts has no value; write --hosts ADDRESS:PORT"),
    row("doctor of a host that is none, with =", "doctor --hosts=here", "'here' is no address; write host:port"),
    row("train dry, with a dash, of no shards", "train quickstart --dry-run --trainer.layout.shard 0", "trainer.layout.shard=0 must be at least 1"),
    row("plan by the old name, with =", "plan quickstart --devices=8xH100-80", "--devices is called --cluster now; write --cluster 8xH100-80"),
    row("plan by the old name", "plan quickstart --devices 8xH100-80", "--devices is called --cluster now; write --cluster 8xH100-80"),
    row("plan of no recipe", "plan quikstart", "did you mean 'quickstart'?"),
    row("plan with no shards", "plan quickstart --trainer.layout.shard 0", "trainer.layout.shard=0 must be at least 1"),
    row("plan of a model that is not there", "plan smollm2 --model.path nowhere", "nowhere has no config.json"),
    row("gpu-check with more", "gpu-check now", "rl gpu-check takes --model DIRECTORY or nothing, not 'now'"),
    row("gpu-check of nothing", "gpu-check --model nowhere", "nowhere has no config.json"),
    row("fetch alone", "fetch", "rl fetch smollm2 [DIRECTORY]"),
    row("fetch another model", "fetch llama", "'llama'", "rl fetch smollm2 [DIRECTORY]"),
    row("fetch with more", "fetch smollm2 a b", "rl fetch smollm2 [DIRECTORY]"),
    row("fetch a flag", "fetch --out x", "rl fetch smollm2 [DIRECTORY]"),
    row("fetch with a flag", "fetch smollm2 --out", "rl fetch smollm2 [DIRECTORY]"),
    row("fetch to nowhere", "fetch smollm2 ''", "rl fetch smollm2 [DIRECTORY]"),
    row("fetch to a device", "fetch smollm2 /dev/null", "/dev/null is a file; give another directory"),
    command("fetch to a file", lambda p: p.write("x", ""), "fetch smollm2 {here}/x", "x is a file; give another directory"),
    command("fetch under a file", lambda p: p.write("x", ""), "fetch smollm2 {here}/x/y", "x is a file"),
    command("fetch to what is not empty", lambda p: p.write("x/y", ""), "fetch smollm2 {here}/x", "is not empty"),
    row("fetch under /proc", "fetch smollm2 /proc/x", "/proc"),
    row("fetch to a name too long", f"fetch smollm2 {'x' * 300}", "longer than a path may be"),
    row("fetch to NUL", lambda p: ["fetch", "smollm2", "a\0b"], "NUL"),
    row("plan for GPUs of 8000 GB", "plan quickstart --cluster 8xH100-8000", "no GPU has 8000 GB; write its memory"),
    row("plan for no hosts", "plan quickstart --cluster 00x8xH100-80", "is not understood"),
    row("plan for no GPUs", "plan quickstart --cluster 00xH100-80", "is not understood"),
    row("plan for a million GPUs", "plan quickstart --cluster 9999xH100-80", "has over 8,192 GPUs; write fewer"),
    row("plan for too many hosts", "plan quickstart --cluster '2000 x 8xH100-80'", "has over 8,192 GPUs; write fewer"),
    row("plan for two clusters", "plan quickstart --cluster cpu --cluster cpu", "--cluster is given 2 times; give it once"),
    row("plan as JSON beside a run", "plan quickstart --json --diff x", "--json has no effect with --diff; leave one of them out"),
    row("plan beside nothing", "plan quickstart --diff nowhere", "no plan.json can be read there"),
    row("plan for GPUs of nothing", "plan quickstart --cluster 8xH100-0", "no GPU has 0 GB"),
    row("check of nothing", "check nowhere.py:f", "does not exist"),
    row("check of an unknown setting", "check quickstart --stepz 3", "unknown setting --stepz; did you mean --steps?"),
]

_MODEL = lambda p: p.copy("model", "model")  # noqa: E731
SERVE = [
    row("no model", "serve", "name a model, as rl serve MODEL"),
    row("a model that is not there", "serve nowhere", "nowhere has no config.json"),
    command("an empty name", _MODEL, "serve model --names ''", "names=('',) has an empty name, or one twice; give each once"),
    command("a blank name", _MODEL, "serve model --names a ' '", "has an empty name, or one twice"),
    command("a name twice", _MODEL, "serve model --names a b a", "names=('a', 'b', 'a') has an empty name, or one twice"),
    command("a name with a colon", _MODEL, "serve model --names a:b", "names='a:b': the SDK takes no name with a colon or two slashes"),
    command("keys for nobody", _MODEL, "serve model --no_api_key True --api_key_file keys", "api_key_file has no effect with no_api_key=True; leave one of them out"),
    command("a port that is none", _MODEL, "serve model --port 70000", "port=70000 must be at least 0 and at most 65535"),
    command("a recipe", nothing, "serve quickstart", "model directory quickstart has no config.json", "rl fetch smollm2"),
    command("an unknown setting", _MODEL, "serve model --nams a", "Unrecognized options: --nams, a; rl serve --help lists the settings"),
]

# fmt: on
TABLE = {
    "flags": FLAGS,
    "values": VALUES,
    "several": SEVERAL,
    "recipes": RECIPES,
    "envs": ENVS,
    "data": DATA,
    "models": MODELS,
    "checkpoints": CHECKPOINTS,
    "earlier": EARLIER,
    "run directories": RUN_DIRECTORIES,
    "algorithms": ALGORITHMS,
    "layouts": LAYOUTS,
    "commands": COMMANDS,
    "serve": SERVE,
}


def make_shared(directory: Path) -> Path:
    """What `Place.copy` copies."""
    model_dir = TinyQwen3(alphabet=ALPHABET).materialize(directory)
    write_model(model_dir, hidden_size=32, intermediate_size=32, head_dim=16)
    step = directory / "step-7"
    step.mkdir()
    record = {"state": checkpoint_notes(quickstart()) | {"step": 7}, "adapters": {}}
    (step / "record.json").write_text(json.dumps(record))
    (step / _METADATA).write_bytes(pickle.dumps(Metadata({}, storage_data={})))
    return directory


@dataclass(frozen=True)
class Outcome:
    code: object
    out: str
    lines: list[str]


@contextlib.contextmanager
def _files_for_output() -> Iterator[tuple[Path, Path]]:
    """Standard output and error to two files: Python's, what loggers hold of it, and the process's own."""
    with tempfile.TemporaryDirectory() as directory:
        paths = Path(directory) / "out", Path(directory) / "err"
        kept = [(sys.stdout, os.dup(1)), (sys.stderr, os.dup(2))]
        streams = [open(path, "w", buffering=1) for path in paths]  # noqa: SIM115
        for number, stream in enumerate(streams, 1):
            os.dup2(stream.fileno(), number)
        sys.stdout, sys.stderr = streams
        handlers = [h for ref in logging._handlerList if type(h := ref()) is logging.StreamHandler]
        before = [handler.stream for handler in handlers]
        for handler in handlers:  # not by setStream, which flushes what another test's capture has closed
            handler.stream = streams[1]
        try:
            yield paths
        finally:
            for handler, stream in zip(handlers, before, strict=True):
                handler.stream = stream
            for number, (_, copy) in enumerate(kept, 1):
                os.dup2(copy, number)
                os.close(copy)
            sys.stdout, sys.stderr = kept[0][0], kept[1][0]
            for stream in streams:
                stream.close()


def outcome(arguments: Arguments) -> Outcome:
    """Of `rl` in this process."""
    code: object = "none"
    with _files_for_output() as (out, err), mock.patch.object(sys, "argv", ["rl", *arguments]):
        try:
            cli.main()
        except SystemExit as exit:
            code = exit.code
        except BaseException as error:
            code = repr(error)
        return Outcome(code, out.read_text(), err.read_text().splitlines())


def build(row: Row, place: Place) -> Arguments:
    return shlex.split(row.arguments) if isinstance(row.arguments, str) else row.arguments(place)


def _not_refused(*_: object) -> None:
    raise SystemExit("not refused")


@contextlib.contextmanager
def without_network_or_new_files() -> Iterator[None]:
    """The Hub is offline, Python leaves no __pycache__ beside recipes, and what is not refused still ends."""
    import huggingface_hub.constants as hub

    import rl.controller.run
    import rl.fetch
    import rl.tinker.serve

    with (
        mock.patch.object(hub, "HF_HUB_OFFLINE", True),
        mock.patch.object(sys, "dont_write_bytecode", True),
        mock.patch.object(rl.controller.run, "_main", _not_refused),
        mock.patch.object(rl.fetch, "_download", _not_refused),
        mock.patch.object(rl.tinker.serve, "_main", _not_refused),
    ):
        yield


def what_is_there(directory: Path) -> set[str]:
    """Every file, and what runs of this process hold in shared memory."""
    return {str(path) for path in [*directory.rglob("*"), *Path("/dev/shm").glob(f"rl-*/{os.getpid()}-*")]}


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with without_network_or_new_files():
        yield make_shared(tmp_path_factory.mktemp("shared"))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "row", [pytest.param(r, id=f"{s}: {r.name}") for s, rows in TABLE.items() for r in rows]
)
def test_bad_input(row, shared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = build(row, Place(tmp_path, shared))
    before, processes = what_is_there(tmp_path), children()
    got = outcome(arguments)
    assert got.code == 2
    assert got.out == ""
    assert got.lines and all(line.startswith("rl: error: ") for line in got.lines)
    text = "\n".join(got.lines)
    assert "Traceback" not in text
    for words in row.words:
        assert words in text
    assert len(got.lines) == row.problems, text
    assert children() <= processes
    assert what_is_there(tmp_path) == before


def test_the_rows_differ():
    names = [(section, row.name) for section, rows in TABLE.items() for row in rows]
    assert len(set(names)) == len(names) >= 200


def _print(sections: Sequence[str]) -> None:
    """Every row: its arguments, and what it gets."""
    count = 0
    with tempfile.TemporaryDirectory() as directory, without_network_or_new_files():
        shared = make_shared(Path(directory))
        for section, row in [(name, row) for name in sections for row in TABLE[name]]:
            count += 1
            here = Path(directory) / str(count)
            here.mkdir()
            os.chdir(here)
            arguments = build(row, Place(here, shared))
            start = time.monotonic()
            got = outcome(arguments)
            took = time.monotonic() - start
            said = shlex.join(a if len(a) < 120 else f"{a[:40]}..." for a in arguments)
            print(f"[{section}: {row.name}] rl {said}".replace(str(here), "HERE").replace("\0", "\\0"))
            for line in got.lines:
                print(f"    {line.replace(str(here), 'HERE')}")
            if took > 1:
                print(f"  ! {took:.1f} s")
            missing = [words for words in row.words if words not in "\n".join(got.lines)]
            if got.code != 2 or got.out or missing or len(got.lines) != row.problems:
                print(f"  ! exit code {got.code}, {len(got.lines)} lines, without {missing}")
        os.chdir("/")
    print(f"{count} rows")


if __name__ == "__main__":
    _print(sys.argv[1:] or list(TABLE))
