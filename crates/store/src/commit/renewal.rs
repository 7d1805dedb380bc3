//! Renewals: keep an attempt recognizable as live where no lock does.
//!
//! Sweeps go by age there: an attempt is dead if its youngest file is older than a limit, by the
//! clock of the storage. A long save therefore rewrites a small file, the *lease*, at intervals. A
//! thread writes it, first after [`RENEW`], so that a shorter save sends no request for it, and the
//! file is removed when the attempt ends. [`RENEW`] is a third of the smallest limit that a sweep
//! accepts ([`AGE_MIN`]), so saves and sweeps need no agreement on the limit.
//!
//! Limit: a process that is stopped for longer than a sweep's limit is taken for dead. Its commit
//! fails then ([`super::fence`]).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use penstock_io::file::Direct;
use penstock_io::file_system::{Change, FileSystem};

/// The smallest age at which files of an attempt are taken for dead. An abandoned request can still
/// be carried out while its signature is valid, 15 minutes on S3.
pub(crate) const AGE_MIN: Duration = Duration::from_secs(15 * 60);

/// Time between two renewals.
pub(crate) const RENEW: Duration = Duration::from_secs(AGE_MIN.as_secs() / 3);

/// The lease of an attempt, renewed until it is dropped.
#[derive(Debug)]
pub(crate) struct Renewal {
    file_system: Arc<dyn FileSystem>,
    path: PathBuf,
    /// Stops the thread, which returns whether it has written the lease.
    running: Option<(Sender<()>, JoinHandle<bool>)>,
    /// A forked child has no such thread, and must remove nothing.
    process: u32,
}

impl Renewal {
    /// Renews a lease once per interval. If no thread can be started there is no lease: by default,
    /// sweeps allow more time than saves take.
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
                // If this write fails, the next one may succeed.
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
            // Best effort: a sweep removes it with the attempt's other files.
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

    /// A file system on which a file can be created again any number of times, as objects can.
    #[derive(Debug)]
    struct Reporting(Mutex<Sender<&'static str>>);

    impl FileSystem for Reporting {
        fn create(&self, path: &Path, _: Direct) -> penstock_io::Result<File> {
            // In its place at once: an object is never missing meanwhile.
            let new = path.with_extension("new");
            let file = File::create(&new, Direct::Off)?;
            std::fs::rename(&new, path).unwrap();
            Ok(file)
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
        let (sender, heard) = channel();
        let file_system: Arc<dyn FileSystem> = Arc::new(Reporting(Mutex::new(sender)));
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
