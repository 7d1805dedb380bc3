"""Compiles the kernels by NVRTC, which needs neither a GPU nor a driver.

    python scripts/compile_kernels.py [--check]

Writes `crates/io/kernels/gather.ptx`, which Penstock launches: the driver compiles it for the GPU
at hand. With --check nothing is written: the script checks that the file matches its sources, that
there is code for every kind of GPU, and that the kernels in docs/gpu.md compile.
"""

import argparse
import ctypes
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nvidia

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "crates/io/kernels"
HEADER = "fifo.cuh"
COMPILED = KERNELS / "gather.ptx"
GUIDE = ROOT / "docs/gpu.md"

# The oldest architecture with all that the kernels need. Newer GPUs run its PTX as well.
ARCHITECTURE = "compute_70"
GPUS = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


def installed(pattern: str) -> Path:
    """Returns a file of one of NVIDIA's packages."""
    for directory in nvidia.__path__:
        for found in Path(directory).glob(pattern):
            return found
    raise SystemExit(f"{pattern}: not in the packages of requirements/kernels.txt")


class Nvrtc:
    """The NVRTC compiler."""

    def __init__(self) -> None:
        # The oldest NVRTC that knows the architecture: drivers read PTX of their own version and of
        # older ones.
        self._library = ctypes.CDLL(str(installed("cuda_nvrtc/lib/libnvrtc.so.11*")))

    def compile(self, source: str, name: str) -> str:
        """Compiles a source to PTX.

        Raises:
            SystemExit: The source does not compile; the message is the compiler's.
        """
        header = (KERNELS / HEADER).read_bytes()
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source.encode(),
            name.encode(),
            1,
            (ctypes.c_char_p * 1)(header),
            (ctypes.c_char_p * 1)(HEADER.encode()),
        )
        options = [f"--gpu-architecture={ARCHITECTURE}".encode()]
        pointers = (ctypes.c_char_p * len(options))(*options)
        status = self._library.nvrtcCompileProgram(program, len(options), pointers)
        said = self._text("ProgramLog", program)
        if status or said.strip():
            raise SystemExit(f"{name}: {said}")
        return self._text("PTX", program)

    def _text(self, kind: str, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{kind}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{kind}", program, text)
        return text.value.decode()

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise SystemExit(f"{name}: error {status}")


def assemble(ptx: str, gpu: str) -> None:
    """Assembles PTX for a GPU, as the driver does.

    Raises:
        SystemExit: The PTX is invalid; the message is the assembler's.
    """
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "kernel.ptx"
        source.write_text(ptx, "utf-8")
        command = [str(installed("cuda_nvcc/bin/ptxas")), "-arch", gpu, str(source)]
        ended = subprocess.run(
            [*command, "-o", str(source.with_suffix(".cubin"))],
            capture_output=True,
            text=True,
            check=False,
        )
    if ended.returncode:
        raise SystemExit(f"{gpu}: {ended.stderr}")


def main() -> None:
    """Writes the PTX, or checks it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    compiler = Nvrtc()
    ptx = compiler.compile((KERNELS / "gather.cu").read_text("utf-8"), "gather.cu")
    if not is_check:
        COMPILED.write_text(ptx, "utf-8")
        return
    if COMPILED.read_text("utf-8") != ptx:
        raise SystemExit(
            f"{COMPILED.relative_to(ROOT)} is not what comes of its sources: make kernels"
        )
    examples = re.findall(
        r"^```cuda\n(.*?)^```", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    if not examples:
        raise SystemExit(f"{GUIDE.relative_to(ROOT)} has no kernel")
    compiled = [compiler.compile(example, GUIDE.name) for example in examples]
    for text in (ptx, *compiled):
        for gpu in GPUS:
            assemble(text, gpu)
    sys.stdout.write(f"{1 + len(compiled)} kernels compile, for {', '.join(GPUS)}\n")


if __name__ == "__main__":
    main()
