//! The CUDA driver API on host memory, for tests without a GPU.
//!
//! The library `libpenstock_cuda_fake.so` has the functions of `libcuda.so.1` that Penstock uses, with the
//! signatures of `cuda.h` 13.2. Code under test loads it by the path that [`library()`] gives, and by no other way.
//! A test steers it by a [`Control`]; one in another language by the symbols `penstock_fake_*`
//! (`symbols.rs`) and the environment: `PENSTOCK_FAKE_SEED`, `PENSTOCK_FAKE_DEVICES`,
//! `PENSTOCK_FAKE_MEMORY_BYTES`, `PENSTOCK_FAKE_DELAY_US`, `PENSTOCK_FAKE_DRIVER_VERSION`,
//! `PENSTOCK_FAKE_PINNED_BYTES`, `PENSTOCK_FAKE_PINNING_PERMITTED`, `PENSTOCK_FAKE_GARBLES` and
//! `PENSTOCK_FAKE_CUFILE_DIRECT`. It has what Penstock uses of `libcufile.so.0` as well.
//!
//! ```no_run
//! let control = penstock_cuda_fake::Control::new();
//! control.set_delay_us_max(500);
//! // What loads a driver by a path gets `penstock_cuda_fake::library()`, and runs in this scope.
//! assert_eq!(control.leaks(), penstock_cuda_fake::Leaks::default());
//! ```
//!
//! It is made to catch callers that rely on what a driver does not promise:
//! - Device memory cannot be reached by its address, and is full of a pattern at first.
//! - Each stream is a thread. Its operations take times drawn from a seed, or wait to be let go. A copy reads
//!   its source in one go when it executes, and writes its destination in one go when it ends; from the call
//!   on, a destination on the host is spoiled.
//! - What a real driver refuses is refused with the same code: handles that are gone, calls without a
//!   context, in a fork or during a capture. An operation that fails takes its context with it.
//! - Calls and operations fail on order, and what is not let go of is counted.
//!
//! What it is stricter in than a driver: a context's handle is not used again after its last release; memory
//! that was registered without `DEVICEMAP` is not reached from a device, and without `PORTABLE` not pinned in
//! other contexts; `cuMemHostUnregister` does not wait, and a copy that begins after it fails.
//!
//! What it does not have: graphs that can be launched, managed memory, arrays, peers, contexts but the
//! primary one, memory pools, and code of devices: kernels are functions of the host, known by name.

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
