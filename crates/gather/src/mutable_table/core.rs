//! `Core`: the state that lookups, updates and compaction of a mutable table share.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

use penstock_io::buffer::Memory;

use super::form::Form;
use super::lock::Lock;
use super::manifest::{TableManifest, piece_path};
use super::newest::{Address, Newest};
use super::piece::{self, Of};
use super::record::Filling;
use super::storage::Storage;
use crate::cache::Cache;
use crate::error::{Error, Result};
use crate::reader::shared::{Counts, Number, ReaderShared};
use crate::table::runs::Merging;
use crate::table::{Segment, Table};

/// State of a mutable table. Locks are taken in the order of the fields, the cache's lock last.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) home: PathBuf,
    pub(super) form: Form,
    pub(super) storage: Storage,
    pub(super) merging: Merging,
    pub(super) cache: Option<Arc<Cache>>,
    /// The table's number in the cache.
    pub(super) number: Arc<Number>,
    pub(super) counts: Arc<Counts>,
    pub(super) next_batch: AtomicU64,
    pub(super) process: u32,
    /// Held while any reader or compaction is left, even after the table was closed.
    pub(super) lock: Lock,
    /// The thread that compacts, or reads a snapshot.
    pub(super) holder: Mutex<Option<ThreadId>>,
    pub(super) drop_logs: Condvar,
    pub(super) manifest: Mutex<TableManifest>,
    pub(super) inner: Mutex<Inner>,
}

/// Where each row is stored.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) newest: Newest,
    pub(super) pieces: Vec<Segment>,
    /// All pieces as one table.
    pub(super) base: Arc<ReaderShared>,
    /// Logs, by number.
    pub(super) logs: HashMap<u64, Arc<ReaderShared>>,
    /// The record that rows are being added to, and its log.
    pub(super) filling: Option<(u64, Filling)>,
    /// Records in flight to their log, oldest first.
    pub(super) flying: VecDeque<Flying>,
}

/// A record in flight.
#[derive(Debug)]
pub(super) struct Flying {
    pub(super) log: u64,
    pub(super) begin: u64,
    pub(super) bytes: u64,
    pub(super) memory: Arc<Memory>,
}

impl Inner {
    /// The bytes of a row that is in memory because its log does not have it yet.
    pub(super) fn in_memory(&self, address: Address) -> Option<&[u8]> {
        let (log, place) = (address.log(), address.place());
        if let Some((of, filling)) = &self.filling
            && *of == log
            && place >= filling.begin
        {
            return Some(filling.bytes_at(place));
        }
        let has =
            |one: &&Flying| one.log == log && (one.begin..one.begin + one.bytes).contains(&place);
        let flying = self.flying.iter().find(has)?;
        Some(&flying.memory.as_slice()[(place - flying.begin) as usize..])
    }

    /// The log of a row in files (`None` for pieces), and its number there.
    pub(super) fn source_of(&self, id: u64) -> (Option<u64>, u64) {
        match self.newest.get(id) {
            None => (None, id),
            Some(address) => (Some(address.log()), address.step()),
        }
    }

    /// The reader of the pieces, or of a log.
    pub(super) fn source(&self, log: Option<u64>) -> &Arc<ReaderShared> {
        match log {
            None => &self.base,
            Some(number) => &self.logs[&number],
        }
    }
}

impl Core {
    pub(super) fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn manifest(&self) -> MutexGuard<'_, TableManifest> {
        self.manifest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn check_process(&self) -> Result<()> {
        let process = self.process;
        match process == penstock_io::process::id() {
            true => Ok(()),
            false => Err(penstock_io::Error::Forked { process }.into()),
        }
    }

    pub(super) fn check(&self, ids: &[u64]) -> Result<()> {
        let rows = self.form.rows;
        match ids.iter().position(|&id| id >= rows) {
            None => Ok(()),
            Some(position) => Err(Error::OutOfRange {
                position,
                id: i128::from(ids[position]),
                rows,
            }),
        }
    }

    /// A reader of a table with this table's cache and counters.
    pub(super) fn shared(&self, table: Table) -> Arc<ReaderShared> {
        Arc::new(ReaderShared {
            table,
            cache: self.cache.clone(),
            counts: Arc::clone(&self.counts),
            share: Arc::clone(&self.storage.share),
            merging: self.merging,
            number: Arc::clone(&self.number),
            next_batch: AtomicU64::new(0),
            process: self.process,
        })
    }

    /// A reader of these pieces.
    pub(super) fn shared_of_pieces(&self, pieces: &[Segment]) -> Arc<ReaderShared> {
        let Form {
            row_bytes,
            value_bytes,
            ..
        } = self.form;
        self.shared(Table::new(pieces.to_vec(), row_bytes, value_bytes))
    }

    /// Opens the file of a piece.
    pub(super) fn open_piece(&self, piece: u64, number: u64) -> Result<Segment> {
        let path = piece_path(&self.home, number);
        let of = Of {
            table: self.manifest().id(),
            form: &self.form,
            piece,
        };
        piece::open(&self.storage, &path, of)
    }

    /// Commits this manifest.
    pub(super) fn commit(&self, manifest: &TableManifest) -> Result<()> {
        self.lock.check()?;
        manifest.commit(&self.home, &*self.storage.file_system)
    }

    /// Waits until no compaction or snapshot is active, and excludes others; `None` on timeout.
    ///
    /// # Errors
    /// [`Error::Held`] if this thread holds one.
    pub(super) fn hold(self: &Arc<Self>, timeout: Duration) -> Result<Option<Held>> {
        let me = thread::current().id();
        let holder = self.holder.lock().unwrap_or_else(PoisonError::into_inner);
        if *holder == Some(me) {
            let path = self.home.clone();
            return Err(Error::Held { path });
        }
        let waited = self
            .drop_logs
            .wait_timeout_while(holder, timeout, |holder| holder.is_some());
        let (mut holder, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() && holder.is_some() {
            return Ok(None);
        }
        *holder = Some(me);
        drop(holder);
        let core = Arc::clone(self);
        Ok(Some(Held { core }))
    }
}

/// The right to compact or to read a snapshot, released on drop.
#[derive(Debug)]
pub(super) struct Held {
    core: Arc<Core>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let holder = self.core.holder.lock();
        *holder.unwrap_or_else(PoisonError::into_inner) = None;
        self.core.drop_logs.notify_one();
    }
}
