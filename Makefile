# Every target sets itself up. Needed: Linux, Python 3.11 to 3.14, Rust, a C compiler, make.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules
# All targets but files, which have a dot or a slash in their names
.PHONY: FORCE $(shell sed -nE 's/^([a-z -]+):.*/\1/p' Makefile)

RUST_PACKAGES := -p penstock-keys -p penstock-cuda -p penstock-cuda-fake -p penstock-io -p penstock-object -p penstock-object-server -p penstock-store \
	-p penstock-gather -p penstock-bench \
	--features penstock-store/objects
# Runs tests under a filter that refuses io_uring, which `cargo test` has compiled with the examples.
WITHOUT_IO_URING := --config 'target."cfg(all())".runner = "target/debug/examples/without_io_uring"'
# Those of penstock-io and penstock-bench, and one of penstock-gather.
ENGINE_TESTS := $(addprefix --test ,engines executor gather measurements memory refused trace)
# Parallel test processes: each starts ranks of its own, some gigabytes. An idle process takes tests from
# the one with most left, in the order of the files, so that tests which share ranks and models stay
# together. One more than there are cores, as many tests wait for a disk or for other processes.
PYTEST_WORKERS := --numprocesses $(shell expr $$(nproc) + 1) --maxprocesses 4 --dist worksteal
# Further arguments for pytest, as in: make test-python PYTEST_ARGS='-k resume -x'
PYTEST_ARGS ?=
# Arguments of a benchmark, as in: make bench SUITE=gather BENCH_ARGS='--help'
# (see python/penstock_bench/README.md). Suites offload, optimizer and stream need libaio-dev.
BENCH_ARGS ?=
# Where the checks of `make reframe` write, and further arguments of ReFrame (see reframe/README.md)
REFRAME_DIRECTORY ?= .cache/reframe
REFRAME_ARGS ?=
# Cells of the matrix of versions (see tests/compat/matrix.toml), as in: COMPAT_ARGS='--suite jax --version newest'
COMPAT_ARGS ?=
# Arguments of the release, as in: make release RELEASE_ARGS='--target x86_64-unknown-linux-gnu'
RELEASE_ARGS ?=

VENV := .venv
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
bench megatron dlio gpu reframe: NATIVE_PROFILE := wheel
NATIVE_SOURCES := Cargo.toml Cargo.lock pyproject.toml \
	$(shell find crates python -path '*/tests' -prune -o \( -name '*.rs' -o -name Cargo.toml \) -print)

UV_INSTALL := $(VENV)/bin/uv pip install --quiet --require-hashes --python $(VENV)/bin/python

help: ## Show this list.
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1|\2/p' $(MAKEFILE_LIST) | \
		while IFS='|' read -r target text; do printf '  make %-15s %s\n' "$$target" "$$text"; done

# ---- Targets for people

demo: $(VENV)/.demo $(NATIVE) ## Train, kill a save in the middle, resume bit for bit (about a minute).
	$(VENV)/bin/penstock demo

# Both halves run at the same time: the Rust tests wait for disks and servers most of the time, the Python
# tests use the processors meanwhile. Each shows its output when it has ended; `make test-rust` and
# `make test-python` show it as it comes.
HALVES = $(MAKE) --no-print-directory --jobs=2 --output-sync=target

test: test-toolchain $(VENV)/.develop objects-server places ## Run all tests but the slow ones, in two halves at the same time.
	+$(HALVES) test-rust test-python

# The engines are tested again where the kernel refuses io_uring, and so are basic promises of rows and of the
# store; their other promises do not depend on the engine. A build without io_uring is checked by `make check`
# and tells what it lacks here. Runs of few tests name all packages too, so that features are the same and
# nothing is compiled again. Some faults of requests are tried in Google's protocol, the others in
# `make test-slow`.
test-rust: test-toolchain | objects-server ## Run the Rust tests, with and without io_uring.
	cargo test --locked $(RUST_PACKAGES)
	PENSTOCK_TORTURE_STORE=google PENSTOCK_TORTURE_STRIDE=256 PENSTOCK_TORTURE_FAULTS=2 \
		cargo test --locked $(RUST_PACKAGES) --test objects_explorer -- no_fault
	cargo test --locked $(RUST_PACKAGES) $(WITHOUT_IO_URING) --lib $(ENGINE_TESTS)
	cargo test --locked $(RUST_PACKAGES) $(WITHOUT_IO_URING) --test load -- round_trip:: damage::
	cargo test --locked $(RUST_PACKAGES) --no-default-features --test refused

# The driver for tests, which needs no GPU.
cuda-fake:
	cargo build --quiet --release --locked -p penstock-cuda-fake

# Tools that make the file systems on which stores are tested; only root mounts them.
places:
	@scripts/install-places

test-python: $(VENV)/.develop $(NATIVE) cuda-fake places ## Run the Python tests against a release build, but for the slow ones.
	$(VENV)/bin/python -m pytest -m 'not slow' $(PYTEST_WORKERS) $(PYTEST_ARGS)

# Trainings in frameworks that are killed and resumed, on one and several ranks, whole benchmarks, and pages
# of the documentation that do the same. `make test` has the quick tests of each framework. The Rust half tries
# more faults of requests to a bucket than `make test`, and `make torture` all.
test-slow: test-toolchain $(VENV)/.develop objects-server ## Run the slow tests: frameworks, their ranks and kills, whole benchmarks, more faults.
	+$(HALVES) test-slow-rust test-slow-python

test-slow-rust: test-toolchain | objects-server
	PENSTOCK_TORTURE_STRIDE=8 PENSTOCK_TORTURE_FAULTS=8 \
		cargo test --locked $(RUST_PACKAGES) --test objects_explorer -- no_fault
	PENSTOCK_TORTURE_STORE=google PENSTOCK_TORTURE_STRIDE=8 PENSTOCK_TORTURE_FAULTS=8 \
		cargo test --locked $(RUST_PACKAGES) --test objects_explorer --test buckets -- \
		--skip every_mutant --skip objects:: --skip requests::

test-slow-python: $(VENV)/.develop $(NATIVE) cuda-fake .cache/dlio-venv/.installed
	scripts/dlio test
	scripts/dlio test-release
	$(VENV)/bin/python -m pytest -m slow $(PYTEST_WORKERS) $(PYTEST_ARGS)

# Servers of S3's and Azure's protocols for the tests of checkpoints in buckets.
objects-server:
	@scripts/install-servers

# The promises that changes break most often: round trips, damage, power cuts, retention, lazy saves and
# ranks. In Python they have the mark `quick`. The packages are those of `test-rust`, so that nothing is
# compiled for this alone.
quick: toolchain $(VENV)/.develop $(NATIVE) ## Run the tests that fail most often, in a minute and a half.
	cargo test --locked $(RUST_PACKAGES) \
		--test load --test store --test crash -- --skip mutant --skip large --skip after_a_death \
		--skip care:: --skip concurrency:: --skip save::
	$(VENV)/bin/python -m pytest -m quick $(PYTEST_WORKERS) $(PYTEST_ARGS)

peers-deepspeed: $(VENV)/.develop $(NATIVE) ## Run DeepSpeed's tests of its I/O on ours; WHAT=checkpoints: those of its checkpoints.
	scripts/peers-deepspeed $(or $(WHAT),ops) $(PYTEST_ARGS)

peers-megatron: $(VENV)/.develop $(NATIVE) ## Run Megatron-Core's tests of its checkpoints, stock and on ours.
	scripts/peers-megatron $(PEERS_ARGS)

# Each combination of versions of a framework, PyTorch, NumPy and Python runs in an environment of its own,
# which is removed afterwards.
compat: wheel ## Run the plug-ins with old and new versions of their frameworks; writes docs/compatibility.md.
	$(VENV)/bin/python -m tests.compat run --wheel dist/penstock-*.whl $(COMPAT_ARGS)

compat-new: wheel ## Show which newer versions the registry has than were tried, and run those.
	$(VENV)/bin/python -m tests.compat new --wheel dist/penstock-*.whl $(COMPAT_ARGS)

# Buckets are compared in an environment of their own: s3fs takes another boto3 than the other peers have.
bench: $(if $(filter objects,$(SUITE)),.cache/objects-venv/.installed objects-server,$(VENV)/.bench) $(NATIVE) ## Compare with fio and other libraries: SUITE=save_load, checkpoint, training, frameworks, gather, indexed, planning, published, …
	scripts/bench $(BENCH_ARGS)

megatron: $(VENV)/.bench $(NATIVE) ## Train a small GPT by Megatron-Core on four ranks, and show the phases of its I/O.
	$(VENV)/bin/python -m penstock_bench.suites.megatron.profile $(BENCH_ARGS)

dlio: $(VENV)/.develop $(NATIVE) .cache/dlio-venv/.installed ## Run DLIO's checkpoints on 2 ranks: its torch.save, synced, and ours; 15 minutes.
	scripts/dlio bench $(BENCH_ARGS)

# Repeats tests of `make test`, which has the driver for tests, with PyTorch and its kernels on a GPU. Tests
# that never passed come first; each result goes to tests/gpu/results.json at once.
test-gpu: $(VENV)/.gpu $(NATIVE) ## Run the tests that need a GPU: two minutes.
	$(VENV)/bin/python -m pytest tests/gpu $(PYTEST_ARGS)

# PyTorch is that of `make test`, with CUDA. On the driver for tests (PENSTOCK_CUDA_DRIVER) it shows that
# everything runs. A run goes on where the last one on such a GPU stopped.
gpu: $(VENV)/.gpu $(NATIVE) ## Measure the promises about GPUs on this machine: a table and JSON, 20 minutes.
	$(VENV)/bin/python -m penstock_bench.suites.gpu --resume docs/maintainers/gpus $(BENCH_ARGS)

# Serial: parallel checks would disturb each other's measurements.
reframe: $(VENV)/.reframe $(NATIVE) ## Run the ReFrame checks of storage: fio, checkpoints, metadata.
	mkdir -p $(REFRAME_DIRECTORY)
	$(VENV)/bin/reframe -C reframe/settings.py -c reframe/checks --prefix .cache/reframe \
		--exec-policy=serial -S directory=$(REFRAME_DIRECTORY) -r $(REFRAME_ARGS)

docs: $(VENV)/.docs $(NATIVE) ## Build the documentation site into site/; a broken link or anchor is an error.
	$(VENV)/bin/python -m docs.site

charts: $(VENV)/.develop ## Draw the charts of the documentation anew, from the tables in its pages.
	$(VENV)/bin/python -m docs.charts

# Packages are installed before, not while others read them.
check: lint-toolchain $(VENV)/.develop $(VENV)/.docs .cache/kernels-venv/.installed ## Run formatters, linters and type checkers; change nothing.
	+$(HALVES) check-rust check-python check-docs check-kernels

check-rust: lint-toolchain $(VENV)/.created
	cargo fmt --all --check
	cargo fmt --manifest-path fuzz/Cargo.toml --check
	$(VENV)/bin/python scripts/check_modules.py crates/*/src python/src
	cargo clippy --locked -p penstock-io --all-targets --no-default-features -- -D warnings
	cargo clippy --locked --workspace --all-targets --all-features -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --locked --workspace --no-deps --all-features

# It does not download PyTorch.
rust: check-rust test-rust ## Check and test the Rust half alone.

check-python: $(VENV)/.develop $(NATIVE)
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/lint-imports --no-logo --no-cache
	$(VENV)/bin/python scripts/private_names.py python/penstock python/penstock_bench
	$(VENV)/bin/python scripts/check_tree.py
	$(VENV)/bin/python scripts/check_prose.py
	$(VENV)/bin/python scripts/seal_mutants.py --check
	$(VENV)/bin/mypy
	$(VENV)/bin/stubtest penstock._native
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.gitlab-ci examples/ci/gitlab-ci.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows \
		examples/ci/github-workflow.yml

# The site of `make docs` is not changed.
check-docs: $(VENV)/.docs $(NATIVE)
	$(VENV)/bin/python -m docs.site --check

check-kernels: .cache/kernels-venv/.installed
	$(<D)/bin/python scripts/compile_kernels.py --check

kernels: .cache/kernels-venv/.installed ## Compile the kernels for GPUs, which needs no GPU.
	$(<D)/bin/python scripts/compile_kernels.py

fmt: lint-toolchain $(VENV)/.develop ## Format everything and apply the linters' safe fixes.
	cargo fmt --all
	cargo fmt --manifest-path fuzz/Cargo.toml
	$(VENV)/bin/ruff check --fix --quiet || true
	$(VENV)/bin/ruff format

wheel: $(VENV)/.demo ## Build the abi3 wheel for this machine type, and that of the benchmarks, into dist/.
	$(VENV)/bin/maturin build --profile wheel --out dist
	$(VENV)/bin/uv build --quiet --wheel --no-build-isolation --out-dir dist python/penstock_bench

release: toolchain $(VENV)/.release ## Build wheels for x86-64 and aarch64 and the sdist, check them; publish nothing.
	$(VENV)/bin/python -m release $(RELEASE_ARGS)

check-long: fuzz torture ## Run the fuzz targets and the torture.

torture: test-toolchain $(VENV)/.develop $(NATIVE) ## Cut the power, kill, flip bits, fail requests, thousands of times; WHAT=frameworks kills their trainings.
	scripts/torture $(or $(WHAT),engine) $(PYTEST_ARGS)

seal-mutants: toolchain $(VENV)/.created ## Break sealing in one place after the other: its tests have to notice; WHAT=names.
	$(VENV)/bin/python scripts/seal_mutants.py $(WHAT)

fuzz: toolchain $(VENV)/.fuzz $(NATIVE) ## Fuzz each parser for FUZZ_SECONDS=60; needs a nightly toolchain.
	scripts/fuzz

lock: $(VENV)/.uv ## Bring the lock files up to the manifests; UPGRADE=1 takes the newest releases.
	UPGRADE=$(UPGRADE) requirements/lock

clean: ## Remove everything that was built or installed here.
	rm -rf $(VENV) target fuzz/target dist site .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f $(NATIVE)

# ---- Set-up

toolchain test-toolchain lint-toolchain:
	@scripts/check-toolchain $(filter-out toolchain,$(subst -, ,$@))

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

# Further packages beside the same versions, one file of them for each use.
$(VENV)/.%: requirements/%.txt $(VENV)/.demo
	$(UV_INSTALL) -r $<
	touch $@

$(VENV)/.fuzz $(VENV)/.bench $(VENV)/.gpu: $(VENV)/.develop

# Environments of their own.
.cache/%-venv/.installed: requirements/%.txt $(VENV)/.uv
	rm -rf $(@D)
	$(VENV)/bin/python -m venv --without-pip $(@D)
	$(VENV)/bin/uv pip install --quiet --require-hashes --python $(@D)/bin/python -r $<
	touch $@

# Cargo decides what to compile; the time stamp only saves the call.
$(NATIVE): $(NATIVE_SOURCES) $(NATIVE_PROFILE_USED) $(VENV)/.demo
	$(VENV)/bin/maturin develop --profile $(NATIVE_PROFILE) --uv
	touch $@

# Changes with the requested profile, so that the module is built again.
$(NATIVE_PROFILE_USED): FORCE
	@mkdir -p $(@D)
	@test "$$(cat $@ 2>/dev/null)" = $(NATIVE_PROFILE) || echo $(NATIVE_PROFILE) > $@
