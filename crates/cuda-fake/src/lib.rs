//! The CUDA driver API on host memory, for tests without a GPU.
//!
//! The library `libpenstock_cuda_fake.so` has the functions of `libcuda.so.1` that Penstock uses,
//! with the signatures of `cuda.h` 13.2, and those of `libcufile.so.0`. Code under test loads it by
//! the path of [`library()`], and in no other way. A Rust test controls it by a [`Control`]; a test
//! in another language by the symbols `penstock_fake_*` (`symbols.rs`) and the environment:
//! `PENSTOCK_FAKE_SEED`, `PENSTOCK_FAKE_DEVICES`, `PENSTOCK_FAKE_MEMORY_BYTES`,
//! `PENSTOCK_FAKE_DELAY_US`, `PENSTOCK_FAKE_DRIVER_VERSION`, `PENSTOCK_FAKE_PINNED_BYTES`,
//! `PENSTOCK_FAKE_PINNING_PERMITTED`, `PENSTOCK_FAKE_GARBLES` and `PENSTOCK_FAKE_CUFILE_DIRECT`.
//!
//! ```no_run
//! let control = penstock_cuda_fake::Control::new();
//! control.set_delay_us_max(500);
//! // Code that loads a driver by path gets `penstock_cuda_fake::library()`; it runs in this scope.
//! assert_eq!(control.leaks(), penstock_cuda_fake::Leaks::default());
//! ```
//!
//! It is made to catch callers that rely on behaviour that no driver promises:
//! - Device memory cannot be accessed by its address, and starts with a pattern.
//! - Each stream is a thread. Its operations take times drawn from a seed, or wait for a test's
//!   permission. A copy reads its source in one go when it executes, and writes its destination in
//!   one go when it ends; from the call on, a destination on the host holds garbage.
//! - Calls that a real driver refuses are refused with the same code: with a handle that is gone,
//!   without a context, in a fork or during a capture. An operation that fails takes its context
//!   with it.
//! - Calls and operations fail when a test plans it, and objects that are not freed are counted.
//!
//! It is stricter than a driver in these points: a context's handle is not reused after its last
//! release; devices cannot access memory that was registered without `DEVICEMAP`, and without
//! `PORTABLE` it is not pinned in other contexts; `cuMemHostUnregister` does not wait, and a copy
//! that begins after it fails.
//!
//! It lacks graphs that can be launched, managed memory, arrays, peers, contexts other than the
//! primary one, memory pools, and device code: kernels are functions of the host, known by name.

#![allow(unsafe_code)]

mod api;
mod backing;
mod capture;
mod config;
mod context;
mod control;
mod driver;
mod event;
mod executor;
mod fault;
mod handle;
mod hold;
mod journal;
mod kernel;
mod kernels;
mod leaks;
mod library;
mod memory;
mod module;
mod operation;
mod state;
mod status;
mod stream;
mod symbols;
mod thread;
mod transfer;

pub use control::{Control, Hold};
pub use journal::Entry;
pub use leaks::Leaks;
pub use library::library;
pub use operation::Kind;
