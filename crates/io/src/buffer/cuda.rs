//! Device memory, as a source and a destination of copies.
//!
//! All copies of one direction use one stream of a device ([`Lane`]): a device copies one way at a
//! time anyway, in queue order. That stream waits for the work that a caller's stream has queued
//! when the caller hands its memory over, so no host thread waits.
//!
//! A [`DeviceRegion`] is memory to copy from; its drop waits for the copies. [`Arriving`] holds a
//! buffer that a device copies to, and gives it out only once the copies are done.
//!
//! A [`DeviceArrayMut`] is memory to copy to. Its copies end up in a [`Departing`], together with
//! the buffers that devices copy from. Dropping that waits, so neither side is freed before the
//! last copy is done.

mod array;
mod arriving;
mod block;
mod collector;
mod departing;
mod flight;
mod lane;
mod mapped;
mod mapping;
mod region;
mod snapshot;
mod telling;
mod words;

pub use array::{DeviceArrayMut, DeviceScatter};
pub use arriving::{Arriving, DeviceCopies};
pub use block::{Cut, DeviceBlock, Moving};
pub use collector::Collector;
pub use departing::{Departing, DeviceFills};
pub use lane::Lane;
pub(super) use mapped::Mapped;
pub(super) use mapping::Mapping;
pub use region::DeviceRegion;
pub use snapshot::Snapshot;
pub use words::Words;
