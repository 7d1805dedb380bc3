//! A descriptor that becomes readable when transfers end, for event loops that poll descriptors.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::EventfdFlags;

use crate::{Error, Result};

/// Collects the keys of transfers that have ended; see
/// [`Transfer::on_done`](super::Transfer::on_done).
#[derive(Clone, Debug)]
pub struct EventFd {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    eventfd: OwnedFd,
    ended: Mutex<Vec<u64>>,
}

impl EventFd {
    /// # Errors
    /// [`Error::Engine`] where the process has too many descriptors.
    pub fn new() -> Result<EventFd> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let eventfd = rustix::event::eventfd(0, flags).map_err(|errno| Error::Engine {
            operation: "eventfd",
            source: errno.into(),
        })?;
        let ended = Mutex::default();
        Ok(EventFd {
            inner: Arc::new(Inner { eventfd, ended }),
        })
    }

    /// A callback that records `key` and makes the descriptor readable.
    pub fn signal(&self, key: u64) -> Box<dyn FnOnce() + Send> {
        let inner = Arc::clone(&self.inner);
        Box::new(move || inner.post(key))
    }

    /// Takes the keys of the transfers that have ended since the last call, and makes the
    /// descriptor unreadable.
    pub fn take(&self) -> Vec<u64> {
        let mut ended = self.inner.lock();
        // The result is not needed: the list of keys is complete.
        let _ = rustix::io::read(&self.inner.eventfd, &mut [0; 8]);
        std::mem::take(&mut ended)
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.eventfd.as_fd()
    }
}

impl Inner {
    fn post(&self, key: u64) {
        self.lock().push(key);
        // It fails only after 2^64 - 1 writes without a read.
        let _ = rustix::io::write(&self.eventfd, &1_u64.to_ne_bytes());
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<u64>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
