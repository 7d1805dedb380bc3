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
    probe.signature(save, state, where, "sharded_strategy")
    load = probe.attribute(f"{_CORE}.serialization", "load")
    probe.signature(load, state, where, "sharded_strategy", "validate_access_integrity", "strict")
    probe.calls(load, "determine_global_metadata", "validate_integrity_and_strict_load")
    probe.calls(save, "save_preprocess")
    preprocess = probe.attribute(f"{_CORE}.serialization", "save_preprocess")
    probe.signature(preprocess, state, "validate_access_integrity")
    probe.calls(preprocess, "validate_sharding_integrity", "determine_global_metadata")
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
        ("state_dict_utils", "determine_global_metadata"),
        ("state_dict_utils", "validate_sharding_integrity"),
        ("validation", "parse_strict_flag"),
        ("validation", "StrictHandling"),
    ):
        probe.attribute(f"{_CORE}.{module}", name)
    probe.check()


def check_datasets() -> None:
    """Checks all that `enable(datasets=True)` and `IndexedDataset` replace or call.

    Apart from `check`: checkpoints do not depend on it.

    Raises:
        MissingDependencyError: Megatron-Core lacks something.
    """
    probe = Probe(PACKAGE, "penstock.integrations.megatron")
    module = "megatron.core.datasets.indexed_dataset"
    dataset = probe.attribute(module, "IndexedDataset")
    initialize = probe.attribute(dataset, "initialize")
    probe.signature(initialize, "path_prefix", "multimodal", "mmap", "object_storage_config")
    probe.calls(initialize, "get_bin_path", "_MMapBinReader", "_FileBinReader")
    probe.calls(probe.attribute(dataset, "get"), "bin_reader", "read")
    reader = probe.attribute(module, "_BinReader")
    probe.signature(probe.attribute(reader, "read"), "dtype", "count", "offset")
    for name in ("get_bin_path", "get_idx_path", "is_object_storage_path"):
        probe.attribute(module, name)
    samples = probe.attribute("megatron.core.datasets.gpt_dataset", "GPTDataset")
    query = probe.attribute(samples, "_query_document_sample_shuffle_indices")
    probe.calls(query, "shuffle_index", "sample_index", "document_index")
    probe.calls(query, "add_extra_token_to_sequence")
    probe.calls(query, "get")
    blend = probe.attribute("megatron.core.datasets.blended_dataset", "BlendedDataset")
    probe.calls(probe.attribute(blend, "__getitem__"), "dataset_index", "dataset_sample_index")
    probe.check()
