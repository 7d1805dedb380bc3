//! The contents that a cut could leave in one file.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::faulty::log::Logged;

/// The least that a device writes atomically.
pub const SECTOR_BYTES: usize = 512;

/// Lengths are computed for all subsets of up to this many unsynced operations, beyond that for
/// prefixes.
const EXHAUSTIVE_LENGTHS_MAX: usize = 10;

/// The possible contents of a file: its lengths and, sector by sector, one of several contents.
pub(super) struct Variants {
    lengths: Vec<u64>,
    durable: Vec<u8>,
    /// Sectors with more than one possible content.
    sectors: Vec<(usize, Vec<[u8; SECTOR_BYTES]>)>,
}

impl Variants {
    pub(super) fn new<'a>(effects: impl Iterator<Item = (&'a Logged, bool)>) -> Variants {
        let (mut durable, mut unsynced) = (Vec::new(), Vec::new());
        let mut length = 0;
        for (op, is_durable) in effects {
            if is_durable {
                length = changed_length(op, length);
                overwrite(&mut durable, op);
                durable.resize(durable.len().max(length as usize), 0);
                if let Logged::Truncate { len, .. } = op {
                    durable.truncate(*len as usize);
                }
            } else {
                unsynced.push(op);
            }
        }
        let lengths = possible_lengths(length, &unsynced);
        let longest = lengths.iter().copied().max().unwrap_or(0) as usize;
        durable.resize(longest.next_multiple_of(SECTOR_BYTES), 0);
        let sector = |bytes: &[u8], index: usize| -> [u8; SECTOR_BYTES] {
            bytes[index * SECTOR_BYTES..][..SECTOR_BYTES]
                .try_into()
                .expect("a whole sector")
        };
        let mut contents: BTreeMap<usize, Vec<[u8; SECTOR_BYTES]>> = BTreeMap::new();
        // A write into part of a sector keeps the rest, as earlier writes left it.
        let mut latest = durable.clone();
        for op in unsynced {
            let Logged::Write { offset, bytes, .. } = op else {
                continue;
            };
            overwrite(&mut latest, op);
            latest.resize(latest.len().next_multiple_of(SECTOR_BYTES), 0);
            let mut alone = durable.clone();
            overwrite(&mut alone, op);
            alone.resize(alone.len().next_multiple_of(SECTOR_BYTES), 0);
            let end = *offset as usize + bytes.len();
            let sectors = *offset as usize / SECTOR_BYTES..end.div_ceil(SECTOR_BYTES);
            for index in sectors.filter(|index| index * SECTOR_BYTES < longest) {
                let old = || vec![sector(&durable, index)];
                let known = contents.entry(index).or_insert_with(old);
                // The sector after all writes before it, and with this write alone.
                for new in [sector(&latest, index), sector(&alone, index)] {
                    if !known.contains(&new) {
                        known.push(new);
                    }
                }
            }
        }
        contents.retain(|_, known| known.len() > 1);
        Variants {
            lengths,
            durable,
            sectors: contents.into_iter().collect(),
        }
    }

    pub(super) fn count(&self) -> u64 {
        let sectors = self.sectors.iter().map(|(_, known)| known.len() as u64);
        sectors.fold(self.lengths.len() as u64, u64::saturating_mul)
    }

    /// The variant with this number. The last one contains every write.
    pub(super) fn bytes(&self, number: u64) -> Arc<[u8]> {
        let lengths = self.lengths.len() as u64;
        let length = self.lengths[(number % lengths) as usize];
        let mut rest = number / lengths;
        let mut bytes = self.durable.clone();
        for (index, known) in &self.sectors {
            let content = &known[(rest % known.len() as u64) as usize];
            rest /= known.len() as u64;
            bytes[index * SECTOR_BYTES..][..SECTOR_BYTES].copy_from_slice(content);
        }
        bytes.truncate(length as usize);
        bytes.into()
    }
}

/// The length after an operation.
fn changed_length(op: &Logged, length: u64) -> u64 {
    match op {
        Logged::Write { offset, bytes, .. } => length.max(offset + bytes.len() as u64),
        Logged::Allocate { len, .. } => length.max(*len),
        Logged::Truncate { len, .. } => *len,
        _ => length,
    }
}

/// Writes the operation's bytes to the content.
fn overwrite(content: &mut Vec<u8>, op: &Logged) {
    if let Logged::Write { offset, bytes, .. } = op {
        let end = *offset as usize + bytes.len();
        content.resize(content.len().max(end), 0);
        content[*offset as usize..end].copy_from_slice(bytes);
    }
}

/// Every length that some part of the unsynced operations leaves.
fn possible_lengths(durable: u64, unsynced: &[&Logged]) -> Vec<u64> {
    let count = unsynced.len();
    let after = |is_kept: &dyn Fn(usize) -> bool| {
        let kept = unsynced.iter().enumerate().filter(|(at, _)| is_kept(*at));
        kept.fold(durable, |length, (_, op)| changed_length(op, length))
    };
    let lengths: BTreeSet<u64> = if count <= EXHAUSTIVE_LENGTHS_MAX {
        (0..1_usize << count)
            .map(|bits| after(&|at| bits >> at & 1 == 1))
            .collect()
    } else {
        (0..=count).map(|kept| after(&|at| at < kept)).collect()
    };
    lengths.into_iter().collect()
}
