//! Rows of a table that changes, by id.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use penstock_io::buffer::IoBuf;

use super::core::{Core, Inner};
use crate::batch::Batch;
use crate::cache::Cache;
use crate::copying::Pieces;
use crate::error::Result;
use crate::key::key_of;
use crate::lookup::{Asked, How, Miss};
use crate::requests::Missing;
use crate::shared::Shared;
use crate::state::Place;

/// Rows that have to be read, by what has them.
#[derive(Default)]
struct Reads {
    by_source: BTreeMap<Option<u64>, Of>,
}

/// What has rows, and the number that each has there.
struct Of {
    source: Arc<Shared>,
    rows: Vec<(Miss, u64)>,
}

impl Core {
    /// Begins to gather rows, each as it is now.
    pub(super) fn look_up(&self, ids: &[u64], out: IoBuf) -> Result<Batch> {
        let width = self.form.value_bytes as usize;
        assert_eq!(out.len(), ids.len() * width, "room for each row");
        self.check_process()?;
        self.check(ids)?;
        self.counts.rows.fetch_add(ids.len() as u64, Relaxed);
        let mut reads = Reads::default();
        let out = match &self.cache {
            None => {
                let how = |position| Miss {
                    position,
                    how: How::Read(None),
                };
                let misses = (0..ids.len()).map(how).collect();
                let mut out = Pieces::whole(out, width);
                self.resolve(&self.inner(), misses, ids, &mut out, &mut reads);
                out
            }
            Some(cache) => self.ask(cache, ids, out, &mut reads),
        };
        self.begin(reads, ids, out)
    }

    fn ask(&self, cache: &Cache, ids: &[u64], out: IoBuf, reads: &mut Reads) -> Pieces {
        let asked = Asked {
            cache,
            counts: &self.counts,
            share: &self.storage.share,
            batch: (self.number.value(), self.next_batch.fetch_add(1, Relaxed)),
            rows: ids.len(),
            width: self.form.value_bytes as usize,
        };
        let key = |position: usize| key_of(self.number.value(), ids[position]);
        asked.look_up(key, out, |rest, out| {
            // Who is to come into the cache is read from where it is now: nobody writes it anew
            // between the two.
            let inner = self.inner();
            let mut misses = Vec::with_capacity(rest.len());
            asked.claim(rest, key, &mut misses);
            self.resolve(&inner, misses, ids, out, reads);
        })
    }

    /// Copies what is in memory, and says where the rest is.
    fn resolve(
        &self,
        inner: &Inner,
        misses: Vec<Miss>,
        ids: &[u64],
        out: &mut Pieces,
        reads: &mut Reads,
    ) {
        let width = self.form.value_bytes as usize;
        for Miss { position, how } in misses {
            let id = ids[position];
            let address = inner.newest.get(id);
            if let Some(bytes) = address.and_then(|address| inner.in_memory(address)) {
                out.place(position).copy_from_slice(&bytes[..width]);
                self.counts.hits.fetch_add(1, Relaxed);
                if let (How::Read(Some(mut claimed)), Some(cache)) = (how, &self.cache) {
                    claimed.memory.as_mut_slice()[..width].copy_from_slice(&bytes[..width]);
                    Cache::arrived(&mut cache.lock(), claimed);
                }
                continue;
            }
            let (log, row) = inner.source_of(id);
            let of = reads.by_source.entry(log).or_insert_with(|| Of {
                source: Arc::clone(inner.source(log)),
                rows: Vec::new(),
            });
            of.rows.push((Miss { position, how }, row));
        }
    }

    fn begin(&self, reads: Reads, ids: &[u64], out: Pieces) -> Result<Batch> {
        let mut sources = Vec::with_capacity(reads.by_source.len());
        let mut misses = Vec::new();
        for (index, Of { source, rows }) in reads.by_source.into_values().enumerate() {
            sources.push((source, Vec::new()));
            misses.extend(rows.into_iter().map(|(miss, row)| (index, miss, row)));
        }
        misses.sort_unstable_by_key(|(_, miss, _)| miss.position);
        let positions: Vec<usize> = misses.iter().map(|(_, miss, _)| miss.position).collect();
        let memory = out.carve(&positions);
        for ((index, miss, row), memory) in misses.into_iter().zip(memory) {
            let place = Place {
                row,
                key: key_of(self.number.value(), ids[miss.position]),
                memory,
            };
            let Miss { how, .. } = miss;
            sources[index].1.push(Missing { place, how });
        }
        let begun = sources
            .into_iter()
            .map(|(source, missing)| source.begin(missing));
        Ok(Batch::of_all(begun.collect::<Result<_>>()?))
    }
}
