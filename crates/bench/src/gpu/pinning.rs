//! Cost of pinning host memory.

use std::sync::Arc;
use std::time::Instant;

use penstock_cuda::{Device, HostMemory};
use penstock_io::Result;
use penstock_io::buffer::Pool;
use serde::Serialize;

/// Seconds taken by pinning.
#[derive(Clone, Debug, Serialize)]
pub struct Pinning {
    /// Bytes that were pinned.
    pub bytes: usize,
    /// As saves and loads pin it: mapped, touched by several threads, then registered.
    pub ours_seconds: f64,
    /// Releasing that memory.
    pub ours_release_seconds: f64,
    /// By the driver alone (`cuMemHostAlloc`, which is `cudaHostAlloc`).
    pub driver_seconds: f64,
    /// Releasing the driver's memory.
    pub driver_release_seconds: f64,
}

/// Pins memory both ways and releases it.
///
/// # Errors
/// [`Error::Cuda`](penstock_io::Error::Cuda), notably if the system allows no more pinned memory.
///
/// # Panics
/// If `bytes` is zero.
pub fn pinning(device: &Arc<Device>, bytes: usize) -> Result<Pinning> {
    let begun = Instant::now();
    let theirs = HostMemory::allocate(device, bytes)?;
    let driver_seconds = begun.elapsed().as_secs_f64();
    let begun = Instant::now();
    drop(theirs);
    let driver_release_seconds = begun.elapsed().as_secs_f64();
    let pool = Pool::pinned(bytes, bytes, device);
    let begun = Instant::now();
    let ours = pool.take()?;
    let ours_seconds = begun.elapsed().as_secs_f64();
    drop(ours);
    let begun = Instant::now();
    drop(pool);
    let ours_release_seconds = begun.elapsed().as_secs_f64();
    Ok(Pinning {
        bytes,
        ours_seconds,
        ours_release_seconds,
        driver_seconds,
        driver_release_seconds,
    })
}
