//! Bytes, files and memory: the lowest layer of Penstock.
//!
//! This crate moves bytes between host memory and files as fast as the hardware allows. It has no
//! tensors, no checkpoints and no Python. It offers
//!
//! - [`engine`]: reads, writes and syncs with many in flight, through `io_uring` or a thread pool
//!   behind one trait, so that nothing above has to ask which of the two it got;
//! - [`transfer`]: the decorator that turns short transfers and interruptions into whole ones;
//! - [`mod@file`]: files opened for direct I/O where the file system can, with a recorded reason
//!   where it cannot;
//! - [`file_system`]: the one way in which files and directories are changed;
//! - [`buffer`]: page-aligned memory, a bounded pool of buffers, and memory borrowed from a caller;
//! - [`fifo`]: requests that kernels of a device make;
//! - [`priority`]: lower priorities for background threads;
//! - [`process`]: the number of this process, without a system call;
//! - [`trace`]: records of where the time goes, in a file for trace viewers.
//!
//! The rule that everything here serves: an operation **owns** its buffer from submission to
//! completion, and memory that the kernel may still touch is never freed.
//!
//! Durability is the caller's task: a completed write is in the file, not on the medium, until a
//! sync of that file, submitted after the write completed, has completed too.

pub mod buffer;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod device;
pub mod engine;
mod error;
pub mod executor;
#[cfg(feature = "faulty")]
pub mod faulty;
pub mod fifo;
pub mod file;
pub mod file_system;
mod kernels;
pub mod priority;
pub mod process;
pub mod staging;
pub mod trace;
pub mod transfer;

pub use error::{Error, Result};
