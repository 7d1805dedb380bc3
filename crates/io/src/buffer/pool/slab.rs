//! The mappings that a pool cuts its buffers from.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use penstock_cuda::{Device, Registration};

use crate::Result;
use crate::buffer::Memory;

/// Large enough to keep the number of mappings small; a larger buffer has a slab of its own.
const PLAIN_BYTES: usize = 16 << 20;

/// Pinning takes a lock that all processes share: this size pins seldom, and never for as long as a
/// second.
const PINNED_BYTES: usize = 256 << 20;

/// Slab sizes are multiples of it, so that later pools find slabs that fit.
const STEP_BYTES: usize = 4 << 20;

/// Bytes that a thread touches at a time before memory is pinned.
const TOUCH_BYTES: usize = 16 << 20;
const TOUCH_THREADS_MAX: usize = 8;

/// One mapping in huge pages.
pub(super) struct Slab {
    /// Dropped before the memory is.
    pinned: Option<Registration>,
    memory: Memory,
    /// Bytes that a pool has cut buffers from.
    used_bytes: usize,
}

impl Slab {
    /// The usual size of a slab.
    pub(super) fn suited_bytes(is_pinned: bool) -> usize {
        match is_pinned {
            true => PINNED_BYTES,
            false => PLAIN_BYTES,
        }
    }

    pub(super) fn plain(bytes: usize) -> Result<Slab> {
        Ok(Slab {
            pinned: None,
            memory: Memory::allocate(bytes)?,
            used_bytes: bytes,
        })
    }

    /// Allocates a slab that is pinned for devices and kept out of forks; also returns why it is
    /// not, where it is not. Its size is one of a few, so that another pool can use it later.
    pub(super) fn pinned(bytes: usize, device: &Arc<Device>) -> Result<(Slab, Option<String>)> {
        let memory = Memory::allocate(bytes.next_multiple_of(STEP_BYTES))?;
        let pinned = match memory.keep_from_forks() {
            Ok(()) => {
                // The driver would touch the pages one by one, several times slower.
                touch(&memory);
                // SAFETY: the pages are this slab's, which drops the registration first.
                unsafe { Registration::new(device, memory.address(), memory.len()) }
                    .map_err(|error| error.to_string())
            }
            Err(error) => Err(format!("madvise: {error}")),
        };
        let (pinned, unpinned) = match pinned {
            Ok(pinned) => (Some(pinned), None),
            Err(reason) => (None, Some(reason)),
        };
        let used_bytes = bytes;
        Ok((
            Slab {
                pinned,
                memory,
                used_bytes,
            },
            unpinned,
        ))
    }

    /// Whether this process has pinned it for this device. A fork has the value but not the memory.
    fn is_of(&self, device: &Arc<Device>) -> bool {
        self.memory.is_ours()
            && self
                .pinned
                .as_ref()
                .is_some_and(|pinned| pinned.is_of(device))
    }

    pub(super) fn as_non_null(&self) -> NonNull<u8> {
        self.memory.as_non_null()
    }

    pub(super) fn address(&self) -> usize {
        self.memory.address()
    }

    /// Bytes that buffers are cut from.
    pub(super) fn len(&self) -> usize {
        self.used_bytes
    }
}

/// Pinned slabs that belong to no pool, the one kept last at the end.
static KEPT: Mutex<Vec<Slab>> = Mutex::new(Vec::new());

/// The most bytes to keep.
const KEPT_BYTES_MAX: usize = 1 << 30;

/// Takes the smallest kept slab that has room for `bytes`.
pub(super) fn take_kept(bytes: usize, device: &Arc<Device>) -> Option<Slab> {
    let mut kept = lock();
    let fits = |&at: &usize| kept[at].memory.len() >= bytes && kept[at].is_of(device);
    let at = (0..kept.len())
        .filter(fits)
        .min_by_key(|&at| kept[at].memory.len())?;
    let mut slab = kept.remove(at);
    slab.used_bytes = bytes;
    Some(slab)
}

/// Keeps slabs for later pools; beyond the bound, the slabs kept longest are dropped.
pub(super) fn keep(slabs: Vec<Slab>) {
    let mut kept = lock();
    kept.extend(slabs.into_iter().filter(|slab| slab.pinned.is_some()));
    let mut bytes: usize = kept.iter().map(|slab| slab.memory.len()).sum();
    let mut gone = 0;
    while bytes > KEPT_BYTES_MAX {
        bytes -= kept[gone].memory.len();
        gone += 1;
    }
    let gone: Vec<Slab> = kept.drain(..gone).collect();
    drop(kept);
    drop(gone);
}

/// Returns the kept slabs to the system.
pub(super) fn release_kept() {
    let kept = std::mem::take(&mut *lock());
    drop(kept);
}

fn lock() -> MutexGuard<'static, Vec<Slab>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Touches all pages, by several threads.
fn touch(memory: &Memory) {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let threads = (memory.len() / TOUCH_BYTES).clamp(1, cores.min(TOUCH_THREADS_MAX));
    let share = memory.len().div_ceil(threads);
    thread::scope(|scope| {
        let starts = (0..memory.len()).step_by(share.max(1));
        for start in starts.skip(1) {
            let range = start..memory.len().min(start + share);
            let work = move || memory.populate(range);
            // Where the system has no more threads to give, pinning touches the remaining pages.
            let _ = thread::Builder::new().spawn_scoped(scope, work);
        }
        memory.populate(0..share.min(memory.len()));
    });
}
