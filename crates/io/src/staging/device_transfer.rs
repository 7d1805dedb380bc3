//! The handle of a transfer between files and device memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::Outcome;
use crate::executor::{Moved, Transfer};
use crate::{Error, Result};

/// Bytes moved, in all and by path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceMoved {
    /// Between files and host memory, the host's part of the transfer included.
    pub moved: Moved,
    /// Between the host and devices.
    pub device_bytes: u64,
}

/// A transfer of device memory in flight. Dropping it does not stop it.
#[derive(Debug)]
pub struct DeviceTransfer {
    shared: Arc<TransferShared>,
    process: u32,
    forked: Error,
}

impl DeviceTransfer {
    /// The handle of the transfer that a copy job has begun.
    pub(super) fn of(shared: &Arc<TransferShared>) -> DeviceTransfer {
        let process = crate::process::id();
        DeviceTransfer {
            shared: Arc::clone(shared),
            process,
            forked: Error::Forked { process },
        }
    }

    /// Whether it has ended, with success or failure. Always false in a fork of the process that
    /// moves the bytes.
    pub fn is_done(&self) -> bool {
        self.is_ours() && self.shared.outcome.get().is_some()
    }

    /// Waits until every byte is in place; returns the bytes moved, or `None` after the timeout.
    ///
    /// # Errors
    /// The first failure, at every call; [`Error::Forked`].
    pub fn wait(
        &self,
        timeout: Option<Duration>,
    ) -> std::result::Result<Option<DeviceMoved>, &Error> {
        if !self.is_ours() {
            return Err(&self.forked);
        }
        match self.shared.outcome.wait(timeout) {
            None => Ok(None),
            Some((Ok(moved), _)) => Ok(Some(*moved)),
            Some((Err(error), _)) => Err(error),
        }
    }

    /// The time from creation to the end; zero until then.
    pub fn took(&self) -> Duration {
        match self.is_ours().then(|| self.shared.outcome.get()).flatten() {
            Some((_, took)) => *took,
            None => Duration::ZERO,
        }
    }

    /// Cancels the pieces that have not begun, as [`Transfer::cancel`] does.
    pub fn cancel(&self) -> Result<()> {
        if !self.is_ours() {
            let process = self.process;
            return Err(Error::Forked { process });
        }
        self.shared.is_cancelled.store(true, Ordering::Release);
        match &self.shared.host_transfer {
            Some(host_transfer) => host_transfer.cancel(),
            None => Ok(()),
        }
    }

    /// Calls `watcher` at the end, on the pipeline's thread, or at once if it has ended already. It
    /// must not wait.
    pub fn on_done(&self, watcher: Box<dyn FnOnce() + Send>) -> Result<()> {
        if !self.is_ours() {
            let process = self.process;
            return Err(Error::Forked { process });
        }
        self.shared.outcome.on_resolved(watcher);
        Ok(())
    }

    fn is_ours(&self) -> bool {
        self.process == crate::process::id()
    }
}

/// The state that a copy job and the handle of its transfer share.
#[derive(Debug)]
pub(super) struct TransferShared {
    outcome: Outcome<(Result<DeviceMoved>, Duration)>,
    is_cancelled: AtomicBool,
    began: Instant,
    /// The host's part of the transfer.
    host_transfer: Option<Transfer>,
}

impl TransferShared {
    /// The state of a transfer that begins now.
    pub(super) fn new(host_transfer: Option<Transfer>) -> TransferShared {
        TransferShared {
            outcome: Outcome::default(),
            is_cancelled: AtomicBool::new(false),
            began: Instant::now(),
            host_transfer,
        }
    }

    /// Whether the pieces that have not begun are cancelled.
    pub(super) fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Acquire)
    }

    /// Reports the result of the job; only the first call has an effect.
    pub(super) fn resolve(&self, result: Result<DeviceMoved>) {
        self.outcome.resolve((result, self.began.elapsed()));
    }
}
