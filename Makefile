# Every target sets itself up. Needed: Linux, Python 3.11 to 3.14, Rust, a C compiler, make.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

# Seconds for each fuzz target.
FUZZ_SECONDS ?= 60
# Arguments of every fuzz target: seconds for one input, words for mutations. The targets assert memory
# in proportion to an input; libFuzzer bounds the process and, under sanitizers, one allocation, in MiB.
FUZZ_ARGS := -timeout=10 -dict=fuzz/format.dict
# How often `make torture` cuts the power of each file system, kills a saver, flips a bit, changes a
# state under a lazy save and damages a checkpoint before salvage. The seed is drawn and printed, so that
# a failure can be repeated.
TORTURE_CUTS ?= 500
TORTURE_KILLS ?= 1000
TORTURE_PYTHON_KILLS ?= 100
TORTURE_FLIPS ?= 10000
TORTURE_LAZY_SAVES ?= 1000
TORTURE_SALVAGES ?= 500
TORTURE_TRANSFERS ?= 10000
TORTURE_STEPS ?= 500
TORTURE_FAULTS ?= 1000
TORTURE_PYTHON_FAULTS ?= 200
TORTURE_MIRROR_KILLS ?= 500
TORTURE_DEVICE_SAVES ?= 10000
TORTURE_TESTS := --features objects --test device --test crash --test every_step --test power_cut --test kill --test care \
	--test objects_explorer --test mirror
TORTURE_SEED ?= $(shell date +%s)
# Frameworks whose trainings `make torture-frameworks` kills, and how often each.
FRAMEWORKS := LIGHTNING TRANSFORMERS ACCELERATE DEEPSPEED TITAN RAY JAX DCP
FRAMEWORK_KILLS ?= 100
RUST_PACKAGES := -p penstock-cuda -p penstock-cuda-fake -p penstock-io -p penstock-object -p penstock-object-server -p penstock-store \
	-p penstock-gather -p penstock-bench \
	--features penstock-store/objects
# Parallel test processes: each starts ranks of its own, some gigabytes. An idle process takes tests from
# the one with most left, in the order of the files, so that tests which share ranks and models stay
# together. One more than there are cores, as many tests wait for a disk or for other processes.
PYTEST_WORKERS := --numprocesses $(shell expr $$(nproc) + 1) --maxprocesses 4 --dist worksteal
# Further arguments for pytest, as in: make test-python PYTEST_ARGS='-k resume -x'
PYTEST_ARGS ?=
# Which benchmark runs, and its arguments: make bench SUITE=gather BENCH_ARGS='--help'
# (see python/penstock_bench/README.md). Suites offload, optimizer and stream need libaio-dev.
SUITE ?= save_load
BENCH_ARGS ?=
# Where the checks of `make reframe` write, and further arguments of ReFrame (see reframe/README.md)
REFRAME_DIRECTORY ?= .cache/reframe
REFRAME_ARGS ?=
# A checkout of DeepSpeed at the commit of docs/deepspeed.md, and the tests that are run from it.
DEEPSPEED_COMMIT := edaa7221267243c7be7fb49c5d5f5c4fb97b4641
DEEPSPEED_CHECKOUT ?= .cache/deepspeed-$(DEEPSPEED_COMMIT)
DEEPSPEED_TESTS ?= v1/nvme v1/pin_memory runtime/zero/test_nvme_checkpointing.py
DEEPSPEED_CHECKPOINT_TESTS ?= latest_checkpoint tag_validation other_optimizer moe_checkpoint \
	convert_checkpoint shared_weights pipeline lr_scheduler zero_optimizer
# Selects cells of the matrix of versions (see tests/compat/matrix.toml)
COMPAT_ARGS ?=
# Arguments of the release, as in: make release RELEASE_ARGS='--target x86_64-unknown-linux-gnu'
RELEASE_ARGS ?=
# From 1.8 on it creates objects on a condition in one step.
VERSITYGW_VERSION := v1.8.0
VERSITYGW := .cache/versitygw-$(VERSITYGW_VERSION)/versitygw
AZURITE_VERSION := 3.37.0
AZURITE_DIRECTORY := .cache/azurite-$(AZURITE_VERSION)
AZURITE := $(AZURITE_DIRECTORY)/node_modules/azurite/dist/src/blob/main.js
CARGO_FUZZ_VERSION := 0.13.2
CARGO_FUZZ := .cache/cargo-fuzz-$(CARGO_FUZZ_VERSION)

VENV := .venv
OBJECTS_VENV := .cache/objects-venv
KERNELS_VENV := .cache/kernels-venv
# Absolute, as maturin and uv find the environment by it. Settings of other environments must not leak in.
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
unexport CONDA_PREFIX PYTHONHOME PYTHONPATH
# Without compiled modules, every test process would compile PyTorch's modules anew.
unexport PYTHONDONTWRITEBYTECODE
# Lets maturin find uv, and the build scripts of pyo3 the right interpreter.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

# The native module that `maturin develop` puts into the package, and its sources.
NATIVE := python/penstock/_native.abi3.so
# Benchmarks measure the module that users install; the demo and the tests wait for a quicker build.
NATIVE_PROFILE := release
NATIVE_PROFILE_USED := target/.native-profile
bench bench-objects bench-frameworks gpu reframe: NATIVE_PROFILE := wheel
NATIVE_SOURCES := Cargo.toml Cargo.lock pyproject.toml \
	$(shell find crates python -path '*/tests' -prune -o \( -name '*.rs' -o -name Cargo.toml \) -print)

UV_INSTALL := $(VENV)/bin/uv pip install --quiet --require-hashes --python $(VENV)/bin/python
UV_COMPILE := $(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 \
	--constraint requirements/limits.in \
	--generate-hashes --no-emit-index-url --custom-compile-command 'make lock' \
	$(if $(UPGRADE),--upgrade)

.PHONY: help
help: ## Show this list.
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1|\2/p' $(MAKEFILE_LIST) | \
		while IFS='|' read -r target text; do printf '  make %-15s %s\n' "$$target" "$$text"; done

# ---- Targets for people

.PHONY: demo
demo: $(VENV)/.demo $(NATIVE) ## Train, kill a save in the middle, resume bit for bit (about a minute).
	$(VENV)/bin/penstock demo

.PHONY: test
test: test-rust test-python ## Run all tests but the slow ones: on two cores in about 17 minutes.

# The engines are tested again without io_uring, and so are basic promises of rows and of the store; their
# other promises do not depend on the engine. Runs of few tests name all packages too, so that features are
# the same and nothing is compiled again. Some faults of requests are tried in Google's protocol, the others
# in `make test-slow`.
.PHONY: test-rust
test-rust: test-toolchain | objects-server ## Run the Rust tests, with and without io_uring.
	cargo test --locked $(RUST_PACKAGES)
	PENSTOCK_TORTURE_STORE=google PENSTOCK_TORTURE_STRIDE=256 PENSTOCK_TORTURE_FAULTS=2 \
		cargo test --locked $(RUST_PACKAGES) --test objects_explorer -- no_fault
	cargo test --locked -p penstock-io -p penstock-bench --no-default-features
	cargo test --locked $(RUST_PACKAGES) --no-default-features --test gather
	cargo test --locked $(RUST_PACKAGES) --no-default-features --test load -- round_trip:: damage::

# The driver for tests, which needs no GPU.
.PHONY: cuda-fake
cuda-fake:
	cargo build --quiet --release --locked -p penstock-cuda-fake

# Tools that make the file systems on which stores are tested; only root mounts them.
.PHONY: places
places:
	@scripts/install-places

.PHONY: test-python
test-python: $(VENV)/.develop $(NATIVE) cuda-fake places ## Run the Python tests against a release build, but for the slow ones.
	$(VENV)/bin/python -m pytest -m 'not slow' $(PYTEST_WORKERS) $(PYTEST_ARGS)

# Trainings in frameworks that are killed and resumed, on one and several ranks, whole benchmarks, and pages
# of the documentation that do the same. `make test` has the quick tests of each framework. First come all
# faults of requests to a bucket, some of which are in `make test`.
.PHONY: test-slow
test-slow: test-toolchain $(VENV)/.develop $(NATIVE) cuda-fake ## Run the slow tests: frameworks, their ranks and kills, whole benchmarks, more faults.
	PENSTOCK_TORTURE_STRIDE=4 PENSTOCK_TORTURE_FAULTS=16 \
		cargo test --locked $(RUST_PACKAGES) --test objects_explorer -- no_fault
	PENSTOCK_TORTURE_STORE=google PENSTOCK_TORTURE_STRIDE=4 PENSTOCK_TORTURE_FAULTS=16 \
		cargo test --locked $(RUST_PACKAGES) --test objects_explorer --test mirror -- \
		--skip every_mutant
	$(VENV)/bin/python -m pytest -m slow $(PYTEST_WORKERS) $(PYTEST_ARGS)
	PENSTOCK_TORTURE_FAMILIES=300 $(VENV)/bin/python -m pytest $(PYTEST_WORKERS) \
		tests/python/checkpoint/state/test_hypothesis.py tests/python/checkpoint/state/test_state.py

# Servers of S3's and Azure's protocols for the tests of checkpoints in buckets. Those are skipped with the
# reason if there is no Go to build the first, or no npm to install the second.
.PHONY: objects-server
objects-server:
	@command -v npm >/dev/null || echo 'missing: npm; tests of az:// will be skipped' >&2
	@! command -v npm >/dev/null || test -e $(AZURITE) || { mkdir -p $(AZURITE_DIRECTORY) && \
		cp requirements/azurite/* $(AZURITE_DIRECTORY) && \
		npm ci --silent --ignore-scripts --no-audit --no-fund --prefix $(AZURITE_DIRECTORY); }
	@command -v go >/dev/null || echo 'missing: go; tests of buckets will be skipped' >&2
	@! command -v go >/dev/null || test -x $(VERSITYGW) || \
		GOBIN=$(CURDIR)/$(dir $(VERSITYGW)) go install github.com/versity/versitygw/cmd/versitygw@$(VERSITYGW_VERSION)

# The promises that changes break most often: round trips, damage, power cuts, retention, lazy saves and
# ranks. In Python they have the mark `quick`. The packages are those of `test-rust`, so that nothing is
# compiled for this alone.
.PHONY: quick
quick: toolchain $(VENV)/.develop $(NATIVE) ## Run the tests that fail most often, in a minute and a half.
	cargo test --locked $(RUST_PACKAGES) \
		--test load --test steps --test commit --test crash -- --skip mutant --skip large --skip after_a_death
	$(VENV)/bin/python -m pytest -m quick $(PYTEST_WORKERS) $(PYTEST_ARGS)

# DeepSpeed's tests are not in its package; the checkout is not changed. Tests that need a GPU are skipped.
# `sequential` ones, which DeepSpeed's settings leave out, are run too.
.PHONY: peers-deepspeed
peers-deepspeed: $(VENV)/.develop $(NATIVE) $(DEEPSPEED_CHECKOUT) ## Run DeepSpeed's tests of its I/O on ours; DEEPSPEED_CHECKOUT=PATH fetches nothing.
	cd $(DEEPSPEED_CHECKOUT)/tests && \
	DS_ACCELERATOR=cpu PYTHONDONTWRITEBYTECODE=1 TORCH_EXTENSIONS_DIR=$(CURDIR)/.cache/torch-extensions \
		penstock deepspeed -- python -m pytest -p no:cacheprovider --override-ini=addopts= \
		--quiet $(addprefix unit/,$(DEEPSPEED_TESTS)) $(PYTEST_ARGS)
	DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$(CURDIR)/.cache/torch-extensions \
		$(VENV)/bin/python -m pytest tests/python/integrations/peers_deepspeed.py

# Up to four processes for each test. PYTEST_ARGS=--theirs runs them with DeepSpeed's own engine.
.PHONY: peers-deepspeed-checkpoints
peers-deepspeed-checkpoints: $(VENV)/.develop $(NATIVE) $(DEEPSPEED_CHECKOUT) ## Run DeepSpeed's tests of its checkpoints with ours; DEEPSPEED_CHECKOUT=PATH fetches nothing.
	cd $(DEEPSPEED_CHECKOUT)/tests && \
	DS_ACCELERATOR=cpu PYTHONDONTWRITEBYTECODE=1 TORCH_EXTENSIONS_DIR=$(CURDIR)/.cache/torch-extensions \
	PYTHONPATH=$(CURDIR)/tests/python/integrations \
		python -m pytest -p peers_deepspeed_checkpoints -p no:cacheprovider --override-ini=addopts= \
		--quiet $(patsubst %,unit/checkpoint/test_%.py,$(DEEPSPEED_CHECKPOINT_TESTS)) $(PYTEST_ARGS)

# Each combination of versions of a framework, PyTorch, NumPy and Python runs in an environment of its own,
# which is removed afterwards. COMPAT_ARGS='--suite jax --version newest' runs one cell.
.PHONY: compat
compat: wheel ## Run the plug-ins with old and new versions of their frameworks; writes docs/compatibility.md.
	$(VENV)/bin/python -m tests.compat run --wheel dist/penstock-*.whl $(COMPAT_ARGS)

.PHONY: compat-new
compat-new: wheel ## Show which newer versions the registry has than were tried, and run those.
	$(VENV)/bin/python -m tests.compat new --wheel dist/penstock-*.whl $(COMPAT_ARGS)

# Suites that are also commands for users write a page; the others print where their results are.
BENCH_COMMANDS := checkpoint gather io stream

.PHONY: bench
bench: $(VENV)/.bench $(NATIVE) ## Compare with fio and other libraries: SUITE=save_load, training, ranks, offload, optimizer, exporting, updates, pyg, gather, stream, checkpoint, io.
	mkdir -p .cache/bench
	TORCH_EXTENSIONS_DIR=$(CURDIR)/.cache/torch-extensions DS_ACCELERATOR=cpu \
		$(if $(filter $(SUITE),$(BENCH_COMMANDS)),$(VENV)/bin/penstock bench $(SUITE) .cache/bench \
			--output .cache/bench/$(SUITE).json --report .cache/bench/$(SUITE).html, \
			$(VENV)/bin/python -m penstock_bench.suites.$(SUITE)) $(BENCH_ARGS)

# In an environment of its own: s3fs takes another boto3 than the peers of `make bench` have. Ours is
# copied as `maturin develop` has installed it, a path and metadata.
.PHONY: bench-objects
bench-objects: $(OBJECTS_VENV)/.objects $(NATIVE) objects-server ## Save to buckets and load from them: we, s3torchconnector, s3fs, Run:ai's streamer.
	cp -r $(VENV)/lib/python3*/site-packages/penstock* $(OBJECTS_VENV)/lib/python3*/site-packages/
	$(OBJECTS_VENV)/bin/python -m penstock_bench.suites.objects $(BENCH_ARGS)

# Repeats tests of `make test`, which has the driver for tests, with PyTorch and its kernels on a GPU. Tests
# that never passed come first; each result goes to tests/gpu/results.json at once.
.PHONY: test-gpu
test-gpu: $(VENV)/.gpu $(NATIVE) ## Run the tests that need a GPU: two minutes.
	$(VENV)/bin/python -m pytest tests/gpu $(PYTEST_ARGS)

# PyTorch is that of `make test`, with CUDA. On the driver for tests (PENSTOCK_CUDA_DRIVER) it shows that
# everything runs. A run goes on where the last one on such a GPU stopped.
.PHONY: gpu
gpu: $(VENV)/.gpu $(NATIVE) ## Measure the promises about GPUs on this machine: a table and JSON, 20 minutes.
	$(VENV)/bin/python -m penstock_bench.suites.gpu --resume docs/maintainers/gpus $(BENCH_ARGS)

.PHONY: bench-frameworks
bench-frameworks: $(VENV)/.develop $(NATIVE) ## Save with each framework, by its own means and by the plug-in: how long training waits.
	for name in lightning transformers accelerate deepspeed torchtitan ray jax dcp; do \
		$(VENV)/bin/python -m penstock_bench.suites.frameworks.$$name $(BENCH_ARGS) || exit; \
	done

# Serial: parallel checks would disturb each other's measurements.
.PHONY: reframe
reframe: $(VENV)/.reframe $(NATIVE) ## Run the ReFrame checks of storage: fio, checkpoints, metadata.
	mkdir -p $(REFRAME_DIRECTORY)
	$(VENV)/bin/reframe -C reframe/settings.py -c reframe/checks --prefix .cache/reframe \
		--exec-policy=serial -S directory=$(REFRAME_DIRECTORY) -r $(REFRAME_ARGS)

.PHONY: docs
docs: $(VENV)/.docs $(NATIVE) ## Build the documentation site into site/; a broken link or anchor is an error.
	$(VENV)/bin/python -m docs.site

.PHONY: charts
charts: $(VENV)/.develop ## Draw the charts of the documentation anew, from the tables in its pages.
	$(VENV)/bin/python -m docs.charts

.PHONY: check
check: check-rust check-python check-docs check-kernels ## Run formatters, linters and type checkers; change nothing.

.PHONY: check-rust
check-rust: lint-toolchain $(VENV)/.created
	cargo fmt --all --check
	cargo fmt --manifest-path fuzz/Cargo.toml --check
	$(VENV)/bin/python scripts/check_modules.py crates/*/src python/src
	cargo clippy --locked --workspace --all-targets --no-default-features -- -D warnings
	cargo clippy --locked --workspace --all-targets --all-features -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --locked --workspace --no-deps --all-features

# It does not download PyTorch.
.PHONY: rust
rust: check-rust test-rust ## Check and test the Rust half alone.

.PHONY: check-python
check-python: $(VENV)/.develop $(NATIVE)
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/lint-imports --no-logo --no-cache
	$(VENV)/bin/python scripts/private_names.py python/penstock python/penstock_bench
	$(VENV)/bin/python scripts/check_tree.py
	$(VENV)/bin/python scripts/check_prose.py
	$(VENV)/bin/mypy
	$(VENV)/bin/stubtest penstock._native
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.gitlab-ci examples/ci/gitlab-ci.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows \
		examples/ci/github-workflow.yml

# The site of `make docs` is not changed.
.PHONY: check-docs
check-docs: $(VENV)/.docs $(NATIVE)
	$(VENV)/bin/python -m docs.site --check

.PHONY: check-kernels
check-kernels: $(KERNELS_VENV)/.kernels
	$(KERNELS_VENV)/bin/python scripts/compile_kernels.py --check

.PHONY: kernels
kernels: $(KERNELS_VENV)/.kernels ## Compile the kernels for GPUs, which needs no GPU.
	$(KERNELS_VENV)/bin/python scripts/compile_kernels.py

.PHONY: fmt
fmt: lint-toolchain $(VENV)/.develop ## Format everything and apply the linters' safe fixes.
	cargo fmt --all
	cargo fmt --manifest-path fuzz/Cargo.toml
	$(VENV)/bin/ruff check --fix --quiet || true
	$(VENV)/bin/ruff format

.PHONY: wheel
wheel: $(VENV)/.demo ## Build the abi3 wheel for this machine type, and that of the benchmarks, into dist/.
	$(VENV)/bin/maturin build --profile wheel --out dist
	$(VENV)/bin/uv build --quiet --wheel --no-build-isolation --out-dir dist python/penstock_bench

.PHONY: release
release: toolchain $(VENV)/.release ## Build wheels for x86-64 and aarch64 and the sdist, check them; publish nothing.
	$(VENV)/bin/python -m release $(RELEASE_ARGS)

.PHONY: check-long
check-long: fuzz torture ## Run the fuzz targets and the torture.

.PHONY: torture
torture: test-toolchain $(VENV)/.develop $(NATIVE) ## Cut the power 500 times on ext4 and XFS, kill 1000 savers, flip 10,000 bits, end 10,000 transfers and 1500 trainings.
	@[ "$$(id -u)" = 0 ] || echo 'missing: root; the power cuts will be skipped' >&2
	@for tool in mount umount python3 mkfs.ext4 mkfs.xfs; do \
		command -v "$$tool" >/dev/null || \
			echo "missing: $$tool; power cuts that take it will be skipped" >&2; \
	done
	cargo test --locked --release -p penstock-store $(TORTURE_TESTS) --no-run
	PENSTOCK_TORTURE_STRIDE=1 PENSTOCK_TORTURE_STATES=60 PENSTOCK_TORTURE_DRAWS=8 \
	PENSTOCK_TORTURE_SMALL_STATES=65536 PENSTOCK_TORTURE_FAULTS=$(TORTURE_FAULTS) \
	PENSTOCK_TORTURE_CUTS=$(TORTURE_CUTS) PENSTOCK_TORTURE_KILLS=$(TORTURE_KILLS) \
		PENSTOCK_TORTURE_FLIPS=$(TORTURE_FLIPS) PENSTOCK_TORTURE_SEED=$(TORTURE_SEED) \
		PENSTOCK_TORTURE_MIRROR_KILLS=$(TORTURE_MIRROR_KILLS) PENSTOCK_TORTURE_MIRROR_FAULTS=1 \
		PENSTOCK_TORTURE_SALVAGES=$(TORTURE_SALVAGES) \
		PENSTOCK_TORTURE_DEVICE_SAVES=$(TORTURE_DEVICE_SAVES) PENSTOCK_TORTURE_DEVICE_FAULTS=60 \
		cargo test --locked --release -p penstock-store $(TORTURE_TESTS) -- \
		--nocapture --test-threads=1
	PENSTOCK_TORTURE_KILLS=$(TORTURE_PYTHON_KILLS) PENSTOCK_TORTURE_SEED=$(TORTURE_SEED) \
		$(VENV)/bin/python -m pytest tests/python/checkpoint/test_kill.py -k any_kill -s
	PENSTOCK_TORTURE_LAZY_SAVES=$(TORTURE_LAZY_SAVES) PENSTOCK_TORTURE_SEED=$(TORTURE_SEED) \
		$(VENV)/bin/python -m pytest tests/python/checkpoint/saving/test_lazy_torn.py -k of_any_kind -s
	PENSTOCK_TORTURE_TRANSFERS=$(TORTURE_TRANSFERS) PENSTOCK_TORTURE_SEED=$(TORTURE_SEED) \
		$(VENV)/bin/python -m pytest tests/python/io/test_ends.py -k leave_nothing -s
	PENSTOCK_TORTURE_STEPS_KILLED=$(TORTURE_STEPS) PENSTOCK_TORTURE_STEPS_CUT=$(TORTURE_STEPS) \
		PENSTOCK_TORTURE_SEED=$(TORTURE_SEED) \
		$(VENV)/bin/python -m pytest tests/python/offload/optim/test_ended.py -s --timeout 7200
	PENSTOCK_TORTURE_FAULTS=$(TORTURE_PYTHON_FAULTS) PENSTOCK_TORTURE_SEED=$(TORTURE_SEED) \
		$(VENV)/bin/python -m pytest tests/python/io/test_failing_files.py \
		tests/python/offload/test_stream_faults.py tests/python/io/test_lying_server.py -s --timeout 7200

# Trainings by each framework, killed at random moments and resumed; more than an hour.
.PHONY: torture-frameworks
torture-frameworks: $(VENV)/.develop $(NATIVE) ## Kill the trainings of each framework 100 times; they have to end with the same bits.
	env $(foreach name,$(FRAMEWORKS),PENSTOCK_TORTURE_$(name)_KILLS=$(FRAMEWORK_KILLS)) \
		PENSTOCK_TORTURE_RAY_WORKER_KILLS=3 \
		PENSTOCK_TORTURE_SEED=$(TORTURE_SEED) $(VENV)/bin/python -m pytest -s --timeout 7200 \
		tests/python/integrations tests/python/documentation/test_example_programs.py -k kill $(PYTEST_ARGS)

.PHONY: fuzz
fuzz: fuzz-rust fuzz-tree ## Fuzz each parser for FUZZ_SECONDS=60; needs a nightly toolchain.

.PHONY: fuzz-rust
fuzz-rust: toolchain $(CARGO_FUZZ)/bin/cargo-fuzz
	@cargo +nightly --version >/dev/null 2>&1 || \
		{ echo 'error: sanitizers need a nightly toolchain: rustup toolchain install nightly' >&2; exit 1; }
	export PATH="$(CURDIR)/$(CARGO_FUZZ)/bin:$$PATH"; \
	targets=$$(cargo +nightly fuzz list); \
	for target in $$targets; do \
		mkdir -p "fuzz/corpus/$$target"; \
		cargo +nightly fuzz run "$$target" "fuzz/corpus/$$target" "fuzz/seeds/$$target" -- \
			-max_total_time=$(FUZZ_SECONDS) $(FUZZ_ARGS) -rss_limit_mb=1024 -malloc_limit_mb=64; \
	done

# The interpreter with PyTorch takes half of the memory.
.PHONY: fuzz-tree
fuzz-tree: $(VENV)/.fuzz $(NATIVE)
	mkdir -p fuzz/corpus/tree fuzz/artifacts/tree
	$(VENV)/bin/python fuzz/tree.py -max_total_time=$(FUZZ_SECONDS) $(FUZZ_ARGS) \
		-rss_limit_mb=1024 -artifact_prefix=fuzz/artifacts/tree/ fuzz/corpus/tree fuzz/seeds/tree

.PHONY: lock
lock: $(VENV)/.uv ## Bring the lock files up to the manifests; UPGRADE=1 takes the newest releases.
	$(UV_COMPILE) --group bootstrap -o requirements/bootstrap.txt
	$(UV_COMPILE) pyproject.toml --extra torch --group build --group test --group check \
		-o requirements/develop.txt
	$(UV_COMPILE) pyproject.toml --extra torch --group build \
		--constraint requirements/develop.txt -o requirements/demo.txt
	$(UV_COMPILE) pyproject.toml --extra torch --group build --group fuzz \
		--constraint requirements/develop.txt -o requirements/fuzz.txt
	$(UV_COMPILE) pyproject.toml --extra torch --group build --group bench --group peers \
		--constraint requirements/develop.txt -o requirements/bench.txt
	$(UV_COMPILE) pyproject.toml --extra torch --group build --group bench --group peers-gpu \
		--constraint requirements/develop.txt -o requirements/gpu.txt
	$(UV_COMPILE) pyproject.toml --extra torch --group bench --group peers-objects \
		--constraint requirements/demo.txt -o requirements/objects.txt
	$(UV_COMPILE) pyproject.toml --group build --group reframe \
		--constraint requirements/develop.txt -o requirements/reframe.txt
	$(UV_COMPILE) pyproject.toml --group build --group release \
		--constraint requirements/develop.txt -o requirements/release.txt
	$(UV_COMPILE) pyproject.toml --group build --group docs \
		--constraint requirements/develop.txt -o requirements/docs.txt
	$(UV_COMPILE) --group kernels -o requirements/kernels.txt
	cargo update $(if $(UPGRADE),,--workspace)
	cargo update --manifest-path fuzz/Cargo.toml $(if $(UPGRADE),,--workspace)

.PHONY: clean
clean: ## Remove everything that was built or installed here.
	rm -rf $(VENV) target fuzz/target dist site .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f $(NATIVE)

# ---- Set-up

.PHONY: toolchain
toolchain:
	@scripts/check-toolchain

.PHONY: test-toolchain
test-toolchain:
	@scripts/check-toolchain test

.PHONY: lint-toolchain
lint-toolchain:
	@scripts/check-toolchain lint

$(VENV)/.created: scripts/find-python | toolchain
	rm -rf $(VENV)
	python=$$(scripts/find-python) && "$$python" -m venv $(VENV)
	touch $@

# pip installs uv, by its hash; uv installs everything else, many times faster with packages of gigabytes.
$(VENV)/.uv: requirements/bootstrap.txt $(VENV)/.created
	$(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-user \
		--require-hashes --only-binary :all: -r $<
	touch $@

# Packages to build and run the package.
$(VENV)/.demo: requirements/demo.txt $(VENV)/.uv
	$(UV_INSTALL) -r $<
	touch $@

# Further packages to test and check it, beside the same versions.
$(VENV)/.develop: requirements/develop.txt $(VENV)/.demo
	$(UV_INSTALL) -r $<
	touch $@

.cache/deepspeed-$(DEEPSPEED_COMMIT):
	git init --quiet $@.partial
	git -C $@.partial fetch --quiet --depth 1 https://github.com/deepspeedai/DeepSpeed $(DEEPSPEED_COMMIT)
	git -C $@.partial checkout --quiet FETCH_HEAD
	mv $@.partial $@

# The driver for fuzzing Python.
$(VENV)/.fuzz: requirements/fuzz.txt $(VENV)/.develop
	$(UV_INSTALL) -r $<
	touch $@

# Libraries compared in the benchmark: more packages beside the same versions.
$(VENV)/.bench: requirements/bench.txt $(VENV)/.develop
	$(UV_INSTALL) -r $<
	touch $@

# Libraries compared on a GPU.
$(VENV)/.gpu: requirements/gpu.txt $(VENV)/.develop
	$(UV_INSTALL) -r $<
	touch $@

# Libraries compared in buckets.
$(OBJECTS_VENV)/.objects: requirements/objects.txt $(VENV)/.uv
	rm -rf $(OBJECTS_VENV)
	$(VENV)/bin/python -m venv --without-pip $(OBJECTS_VENV)
	$(VENV)/bin/uv pip install --quiet --require-hashes --python $(OBJECTS_VENV)/bin/python -r $<
	touch $@

# Compilers of kernels for GPUs.
$(KERNELS_VENV)/.kernels: requirements/kernels.txt $(VENV)/.uv
	rm -rf $(KERNELS_VENV)
	$(VENV)/bin/python -m venv --without-pip $(KERNELS_VENV)
	$(VENV)/bin/uv pip install --quiet --require-hashes --python $(KERNELS_VENV)/bin/python -r $<
	touch $@

# ReFrame, for the checks of an HPC site: packages beside the same versions.
$(VENV)/.reframe: requirements/reframe.txt $(VENV)/.demo
	$(UV_INSTALL) -r $<
	touch $@

# Tools for a release: packages beside the same versions.
$(VENV)/.release: requirements/release.txt $(VENV)/.demo
	$(UV_INSTALL) -r $<
	touch $@

# Tools for the documentation site: packages beside the same versions.
$(VENV)/.docs: requirements/docs.txt $(VENV)/.demo
	$(UV_INSTALL) -r $<
	touch $@

# Cargo decides what to compile; the time stamp only saves the call.
$(NATIVE): $(NATIVE_SOURCES) $(NATIVE_PROFILE_USED) $(VENV)/.demo
	$(VENV)/bin/maturin develop --profile $(NATIVE_PROFILE) --uv
	touch $@

# Changes with the requested profile, so that the module is built again.
.PHONY: FORCE
$(NATIVE_PROFILE_USED): FORCE
	@mkdir -p $(@D)
	@test "$$(cat $@ 2>/dev/null)" = $(NATIVE_PROFILE) || echo $(NATIVE_PROFILE) > $@

$(CARGO_FUZZ)/bin/cargo-fuzz: | toolchain
	cargo install --quiet --locked --version $(CARGO_FUZZ_VERSION) --root $(CARGO_FUZZ) cargo-fuzz
