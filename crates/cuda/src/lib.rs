//! The CUDA driver, loaded on first use.
//!
//! Nothing here is linked with CUDA: the functions of the driver are looked up by name in a library
//! (`libcuda.so.1`, or the one in `PENSTOCK_CUDA_DRIVER`), so that the same program runs on
//! machines without one. A driver that is *found* need not be *usable*: it may be too old, without
//! a device or without permission, and [`Error`] distinguishes these.
//!
//! Rules of this crate, as PyTorch or another library uses the driver in the same process:
//!
//! - devices are used through their primary context, which is current during a call and no longer;
//! - streams are this crate's own, and do not wait for stream 0; an [`Event`] makes the device, not
//!   the host, wait for work that another library has queued on a stream;
//! - a call never invalidates a graph that another thread captures, and work that would go into a
//!   graph is refused;
//! - forks of a process that used the driver never use it.
//!
//! It is the lowest layer: `penstock-io` uses it, and it has no files and no tensors.

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

pub use copies::{Direction, PitchedCopy};
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
