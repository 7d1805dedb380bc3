"""DLIO under MPI for tests: its settings, its mechanism in this process, and whole runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from dlio_benchmark.checkpointing.checkpointing_factory import CheckpointingFactory
from dlio_benchmark.checkpointing.pytorch_checkpointing import PyTorchCheckpointing
from dlio_benchmark.utils.config import ConfigArguments, LoadConfig
from dlio_benchmark.utils.utility import DLIOMPI
from hydra import compose, initialize_config_module

CONFIGS = "dlio_benchmark.configs"
MECHANISM = "penstock.integrations.dlio.Checkpointing"
MPIRUN = Path(sys.executable).with_name("mpirun")
RUN_SECONDS_MAX = 280

IS_RELEASE = not hasattr(PyTorchCheckpointing, "get_layer_index")
"""Whether this is DLIO 2.0.0 of the registry, rather than a later state of its repository."""

_OURS = f"++workload.checkpoint.checkpoint_mechanism_classname={MECHANISM}"

TINY = (
    "workload=llama_8b_zero3",
    "++workload.model.num_layers=2",
    "++workload.model.transformer.vocab_size=500",
    "++workload.model.transformer.hidden_size=128",
    "++workload.model.transformer.ffn_hidden_size=256",
    "++workload.model.transformer.num_attention_heads=4",
    "++workload.model.transformer.num_kv_heads=2",
    "++workload.checkpoint.mode=subset",
    "++workload.model.parallelism.data=8",
    "++workload.checkpoint.time_between_checkpoints=0",
    "++workload.checkpoint.rank_sync=True",
    "++workload.checkpoint.num_checkpoints_write=1",
    "++workload.checkpoint.num_checkpoints_read=1",
    _OURS,
)
"""A model of the shape of MLPerf's 8B, some hundred KB a rank: a subset of 8 ranks."""

TINY_RELEASE = (
    "workload=megatron_deepspeed",
    "++workload.checkpoint.model_size=3001",
    "++workload.checkpoint.type=all_ranks",
    "++workload.checkpoint.optimization_groups=[5000,4096]",
    "++workload.checkpoint.num_layers=2",
    "++workload.checkpoint.layer_parameters=[7000,100]",
    "++workload.checkpoint.tensor_parallelism=1",
    "++workload.checkpoint.pipeline_parallelism=1",
    _OURS,
)
"""A model as DLIO 2.0.0 describes one, of sizes in bytes."""

TINY_HERE = TINY_RELEASE if IS_RELEASE else TINY


def places(directory: Path) -> list[str]:
    """Settings that put all files of a run into a directory."""
    return [
        f"++workload.checkpoint.checkpoint_folder={directory / 'checkpoints'}",
        f"++workload.output.folder={directory / 'out'}",
    ]


def mechanism(directory: Path, *settings: str) -> Any:
    """Makes DLIO's mechanism in this process, as its program does."""
    DLIOMPI.get_instance().initialize()
    ConfigArguments.reset() if hasattr(ConfigArguments, "reset") else None
    with initialize_config_module(CONFIGS, version_base=None):
        config = compose("config", [*settings, *places(directory)])
    args = ConfigArguments.get_instance()
    LoadConfig(args, config["workload"])
    args.my_rank = DLIOMPI.get_instance().rank()
    args.comm_size = DLIOMPI.get_instance().size()
    args.derive_configurations()
    return CheckpointingFactory().get_mechanism(args.checkpoint_mechanism)


def mpirun(ranks: int, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of Python on some ranks.

    A rank that fails ends the others (`mpi4py`): DLIO itself leaves them waiting.
    """
    return subprocess.run(
        [
            *(MPIRUN, "--allow-run-as-root", "--oversubscribe", "-np", str(ranks)),
            *(sys.executable, "-m", "mpi4py", *command),
        ],
        text=True,
        capture_output=True,
        timeout=RUN_SECONDS_MAX,
        env={**os.environ, **variables},
        check=False,
    )


def run(directory: Path, ranks: int, *settings: str, **variables: str) -> Any:
    """Runs the program on some ranks, in a directory."""
    here = f"hydra.run.dir={directory / 'hydra'}"
    command = ("-m", "dlio_benchmark.main", *settings, *places(directory), here)
    return mpirun(ranks, *command, **variables)


def tensors_of(state: Any, name: str = "") -> dict[str, Any]:
    """All tensors in nested dictionaries, by their dotted names."""
    if not isinstance(state, dict):
        return {name: state}
    found: dict[str, Any] = {}
    for key, one in state.items():
        found |= tensors_of(one, f"{name}.{key}".lstrip("."))
    return found
