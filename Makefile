# Everything sets itself up: `make demo` and `make test` work on a fresh clone.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# Also on two cores: tests wait half of the time, for processes, disks and deadlines.
JOBS ?= 3
PART ?= quick
READY := $(VENV)/.ready

.PHONY: demo test torture same-states test-long test-gpu test-corners test-s3 bench first-contact bench-gpu bench-gpu-peers bench-ranks bench-faults bench-storage bench-codecs bench-offline bench-scale bench-chaos bench-ledger bench-callbacks bench-deepspeed bench-torchtitan bench-ray bench-megatron bench-waits lint docs wheel release-check format clean

$(READY): pyproject.toml constraints.txt hatch_build.py $(wildcard ckpt/core/format/*.c)
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch and what the tests need into $(VENV)"
	$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=40 $(if $(PKG),tests/$(PKG) --part all,--part $(PART)) $(ARGS)

test-long: $(READY)
	$(BIN)/python -m pytest -m long --timeout 7200

torture: $(READY)
	$(BIN)/python benchmarks/torture.py $(ARGS)

same-states: $(READY)
	$(BIN)/python benchmarks/same_states.py $(ARGS)

bench: $(READY)
	$(BIN)/python benchmarks/figures.py $(ARGS)

first-contact: $(READY)
	$(BIN)/python benchmarks/first_contact.py --json first-contact.jsonl $(ARGS)

bench-gpu: $(READY)
	$(BIN)/python benchmarks/gpu.py $(ARGS)

bench-gpu-peers: $(READY)
	$(BIN)/python benchmarks/gpu_peers.py $(ARGS)

bench-ranks: $(READY)
	$(BIN)/python benchmarks/ranks.py

bench-faults: $(READY)
	$(BIN)/python benchmarks/faults.py

bench-storage: $(READY)
	sh tests/servers/install.sh $(BIN)
	$(BIN)/python benchmarks/storage.py

bench-offline: $(READY)
	$(BIN)/python benchmarks/offline.py $(ARGS)

bench-codecs: $(READY)
	-$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt zipnn blosc2
	$(BIN)/python benchmarks/codecs.py $(ARGS)

bench-scale: $(READY)
	$(BIN)/python benchmarks/scale.py $(ARGS)

bench-chaos: $(READY)
	$(BIN)/python benchmarks/chaos.py $(ARGS)

bench-ledger: $(READY)
	$(BIN)/python benchmarks/ledger.py $(ARGS)

bench-callbacks: $(READY)
	$(BIN)/python benchmarks/callbacks.py $(ARGS)
	$(BIN)/python benchmarks/callbacks_hf.py $(ARGS)

bench-deepspeed: $(READY)
	$(BIN)/python benchmarks/deepspeed_saves.py $(ARGS)

bench-torchtitan: $(READY)
	$(BIN)/python benchmarks/torchtitan_saves.py $(ARGS)

bench-ray: $(READY)
	$(BIN)/python benchmarks/ray_saves.py $(ARGS)

bench-megatron: $(READY)
	$(BIN)/python benchmarks/megatron_saves.py $(ARGS)

bench-waits: $(READY)
	$(BIN)/python benchmarks/waits.py $(ARGS)

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

test-corners: $(READY)
	$(BIN)/python -m pytest tests/test_corners.py --any-build --timeout 3600 $(ARGS)

test-s3: $(READY)
	sh tests/servers/install.sh $(BIN)
	$(BIN)/python -m pytest -m s3 $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=backends $(BIN)/lint-imports

$(VENV)/.docs: $(READY)
	$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir dist/site

wheel: $(READY)
	$(BIN)/pip wheel -q --disable-pip-version-check --no-deps -w dist .

release-check: $(READY)
	$(BIN)/python benchmarks/release_check.py $(ARGS)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
