//! Memory of devices, as far as it is copied to the host and from it.
//!
//! All copies of one direction go through one stream of a device ([`Lane`]): a device copies one way at a
//! time anyway, and what was queued first is done first. The stream waits for what a caller's stream has
//! queued when the caller hands its memory over, so that nobody waits on the host.
//!
//! A [`DeviceRegion`] stands for memory to copy from; dropped, it waits for the copies. A buffer that a
//! device copies to is an [`Arriving`], which nobody reaches before it is there.
//!
//! A [`DeviceArrayMut`] stands for memory to copy to. It goes into the copies, and with them into a
//! [`Departing`], which has the buffers that devices copy from too: dropped, that waits, so neither side is
//! let go of before the last copy is done.

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
