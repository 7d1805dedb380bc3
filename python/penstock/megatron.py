"""Runs a program that trains with Megatron-Core, whose checkpoints Penstock saves and loads.

The program is not edited: ``torchrun … -m penstock.megatron pretrain_gpt.py …`` takes the place of
``torchrun … pretrain_gpt.py …``.
"""

from __future__ import annotations

import os
import runpy
import sys

_DATASETS = "--datasets"
_USAGE = f"usage: python -m penstock.megatron [{_DATASETS}] PROGRAM.py [ARGUMENT …]"


def main(arguments: list[str]) -> None:
    """Runs a program with `penstock.integrations.megatron.enable`.

    Args:
        arguments: The path of the program, and its arguments; before them ``--datasets``, if
            Penstock is to read the indexed datasets, too.

    Raises:
        SystemExit: There is no program.
        MissingDependencyError: As for `penstock.integrations.megatron.enable`.
    """
    datasets = arguments[:1] == [_DATASETS]
    arguments = arguments[datasets:]
    if not arguments or arguments[0].startswith("-"):
        sys.exit(_USAGE)
    # Python puts the directory of a program there, from which a checkout of Megatron-LM is found.
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    sys.argv = arguments
    from penstock.integrations.megatron import enable

    enable(datasets=datasets)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
