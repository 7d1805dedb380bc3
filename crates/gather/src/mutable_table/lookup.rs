//! Lookups of a mutable table's rows by id.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use penstock_io::buffer::IoBuf;

use super::core::{Core, Inner};
use crate::batch::Batch;
use crate::batch::state::Place;
use crate::cache::Cache;
use crate::error::Result;
use crate::index::key::key_of;
use crate::reader::copying::Pieces;
use crate::reader::lookup::{Asked, How, Miss};
use crate::reader::requests::Missing;
use crate::reader::shared::ReaderShared;

/// Rows that have to be read, by source.
#[derive(Default)]
struct Reads {
    by_source: BTreeMap<Option<u64>, Of>,
}

/// A source, and the rows to read from it.
struct Of {
    source: Arc<ReaderShared>,
    missing: Vec<Missing>,
}

impl Core {
    /// Begins to gather the current rows.
    pub(super) fn look_up(&self, ids: &[u64], out: IoBuf) -> Result<Batch> {
        let width = self.form.value_bytes as usize;
        assert_eq!(out.len(), ids.len() * width, "room for each row");
        self.check_process()?;
        self.check(ids)?;
        self.counts.rows.fetch_add(ids.len() as u64, Relaxed);
        match &self.cache {
            None => {
                let how = |position| Miss {
                    position,
                    how: How::Read(None),
                };
                let misses = (0..ids.len()).map(how).collect();
                let out = Pieces::whole(out, width);
                let reads = self.resolve(&self.inner(), misses, ids, out);
                Ok(Batch::of_all(reads.begin()?))
            }
            Some(cache) => self.ask(cache, ids, out),
        }
    }

    fn ask(&self, cache: &Cache, ids: &[u64], out: IoBuf) -> Result<Batch> {
        let asked = Asked {
            cache,
            counts: &self.counts,
            share: &self.storage.share,
            rows: ids.len(),
            width: self.form.value_bytes as usize,
        };
        let key = |position: usize| key_of(self.number.value(), ids[position]);
        let mut begun = Vec::new();
        asked.look_up(key, out, |rest, out| {
            // Rows claimed for the cache are read from their current place, and no update can come
            // between claim and lookup. Between two steps rows may move into a log, or out of one.
            let inner = self.inner();
            let number = self.next_batch.fetch_add(1, Relaxed);
            let misses = asked.claim(rest, key, (self.number.value(), number));
            let reads = self.resolve(&inner, misses, ids, out);
            drop(inner);
            begun.extend(reads.begin()?);
            Ok(())
        })?;
        Ok(Batch::of_all(begun))
    }

    /// Copies rows that are in memory, and locates the others.
    fn resolve(&self, inner: &Inner, misses: Vec<Miss>, ids: &[u64], mut out: Pieces) -> Reads {
        let width = self.form.value_bytes as usize;
        let mut rest = Vec::with_capacity(misses.len());
        for Miss { position, how } in misses {
            let address = inner.newest.get(ids[position]);
            if let Some(bytes) = address.and_then(|address| inner.in_memory(address)) {
                out.place(position).copy_from_slice(&bytes[..width]);
                self.counts.hits.fetch_add(1, Relaxed);
                if let (How::Read(Some(mut claimed)), Some(cache)) = (how, &self.cache) {
                    claimed.memory.as_mut_slice()[..width].copy_from_slice(&bytes[..width]);
                    Cache::arrived(&mut cache.lock(), claimed);
                }
                continue;
            }
            rest.push(Miss { position, how });
        }
        let positions: Vec<usize> = rest.iter().map(|miss| miss.position).collect();
        let mut reads = Reads::default();
        for (Miss { position, how }, memory) in rest.into_iter().zip(out.carve(&positions)) {
            let id = ids[position];
            let (log, row) = inner.source_of(id);
            let key = key_of(self.number.value(), id);
            let place = Place { row, key, memory };
            let of = reads.by_source.entry(log).or_insert_with(|| Of {
                source: Arc::clone(inner.source(log)),
                missing: Vec::new(),
            });
            of.missing.push(Missing { place, how });
        }
        reads
    }
}

impl Reads {
    /// Begins all reads; a source that fails releases its claims.
    fn begin(self) -> Result<Vec<Batch>> {
        let sources = self.by_source.into_values();
        let begun: Vec<_> = sources.map(|of| of.source.begin(of.missing)).collect();
        begun.into_iter().collect()
    }
}
