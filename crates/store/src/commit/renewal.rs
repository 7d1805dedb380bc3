//! Renewals: how an attempt is known to be live where no lock tells.
//!
//! There a sweep goes by age: an attempt is dead whose youngest file is older than a limit, by the clock of
//! the storage. Whoever saves for long writes a small file now and then, the *lease*, whose age is what
//! counts then. It is written by a thread, first after [`RENEW`], so that a save that is shorter asks for
//! nothing, and removed with the end of the attempt. [`RENEW`] is a third of the least limit that a sweep
//! takes ([`AGE_MIN`]), so sweeps and saves need not agree on one.
//!
//! What it does not promise: a process that is stopped for longer than a limit is taken for dead. Its
//! commit fails then ([`super::fence`]).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use penstock_io::file::Direct;
use penstock_io::file_system::{Change, FileSystem};

/// The least age at which files of an attempt are taken for dead. A request that nobody waits for any more
/// may be carried out for as long as its signature is good, 15 minutes on S3.
pub(crate) const AGE_MIN: Duration = Duration::from_secs(15 * 60);

/// Between two renewals.
pub(super) const RENEW: Duration = Duration::from_secs(AGE_MIN.as_secs() / 3);

/// The lease of an attempt, renewed until it is dropped.
#[derive(Debug)]
pub(super) struct Renewal {
    file_system: Arc<dyn FileSystem>,
    path: PathBuf,
    /// Ends the thread, which tells whether it has written anything.
    running: Option<(Sender<()>, JoinHandle<bool>)>,
    /// A fork has no such thread, and nothing to remove.
    process: u32,
}

impl Renewal {
    /// Renews a lease once in an interval. Without a thread to be had there is none: sweeps take longer
    /// than saves by default.
    pub(super) fn begin(
        path: PathBuf,
        file_system: &Arc<dyn FileSystem>,
        interval: Duration,
    ) -> Renewal {
        let (end, ended) = channel();
        let (writes, to) = (Arc::clone(file_system), path.clone());
        let renew = move || {
            let mut is_written = false;
            while ended.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                // The next one may succeed.
                is_written |= write(&to, writes.as_ref()).is_ok();
            }
            is_written
        };
        let thread = std::thread::Builder::new().name("penstock-lease".to_owned());
        Renewal {
            file_system: Arc::clone(file_system),
            path,
            running: thread.spawn(renew).ok().map(|thread| (end, thread)),
            process: std::process::id(),
        }
    }
}

fn write(path: &Path, file_system: &dyn FileSystem) -> penstock_io::Result<()> {
    let file = file_system.create(path, Direct::Off)?;
    file_system.change(Change::Write(&file, b"{}"))?;
    file_system.change(Change::SyncData(&file))
}

impl Drop for Renewal {
    fn drop(&mut self) {
        let Some((end, thread)) = self.running.take() else {
            return;
        };
        if self.process != std::process::id() {
            return;
        }
        drop(end);
        if thread.join().unwrap_or(true) {
            // Best effort: it is swept with what is left of the attempt.
            let _ = self.file_system.change(Change::RemoveFile(&self.path));
        }
    }
}
