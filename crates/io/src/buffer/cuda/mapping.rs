//! Memory that is mapped for kernels step by step, as more of it is used.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use penstock_cuda::{Device, Registration};

use crate::buffer::Memory;
use crate::{Error, Result};

/// Bytes pinned by one call, in whole pages: other threads that pin wait meanwhile.
const MAPPED_BYTES: usize = if cfg!(test) { 64 << 10 } else { 256 << 20 };

/// Memory in slots, a growing first part of which kernels of a device read, and how many readers
/// each slot has.
pub(in crate::buffer) struct Mapping {
    device: Arc<Device>,
    /// Address of the first slot for kernels.
    device_address: AtomicU64,
    /// Mapped bytes from the start; the rest is not pinned yet.
    bytes: AtomicUsize,
    /// For each slot, how many readers on the device it is lent to.
    lent: Box<[AtomicU32]>,
    registrations: Mutex<Vec<Registration>>,
    /// Why mapping more has failed, if it has.
    failure: OnceLock<String>,
}

impl Mapping {
    /// Starts with no byte mapped; from now on forks do not inherit the memory.
    pub(in crate::buffer) fn of(
        device: &Arc<Device>,
        memory: &Memory,
        count: usize,
    ) -> Result<Mapping> {
        let bytes = memory.len();
        let kept = memory.keep_from_forks();
        kept.map_err(|source| Error::OutOfMemory { bytes, source })?;
        Ok(Mapping {
            device: Arc::clone(device),
            device_address: AtomicU64::new(0),
            bytes: AtomicUsize::new(0),
            lent: (0..count).map(|_| AtomicU32::new(0)).collect(),
            registrations: Mutex::default(),
            failure: OnceLock::new(),
        })
    }

    /// Maps the first `bytes` of the memory, rounded up to whole steps.
    pub(in crate::buffer) fn grow(
        &self,
        memory: &Memory,
        bytes: usize,
    ) -> std::result::Result<(), String> {
        if bytes.min(memory.len()) <= self.bytes.load(Ordering::Acquire) {
            return Ok(());
        }
        if let Some(failure) = self.failure.get() {
            return Err(failure.clone());
        }
        let grown = self
            .try_grow(memory, bytes)
            .map_err(|error| error.to_string());
        grown.inspect_err(|failure| _ = self.failure.set(failure.clone()))
    }

    fn try_grow(&self, memory: &Memory, bytes: usize) -> Result<()> {
        let lock = self.registrations.lock();
        let mut registrations = lock.unwrap_or_else(PoisonError::into_inner);
        let start = memory.as_non_null().as_ptr().expose_provenance();
        loop {
            let first = self.bytes.load(Ordering::Relaxed);
            if first >= bytes.min(memory.len()) {
                return Ok(());
            }
            let end = memory.len().min(first + MAPPED_BYTES);
            memory.populate(first..end);
            // SAFETY: the pages stay until the mapping is dropped, which drops the registration
            // first.
            let registration =
                unsafe { Registration::mapped(&self.device, start + first, end - first) }?;
            let address = registration.device_address()?;
            if first == 0 {
                self.device_address.store(address, Ordering::Relaxed);
            } else if address != self.device_address.load(Ordering::Relaxed) + first as u64 {
                return Err(Error::Cuda(penstock_cuda::Error::Unusable {
                    ordinal: self.device.ordinal(),
                    reason: "kernels find parts of memory apart from each other".to_owned(),
                }));
            }
            registrations.push(registration);
            self.bytes.store(end, Ordering::Release);
        }
    }

    /// The address for kernels of `len` bytes at `offset`, if they are mapped.
    pub(in crate::buffer) fn find(&self, offset: usize, len: usize) -> Option<u64> {
        let is_there = offset + len <= self.bytes.load(Ordering::Acquire);
        is_there.then(|| self.device_address.load(Ordering::Relaxed) + offset as u64)
    }

    /// The device whose kernels read the memory.
    pub(in crate::buffer) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Marks a slot as read by kernels, until it is [given back](Mapping::give_back).
    pub(in crate::buffer) fn lend(&self, slot: u32) {
        self.lent[slot as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(in crate::buffer) fn give_back(&self, slot: u32) {
        self.lent[slot as usize].fetch_sub(1, Ordering::Release);
    }

    /// Whether kernels read a slot.
    pub(in crate::buffer) fn is_lent(&self, slot: u32) -> bool {
        self.lent[slot as usize].load(Ordering::Acquire) > 0
    }
}
