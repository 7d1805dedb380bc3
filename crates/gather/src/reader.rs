//! `Reader`: gathers rows of a table by id, from a cache and by requests to an executor.

pub(crate) mod copying;
mod landing;
pub(crate) mod lookup;
pub(crate) mod requests;
pub(crate) mod shared;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use penstock_cuda::Device;
use penstock_io::buffer::{IoBuf, Lent};
use penstock_io::executor;
use penstock_io::trace;

use self::copying::Pieces;
use self::lookup::{Asked, How, Miss};
use self::requests::Missing;
use self::shared::{Counts, Number, ReaderShared};
use crate::batch::Batch;
use crate::batch::state::Place;
use crate::cache::Cache;
use crate::error::{Error, Result};
use crate::index::Index;
use crate::index::key::key_of;
use crate::table::Table;
use crate::table::checks::BLOCK_BYTES;
use crate::table::runs::Merging;

/// A table, a share of an executor to read it, and an optional cache. Clones share all of these.
#[derive(Clone, Debug)]
pub struct Reader {
    pub(crate) shared: Arc<ReaderShared>,
}

impl Reader {
    /// A reader of a table.
    ///
    /// # Panics
    /// If the cache's slots do not have the size of a row, or a row with the blocks in which it
    /// begins and ends is longer than a request of the executor.
    pub fn new(
        table: Table,
        share: Arc<executor::Share>,
        cache: Option<Arc<Cache>>,
        merging: Merging,
    ) -> Reader {
        let fits = |cache: &Cache| cache.row_bytes() as u64 == table.value_bytes();
        assert!(cache.as_deref().is_none_or(fits), "slots are rows");
        let longest = share.block_bytes().saturating_sub(2 * BLOCK_BYTES);
        assert!(
            table.row_bytes() <= longest,
            "a row is longer than a request"
        );
        let merging = Merging {
            run_bytes_max: merging.run_bytes_max.min(share.block_bytes()),
            ..merging
        };
        Reader {
            shared: Arc::new(ReaderShared {
                number: Number::of(cache.as_ref(), table.rows()),
                table,
                cache,
                share,
                merging,
                counts: Arc::default(),
                next_batch: AtomicU64::new(0),
                process: penstock_io::process::id(),
            }),
        }
    }

    /// The table that rows are read from.
    pub fn table(&self) -> &Table {
        &self.shared.table
    }

    /// Counters since the reader was made.
    pub fn counts(&self) -> &Counts {
        &self.shared.counts
    }

    /// Begins to gather rows in the order of `ids`, which may repeat.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], before anything is read; [`Error::Io`] in a fork of the process that
    /// made the executor.
    ///
    /// # Panics
    /// If the length of `out` is not `ids.len()` times the bytes of a row's values.
    pub fn gather(&self, ids: &[u64], out: IoBuf) -> Result<Batch> {
        self.gather_hinted(ids, out, None)
    }

    /// As [`gather`](Reader::gather), for a batch announced with [`hint`](Reader::hint),
    /// which is then over.
    ///
    /// # Panics
    /// As [`gather`](Reader::gather).
    pub fn gather_hinted(&self, ids: &[u64], out: IoBuf, hinted: Option<u64>) -> Result<Batch> {
        let _span = trace::span("gather");
        let shared = &self.shared;
        let width = shared.table.value_bytes() as usize;
        assert_eq!(out.len(), ids.len() * width, "room for each row");
        shared.check_process()?;
        shared.check(ids)?;
        let hinted = hinted.map(|number| HintedBatch {
            number,
            is_over: true,
        });
        shared.gather_part(ids, out, hinted)
    }

    /// Announces a batch to the cache, to be gathered after those already announced.
    ///
    /// # Returns
    /// The batch's number; `None` without a cache.
    pub fn hint(&self, ids: &[u64]) -> Result<Option<u64>> {
        self.with_keys(ids, |index, keys| index.hint(keys))
    }

    /// Withdraws an announced batch that will not be gathered.
    pub fn forget(&self, hinted: u64) {
        if let Some(cache) = &self.shared.cache
            && self.shared.process == penstock_io::process::id()
        {
            cache.lock().index.cancel(hinted);
        }
    }

    /// Pins rows in the cache, once they are cached.
    ///
    /// # Returns
    /// How many of them are pinned; `None` without a cache.
    pub fn pin(&self, ids: &[u64]) -> Result<Option<usize>> {
        self.with_keys(ids, |index, keys| index.pin(keys))
    }

    /// Unpins rows.
    pub fn unpin(&self, ids: &[u64]) -> Result<()> {
        self.with_keys(ids, |index, keys| index.unpin(keys))
            .map(drop)
    }

    fn with_keys<T>(
        &self,
        ids: &[u64],
        apply: impl FnOnce(&mut Index, &[u64]) -> T,
    ) -> Result<Option<T>> {
        let shared = &self.shared;
        shared.check_process()?;
        shared.check(ids)?;
        let Some(cache) = &shared.cache else {
            return Ok(None);
        };
        let keys: Vec<u64> = ids.iter().map(|&row| shared.key(row)).collect();
        Ok(Some(apply(&mut cache.lock().index, &keys)))
    }
}

/// An announced batch, gathered as a whole or in parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HintedBatch {
    pub(crate) number: u64,
    /// Whether this is its last part.
    pub(crate) is_over: bool,
}

impl ReaderShared {
    /// Begins to gather rows that exist.
    pub(crate) fn gather_part(
        self: &Arc<Self>,
        ids: &[u64],
        out: IoBuf,
        hinted: Option<HintedBatch>,
    ) -> Result<Batch> {
        let width = self.table.value_bytes() as usize;
        self.counts.rows.fetch_add(ids.len() as u64, Relaxed);
        let Some(cache) = &self.cache else {
            let how = |position| Miss {
                position,
                how: How::Read(None),
            };
            let misses = (0..ids.len()).map(how).collect();
            return self.begin(self.missing(ids, misses, Pieces::whole(out, width)));
        };
        self.gather(cache, ids, out, hinted)
    }

    /// Makes the cache's slots readable by kernels of a device, as far as possible.
    pub(crate) fn map(&self, device: &Arc<Device>) {
        if let Some(cache) = &self.cache {
            let slots = cache.lock().index.untouched();
            // Slots that kernels cannot read are not lent.
            let _ = cache.slots().map(device, slots);
        }
    }

    /// Lends the cached rows of these ids to a device; also returns the positions of the others.
    ///
    /// # Panics
    /// If there is no cache.
    pub(crate) fn lend(&self, ids: &[u64], hinted: Option<HintedBatch>) -> (Lent, Vec<usize>) {
        let cache = self
            .cache
            .as_ref()
            .expect("it is asked for what a cache has");
        if let Some(HintedBatch { number, .. }) = hinted {
            cache.lock().index.reach(number);
        }
        let key = |position: usize| self.key(ids[position]);
        let (lent, rest) = lookup::lend(cache, &self.counts, ids.len(), key);
        self.counts.rows.fetch_add(lent.len() as u64, Relaxed);
        (lent, rest)
    }

    /// Tells the cache that a part of an announced batch is gathered elsewhere; the last part ends
    /// the batch.
    pub(crate) fn passed(&self, hinted: Option<HintedBatch>) {
        if let (Some(cache), Some(hinted)) = (&self.cache, hinted)
            && hinted.is_over
        {
            cache.lock().index.cancel(hinted.number);
        }
    }

    pub(crate) fn check_process(&self) -> Result<()> {
        let process = self.process;
        match process == penstock_io::process::id() {
            true => Ok(()),
            false => Err(penstock_io::Error::Forked { process }.into()),
        }
    }

    pub(crate) fn check(&self, ids: &[u64]) -> Result<()> {
        let rows = self.table.rows();
        match ids.iter().position(|&id| id >= rows) {
            None => Ok(()),
            Some(position) => Err(Error::OutOfRange {
                position,
                id: i128::from(ids[position]),
                rows,
            }),
        }
    }

    fn key(&self, row: u64) -> u64 {
        key_of(self.number.value(), row)
    }

    /// Copies the cached rows of these ids, and begins to read the others.
    fn gather(
        self: &Arc<Self>,
        cache: &Cache,
        ids: &[u64],
        out: IoBuf,
        hinted: Option<HintedBatch>,
    ) -> Result<Batch> {
        if let Some(HintedBatch { number, .. }) = hinted {
            cache.lock().index.reach(number);
        }
        let asked = Asked {
            cache,
            counts: &self.counts,
            share: &self.share,
            rows: ids.len(),
            width: self.table.value_bytes() as usize,
        };
        let key = |position: usize| self.key(ids[position]);
        // Rows of whole blocks are read as soon as they are known to be missing: copying a large
        // batch takes long, and the device would be idle meanwhile. Several smaller rows may share
        // a block, so these are collected first.
        let is_read_at_once = self.table.row_bytes() >= BLOCK_BYTES;
        let (mut begun, mut missing) = (Vec::new(), Vec::new());
        let mut number = self.next_batch.fetch_add(1, Relaxed);
        let looked_up = asked.look_up(key, out, |rest, out| {
            let misses = asked.claim(rest, key, (self.number.value(), number));
            missing.extend(self.missing(ids, misses, out));
            if is_read_at_once {
                begun.push(self.begin(std::mem::take(&mut missing))?);
                // A new number, so that the next parts wait for the reads in flight and do not
                // repeat them.
                number = self.next_batch.fetch_add(1, Relaxed);
            }
            Ok(())
        });
        if let Some(HintedBatch { number, is_over }) = hinted
            && (is_over || looked_up.is_err())
        {
            cache.lock().index.cancel(number);
        }
        looked_up?;
        // A batch whose rows were all cached has no parts: nothing of it is under way.
        if !missing.is_empty() {
            begun.push(self.begin(missing)?);
        }
        Ok(Batch::of_all(begun))
    }

    /// Missing rows, with their places in a part of the result.
    fn missing(&self, ids: &[u64], misses: Vec<Miss>, out: Pieces) -> Vec<Missing> {
        let positions: Vec<usize> = misses.iter().map(|miss| miss.position).collect();
        let memory = out.carve(&positions);
        let missing = |(miss, memory): (Miss, IoBuf)| {
            let row = ids[miss.position];
            Missing {
                place: Place {
                    row,
                    key: self.key(row),
                    memory,
                },
                how: miss.how,
            }
        };
        misses.into_iter().zip(memory).map(missing).collect()
    }
}
