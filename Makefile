# Needs Python >= 3.11, make and git; each target makes the environment that it needs.
#
# PYTHON=python3.13   the interpreter for a new environment (default: the newest that is found)
# VENV=.venv-3.13     where that environment lies
# ACCEL=cuda | tpu    run on an accelerator, in an environment of its own
# ARGS="..."          more arguments for the command that is run

PYTHON ?=
ACCEL ?=
ARGS ?=
.DEFAULT_GOAL := help
.PHONY: help test test-quick test-lowest test-all-jax compare study scoreboard kit bench gpu gpu-static tpu tpu-static \
  drawn notebook lint format docs docs-look links dist clean
.DELETE_ON_ERROR:

ifeq ($(ACCEL),)
  VENV ?= .venv
  PLATFORM := JAX_PLATFORMS=cpu
  EXTRA :=
else ifeq ($(ACCEL),cuda)
  VENV ?= .venv-cuda
  PLATFORM :=
  # CUDA 13 needs driver 580 or later.
  DRIVER := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null \
              | head -n 1 | cut -d . -f 1 | grep -x '[0-9][0-9]*')
  EXTRA := ,corpora,$(shell test "$(or $(DRIVER),0)" -ge 580 && echo cuda13 || echo cuda12)
else ifeq ($(ACCEL),tpu)
  VENV ?= .venv-tpu
  PLATFORM :=
  EXTRA := ,tpu
else
  $(error ACCEL=$(ACCEL) is not known: use ACCEL=cuda, ACCEL=tpu, or leave it out for the CPU)
endif

# An environment keeps the Python it was made with.
ifneq ($(PYTHON),)
  version = $(shell "$(1)" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
  ifneq ($(wildcard $(VENV)/bin/python),)
    ifneq ($(call version,$(PYTHON)),$(call version,$(VENV)/bin/python))
      $(error $(VENV) has Python $(call version,$(VENV)/bin/python), another than PYTHON=$(PYTHON): add VENV=.venv-other for a second environment)
    endif
  endif
endif

RUN := $(PLATFORM) $(VENV)/bin/python

help: ## List the targets and settings
	@echo "Targets:"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "Settings:"
	@sed -n 's/^# \([A-Z][A-Z]*=\)/  \1/p' $(firstword $(MAKEFILE_LIST))

# Compilation takes most of the time, on one core per process. Workers take tests from each other
# (worksteal), since a few files hold most of the work. A debugger needs a single process.
IN_ONE_PROCESS := $(filter --pdb --trace --pdbcls% no:xdist -pno:xdist,$(ARGS))
WORKERS := $(if $(IN_ONE_PROCESS),,-n auto --maxprocesses 4 --dist worksteal)

test: $(VENV)/.installed-test ## Run the tests (ARGS: any arguments of pytest, "-k rope -x" for one)
	$(RUN) -m pytest $(WORKERS) $(ARGS)

# Warnings are those of the oldest packages, about each other.
test-lowest: ## Run the tests with the oldest versions that pyproject.toml allows
	@$(MAKE) --no-print-directory VENV=.venv-lowest PYTHON="$(or $(PYTHON),$(call find,3.11))" \
	  ARGS='-W ignore::DeprecationWarning $(ARGS)' LOWEST=1 test

# The newest release of each line.
test-all-jax: test-jax-0.10 test-jax-0.11 test-jax-0.12 ## Run the tests on each release of JAX, in up to an hour

test-jax-%:
	@$(MAKE) --no-print-directory VENV=.venv-jax-$* JAX=$* \
	  PYTHON="$(or $(PYTHON),$(if $(filter 0.10,$*),$(call find,3.11),$(call find,3.12 3.13)))" test

test-quick: $(VENV)/.installed-test ## Run one scheme of each kind and a training step: under a minute
	$(RUN) -m pytest $(WORKERS) $(ARGS) @tests/quick.txt

# A value may hold spaces: each is quoted for the shell.
quote = '$(subst ','\'',$(1))'
option = $(if $(value $(1)),--$(2) $(call quote,$($(1))))

compare: $(VENV)/.installed-experiments ## Train and compare (QUICK=1 SCHEMES=rope,alibi SEEDS=3 NAME=mine)
	$(strip $(RUN) -m experiments compare configs/compare.toml $(if $(filter-out 0,$(QUICK)),--quick) \
	  $(call option,SCHEMES,schemes) $(call option,SEEDS,seeds) $(call option,NAME,name) $(ARGS))

study: $(VENV)/.installed-experiments ## Compare at learning rates chosen for each scheme, in hours (ARGS="--minutes 30")
	$(RUN) -m experiments study --run $(ARGS)

scoreboard: $(VENV)/.installed-experiments ## Test claims of the literature, write RESULTS.md (ARGS="R08 --seeds 1")
	$(RUN) -m experiments scoreboard --run $(ARGS)

kit: $(VENV)/.installed-experiments ## Collect wheels for a GPU without network: build/kit (ARGS="--python 3.12")
	$(VENV)/bin/python -m experiments.commands.kit $(ARGS)

bench: $(VENV)/.installed-experiments ## Measure speed as ratios (ARGS="step" for a training step)
	$(RUN) -m experiments bench $(or $(ARGS),rope)

# A Python that has JAX for the device needs no environment and no network.
on_device = @if "$(or $(PYTHON),python3)" -c 'import sys; from importlib.util import find_spec as has; \
  sys.exit(not (has("jax") and any(map(has, sys.argv[1:]))))' $(2) 2>/dev/null; then \
  "$(or $(PYTHON),python3)" -m experiments.bench.accelerator --on $@ --out results/$@-new $(ARGS); \
  else $(MAKE) --no-print-directory ACCEL=$(1) accelerator-$@; fi

gpu: ## Check and time attention on an NVIDIA GPU, within 9 minutes (ARGS="--out FOLDER")
	$(call on_device,cuda,jax_cuda13_plugin jax_cuda12_plugin)

# The interpreter and the compiler for GPU kernels came with jax 0.11.2, which needs Python 3.12.
gpu-static: ## Compile the GPU kernels without a GPU, compare spills and memory (ARGS=--help)
	@$(MAKE) --no-print-directory VENV=.venv-static compile-gpu-kernels

compile-gpu-kernels: $(VENV)/.installed-test
	@v=$$($(VENV)/bin/python -c "import jax; print(jax.__version__)"); \
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check \
	  "jax-cuda13-plugin==$$v" "jax-cuda13-pjrt==$$v"
	$(RUN) tests/engine/make_gpu_static.py $(ARGS)

tpu: ## Check and time attention on a TPU, within 9 minutes (ARGS="--out FOLDER")
	$(call on_device,tpu,libtpu)

accelerator-%: $(VENV)/.installed-experiments
	$(RUN) -m experiments.bench.accelerator --on $* --out results/$*-new $(ARGS)

tpu-static: ## Compile the TPU kernels without a TPU, compare their cycles (ARGS=--help)
	@$(MAKE) --no-print-directory ACCEL=tpu .venv-tpu/.installed-test
	.venv-tpu/bin/python tests/engine/make_tpu_static.py $(ARGS)

drawn: $(VENV)/.installed-experiments ## Draw docs/drawn/*.svg, docs/explorer.html and docs/strip.png
	$(RUN) -m experiments drawn
	$(RUN) -m experiments explorer
	$(RUN) -m experiments gallery --strip docs/strip.png

notebook: $(VENV)/.installed-notebook ## Run docs/drawn.md as a notebook, write docs/drawn.ipynb
	$(RUN) -m experiments drawn --notebook docs/drawn.ipynb

lint: $(VENV)/.installed-lint ## Check style, formatting, types, workflows and forms
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ty check --python $(VENV)
	$(VENV)/bin/zizmor --offline --no-progress .github
	$(call check_schema,github-workflows) .github/workflows/*.yml
	$(call check_schema,dependabot) .github/dependabot.yml
	$(call check_schema,github-issue-config) .github/ISSUE_TEMPLATE/config.yml
	$(call check_schema,github-issue-forms) $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(call check_schema,citation-file-format) --force-filetype yaml CITATION.cff

check_schema = $(VENV)/bin/check-jsonschema --builtin-schema vendor.$(1)

format: $(VENV)/.installed-lint ## Format the code, mend what can be mended
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

dist: $(VENV)/.installed-dist ## Build sdist and wheel, try the wheel in a clean environment
	rm -rf dist build/dist
	$(VENV)/bin/python -m build --outdir dist
	$(VENV)/bin/twine check --strict dist/*
	$(VENV)/bin/python -m venv build/dist
	build/dist/bin/python -m pip install -q --disable-pip-version-check "$$(echo dist/*.whl)[flax]"
	$(VENV)/bin/python tests/make_dist_check.py dist/*.whl build/dist/bin/python

SPHINX := -m sphinx -E -W --keep-going -n -q -d build/doctrees -b html docs build/site

docs: $(VENV)/.installed-docs ## Build the site, without the network: build/site/index.html
	$(RUN) $(SPHINX) $(ARGS)
	@echo "build/site/index.html"

# Debian: apt-get install chromium.
docs-look: $(VENV)/.installed-docs ## Look at the site in Chromium, after make docs (ARGS="index study")
	$(RUN) docs/look.py $(ARGS)

links: $(VENV)/.installed-docs ## Request every address that the documentation names
	$(RUN) -m sphinx -q -b linkcheck docs build/links

clean: ## Remove environments and caches, never results
	rm -rf .venv .venv-cuda .venv-lowest .venv-jax-* .venv-static .venv-tpu build dist docs/reference .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What a target needs is installed once, and again when pyproject.toml changes. The stamp is written
# last, so that what failed is tried again; the group lint holds test.
$(VENV)/.installed-experiments: pyproject.toml
	$(call install)
	@touch $@

$(VENV)/.installed-%: pyproject.toml
	$(call install,--group $*)
	@touch $@ $(VENV)/.installed-experiments $(if $(filter lint,$*),$(VENV)/.installed-test)

# Pythons that are new enough and can make environments (Debian splits that off), newest first.
# pyenv has more than those on the path.
find = $(shell for v in $(1); do \
  for p in "python$$v" "$$(pyenv prefix $$v 2>/dev/null)/bin/python"; do \
    if "$$p" -c "import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))" \
      >/dev/null 2>&1; then echo "$$p"; exit; fi; done; done)
NEWEST = $(call find,3.14 3.13 3.12 3.11 3)

# pip takes the newest versions, uv can take the oldest. Groups came with pip 25.1.
define install
@set -eu; \
if ! "$(VENV)/bin/python" -c "" 2>/dev/null; then \
  python=$(call quote,$(or $(PYTHON),$(NEWEST))); \
  if ! "$$python" -c "import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))" \
    >/dev/null 2>&1; then \
    echo "No Python >= 3.11 with venv was found$(if $(PYTHON), as PYTHON=$(PYTHON));\
 name one with PYTHON=/path/to/python3." >&2; exit 2; fi; \
  echo "Making $(VENV) with $$python ..."; \
  "$$python" -m venv --clear "$(VENV)"; \
fi; \
"$(VENV)/bin/python" -m pip --version >/dev/null 2>&1 || "$(VENV)/bin/python" -m ensurepip -q; \
echo "Installing posenc_jax[experiments$(EXTRA)] $(1) into $(VENV) (minutes the first time) ..."; \
pip() { "$(VENV)/bin/python" -m pip install -q --disable-pip-version-check "$$@"; }; \
pip $(if $(LOWEST),uv,"pip>=25.1"); \
$(if $(LOWEST),"$(VENV)/bin/python" -m uv pip install -q --python "$(VENV)/bin/python" \
  --resolution lowest-direct,pip) -e ".[experiments$(EXTRA)]" $(1) $(if $(JAX),"jax==$(JAX).*")
endef
