//! The end of an item: it is compared with digests, tags and hashes, mended from a replica if it is
//! damaged, and brought to its place.

use std::ops::Range;

use penstock_io::buffer::DeviceFills;
use penstock_io::trace;

use super::{Hashing, OnDamage, Worker};
use crate::error::Result;
use crate::format::digest::CHUNK_BYTES;
use crate::pipeline::damage::Damage;
use crate::pipeline::placed::PlacedItem;
use crate::pipeline::{failed, replica};
use crate::sign::FileHasher;

impl Worker<'_> {
    /// Reads damaged chunks from the replica; keeps those that it does not have either.
    fn mend(&mut self, item: &mut PlacedItem, damaged: &mut Vec<Damage>) {
        let Some(path) = &self.settings.replica else {
            return;
        };
        let _span = trace::span("mend");
        let source = &self.sources[item.file];
        damaged.retain(|damage| {
            let number = (damage.range.start / CHUNK_BYTES) as usize;
            let digest = source.chunks.map(|chunks| chunks[number]);
            let read = |digest| replica::chunk(path, source.file.path(), &damage.range, digest);
            let Some(bytes) = digest.and_then(read) else {
                return true;
            };
            item.put(damage.range.start, &bytes);
            self.tally.mended.push((item.file, damage.range.start));
            false
        });
        if damaged.is_empty() {
            // All of it is there now: a signed item is still to be hashed.
            item.unreadable = None;
        }
    }

    /// Hashes the chunks of an item that could be read; returns the first one that is not the signed
    /// one.
    fn hash(&self, item: &PlacedItem) -> Option<Range<u64>> {
        let source = &self.sources[item.file];
        if matches!(source.hashing, Hashing::Off) {
            return None;
        }
        if item.unreadable.is_some() {
            assert!(
                self.on_damage != OnDamage::Stop,
                "an item that was not mended ends its load"
            );
            return None;
        }
        let _span = trace::span("hash");
        let mut wrong = None;
        let hasher = FileHasher::new(source.bytes);
        item.hash_chunks(&hasher, |index, range, hash| match source.hashing {
            Hashing::Off => {}
            Hashing::Compare(hashes) => {
                if hashes[index] != hash && wrong.is_none() {
                    wrong = Some(range);
                }
            }
            Hashing::Collect(hashes) => {
                hashes.lock().expect("no worker panics with the lock")[index] = hash;
            }
        });
        wrong
    }

    /// Verifies a complete item and copies its bytes to their places.
    pub(super) fn finish(&mut self, mut item: PlacedItem) -> Result<()> {
        item.place_reread();
        let source = &self.sources[item.file];
        // Damage and tampering look alike to a tag or a hash: the second read is compared with the
        // digests, too.
        let must_verify = self.settings.verify && !source.is_authenticated();
        let is_verified = must_verify || self.on_damage != OnDamage::Stop || item.retried;
        let span = trace::span("digest");
        let mut damaged = item.damage(source.chunks.filter(|_| is_verified));
        drop(span);
        if !damaged.is_empty() && !item.retried {
            item.retry(&source.file);
            return self.start(item);
        }
        if !damaged.is_empty() && self.on_damage == OnDamage::Stop {
            self.mend(&mut item, &mut damaged);
        }
        if !damaged.is_empty() {
            if let (OnDamage::Stop, Some(_)) = (self.on_damage, &item.unreadable) {
                let error = self.lost.take().expect("the device said why");
                return Err(failed("read", source.file.path())(error));
            }
            self.tally.damage.extend_from_slice(&damaged);
            if self.on_damage == OnDamage::Stop {
                self.halt.stop();
                return Ok(());
            }
        }
        if let (Some(range), true) = (self.hash(&item), damaged.is_empty()) {
            if !is_verified {
                item.retry(&source.file);
                return self.start(item);
            }
            self.tally.damage.push(tampered(item.file, range));
            self.halt.stop();
            return Ok(());
        }
        if let (Some(opener), true) = (source.opener, damaged.is_empty()) {
            let span = trace::span("open sealed");
            let opened = item.open(opener);
            drop(span);
            if let Err(range) = opened {
                if !is_verified {
                    item.retry(&source.file);
                    return self.start(item);
                }
                self.tally.damage.push(tampered(item.file, range));
                self.halt.stop();
                return Ok(());
            }
            let header_bytes = opener.header_bytes().saturating_sub(item.range.start);
            let item_bytes = item.range.end - item.range.start;
            self.tally.opened_bytes += item_bytes.saturating_sub(header_bytes);
        }
        let bytes = item.range.end - item.range.start;
        if damaged.is_empty() || self.on_damage == OnDamage::Survey {
            let _span = trace::span("copy");
            let mut fills = DeviceFills::default();
            self.tally.bounced_bytes += item.unstage(&mut fills);
            self.device_copies.queue(fills)?;
        }
        self.halt.progress.advance(bytes);
        Ok(())
    }
}

/// A chunk that matches its digest and belongs elsewhere.
fn tampered(file: usize, range: Range<u64>) -> Damage {
    Damage {
        file,
        range,
        byte: None,
        unreadable: None,
        is_tampered: true,
    }
}
