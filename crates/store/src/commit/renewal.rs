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
pub(crate) const RENEW: Duration = Duration::from_secs(AGE_MIN.as_secs() / 3);

/// The lease of an attempt, renewed until it is dropped.
#[derive(Debug)]
pub(crate) struct Renewal {
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
    pub(crate) fn begin(
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

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::Receiver;

    use penstock_io::file::File;
    use penstock_io::file_system::Files;

    use super::*;

    /// Where a file is made again as often as anybody wants to, as objects are.
    #[derive(Debug)]
    struct Told(Mutex<Sender<&'static str>>);

    impl FileSystem for Told {
        fn create(&self, path: &Path, _: Direct) -> penstock_io::Result<File> {
            let _ = std::fs::remove_file(path);
            File::create(path, Direct::Off)
        }

        fn change(&self, change: Change<'_>) -> penstock_io::Result<()> {
            if matches!(change, Change::SyncData(_) | Change::RemoveFile(_)) {
                self.0.lock().unwrap().send(change.operation()).unwrap();
            }
            penstock_io::file_system::Native.change(change)
        }

        fn files(&self) -> &dyn Files {
            &penstock_io::file_system::Native
        }
    }

    fn renew(path: &Path, interval: Duration) -> (Renewal, Receiver<&'static str>) {
        let (told, heard) = channel();
        let file_system: Arc<dyn FileSystem> = Arc::new(Told(Mutex::new(told)));
        let renewal = Renewal::begin(path.to_owned(), &file_system, interval);
        (renewal, heard)
    }

    #[test]
    fn a_lease_is_renewed_until_the_attempt_ends_and_removed_then() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("lease");
        let (renewal, heard) = renew(&path, Duration::from_millis(1));
        for _ in 0..3 {
            assert_eq!(heard.recv().unwrap(), "fdatasync");
        }
        assert!(path.exists());
        drop(renewal);
        assert_eq!(heard.iter().last(), Some("remove"));
        assert!(!path.exists());
    }

    #[test]
    fn an_attempt_that_is_short_asks_for_nothing() {
        let root = tempfile::tempdir().unwrap();
        let (renewal, heard) = renew(&root.path().join("lease"), RENEW);
        drop(renewal);
        assert_eq!(heard.iter().next(), None);
    }
}
