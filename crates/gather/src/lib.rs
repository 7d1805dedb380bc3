//! Gathers rows by id from tables larger than memory.
//!
//! A [`Table`] is rows of equal size in files. A [`Reader`] gathers batches of rows: cached ones
//! are copied from its [`Cache`], and the others are read once each, with as few requests as the
//! device's bandwidth and latency suggest, directly into the result if direct I/O can reach it.
//!
//! A [`DeviceReader`] gathers into device memory, through pinned host memory.
//!
//! A [`RangeReader`] reads byte ranges of one file: rows of any lengths.
//!
//! A [`Proxy`] serves requests of kernels on a device.
//!
//! A [`MutableTable`] is a table whose rows can be updated.
//!
//! [`EdgeRanges`] and [`NodeNumbers`] sample the neighbourhoods in a graph whose nodes have rows.
//!
//! Guarantees: a successful batch has every row, in the caller's order; if a table has [`Checks`],
//! every block that was read is the one that was written. This crate does not know checkpoints:
//! its caller passes files, ranges and checksums.

#![forbid(unsafe_code)]

mod batch;
mod cache;
mod device;
mod error;
mod index;
mod mutable_table;
mod neighborhood;
mod proxy;
mod ranges;
mod reader;
mod table;

pub use batch::Batch;
pub use cache::Cache;
pub use device::{DeviceBatch, DeviceReader};
pub use error::{Error, Result};
pub use index::{Index, Policy, Slot, replay};
pub use mutable_table::{
    Compaction, Form, Frozen, MutableTable, NewTable, Opening, Storage, TABLE_MANIFEST,
};
pub use neighborhood::{EdgeRanges, NodeNumbers};
pub use proxy::{Proxy, Serving};
pub use ranges::RangeReader;
pub use reader::Reader;
pub use reader::shared::Counts;
pub use table::checks::{BLOCK_BYTES, Checks};
pub use table::runs::Merging;
pub use table::seal::OpenBlocks;
pub use table::{Segment, Table};
