//! A table whose rows can be updated.
//!
//! Rows are stored in pieces, files that are never modified. Updates are appended to logs, many in
//! one request, at the bandwidth of the device, and a table in memory locates the newest version
//! of each row. Compaction rewrites one by one the pieces that have updated rows, and then removes
//! the logs. The manifest, a small file, names the pieces and the logs; replacing it is the
//! commit.
//!
//! Guarantees: updates made before a flush that returned survive a power cut; a read returns a
//! whole row as it was written at some time, not older than the last flush; all bytes read are
//! verified by checksums. Unflushed updates may be lost, the last ones first.
//!
//! In the cache a row has one key wherever it is stored, and an update replaces its cached bytes.
//! A read that overlaps an update is not cached.

mod append;
mod compact;
mod core;
mod form;
mod lock;
mod log;
mod lookup;
mod manifest;
mod newest;
mod piece;
mod record;
mod storage;

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use penstock_io::buffer::{HostRegion, IoBuf, Memory};
use penstock_io::file_system::Change;
use penstock_io::trace;

use self::append::{LogTail, Writer};
use self::core::{Core, Inner};
use self::lock::Lock;
use self::log::{FIRST, Log, Named};
use self::manifest::{TableManifest, log_path, piece_path, sweep};
use self::newest::{Address, Newest};
use self::piece::Of;
use crate::batch::Batch;
use crate::cache::Cache;
use crate::error::{Error, Result};
use crate::reader::shared::{Counts, Number};
use crate::table::Table;
use crate::table::checks::BLOCK_BYTES;
use crate::table::runs::Merging;

pub use self::compact::{Compaction, Frozen};
pub use self::form::Form;
pub use self::manifest::TABLE_MANIFEST;
pub use self::storage::Storage;

/// A table whose rows can be updated, opened exclusively.
#[derive(Debug)]
pub struct MutableTable {
    core: Arc<Core>,
    writer: Mutex<Writer>,
}

/// Options for opening a table.
#[derive(Debug)]
pub struct Opening {
    /// The cache for its rows, if any.
    pub cache: Option<Arc<Cache>>,
    /// When neighbouring rows are read together.
    pub merging: Merging,
    /// Bytes of a log, raised to what one row needs.
    pub log_bytes: u64,
    /// Largest write in bytes, raised to what one row needs.
    pub record_bytes: u64,
}

/// A table that is being created by appending rows.
#[derive(Debug)]
pub struct NewTable {
    storage: Storage,
    home: std::path::PathBuf,
    form: Form,
    manifest: TableManifest,
    /// The piece being filled, and how many of its rows are set.
    filling: Option<(Memory, u64)>,
    is_finished: bool,
    _lock: Lock,
}

impl NewTable {
    /// Begins a table, which exists once [`finish`](NewTable::finish) returns.
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::Busy`], [`Error::Io`].
    ///
    /// # Panics
    /// If the form cannot be stored, or a row is longer than a request of the executor.
    pub fn begin(
        home: &Path,
        form: Form,
        note: serde_json::Value,
        storage: Storage,
    ) -> Result<NewTable> {
        assert!(form.is_sound(), "{form:?} cannot be stored");
        check_request(&form, &storage);
        if !home.exists() {
            storage.change(Change::CreateDirectory(home))?;
        }
        if let Some(parent) = home.parent() {
            storage.change(Change::SyncDirectory(parent))?;
        }
        let lock = Lock::take(home)?;
        manifest::begin(home, &*storage.file_system)?;
        let manifest = TableManifest::new(&form, note);
        // Files of an earlier creation that did not finish.
        sweep(home, &manifest, &*storage.file_system);
        Ok(NewTable {
            storage,
            home: home.to_owned(),
            form,
            manifest,
            filling: None,
            is_finished: false,
            _lock: lock,
        })
    }

    /// Appends rows, given as the bytes of their values.
    ///
    /// # Panics
    /// If the table has fewer rows, or the last row is incomplete.
    pub fn append(&mut self, rows: &HostRegion) -> Result<()> {
        let form = self.form;
        let width = form.value_bytes;
        assert!(rows.len().is_multiple_of(width), "whole rows");
        let count = rows.len() / width;
        let mut taken = 0;
        while taken < count {
            let piece = self.manifest.pieces.len() as u64;
            assert!(piece < form.pieces(), "the table has fewer rows");
            let of_piece = form.bytes_of(piece) / form.row_bytes;
            let (memory, rows_there) = match &mut self.filling {
                Some(filling) => filling,
                filling => {
                    let bytes = piece::file_bytes(&form, piece);
                    filling.insert((Memory::allocate(bytes as usize)?, 0))
                }
            };
            let more = (of_piece - *rows_there).min(count - taken);
            for index in 0..more {
                let at = ((*rows_there + index) * form.row_bytes) as usize;
                let row = &mut memory.as_mut_slice()[at..at + width as usize];
                rows.copy_to((taken + index) * width, row);
            }
            *rows_there += more;
            taken += more;
            if *rows_there == of_piece {
                self.write_piece()?;
            }
        }
        Ok(())
    }

    fn write_piece(&mut self) -> Result<()> {
        let piece = self.manifest.pieces.len() as u64;
        let number = self.manifest.take_piece();
        let path = piece_path(&self.home, number);
        let of = Of {
            table: self.manifest.id(),
            form: &self.form,
            piece,
        };
        match self.filling.take() {
            Some((memory, _)) => piece::write(&self.storage, &path, of, memory)?,
            None => piece::write_zeros(&self.storage, &path, of)?,
        }
        self.manifest.pieces.push(number);
        Ok(())
    }

    /// Commits the table; rows that were not appended are zero.
    pub fn finish(mut self) -> Result<()> {
        while (self.manifest.pieces.len() as u64) < self.form.pieces() {
            self.write_piece()?;
        }
        self.manifest
            .commit(&self.home, &*self.storage.file_system)?;
        self.is_finished = true;
        manifest::end(&self.home, &*self.storage.file_system);
        Ok(())
    }
}

impl Drop for NewTable {
    /// Removes all files of an unfinished table.
    fn drop(&mut self) {
        if !self.is_finished {
            self.manifest.pieces.clear();
            sweep(&self.home, &self.manifest, &*self.storage.file_system);
            manifest::end(&self.home, &*self.storage.file_system);
        }
    }
}

/// Checks that a request can hold a row with the blocks in which it begins and ends.
fn check_request(form: &Form, storage: &Storage) {
    let longest = storage.share.block_bytes().saturating_sub(2 * BLOCK_BYTES);
    assert!(form.row_bytes <= longest, "a row is longer than a request");
}

impl MutableTable {
    /// Reads a table's form, and the metadata that its creator attached.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::Broken`], [`Error::Newer`].
    pub fn describe(home: &Path) -> Result<(Form, serde_json::Value)> {
        let manifest = TableManifest::read(home)?;
        Ok((manifest.form(), manifest.note))
    }

    /// Opens a table exclusively, and recovers all flushed updates.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::Busy`], [`Error::Broken`], [`Error::Newer`], [`Error::Io`].
    ///
    /// # Panics
    /// If the cache's slots do not have the size of a row, or a row is longer than a request.
    pub fn open(home: &Path, storage: Storage, opening: Opening) -> Result<MutableTable> {
        // Without a table no lock file is created.
        TableManifest::read(home)?;
        let lock = Lock::take(home)?;
        let manifest = TableManifest::read(home)?;

        let form = manifest.form();
        check_request(&form, &storage);
        let Opening {
            cache,
            merging,
            log_bytes,
            record_bytes,
        } = opening;
        let fits = |cache: &Cache| cache.row_bytes() as u64 == form.value_bytes;
        assert!(cache.as_deref().is_none_or(fits), "slots are rows");
        sweep(home, &manifest, &*storage.file_system);
        manifest::end(home, &*storage.file_system);
        let run_bytes_max = merging.run_bytes_max.min(storage.share.block_bytes());
        let inner = Inner {
            newest: Newest::default(),
            pieces: Vec::new(),
            base: Arc::new(crate::reader::shared::ReaderShared {
                table: Table::new(Vec::new(), form.row_bytes, form.value_bytes),
                cache: None,
                counts: Arc::default(),
                share: Arc::clone(&storage.share),
                merging,
                number: Number::of(None, 0),
                next_batch: AtomicU64::new(0),
                process: penstock_io::process::id(),
            }),
            logs: HashMap::new(),
            filling: None,
            flying: VecDeque::new(),
        };
        let core = Core {
            home: home.to_owned(),
            form,
            storage,
            merging: Merging {
                run_bytes_max,
                ..merging
            },
            number: Number::of(cache.as_ref(), form.rows),
            cache,
            counts: Arc::default(),
            next_batch: AtomicU64::new(0),
            process: penstock_io::process::id(),
            lock,
            holder: Mutex::new(None),
            drop_logs: Condvar::new(),
            manifest: Mutex::new(manifest),
            inner: Mutex::new(inner),
        };
        core.find_pieces()?;
        let found = core.find_logs()?;
        Ok(MutableTable {
            writer: Mutex::new(Writer::new(log_bytes, record_bytes, found, &form)),
            core: Arc::new(core),
        })
    }

    /// Number and size of its rows.
    pub fn form(&self) -> &Form {
        &self.core.form
    }

    /// Counters since the table was opened.
    pub fn counts(&self) -> &Counts {
        &self.core.counts
    }

    /// Number of updated rows outside of pieces, and bytes of the logs that hold them.
    ///
    /// # Errors
    /// [`Error::Io`] in a fork of the process that opened it.
    pub fn logged(&self) -> Result<(u64, u64)> {
        self.core.check_process()?;
        // In the locking order.
        let end = self.writer().end();
        let manifest = self.core.manifest();
        let closed: u64 = manifest.closed.iter().map(|one| one.end).sum();
        let bytes = closed + manifest.open.map_or(0, |_| end);
        drop(manifest);
        Ok((self.core.inner().newest.len() as u64, bytes))
    }

    /// Begins to gather the current rows in the order of `ids`, which may repeat.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], before anything is read; [`Error::Io`] in a fork of the process that
    /// opened it.
    ///
    /// # Panics
    /// If the length of `out` is not `ids.len()` times the bytes of a row's values.
    pub fn look_up(&self, ids: &[u64], out: IoBuf) -> Result<Batch> {
        let _span = trace::span("look up");
        self.core.look_up(ids, out)
    }

    /// Updates rows, given as the bytes of their values. Later lookups find the new rows. If an id
    /// occurs twice, its last row counts.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], before anything is written; [`Error::Io`] if a log cannot be
    /// written, after which the table has to be opened again; until then [`Error::Failed`].
    ///
    /// # Panics
    /// If the length of `rows` is not `ids.len()` times the bytes of a row's values.
    pub fn update(&self, ids: &[u64], rows: &HostRegion) -> Result<()> {
        let _span = trace::span("update");
        let core = &self.core;
        assert_eq!(rows.len(), ids.len() as u64 * core.form.value_bytes);
        core.check_process()?;
        core.check(ids)?;
        self.writer().update(core, ids, rows)
    }

    /// Makes all updates durable: when it returns, a power cut cannot undo them.
    pub fn flush(&self) -> Result<()> {
        let _span = trace::span("flush");
        self.core.check_process()?;
        self.writer().flush(&self.core)
    }

    /// Takes a snapshot of all rows, while updates go on. Waits until no other snapshot exists.
    pub fn freeze(&self) -> Result<Frozen> {
        loop {
            if let Some(frozen) = self.try_freeze(Duration::from_secs(60))? {
                return Ok(frozen);
            }
        }
    }

    /// As [`freeze`](MutableTable::freeze), but returns `None` if another snapshot still exists
    /// after `timeout`.
    pub fn try_freeze(&self, timeout: Duration) -> Result<Option<Frozen>> {
        self.core.check_process()?;
        let Some(held) = self.core.hold(timeout)? else {
            return Ok(None);
        };
        let mut frozen = Frozen::new(&self.core, held, &mut self.writer())?;
        frozen.sort();
        Ok(Some(frozen))
    }

    /// Waits until no snapshot exists; `false` on timeout, or if this thread holds one.
    pub fn is_still(&self, timeout: Duration) -> bool {
        matches!(self.core.hold(timeout), Ok(Some(_)) | Err(_))
    }

    fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for MutableTable {
    fn drop(&mut self) {
        if self.core.process == penstock_io::process::id() {
            self.writer().rest();
        }
    }
}

impl Core {
    fn find_pieces(&self) -> Result<()> {
        let numbers = self.manifest().pieces.clone();
        let open = |(piece, number): (u64, u64)| self.open_piece(piece, number);
        let pieces: Result<Vec<_>> = (0..).zip(numbers).map(open).collect();
        let mut inner = self.inner();
        inner.pieces = pieces?;
        inner.base = self.shared_of_pieces(&inner.pieces);
        Ok(())
    }

    /// Replays the logs, oldest first.
    fn find_logs(&self) -> Result<LogTail> {
        let manifest = self.manifest().clone();
        let mut found = LogTail {
            sequence: 0,
            end: FIRST,
            is_unsynced: false,
        };
        let closed = manifest
            .closed
            .iter()
            .map(|one| (one.number, Some(one.end)));
        let logs = closed.chain(manifest.open.map(|number| (number, None)));
        for (index, (number, end)) in logs.enumerate() {
            let path = log_path(&self.home, number);
            let broken = |detail: String| Error::Broken {
                path: path.clone(),
                detail,
            };
            let row_bytes = self.form.row_bytes;
            let named = Named {
                table: manifest.id(),
                number,
            };
            let log = Log::open(&self.storage, &path, named, row_bytes)?;
            if index > 0 && log.first_sequence != found.sequence {
                return Err(broken("it does not follow the log before it".to_owned()));
            }
            let mut inner = self.inner();
            let mut beyond = None;
            let reached = log.replay(&self.storage, row_bytes, end, |id, place| {
                match id < self.form.rows {
                    true => inner.newest.set(id, Address::new(number, place)),
                    false => beyond = Some(id),
                }
            })?;
            if let Some(id) = beyond {
                return Err(broken(format!("it has row {id}: the table has fewer")));
            }
            let source = self.shared(log.table(&self.storage, &self.form)?);
            inner.logs.insert(number, source);
            found = LogTail {
                sequence: reached.sequence,
                end: reached.end,
                is_unsynced: end.is_none() && reached.end > FIRST,
            };
        }
        Ok(found)
    }
}
