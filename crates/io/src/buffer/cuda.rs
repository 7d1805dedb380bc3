//! Device memory, as a source and a destination of copies.
//!
//! All copies of one direction use one stream of a device ([`DeviceStreams`]): a device copies one way at a
//! time anyway, in queue order. That stream waits for the work that a caller's stream has queued
//! when the caller hands its memory over, so no host thread waits.
//!
//! A [`DeviceRegion`] is memory to copy from; its drop waits for the copies. [`DeviceToHost`] holds a
//! buffer that a device copies to, and gives it out only once the copies are done.
//!
//! A [`DeviceArrayMut`] is memory to copy to. Its copies end up in a [`HostToDevice`], together with
//! the buffers that devices copy from. Dropping that waits, so neither side is freed before the
//! last copy is done.

mod array;
mod block;
mod device_to_host;
mod host_to_device;
mod in_flight;
mod kernel_params;
mod mapped;
mod mapping;
mod region;
mod row_gather;
mod snapshot;
mod streams;
mod words;

pub use array::{DeviceArrayMut, DeviceScatter};
pub use block::{Cut, DeviceBlock, Moving};
pub use device_to_host::{DeviceCopies, DeviceToHost};
pub use host_to_device::{DeviceFills, HostToDevice};
pub(super) use mapped::Mapped;
pub(super) use mapping::Mapping;
pub use region::DeviceRegion;
pub use row_gather::RowGatherKernel;
pub use snapshot::Snapshot;
pub use streams::DeviceStreams;
pub use words::Words;
