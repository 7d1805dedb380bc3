//! The Python boundary: argument conversion, release of the GIL, error mapping. No logic.
//!
//! `penstock._native` is private: users import the package around it, which documents and types
//! this boundary. Memory of Python objects becomes a region in `tensor.rs`, or in
//! `features/exchange.rs` by PyTorch's own functions, and `owner.rs` keeps references: the only
//! files here with `unsafe` code.
#![allow(
    clippy::needless_pass_by_value,
    unreachable_pub,
    reason = "PyO3 hands arguments over as owned values and wants what it exports to be public"
)]

mod attempt;
mod bench;
mod blocks;
mod caching_allocator;
mod call;
mod checkpoint;
mod data_file;
mod digests;
mod errors;
mod event_fd;
mod features;
mod files;
mod gpu;
mod header;
mod ids;
mod job;
mod keys;
mod mirror;
mod moment;
mod names;
mod offload;
mod options;
mod owner;
mod ranges;
mod remote;
mod report;
mod row_proxy;
mod rows;
mod salvage;
mod save;
mod signing;
mod store;
mod table;
mod tensor;
mod trace;
mod verify;

use pyo3::prelude::*;

/// The Rust engine as Python sees it.
#[pymodule]
mod _native {
    /// The newest format version that is read, and the version that is written.
    #[pymodule_export]
    const FORMAT_VERSION: u64 = penstock_store::FORMAT_VERSION;
    /// Bytes of a file that share one digest.
    #[pymodule_export]
    const CHUNK_BYTES: u64 = penstock_store::format::digest::CHUNK_BYTES;
    #[pymodule_export]
    const PREVIOUS_MAX: usize = penstock_store::format::manifest::PREVIOUS_MAX;
    /// File name of a table's manifest.
    #[pymodule_export]
    const TABLE_MANIFEST: &str = penstock_gather::TABLE_MANIFEST;
    /// URL schemes of buckets.
    #[pymodule_export]
    const OBJECT_SCHEMES: [&str; 3] = penstock_object::SCHEMES;
    /// The file that makes a checkpoint complete.
    #[pymodule_export]
    const MANIFEST: &str = penstock_store::MANIFEST;
    #[pymodule_export]
    use crate::attempt::Attempt;
    #[pymodule_export]
    use crate::bench::{Bench, probe_directory, probe_io_uring, probe_names, probe_watch};
    #[pymodule_export]
    use crate::blocks::{NativeBlockOpener, NativeBlockSealer, NativeFileSeal};
    #[pymodule_export]
    use crate::caching_allocator::{
        CachingHostAllocator, copy_side_by_side, order_of_sizes, reserve,
    };
    #[pymodule_export]
    use crate::checkpoint::{Checkpoint, open};
    #[pymodule_export]
    use crate::data_file::DataFile;
    #[pymodule_export]
    use crate::digests::{chunk_digests, combine_digests, digests, dtypes};
    #[pymodule_export]
    use crate::event_fd::EventFd;
    #[pymodule_export]
    use crate::features::neighborhood::{NodeNumbers, draw_edges};
    #[pymodule_export]
    use crate::features::small_gathers::SmallGathers;
    #[pymodule_export]
    use crate::features::{
        DeviceRowBatch, RowBatch, RowCache, RowIndex, RowReader, block_checks, check_stream,
    };
    #[pymodule_export]
    use crate::files::times::FileTimes;
    #[pymodule_export]
    use crate::files::{has_file, list_names, read_start, stat};
    #[pymodule_export]
    use crate::gpu::{
        measure_link, measure_packing, measure_pinning, measure_posts, pinned_bytes, probe_copies,
        probe_gpus,
    };
    #[pymodule_export]
    use crate::header::{header_end, header_types, parse_header};
    #[pymodule_export]
    use crate::job::{Arena, Job};
    #[pymodule_export]
    use crate::keys::{
        AttemptKey, EphemeralKey, Identities, Recipients, generate_key, read_recipients, rewrap,
    };
    #[pymodule_export]
    use crate::mirror::{MirrorJob, mirror};
    #[pymodule_export]
    use crate::moment::Moment;
    #[pymodule_export]
    use crate::names::{
        is_part_file, parse_step, part_file, rank_of_file, shard_file, signature_files,
        step_directory,
    };
    #[pymodule_export]
    use crate::offload::{Executor, Share, Transfer};
    #[pymodule_export]
    use crate::ranges::RangeReader;
    #[pymodule_export]
    use crate::remote::{Listener, Question, Questions, probe_bucket, reach};
    #[pymodule_export]
    use crate::row_proxy::{RowProxy, RowServing, fifo_header};
    #[pymodule_export]
    use crate::rows::{
        BoxEntry, GatherCounts, GroupEntry, HeaderTensor, MissingTensor, RowTableForm,
        SurveyedTensor, TensorEntry, TransferCounts,
    };
    #[pymodule_export]
    use crate::salvage::{salvage, survey};
    #[pymodule_export]
    use crate::save::save;
    #[pymodule_export]
    use crate::signing::{Signers, SigningKeys, sign};
    #[pymodule_export]
    use crate::store::{Store, remove_checkpoint};
    #[pymodule_export]
    use crate::table::{FrozenTable, NewRowTable, RowTable, row_table_form};
    #[pymodule_export]
    use crate::tensor::HostBuffer;
    #[pymodule_export]
    use crate::tensor::device::cuda_problem;
    #[pymodule_export]
    use crate::trace::{
        trace_begin, trace_forget, trace_is_on, trace_now, trace_overlapping, trace_span,
        trace_start, trace_stop,
    };
    #[pymodule_export]
    use crate::verify::verify;
}
