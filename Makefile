# Everything runs in one virtual environment, .venv, made on first use and again when pyproject.toml or
# constraints.txt change. Other settings: make demo PYTHON=python3.12 VENV=/tmp/venv CONSTRAINTS=
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
export PYTHON VENV CONSTRAINTS

.DEFAULT_GOAL := help
.PHONY: help demo test fuzz sweep lab report check kernels kernels-check gpu env env-check clean

help:  ## these lines
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 24

$(VENV)/.installed-%: pyproject.toml constraints.txt
	@tools/venv.sh $*
	@touch $@

demo: $(VENV)/.installed-report  ## run the tour on the small model, write reports/00_tour.html (needs no GPU)
	@$(BIN)/python tools/reports.py notebooks/00_tour.ipynb

report: $(VENV)/.installed-report  ## run every notebook, write reports/*.html
	@$(BIN)/python tools/reports.py

lab: $(VENV)/.installed-report  ## open JupyterLab on the tour
	@$(BIN)/jupyter lab notebooks/00_tour.ipynb

test: $(VENV)/.installed-dev  ## every quick test that needs no GPU; make test ARGS="-k name" for some
	@$(BIN)/python tools/run_tests.py $(ARGS)

fuzz: $(VENV)/.installed-dev  ## damage model files 20,000 times and open them; make fuzz ARGS="--seed 7 --first 541 --cases 1"
	@$(BIN)/python -m tests.support.file_fuzz --cases 20000 $(ARGS)

sweep: $(VENV)/.installed-dev  ## decode arms at every pair of widths, 100 repeats in the interpreter (minutes; make test takes some)
	@MOE_LAB_SWEEP=1 $(BIN)/python -m pytest -q tests/unit/test_decode_arms.py $(ARGS)
	@MOE_LAB_SWEEP=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -q tests/kernels/test_decode_repeats.py $(ARGS)

check: $(VENV)/.installed-dev  ## lint, format, types, generated files
	@$(BIN)/ruff check . || { echo "ruff found the above; '$(BIN)/ruff check --fix .' mends some."; exit 1; }
	@$(BIN)/ruff format --check . || { echo "Run: $(BIN)/ruff format ."; exit 1; }
	@$(BIN)/pyright --pythonpath $(BIN)/python || { echo "pyright found the above."; exit 1; }
	@$(BIN)/python tools/sync_env.py --check
	@$(BIN)/python tools/strip_notebooks.py --check

kernels: $(VENV)/.installed-dev  ## compile every kernel variant for sm_90, write benchmarks/results/sm_90/kernels.csv
	@$(BIN)/python -m tools.variants $(ARGS)

kernels-check: $(VENV)/.installed-dev  ## the same variants as in that table, no spills, a sample compiled again
	@$(BIN)/python -m tools.variants --check $(ARGS)

gpu: $(if $(GPU_PYTHON),,$(VENV)/.installed-dev)  ## the GPU tests; make gpu GPU_PYTHON=python3 uses a Python you have
	@$(or $(GPU_PYTHON),$(BIN)/python) -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || \
	  { echo "No CUDA device is visible to $(or $(GPU_PYTHON),$(BIN)/python): run this on a machine with one (see nvidia-smi)."; exit 1; }
	@$(or $(GPU_PYTHON),$(BIN)/python) -m pytest -q -rfEs tests/gpu $(ARGS)

env: $(VENV)/.installed-report  ## write environment.yml from pyproject.toml
	@$(BIN)/python tools/sync_env.py

env-check:  ## install environment.yml's pip section into an empty venv (minutes, 3 GB)
	@$(PYTHON) tools/env_check.py

clean:  ## remove reports and caches, keep the environment
	@rm -rf reports build dist .pytest_cache .ruff_cache .hypothesis
