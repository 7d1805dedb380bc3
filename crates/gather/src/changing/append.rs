//! `Writer`: rows that are written anew go to the end of a log.

use std::collections::VecDeque;
use std::sync::Arc;

use penstock_io::buffer::{HostRegion, Memory};
use penstock_io::executor::Transfer;
use penstock_io::file::{Direct, File};
use penstock_io::file_system::Change;

use super::core::{Core, Flying, Inner};
use super::form::Form;
use super::frame::{self, Filling};
use super::head::{Closed, log_path};
use super::log::{FIRST, Log, Named, Reached};
use super::newest::{Address, LOG_BYTES_MAX, LOGS_MAX};
use crate::cache::Cache;
use crate::checks::BLOCK_BYTES;
use crate::error::{Error, Result};
use crate::key::key_of;

/// Bytes of frames on their way at most: who writes faster than the device waits.
const FLYING_BYTES_MAX: u64 = 64 << 20;

/// Rows that are taken under one lock.
const TAKEN: usize = 1024;

/// Where the next rows go. Who has it is alone in writing.
#[derive(Debug)]
pub(super) struct Writer {
    /// Bytes of a log at most.
    log_bytes: u64,
    /// Rows of a frame at most.
    frame_rows: u64,
    /// What is appended to; none before the first row.
    log: Option<Log>,
    /// Up to where it was handed over.
    reached: Reached,
    /// Those of the frames on their way.
    transfers: VecDeque<Transfer>,
    flying_bytes: u64,
    spare: Vec<Memory>,
    /// Whether something was appended that is not known to be durable.
    is_dirty: bool,
    /// Why nothing is written any more.
    failed: Option<String>,
}

/// Where the last frame of the logs that were found ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    /// The sequence of the next frame.
    pub(super) sequence: u64,
    /// Of the log that was appended to.
    pub(super) end: u64,
    /// Whether that log has frames which who wrote them may not have synced.
    pub(super) is_unsynced: bool,
}

impl Writer {
    /// Appends to logs of so many bytes, in frames of so many, or what a row takes, behind what was
    /// found.
    pub(super) fn new(log_bytes: u64, frame_bytes: u64, found: Found, form: &Form) -> Writer {
        let least = FIRST + frame::bytes_of(1, form.row_bytes);
        let log_bytes = log_bytes.clamp(least, LOG_BYTES_MAX - BLOCK_BYTES);
        Writer {
            log_bytes: log_bytes.next_multiple_of(BLOCK_BYTES),
            frame_rows: frame::rows_within(frame_bytes, form.row_bytes).max(1),
            log: None,
            reached: Reached {
                end: found.end,
                sequence: found.sequence,
            },
            transfers: VecDeque::new(),
            flying_bytes: 0,
            spare: Vec::new(),
            is_dirty: found.is_unsynced,
            failed: None,
        }
    }

    /// Writes rows anew: of each, the bytes of its values; of an id that comes twice the last ones
    /// count.
    pub(super) fn update(&mut self, core: &Core, ids: &[u64], rows: &HostRegion) -> Result<()> {
        self.check(core)?;
        let done = self.take(core, ids, rows);
        self.noted(done)
    }

    /// Makes durable all that was written.
    pub(super) fn flush(&mut self, core: &Core) -> Result<()> {
        self.check(core)?;
        let done = self.write_out(core);
        self.noted(done)
    }

    /// Has all that was written in logs that nothing is appended to any more.
    pub(super) fn close_log(&mut self, core: &Core) -> Result<()> {
        self.check(core)?;
        let done = self.end_log(core);
        self.noted(done)
    }

    /// Where the log ends that is appended to, or was when the table was opened.
    pub(super) fn end(&self) -> u64 {
        self.reached.end
    }

    /// Waits for what is on its way, however it ends: whoever opens the table next finds all of it or
    /// none.
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
            let log = self.frame(core)?;
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

    /// Has a frame with room for a row.
    ///
    /// # Returns
    /// The number of its log.
    fn frame(&mut self, core: &Core) -> Result<u64> {
        let full = match &core.inner().filling {
            Some((log, filling)) if filling.room() > 0 => return Ok(*log),
            filling => filling.is_some(),
        };
        if full {
            self.hand_over(core)?;
        }
        let row_bytes = core.form.row_bytes;
        let rows_max = self.frame_rows;
        let bytes_max = frame::bytes_of(rows_max, row_bytes);
        let fitting = |log: &Log, reached: Reached| {
            let room = (log.capacity - reached.end).min(bytes_max);
            frame::rows_within(room, row_bytes).min(rows_max)
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
        let memory = match self.spare.pop() {
            Some(memory) => memory,
            None => Memory::allocate(bytes_max as usize)?,
        };
        let log = self.log.as_ref().expect("it has begun").number;
        let filling = Filling::new(memory, self.reached.end, rows, row_bytes);
        core.inner().filling = Some((log, filling));
        Ok(log)
    }

    /// Has the frame that is being filled written.
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
                self.spare.push(filling.into_memory());
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

    /// Waits for the oldest frame on its way.
    fn land(&mut self, core: &Core) -> Result<()> {
        let Some(transfer) = self.transfers.front() else {
            return Ok(());
        };
        // What could not be written stays in memory, where it is found.
        transfer.wait(None)?;
        self.transfers.pop_front();
        let flying = core.inner().flying.pop_front();
        let flying = flying.expect("each transfer has its frame");
        self.flying_bytes -= flying.bytes;
        if let Ok(memory) = Arc::try_unwrap(flying.memory) {
            self.spare.push(memory);
        }
        Ok(())
    }

    /// Makes durable all that was written.
    fn write_out(&mut self, core: &Core) -> Result<()> {
        self.hand_over(core)?;
        while !self.transfers.is_empty() {
            self.land(core)?;
        }
        if !self.is_dirty {
            return Ok(());
        }
        let Some(log) = &self.log else {
            if let Some(number) = core.head().open {
                sync_found(core, number)?;
            }
            self.is_dirty = false;
            return Ok(());
        };
        log.sync(&core.storage)?;
        self.is_dirty = false;
        // Durable it is with the next sync; a process that is killed now leaves it all the same.
        log.mark(&core.storage, self.reached)?.wait(None)?;
        Ok(())
    }

    /// Writes nothing to the log any more.
    fn end_log(&mut self, core: &Core) -> Result<()> {
        self.write_out(core)?;
        let log = self.log.take();
        let mut head = core.head();
        let Some(number) = head.open else {
            return Ok(());
        };
        let path = log_path(&core.home, number);
        let mut next = head.clone();
        next.open = None;
        let end = self.reached.end;
        let has_rows = end > FIRST;
        if has_rows {
            next.closed.push(Closed { number, end });
        }
        core.commit(&next)?;
        *head = next;
        if !has_rows {
            core.inner().logs.remove(&number);
            return core.storage.change(Change::RemoveFile(&path));
        }
        match &log {
            Some(log) => log.cut(&core.storage, end),
            // One that was found.
            None => {
                let file = File::open_to_write(&path, Direct::Off)?;
                core.storage.change(Change::Truncate(&file, end))
            }
        }
    }

    /// Begins a new log.
    fn begin_log(&mut self, core: &Core) -> Result<()> {
        core.lock.check()?;
        let mut head = core.head();
        let number = head.next_log;
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
                table: head.id(),
                number,
            },
            row_bytes,
            sequence,
            self.log_bytes,
        )?;
        let source = core.shared(log.table(&core.storage, &core.form)?);
        let mut next = head.clone();
        next.open = Some(number);
        next.next_log += 1;
        core.commit(&next)?;
        *head = next;
        let inner: &mut Inner = &mut core.inner();
        inner.logs.insert(number, source);
        self.reached.end = FIRST;
        self.log = Some(log);
        Ok(())
    }
}

/// Makes durable what was found in a log: that it was read does not say that it is.
fn sync_found(core: &Core, number: u64) -> Result<()> {
    let file = File::open_to_write(&log_path(&core.home, number), Direct::Off)?;
    core.storage.change(Change::SyncData(&file))
}
