"""tinker-cookbook's own recipes, unmodified and offline, against `rl serve`: `make cookbook`.

The server answers under several models' names, because some recipes write their own model's name. Each name is a
directory in the working directory, where the recipes' tokenizers look, and so are their datasets, of a few made-up
rows. Every command is printed with its input, so that it can be run by hand.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.integration.runs import ROOT, start

MODEL = "Qwen/Qwen3-4B-Instruct-2507"  # a name whose renderer the cookbook knows: ChatML
TEACHER = "Qwen/Qwen3.6-35B-A3B"  # written in prompt_distillation.create_data
CONTEXT_LENGTH = 4096  # prompt_distillation.create_data and rubric ask for 1,000 and 2,048 tokens
_MODEL = f"model_name={MODEL} lora_rank=8"
_CONFIG = f"model_name={MODEL} renderer_name=qwen3_instruct behavior_if_log_dir_exists=resume"
_RL = f"math_rl.train {_CONFIG} env=arithmetic groups_per_batch=4 group_size=4 max_tokens=8 lora_rank=8"
_RL += " eval_every=0 save_every=0 max_steps=2"
_CHAT = f"chat_sl.train {_CONFIG} dataset=no_robots batch_size=8 max_length=64 lora_rank=8 eval_every=0"
_STREAM = "stream_minibatch_config.groups_per_batch=4 stream_minibatch_config.num_minibatches=2"
_DPO = f"preference.dpo.train {_CONFIG} dataset=hhh batch_size=4 max_length=64 max_steps=2"
_LOOP = f"rl_loop {_MODEL} batch_size=4 group_size=4 max_tokens=32 max_steps=2"
_MULTI = f"{_CONFIG} group_size=2 batch_size=2 max_tokens=8 eval_every=0 max_steps=2"
_BASIC = f"model_name={MODEL} lora_rank=8 max_steps=2 eval_every=0"
_GSM8K = f"{_BASIC} max_tokens=8 dataset_builder=tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder"
_GSM8K += " dataset_builder.batch_size=4 dataset_builder.group_size=4"
_GSM8K += f" dataset_builder.renderer_name=qwen3_instruct dataset_builder.model_name_for_tokenizer={MODEL}"
_ROBOTS = f"{_BASIC} dataset_builder=tinker_cookbook.recipes.chat_sl.chat_datasets:NoRobotsBuilder"
_COMMON = f"model_name_for_tokenizer={MODEL} renderer_name=qwen3_instruct batch_size=8 max_length=64"
_ROBOTS += "".join(f" dataset_builder.common_config.{setting}" for setting in _COMMON.split())
_DISTILL = (
    f"prompt_distillation.train {_CONFIG} file_path=distilled.jsonl lora_rank=8 batch_size=4 max_length=64"
)
_RLHF = f"preference.rlhf.rlhf_pipeline base_model={MODEL} short_name=smollm2 lora_rank=8 batch_size=4"
_RLHF += " max_length=64 rl_max_tokens=8 rl_group_size=2 eval_every=0 save_every=0 max_steps=2"
_RUBRIC = f"rubric.train {_CONFIG} grader_llm_name={MODEL} grader_renderer_name=qwen3_instruct lora_rank=8"
_RUBRIC += " train_jsonl_path=rubric.jsonl test_jsonl_path=rubric.jsonl groups_per_batch=1 train_group_size=2"
_RUBRIC += " max_tokens=8 loss_fn=importance_sampling eval_every=0 save_every=0 max_steps=2"
_TALK = f"base_model={MODEL} max_tokens=16"
KILLED = "chat_sl, killed after its first checkpoint"
RUNS = {  # name -> what follows `python -m tinker_cookbook.`
    "sl_loop": f"recipes.sl_loop {_MODEL} batch_size=8 max_length=128 max_steps=3 save_every=2",
    "rl_loop": f"recipes.{_LOOP} loss_fn=importance_sampling",
    "rl_loop, gspo": f"recipes.{_LOOP} loss_fn=gspo",
    "math_rl": f"recipes.{_RL} loss_fn=importance_sampling",
    "math_rl, ppo": f"recipes.{_RL} loss_fn=ppo",
    "math_rl, cispo, off-policy": f"recipes.{_RL} loss_fn=cispo max_steps_off_policy=1",
    "math_rl, streamed minibatches": f"recipes.{_RL} loss_fn=importance_sampling {_STREAM}",
    "chat_sl": f"recipes.{_CHAT} max_steps=3",
    KILLED: f"recipes.{_CHAT} max_steps=6 save_every=2",
    "chat_sl, resumed": f"recipes.{_CHAT} max_steps=6 save_every=2",
    "sl_basic": f"recipes.sl_basic {_ROBOTS}",
    "rl_basic": f"recipes.rl_basic {_GSM8K}",
    "guess_number": f"recipes.multiplayer_rl.guess_number.train {_MULTI}",
    "shorter": f"recipes.preference.shorter.train {_MULTI}",
    "prompt_distillation, data": "recipes.prompt_distillation.create_data output_file=sampled.jsonl",
    "prompt_distillation": f"recipes.{_DISTILL} eval_every=0 max_steps=2",
    "rubric": f"recipes.{_RUBRIC}",
    "rlhf_pipeline": f"recipes.{_RLHF}",
    "chat": f"chat_app.tinker_chat_cli {_TALK}",
    "dpo": f"recipes.{_DPO}",
}
WITHOUT_LOG_PATH = ("prompt_distillation, data", "rlhf_pipeline", "chat")  # they have no such setting
INPUTS = {"chat": "What is 2+2?\nn\nName a colour.\nquit\n"}  # name -> what is typed
PRINTED = {  # name -> what a good run prints besides: these end with 0 after an error
    "chat": r"(?s)Assistant: (?!Error).+Assistant: (?!Error).+Goodbye",
}
LONGEST = 900


def chat(*turns: str) -> list[dict]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turns, strict=True)]


def preference(i: int) -> dict:
    asked = f"\n\nHuman: Count to {i}.\n\nAssistant:"
    return {"chosen": f"{asked} Sure, here it is.", "rejected": f"{asked} No."}


DATASETS = {  # name -> configuration, rows for training, rows for a test
    "openai/gsm8k": ("main", lambda i: {"question": f"What is {i}+1?", "answer": f"#### {i + 1}"}, 64, 16),
    "HuggingFaceH4/no_robots": ("default", lambda i: {"messages": chat(f"Say {i}", f"{i}!")}, 64, 16),
    "Anthropic/hh-rlhf": ("default", preference, 64, 1100),
}


def rubric(i: int) -> dict:
    graded = "Please output your score between 0 and 1 wrapped in <score> ... </score>"
    item = {"rubric_str": f"Is the answer {i + 1}?", "extraction_regex": "<score>(.*?)</score>"}
    item["grader_output_format_instruction"] = graded
    return {"convo": [{"role": "user", "content": f"What is {i}+1?"}], "rubric_items": [item]}


FILES = {  # name -> lines
    "rubric.jsonl": [json.dumps(rubric(i)) for i in range(8)],
    "distilled.jsonl": [json.dumps({"messages": chat(f"Guten Tag {i}", "de")}) for i in range(16)],
    "tinker_cookbook/example_data/multilingual.txt": ["Guten Morgen."],
}


def prepare(directory: Path, model_dir: Path) -> None:
    """The working directory of the recipes."""
    for name, (config, make, *counts) in DATASETS.items():
        there = directory / name
        there.mkdir(parents=True)
        described = [f"configs:\n- config_name: {config}\n  data_files:"]
        for split, count in zip(("train", "test"), counts, strict=True):
            rows = (json.dumps(make(i)) + "\n" for i in range(count))
            (there / f"{split}.jsonl").write_text("".join(rows))
            described.append(f"  - split: {split}\n    path: {split}.jsonl")
        text = "\n".join(described)
        (there / "README.md").write_text(f"---\n{text}\n---\n")
    for name, lines in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("\n".join(lines) + "\n")
    for name in (MODEL, TEACHER):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).symlink_to(model_dir.resolve())


@contextlib.contextmanager
def serving(model_dir: Path, directory: Path):
    """(URL, key) of `rl serve` with this model."""
    log = directory / "server.txt"
    flags = ("--port", "0", "--context_length", CONTEXT_LENGTH, "--directory", directory / "server")
    flags += ("--names", MODEL, TEACHER)
    process = start("serve", model_dir, *flags, stdout=log.open("w"), stderr=subprocess.STDOUT)
    try:
        while not (found := re.search(r"at (http://\S+);", log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        yield found[1], (directory / "server" / "api_keys").read_text().strip()
    finally:
        process.terminate()
        process.wait(60)


def run(name: str, directory: Path, url: str, key: str) -> tuple[bool, str]:
    """Whether it ran to its end, and what it printed."""
    log = (
        "chat_sl-killed"
        if name in (KILLED, "chat_sl, resumed")
        else name.replace(", ", "-").replace(" ", "-")
    )
    module, *settings = shlex.split(RUNS[name])
    env = os.environ | {
        "TINKER_API_KEY": key,
        "TINKER_BASE_URL": url,
        "TINKER_TELEMETRY": "0",
        "TINKER_COOKBOOK_RUNS_DIR": str(directory / "logs"),
        "HF_HOME": str(directory / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-m", f"tinker_cookbook.{module}", *settings]
    if name not in WITHOUT_LOG_PATH:
        command.append(f"log_path={directory / 'logs' / log}")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "stdin": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=directory, env=env, **pipes)
    if name == KILLED:
        while not list((directory / "logs" / log).glob("checkpoints.jsonl")) and process.poll() is None:
            time.sleep(0.05)
        process.kill()
        return process.wait() < 0, process.stdout.read()
    output, _ = process.communicate(INPUTS.get(name, ""), timeout=LONGEST)
    if name in PRINTED and not re.search(PRINTED[name], output):
        return False, output
    went_on = "Resumed training from" in output and "already complete" not in output
    return process.returncode == 0 and (went_on or "resumed" not in name), output


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m-instruct")
    parser.add_argument("--only", default="", help="run those whose names match this pattern")
    options = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory(prefix="rl-cookbook-") as root:
        directory = Path(root)
        prepare(directory, options.model)
        with serving(options.model, directory) as (url, key):
            for name in (name for name in RUNS if re.search(options.only, name)):
                typed = f"printf {INPUTS[name]!r} | " if name in INPUTS else ""
                print(f"{typed}python -m tinker_cookbook.{RUNS[name]}", flush=True)
                began = time.monotonic()
                good, output = run(name, directory, url, key)
                seconds = time.monotonic() - began
                print(f"  {name}: {'done' if good else 'FAILED'} in {seconds:.0f} s", flush=True)
                for kl in re.findall(r"optim/kl_sample_train_v1\s+│\s+(\S+)", output):
                    print(f"    optim/kl_sample_train_v1 {kl}")
                if not good:
                    print(output[-3000:])
                    failed.append(name)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
