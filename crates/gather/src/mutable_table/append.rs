//! `Writer`: appends updated rows to a log.

use std::collections::VecDeque;
use std::sync::Arc;

use penstock_io::buffer::{HostRegion, Memory};
use penstock_io::executor::Transfer;
use penstock_io::file::{Direct, File};
use penstock_io::file_system::Change;

use super::core::{Core, Flying, Inner};
use super::form::Form;
use super::log::{FIRST, Log, Named, Reached};
use super::manifest::{Closed, log_path};
use super::newest::{Address, LOG_BYTES_MAX, LOGS_MAX};
use super::record::{self, Filling};
use crate::cache::Cache;
use crate::error::{Error, Result};
use crate::index::key::key_of;
use crate::table::checks::BLOCK_BYTES;

/// Most bytes of records in flight: a caller that writes faster than the device waits.
const FLYING_BYTES_MAX: u64 = 64 << 20;

/// Rows copied under one lock.
const TAKEN: usize = 1024;

/// Where the next rows go. The lock on the writer excludes other writers.
#[derive(Debug)]
pub(super) struct Writer {
    /// Most bytes of a log.
    log_bytes: u64,
    /// Most rows of a record.
    record_rows: u64,
    /// The log that is appended to; `None` before the first row.
    log: Option<Log>,
    /// The end of the records submitted so far.
    reached: Reached,
    /// Writes of the records in flight.
    transfers: VecDeque<Transfer>,
    flying_bytes: u64,
    unused: Vec<Memory>,
    /// Whether appended records may not be durable yet.
    is_dirty: bool,
    /// The failure that stopped all writing.
    failed: Option<String>,
}

/// The end of the last record in the logs that were found.
#[derive(Clone, Copy, Debug)]
pub(super) struct LogTail {
    /// The sequence number of the next record.
    pub(super) sequence: u64,
    /// Its end in the log that was open.
    pub(super) end: u64,
    /// Whether that log has records that may not have been synced.
    pub(super) is_unsynced: bool,
}

impl Writer {
    /// Appends after the found records, to logs of `log_bytes` in records of `record_bytes`, both
    /// raised to what one row needs.
    pub(super) fn new(log_bytes: u64, record_bytes: u64, found: LogTail, form: &Form) -> Writer {
        let least = FIRST + record::bytes_of(1, form.row_bytes);
        let log_bytes = log_bytes.clamp(least, LOG_BYTES_MAX - BLOCK_BYTES);
        Writer {
            log_bytes: log_bytes.next_multiple_of(BLOCK_BYTES),
            record_rows: record::rows_within(record_bytes, form.row_bytes).max(1),
            log: None,
            reached: Reached {
                end: found.end,
                sequence: found.sequence,
            },
            transfers: VecDeque::new(),
            flying_bytes: 0,
            unused: Vec::new(),
            is_dirty: found.is_unsynced,
            failed: None,
        }
    }

    /// Updates rows, given as the bytes of their values; if an id occurs twice, its last row
    /// counts.
    pub(super) fn update(&mut self, core: &Core, ids: &[u64], rows: &HostRegion) -> Result<()> {
        self.check(core)?;
        let done = self.take(core, ids, rows);
        self.noted(done)
    }

    /// Makes all updates durable.
    pub(super) fn flush(&mut self, core: &Core) -> Result<()> {
        self.check(core)?;
        let done = self.write_out(core);
        self.noted(done)
    }

    /// Closes the current log, so that later updates go to another one.
    pub(super) fn close_log(&mut self, core: &Core) -> Result<()> {
        self.check(core)?;
        let done = self.end_log(core);
        self.noted(done)
    }

    /// The end of the log that is appended to, or of the one that was found open.
    pub(super) fn end(&self) -> u64 {
        self.reached.end
    }

    /// Waits for the records in flight, whatever their result: the next opening of the table
    /// then finds all of them or none.
    pub(super) fn rest(&mut self) {
        for transfer in self.transfers.drain(..) {
            drop(transfer.wait(None));
        }
    }

    fn check(&self, core: &Core) -> Result<()> {
        match &self.failed {
            None => Ok(()),
            Some(detail) => Err(Error::Failed {
                path: core.home.clone(),
                detail: detail.clone(),
            }),
        }
    }

    fn noted(&mut self, done: Result<()>) -> Result<()> {
        if let Err(error) = &done {
            let cause = std::error::Error::source(error);
            let cause = cause.map_or_else(String::new, |cause| format!(": {cause}"));
            self.failed = Some(format!("{error}{cause}"));
        }
        done
    }

    fn take(&mut self, core: &Core, ids: &[u64], rows: &HostRegion) -> Result<()> {
        let width = core.form.value_bytes as usize;
        let mut taken = 0;
        while taken < ids.len() {
            let log = self.record(core)?;
            let mut inner = core.inner();
            let inner = &mut *inner;
            let (_, filling) = inner.filling.as_mut().expect("there is one now");
            let count = (filling.room() as usize).min(TAKEN).min(ids.len() - taken);
            let mut cached = core.cache.as_deref().map(Cache::lock);
            for (index, &id) in (taken..).zip(&ids[taken..taken + count]) {
                let place = filling.push(id, rows, (index * width) as u64, width);
                inner.newest.set(id, Address::new(log, place));
                if let (Some(cache), Some(cached)) = (&core.cache, &mut cached) {
                    let bytes = &filling.bytes_at(place)[..width];
                    cache.put(cached, key_of(core.number.value(), id), bytes);
                }
            }
            taken += count;
        }
        Ok(())
    }

    /// Provides a record with room for a row.
    ///
    /// # Returns
    /// The number of its log.
    fn record(&mut self, core: &Core) -> Result<u64> {
        let full = match &core.inner().filling {
            Some((log, filling)) if filling.room() > 0 => return Ok(*log),
            filling => filling.is_some(),
        };
        if full {
            self.hand_over(core)?;
        }
        let row_bytes = core.form.row_bytes;
        let rows_max = self.record_rows;
        let bytes_max = record::bytes_of(rows_max, row_bytes);
        let fitting = |log: &Log, reached: Reached| {
            let room = (log.capacity - reached.end).min(bytes_max);
            record::rows_within(room, row_bytes).min(rows_max)
        };
        let mut rows = self
            .log
            .as_ref()
            .map_or(0, |log| fitting(log, self.reached));
        if rows == 0 {
            self.end_log(core)?;
            self.begin_log(core)?;
            rows = self
                .log
                .as_ref()
                .map_or(0, |log| fitting(log, self.reached));
        }
        let memory = match self.unused.pop() {
            Some(memory) => memory,
            None => Memory::allocate(bytes_max as usize)?,
        };
        let log = self.log.as_ref().expect("it has begun").number;
        let filling = Filling::new(memory, self.reached.end, rows, row_bytes);
        core.inner().filling = Some((log, filling));
        Ok(log)
    }

    /// Submits the record that is being filled.
    fn hand_over(&mut self, core: &Core) -> Result<()> {
        let Some(log) = &self.log else {
            return Ok(());
        };
        let (memory, bytes) = {
            let mut inner = core.inner();
            let Some((_, filling)) = inner.filling.take() else {
                return Ok(());
            };
            if filling.is_empty() {
                self.unused.push(filling.into_memory());
                return Ok(());
            }
            let (memory, bytes) = filling.seal(log.id, self.reached.sequence);
            let memory = Arc::new(memory);
            inner.flying.push_back(Flying {
                log: log.number,
                begin: self.reached.end,
                bytes,
                memory: Arc::clone(&memory),
            });
            (memory, bytes)
        };
        self.is_dirty = true;
        let transfer = log.append(&core.storage, self.reached.end, &memory, bytes)?;
        self.transfers.push_back(transfer);
        self.flying_bytes += bytes;
        self.reached.end += bytes;
        self.reached.sequence += 1;
        drop(memory);
        while self.flying_bytes > FLYING_BYTES_MAX
            || self.transfers.front().is_some_and(Transfer::is_done)
        {
            self.land(core)?;
        }
        Ok(())
    }

    /// Waits for the oldest record in flight.
    fn land(&mut self, core: &Core) -> Result<()> {
        let Some(transfer) = self.transfers.front() else {
            return Ok(());
        };
        // On failure the record stays in memory, where lookups find it.
        transfer.wait(None)?;
        self.transfers.pop_front();
        let flying = core.inner().flying.pop_front();
        let flying = flying.expect("each transfer has its record");
        self.flying_bytes -= flying.bytes;
        if let Ok(memory) = Arc::try_unwrap(flying.memory) {
            self.unused.push(memory);
        }
        Ok(())
    }

    /// Makes all updates durable.
    fn write_out(&mut self, core: &Core) -> Result<()> {
        self.hand_over(core)?;
        while !self.transfers.is_empty() {
            self.land(core)?;
        }
        if !self.is_dirty {
            return Ok(());
        }
        let Some(log) = &self.log else {
            if let Some(number) = core.manifest().open {
                sync_found(core, number)?;
            }
            self.is_dirty = false;
            return Ok(());
        };
        log.sync(&core.storage)?;
        self.is_dirty = false;
        // The next sync makes the mark durable; it also survives the death of this process.
        log.mark(&core.storage, self.reached)?.wait(None)?;
        Ok(())
    }

    /// Closes the log.
    fn end_log(&mut self, core: &Core) -> Result<()> {
        self.write_out(core)?;
        let log = self.log.take();
        let mut manifest = core.manifest();
        let Some(number) = manifest.open else {
            return Ok(());
        };
        let path = log_path(&core.home, number);
        let mut next = manifest.clone();
        next.open = None;
        let end = self.reached.end;
        let has_rows = end > FIRST;
        if has_rows {
            next.closed.push(Closed { number, end });
        }
        core.commit(&next)?;
        *manifest = next;
        if !has_rows {
            core.inner().logs.remove(&number);
            return core.storage.change(Change::RemoveFile(&path));
        }
        match &log {
            Some(log) => log.cut(&core.storage, end),
            // The log that was found on opening.
            None => {
                let file = File::open_to_write(&path, Direct::Off)?;
                core.storage.change(Change::Truncate(&file, end))
            }
        }
    }

    /// Begins a new log.
    fn begin_log(&mut self, core: &Core) -> Result<()> {
        core.lock.check()?;
        let mut manifest = core.manifest();
        let number = manifest.next_log;
        if number >= LOGS_MAX {
            return Err(Error::Failed {
                path: core.home.clone(),
                detail: "it has had as many logs as can be counted".to_owned(),
            });
        }
        let path = log_path(&core.home, number);
        let (row_bytes, sequence) = (core.form.row_bytes, self.reached.sequence);
        let log = Log::create(
            &core.storage,
            &path,
            Named {
                table: manifest.id(),
                number,
            },
            row_bytes,
            sequence,
            self.log_bytes,
        )?;
        let source = core.shared(log.table(&core.storage, &core.form)?);
        let mut next = manifest.clone();
        next.open = Some(number);
        next.next_log += 1;
        core.commit(&next)?;
        *manifest = next;
        let inner: &mut Inner = &mut core.inner();
        inner.logs.insert(number, source);
        self.reached.end = FIRST;
        self.log = Some(log);
        Ok(())
    }
}

/// Syncs a log that was found: readable bytes are not necessarily durable.
fn sync_found(core: &Core, number: u64) -> Result<()> {
    let file = File::open_to_write(&log_path(&core.home, number), Direct::Off)?;
    core.storage.change(Change::SyncData(&file))
}
