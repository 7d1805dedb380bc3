//! A file system whose locks are not visible to all of its users, as on NFS, Lustre and FUSE, and
//! what other hosts do there during a call.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::{Arc, Mutex};

use penstock_io::file::{Direct, File};
use penstock_io::file_system::{Change, FileSystem, Files, Native};
use penstock_io::{Error, Result};

const EIO: i32 = 5;

type Call = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct UnlockedState {
    seen: usize,
    /// Another host's action right before the change with this number, counted from 1.
    meanwhile: Option<(usize, Call)>,
    /// The number of the first change that this host, being dead, cannot make.
    dies: Option<usize>,
}

/// One host's view of it.
#[derive(Default)]
pub struct Unlocked {
    state: Mutex<UnlockedState>,
}

impl Unlocked {
    /// A host without any event.
    pub fn host() -> Arc<Unlocked> {
        Arc::new(Unlocked::default())
    }

    /// Performs an action of another host right before the nth change from now.
    pub fn meanwhile(&self, nth: usize, call: impl FnOnce() + Send + 'static) {
        let mut state = self.state.lock().unwrap();
        state.seen = 0;
        state.meanwhile = Some((nth, Box::new(call)));
    }

    /// Kills this host right before the nth change from now.
    pub fn die(&self, nth: usize) {
        let mut state = self.state.lock().unwrap();
        state.seen = 0;
        state.dies = Some(nth);
    }

    /// Whether the scheduled action and death, if any, have happened.
    pub fn is_done(&self) -> bool {
        let state = self.state.lock().unwrap();
        state.meanwhile.is_none() && state.dies.is_none_or(|nth| state.seen >= nth)
    }

    /// Counts a change; returns an error once the host is dead.
    fn count(&self, operation: &'static str, path: &Path) -> Result<()> {
        let mut state = self.state.lock().unwrap();
        state.seen += 1;
        let seen = state.seen;
        let is_dead = state.dies.is_some_and(|nth| seen >= nth);
        let call = state.meanwhile.take_if(|(nth, _)| *nth == seen);
        drop(state);
        if let Some((_, call)) = call {
            call();
        }
        if is_dead {
            return Err(Error::Storage {
                operation,
                path: path.to_owned(),
                source: io::Error::from_raw_os_error(EIO),
            });
        }
        Ok(())
    }
}

impl fmt::Debug for Unlocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Unlocked")
    }
}

impl FileSystem for Unlocked {
    fn files(&self) -> &dyn Files {
        &Native
    }

    fn create(&self, path: &Path, direct: Direct) -> Result<File> {
        self.count("create", path)?;
        Native.create(path, direct)
    }

    fn change(&self, change: Change<'_>) -> Result<()> {
        self.count(change.operation(), change.path())?;
        Native.change(change)
    }

    fn locks(&self, _: BorrowedFd<'_>) -> bool {
        false
    }
}
