//! Rows by id from tables that are larger than memory.
//!
//! A [`Table`] is rows of equal bytes in files. A [`Reader`] gathers batches of them: what its
//! [`Cache`] has is copied, the rest is read with as few requests as bandwidth and latency of the
//! device ask for, each row once, and lands in the result itself where direct I/O can reach that.
//!
//! A [`DeviceReader`] gathers into memory of a device, through pinned memory of the host.
//!
//! A [`Proxy`] serves what kernels of a device ask for.
//!
//! A [`ChangingTable`] is one whose rows are written anew.
//!
//! Promised: a batch that ends well has every row, in the caller's order; where a table has
//! [`Checks`], every block that was read is the one that was written. Nothing here knows what a
//! checkpoint is: whoever opens one hands over files, ranges and checksums.

#![forbid(unsafe_code)]

mod batch;
mod cache;
mod changing;
mod checks;
mod copying;
mod device;
mod error;
mod index;
mod key;
mod landing;
mod lookup;
mod proxy;
mod reader;
mod requests;
mod runs;
mod shared;
mod state;
mod table;

pub use batch::Batch;
pub use cache::Cache;
pub use changing::{ChangingTable, Folded, Form, Frozen, NewTable, Opening, Storage, TABLE_HEAD};
pub use checks::{BLOCK_BYTES, Checks};
pub use device::{DeviceBatch, DeviceReader};
pub use error::{Error, Result};
pub use index::{Index, Policy, Slot, replay};
pub use proxy::{Proxy, Serving};
pub use reader::Reader;
pub use runs::Merging;
pub use shared::Counts;
pub use table::{Segment, Table};
