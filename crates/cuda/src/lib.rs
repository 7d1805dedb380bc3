//! The CUDA driver, found when it is first asked for.
//!
//! Nothing here is linked with CUDA: the functions of the driver are looked up by name in a library
//! (`libcuda.so.1`, or what `PENSTOCK_CUDA_DRIVER` names), so that the same program runs where there is
//! none. A driver that is *found* need not be *usable*: it may be too old, without a device or without
//! permission, and [`Error`] says which.
//!
//! The rules that everything here keeps, as PyTorch or another user of the driver is in the same process:
//!
//! - devices are used through their primary context, which is current during a call and no longer;
//! - streams are this crate's own, and do not wait for the stream 0; what a stream of somebody else's has
//!   queued is waited for by an [`Event`], by the device and not by the host;
//! - a call never voids a graph that another thread captures, and work that would go into a graph is
//!   refused;
//! - no fork of a process that used the driver uses it.
//!
//! It stands beside `penstock-io` at the bottom, and knows no file and no tensor.

mod copies;
mod cufile;
mod device;
mod driver;
mod error;
mod event;
mod host;
mod memory;
mod module;
mod raw;
mod registration;
mod stream;
mod table;
mod version;

#[cfg(feature = "conformance")]
pub mod conformance;

pub use copies::{Direction, Piece};
pub use cufile::{CUFILE_VARIABLE, CuFile, CuFileCounts, CuFileHandle};
pub use device::Device;
pub use driver::{DRIVER_VARIABLE, Driver, Library};
pub use error::{Error, Result};
pub use event::Event;
pub use host::HostMemory;
pub use memory::DeviceMemory;
pub use module::{Kernel, Module};
pub use registration::Registration;
pub use stream::{Foreign, Stream};
pub use version::Version;
