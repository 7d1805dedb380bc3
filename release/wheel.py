"""Wheels for each machine type, with their debug tables in separate files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from release.command import ReleaseError, output, python, run

TARGETS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")
COMPATIBILITY = "manylinux_2_28"
"""PEP 600: glibc 2.28, which every distribution with a package of Python 3.11 has."""

MODULE = Path("penstock/_native.abi3.so")


def require_targets(targets: tuple[str, ...]) -> None:
    """Checks that the toolchain can compile for all targets.

    Raises:
        ReleaseError: The standard library of a target is missing.
    """
    library = _sysroot() / "lib/rustlib"
    missing = [target for target in targets if not (library / target / "lib").is_dir()]
    if missing:
        raise ReleaseError(
            f"the toolchain has no {', '.join(missing)}: rustup target add {' '.join(missing)}, or "
            "leave it out by RELEASE_ARGS='--target …'"
        )


def build(source: Path, target: str, dist: Path, cache: Path) -> Path:
    """Builds the wheel of a target; returns its path.

    Args:
        source: The tree to build.
        target: One of `TARGETS`.
        dist: Output directory.
        cache: Cargo's target directory, kept between builds.
    """
    registry = Path(os.environ.get("CARGO_HOME") or Path.home() / ".cargo") / "registry/src"
    flags = [
        # Build directories are useless in messages, and would make each build differ.
        f"--remap-path-prefix={registry}=/cargo",
        f"--remap-path-prefix={source}=/penstock",
        # Debuggers match a debug file to its module by the build id.
        "-Clink-arg=-Wl,--build-id=sha1",
    ]
    environment = {
        **os.environ,
        "CARGO_TARGET_DIR": str(cache),
        "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(flags),
    }
    before = set(dist.glob("*.whl"))
    # zig links against the glibc that the tag promises, so it builds for this machine type too.
    run(
        *python("maturin", "build", "--release", "--zig", "--compatibility", COMPATIBILITY),
        *("--target", target, "--out", dist),
        within=source,
        environment=environment,
    )
    (made,) = set(dist.glob("*.whl")) - before
    return made


def build_benchmarks(source: Path, dist: Path) -> Path:
    """Builds the wheel of `penstock_bench`, for every machine type; returns its path."""
    run(
        *python("uv", "build", "--quiet", "--wheel", "--no-build-isolation", "--out-dir", dist),
        source / "python/penstock_bench",
    )
    (made,) = dist.glob("penstock_bench-*.whl")
    return made


def split(wheel: Path, debug: Path) -> Path:
    """Moves the debug tables of a wheel's module to a file of their own; returns its path.

    The module keeps its symbols, so that a backtrace has names, and the name of the debug file
    (``.gnu_debuglink``), which debuggers look for beside it.

    Args:
        wheel: Wheel to replace.
        debug: Directory for debug files; the wheel's is in a subdirectory with its name.
    """
    found = debug / wheel.stem / f"{MODULE.name}.debug"
    found.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=wheel.parent) as work:
        run(*python("wheel", "unpack", "--dest", work, wheel))
        (content,) = Path(work).iterdir()
        module = content / MODULE
        _copy_tables(module, found)
        wheel.unlink()
        run(*python("wheel", "pack", "--dest-dir", wheel.parent, content))
    if not wheel.exists():
        raise ReleaseError(f"{wheel.name} has another name when it is packed again")
    return found


def _copy_tables(module: Path, debug: Path) -> None:
    # LLVM's tool from the toolchain: a system's own knows its own machine type only.
    sysroot = _sysroot()
    (objcopy,) = sysroot.glob("lib/rustlib/*/bin/rust-objcopy")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(sysroot / "lib")}
    run(objcopy, "--only-keep-debug", module, debug, environment=environment)
    run(
        *(objcopy, "--strip-debug", f"--add-gnu-debuglink={debug}", module),
        environment=environment,
    )


def _sysroot() -> Path:
    return Path(output("rustc", "--print", "sysroot").strip())
