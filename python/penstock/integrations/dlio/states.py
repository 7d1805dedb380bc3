"""The states that a rank of DLIO saves, by the names of the files that DLIO would write.

DLIO makes them once, when its mechanism is made, and writes each to a file of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from dlio_benchmark.checkpointing.base_checkpointing import BaseCheckpointing

State: TypeAlias = dict[str, Any]
"""Tensors by name, perhaps in further dictionaries."""


def states_of(mechanism: BaseCheckpointing, rank: int) -> dict[str, State]:
    """Returns the states of a rank; none if another rank saves for it.

    Args:
        mechanism: DLIO's mechanism, which holds the tensors.
        rank: The rank, in MPI's world.
    """
    if hasattr(mechanism, "get_layer_index"):
        found = _states(mechanism, rank)
    else:
        found = _states_of_release(mechanism, rank)
    return {name: state for name, state in found.items() if state}


def _states(mechanism: Any, rank: int) -> dict[str, State]:
    """The states of a rank as DLIO's repository saves them."""
    if mechanism.rank_to_checkpoint != rank:
        return {}
    model_rank = mechanism.model_parallelism_rank
    place = f"zero_pp_rank_{mechanism.data_parallelism_rank}_mp_rank_{model_rank}"
    layers = mechanism.layer_state or {}
    found = {f"model_states-{rank}": mechanism.model_state or {}}
    if not 0 < mechanism.args.zero_stage < 3:
        found[f"{place}_model_states"] = layers
    elif mechanism.data_parallelism_rank == 0 and mechanism.args.num_layers > 0:
        if mechanism.args.pipeline_parallelism > 1:
            found |= {
                f"layer_{index}-model_{model_rank}_model_states": layer
                for index, layer in layers.items()
            }
        else:
            found[f"model_{model_rank}_model_states"] = layers
    found[f"{place}_optim_states"] = mechanism.optimization_state or {}
    return found


def _states_of_release(mechanism: Any, rank: int) -> dict[str, State]:
    """The states of a rank as DLIO 2.0.0 saves them: each layer is written from one state."""
    # Ranks that do not save have no such attributes.
    layers = getattr(mechanism, "layer_state", None)
    found = {
        f"model-{rank}": getattr(mechanism, "model_state", None) or {},
        f"optimizer-{rank}": getattr(mechanism, "optimization_state", None) or {},
    }
    args = mechanism.args
    if layers and args.num_layers > 0 and rank % args.pipeline_parallelism == 0:
        count = args.num_layers + (args.tensor_parallelism if args.tensor_parallelism > 1 else 0)
        found |= {f"layer-{layer}-{rank}": layers for layer in range(count)}
    return found
