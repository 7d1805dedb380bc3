//! A table whose rows are written anew.
//!
//! Rows are in pieces, files that are never changed, and what was written since is in logs, where a
//! table in memory finds it: updates go to the end of a log, many to a request, at the bandwidth of
//! the device. A fold writes the pieces anew that have such rows, one by one, and lets go of the logs.
//! The head, a small file, names the pieces and the logs; to replace it is to commit.
//!
//! Promised: what was written before a flush that returned survives a power cut; a row is read as it
//! was written at some time, whole, and as the latest one that was flushed or a later one; what is
//! read of a file is compared with checksums. Rows that were written and not flushed may be lost, the
//! last ones first.
//!
//! In the cache a row has one key wherever it lies; writing it anew changes what is there. A row that
//! was on its way meanwhile is not kept.

mod append;
mod core;
mod fold;
mod form;
mod frame;
mod head;
mod lock;
mod log;
mod lookup;
mod newest;
mod piece;
mod storage;

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use penstock_io::buffer::{HostRegion, IoBuf, Memory};
use penstock_io::file_system::Change;
use penstock_io::trace;

use self::append::{Found, Writer};
use self::core::{Core, Inner};
use self::head::{Head, log_path, piece_path, sweep};
use self::lock::Lock;
use self::log::{FIRST, Log, Named};
use self::newest::{Address, Newest};
use self::piece::Of;
use crate::batch::Batch;
use crate::cache::Cache;
use crate::checks::BLOCK_BYTES;
use crate::error::{Error, Result};
use crate::runs::Merging;
use crate::shared::{Counts, Number};
use crate::table::Table;

pub use self::fold::{Folded, Frozen};
pub use self::form::Form;
pub use self::head::TABLE_HEAD;
pub use self::storage::Storage;

/// See the module's description.
#[derive(Debug)]
pub struct ChangingTable {
    core: Arc<Core>,
    writer: Mutex<Writer>,
}

/// How a table is opened.
#[derive(Debug)]
pub struct Opening {
    /// Rows in memory that it has some of.
    pub cache: Option<Arc<Cache>>,
    /// Which rows are read together.
    pub merging: Merging,
    /// Bytes of a log; brought up to what a row takes.
    pub log_bytes: u64,
    /// Bytes that are written at once, at most; brought up to what a row takes.
    pub frame_bytes: u64,
}

/// A table that is being made: rows are appended to it.
#[derive(Debug)]
pub struct NewTable {
    storage: Storage,
    home: std::path::PathBuf,
    form: Form,
    head: Head,
    /// The next piece, and how many rows of it there are.
    filling: Option<(Memory, u64)>,
    is_finished: bool,
    _lock: Lock,
}

impl NewTable {
    /// Begins a table; it is there when it is finished.
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::Busy`], [`Error::Io`].
    ///
    /// # Panics
    /// If the form is none that can be stored, or rows are longer than a request of the executor.
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
        head::begin(home, &*storage.file_system)?;
        let head = Head::new(&form, note);
        // Of one that was begun and never finished.
        sweep(home, &head, &*storage.file_system);
        Ok(NewTable {
            storage,
            home: home.to_owned(),
            form,
            head,
            filling: None,
            is_finished: false,
            _lock: lock,
        })
    }

    /// Appends rows: of each, the bytes of its values.
    ///
    /// # Errors
    /// [`Error::Io`].
    ///
    /// # Panics
    /// If there are more than the table has, or part of one.
    pub fn append(&mut self, rows: &HostRegion) -> Result<()> {
        let form = self.form;
        let width = form.value_bytes;
        assert!(rows.len().is_multiple_of(width), "whole rows");
        let count = rows.len() / width;
        let mut taken = 0;
        while taken < count {
            let piece = self.head.pieces.len() as u64;
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
        let piece = self.head.pieces.len() as u64;
        let number = self.head.take_piece();
        let path = piece_path(&self.home, number);
        let of = Of {
            table: self.head.id(),
            form: &self.form,
            piece,
        };
        match self.filling.take() {
            Some((memory, _)) => piece::write(&self.storage, &path, of, memory)?,
            None => piece::write_zeros(&self.storage, &path, of)?,
        }
        self.head.pieces.push(number);
        Ok(())
    }

    /// Commits the table; rows that were not appended are zero.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn finish(mut self) -> Result<()> {
        while (self.head.pieces.len() as u64) < self.form.pieces() {
            self.write_piece()?;
        }
        self.head.commit(&self.home, &*self.storage.file_system)?;
        self.is_finished = true;
        head::end(&self.home, &*self.storage.file_system);
        Ok(())
    }
}

impl Drop for NewTable {
    /// Of one that was not finished nothing stays.
    fn drop(&mut self) {
        if !self.is_finished {
            self.head.pieces.clear();
            sweep(&self.home, &self.head, &*self.storage.file_system);
            head::end(&self.home, &*self.storage.file_system);
        }
    }
}

/// Requests have to be able to bring a row with the blocks that it begins and ends in.
fn check_request(form: &Form, storage: &Storage) {
    let longest = storage.share.block_bytes().saturating_sub(2 * BLOCK_BYTES);
    assert!(form.row_bytes <= longest, "a row is longer than a request");
}

impl ChangingTable {
    /// What the caller said of a table when it was made, and its form.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::Broken`], [`Error::Newer`].
    pub fn look(home: &Path) -> Result<(Form, serde_json::Value)> {
        let head = Head::read(home)?;
        Ok((head.form(), head.note))
    }

    /// Opens a table, alone, and finds all that was flushed.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::Busy`], [`Error::Broken`], [`Error::Newer`], [`Error::Io`].
    ///
    /// # Panics
    /// If slots of the cache do not have the size of rows, or a row is longer than a request.
    pub fn open(home: &Path, storage: Storage, opening: Opening) -> Result<ChangingTable> {
        // No lock is made where there is no table.
        Head::read(home)?;
        let lock = Lock::take(home)?;
        let head = Head::read(home)?;

        let form = head.form();
        check_request(&form, &storage);
        let Opening {
            cache,
            merging,
            log_bytes,
            frame_bytes,
        } = opening;
        let fits = |cache: &Cache| cache.row_bytes() as u64 == form.value_bytes;
        assert!(cache.as_deref().is_none_or(fits), "slots are rows");
        sweep(home, &head, &*storage.file_system);
        head::end(home, &*storage.file_system);
        let run_bytes_max = merging.run_bytes_max.min(storage.share.block_bytes());
        let inner = Inner {
            newest: Newest::default(),
            pieces: Vec::new(),
            base: Arc::new(crate::shared::Shared {
                table: Table::new(Vec::new(), form.row_bytes, form.value_bytes),
                cache: None,
                counts: Arc::default(),
                share: Arc::clone(&storage.share),
                merging,
                number: Number::of(None),
                next_batch: AtomicU64::new(0),
                process: std::process::id(),
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
            number: Number::of(cache.as_ref()),
            cache,
            counts: Arc::default(),
            next_batch: AtomicU64::new(0),
            process: std::process::id(),
            lock,
            holder: Mutex::new(None),
            let_go: Condvar::new(),
            head: Mutex::new(head),
            inner: Mutex::new(inner),
        };
        core.find_pieces()?;
        let found = core.find_logs()?;
        Ok(ChangingTable {
            writer: Mutex::new(Writer::new(log_bytes, frame_bytes, found, &form)),
            core: Arc::new(core),
        })
    }

    /// How many rows it has, of what size.
    pub fn form(&self) -> &Form {
        &self.core.form
    }

    /// What was done so far.
    pub fn counts(&self) -> &Counts {
        &self.core.counts
    }

    /// Rows that were written anew and are not in pieces, and bytes of logs that have them.
    ///
    /// # Errors
    /// [`Error::Io`] in a fork of the process that opened it.
    pub fn logged(&self) -> Result<(u64, u64)> {
        self.core.check_process()?;
        // In the order in which locks are taken.
        let end = self.writer().end();
        let head = self.core.head();
        let closed: u64 = head.closed.iter().map(|one| one.end).sum();
        let bytes = closed + head.open.map_or(0, |_| end);
        drop(head);
        Ok((self.core.inner().newest.len() as u64, bytes))
    }

    /// Begins to gather rows, in the order of their ids, which may repeat: each as it is now.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], before anything is read; [`Error::Io`] in a fork of the process that
    /// opened it.
    ///
    /// # Panics
    /// If `out` does not have the bytes of so many values.
    pub fn look_up(&self, ids: &[u64], out: IoBuf) -> Result<Batch> {
        let _span = trace::span("look up");
        self.core.look_up(ids, out)
    }

    /// Writes rows anew: of each, the bytes of its values. Who asks from now on finds them. Of an id
    /// that comes twice the last ones count.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], before anything is written; [`Error::Io`] where a log cannot be
    /// written, after which the table has to be opened again; [`Error::Failed`] then.
    ///
    /// # Panics
    /// If `rows` does not have the bytes of so many values.
    pub fn update(&self, ids: &[u64], rows: &HostRegion) -> Result<()> {
        let _span = trace::span("update");
        let core = &self.core;
        assert_eq!(rows.len(), ids.len() as u64 * core.form.value_bytes);
        core.check_process()?;
        core.check(ids)?;
        self.writer().update(core, ids, rows)
    }

    /// Makes durable all that was written; when it returns, a power cut cannot take it.
    ///
    /// # Errors
    /// As [`update`](ChangingTable::update).
    pub fn flush(&self) -> Result<()> {
        let _span = trace::span("flush");
        self.core.check_process()?;
        self.writer().flush(&self.core)
    }

    /// All rows as they are now, while others are written anew. Waits until nothing else is frozen.
    ///
    /// # Errors
    /// As [`flush`](ChangingTable::flush), which it does.
    pub fn freeze(&self) -> Result<Frozen> {
        loop {
            if let Some(frozen) = self.try_freeze(Duration::from_secs(60))? {
                return Ok(frozen);
            }
        }
    }

    /// As [`freeze`](ChangingTable::freeze); `None` where the time is over before nothing else is
    /// frozen.
    ///
    /// # Errors
    /// As [`freeze`](ChangingTable::freeze); [`Error::Held`] where this thread has all rows frozen.
    pub fn try_freeze(&self, timeout: Duration) -> Result<Option<Frozen>> {
        self.core.check_process()?;
        let Some(held) = self.core.hold(timeout)? else {
            return Ok(None);
        };
        let mut frozen = Frozen::new(&self.core, held, &mut self.writer())?;
        frozen.sort();
        Ok(Some(frozen))
    }

    /// Waits until nothing is frozen; `false` where the time is over before, or this thread has it
    /// so.
    pub fn is_still(&self, timeout: Duration) -> bool {
        matches!(self.core.hold(timeout), Ok(Some(_)) | Err(_))
    }

    fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ChangingTable {
    fn drop(&mut self) {
        if self.core.process == std::process::id() {
            self.writer().rest();
        }
    }
}

impl Core {
    fn find_pieces(&self) -> Result<()> {
        let numbers = self.head().pieces.clone();
        let open = |(piece, number): (u64, u64)| self.open_piece(piece, number);
        let pieces: Result<Vec<_>> = (0..).zip(numbers).map(open).collect();
        let mut inner = self.inner();
        inner.pieces = pieces?;
        inner.base = self.shared_of_pieces(&inner.pieces);
        Ok(())
    }

    /// Finds what was written anew, oldest first.
    fn find_logs(&self) -> Result<Found> {
        let head = self.head().clone();
        let mut found = Found {
            sequence: 0,
            end: FIRST,
            is_unsynced: false,
        };
        let closed = head.closed.iter().map(|one| (one.number, Some(one.end)));
        let logs = closed.chain(head.open.map(|number| (number, None)));
        for (index, (number, end)) in logs.enumerate() {
            let path = log_path(&self.home, number);
            let broken = |detail: String| Error::Broken {
                path: path.clone(),
                detail,
            };
            let row_bytes = self.form.row_bytes;
            let named = Named {
                table: head.id(),
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
            found = Found {
                sequence: reached.sequence,
                end: reached.end,
                is_unsynced: end.is_none() && reached.end > FIRST,
            };
        }
        Ok(found)
    }
}
