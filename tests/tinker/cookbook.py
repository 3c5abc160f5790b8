"""tinker-cookbook's own recipes, unmodified and offline, against `rl serve`: `make cookbook`.

Their models' names are directories beside each other in the working directory, where the recipes' tokenizers look, and
so are their datasets, of a few made-up rows. What runs is printed, so that it can be run by hand.
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
_MODEL = f"model_name={MODEL} lora_rank=8"
_CONFIG = f"model_name={MODEL} renderer_name=qwen3_instruct behavior_if_log_dir_exists=resume"
_RL = f"math_rl.train {_CONFIG} env=arithmetic groups_per_batch=4 group_size=4 max_tokens=8 lora_rank=8"
_RL += " eval_every=0 save_every=0 max_steps=2"
_CHAT = f"chat_sl.train {_CONFIG} dataset=no_robots batch_size=8 max_length=64 lora_rank=8 eval_every=0"
_STREAM = "stream_minibatch_config.groups_per_batch=4 stream_minibatch_config.num_minibatches=2"
_DPO = f"preference.dpo.train {_CONFIG} dataset=hhh batch_size=4 max_length=64 max_steps=2"
_LOOP = f"rl_loop {_MODEL} batch_size=4 group_size=4 max_tokens=32 max_steps=2"
KILLED = "chat_sl, killed after its first checkpoint"
RUNS = {  # name -> what follows `python -m tinker_cookbook.recipes.`
    "sl_loop": f"sl_loop {_MODEL} batch_size=8 max_length=128 max_steps=3 save_every=2",
    "rl_loop": f"{_LOOP} loss_fn=importance_sampling",
    "rl_loop, gspo": f"{_LOOP} loss_fn=gspo",
    "math_rl": f"{_RL} loss_fn=importance_sampling",
    "math_rl, ppo": f"{_RL} loss_fn=ppo",
    "math_rl, cispo, off-policy": f"{_RL} loss_fn=cispo max_steps_off_policy=1",
    "math_rl, streamed minibatches": f"{_RL} loss_fn=importance_sampling {_STREAM}",
    "chat_sl": f"{_CHAT} max_steps=3",
    KILLED: f"{_CHAT} max_steps=8 save_every=2",
    "chat_sl, resumed": f"{_CHAT} max_steps=8 save_every=2",
    "dpo": _DPO,
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
    (directory / MODEL).parent.mkdir(parents=True)
    (directory / MODEL).symlink_to(model_dir.resolve())


@contextlib.contextmanager
def serving(model_dir: Path, directory: Path):
    """(URL, key) of `rl serve` with this model."""
    log = directory / "server.txt"
    flags = ("--port", "0", "--context_length", "512", "--directory", directory / "server", "--names", MODEL)
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
        "HF_HOME": str(directory / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{module}", *settings]
    command += [f"log_path={directory / 'logs' / log}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=directory, env=env, **pipes)
    if name == KILLED:
        while not list((directory / "logs" / log).glob("checkpoints.jsonl")) and process.poll() is None:
            time.sleep(0.05)
        process.kill()
        return process.wait() < 0, process.stdout.read()
    output, _ = process.communicate(timeout=LONGEST)
    went_on = "Resumed training from" in output and "already complete" not in output
    return process.returncode == 0 and (went_on or "resumed" not in name), output


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m-instruct")
    parser.add_argument("--only", default="", help="run what has this in its name")
    options = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory(prefix="rl-cookbook-") as root:
        directory = Path(root)
        prepare(directory, options.model)
        with serving(options.model, directory) as (url, key):
            for name in (name for name in RUNS if options.only in name):
                print(f"python -m tinker_cookbook.recipes.{RUNS[name]}", flush=True)
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
