"""Checks that the plug-in fits the installed Megatron-Core."""

from __future__ import annotations

from penstock.integrations.versions import Probe, check_version

PACKAGE = "megatron-core"
_CORE = "megatron.core.dist_checkpointing"

_SHARDED_TENSOR = (
    "key",
    "data",
    "dtype",
    "local_shape",
    "global_shape",
    "global_offset",
    "axis_fragmentations",
    "replica_id",
    "prepend_axis_num",
    "allow_shape_mismatch",
)


def check() -> None:
    """Checks the version, and all that is replaced or called.

    Raises:
        MissingDependencyError: Megatron-Core is missing or too old, or lacks something.
    """
    check_version(PACKAGE, "0.13", "0.19", module="megatron.core")
    probe = Probe(PACKAGE, "penstock.integrations.megatron")
    strategies = f"{_CORE}.strategies.torch"
    state, where = "sharded_state_dict", "checkpoint_dir"
    for strategy, methods in (
        ("TorchDistSaveShardedStrategy", {"save": (state, where), "async_save": (state, where)}),
        (
            "TorchDistLoadShardedStrategy",
            {
                "load": (state, where),
                "load_tensors_metadata": (where,),
                "load_sharded_metadata": (where,),
            },
        ),
    ):
        kind = probe.attribute(strategies, strategy)
        for name, parameters in methods.items():
            probe.signature(probe.attribute(kind, name), *parameters)
    wrapper = f"{_CORE}.strategies.fully_parallel"
    wrapper_class = probe.attribute(wrapper, "FullyParallelSaveStrategyWrapper")
    apply = probe.attribute(wrapper_class, "apply_saving_parallelization")
    probe.signature(apply, state)
    probe.calls(apply, "do_cache_distribution", "cached_distribution")
    save = probe.attribute(f"{_CORE}.serialization", "save")
    probe.calls(save, "save_config", "async_save", "finalize_fns")
    probe.signature(probe.attribute(f"{_CORE}.serialization", "save_config"), "config", where)
    probe.signature(probe.attribute(f"{_CORE}.mapping", "ShardedTensor"), *_SHARDED_TENSOR)
    request = probe.attribute(f"{_CORE}.strategies.async_utils", "AsyncRequest")
    probe.signature(request, "async_fn", "async_fn_args", "finalize_fns")
    for module, name in (
        ("core", "CONFIG_FNAME"),
        ("core", "CheckpointingConfig"),
        ("core", "CheckpointingException"),
        ("dict_utils", "dict_list_map_outplace"),
        ("dict_utils", "nested_values"),
        ("mapping", "is_main_replica"),
        ("mapping", "ShardedObject"),
    ):
        probe.attribute(f"{_CORE}.{module}", name)
    probe.check()
