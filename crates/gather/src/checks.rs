//! A checksum for each block of a table: what is read of a row is compared, whatever else it is part of.
//!
//! The digests of checkpoints cover a mebibyte each, which no read of a row can afford. CRC-32C of
//! 4 KiB takes a thousandth of the room.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use crc_fast::CrcAlgorithm::Crc32Iscsi;
use penstock_io::buffer::HostRegion;

/// Bytes that share a checksum: those of a page, which is the least that most devices read.
pub const BLOCK_BYTES: u64 = 4096;

/// CRC-32C of every block of a segment. The last block may be shorter.
#[derive(Debug)]
pub struct Checks {
    sums: Box<[AtomicU32]>,
}

impl Checks {
    /// Those that were stored.
    pub fn new(sums: impl IntoIterator<Item = u32>) -> Checks {
        Checks {
            sums: sums.into_iter().map(AtomicU32::new).collect(),
        }
    }

    /// Those of a file that grows, before its blocks are there.
    pub(crate) fn unknown(count: u64) -> Checks {
        Checks::new((0..count).map(|_| 0))
    }

    /// Notes blocks one behind the other, before anybody asks for what is in them.
    pub(crate) fn note(&self, first: u64, bytes: &[u8]) {
        let blocks = bytes.chunks(BLOCK_BYTES as usize);
        for (sum, bytes) in self.sums[first as usize..].iter().zip(blocks) {
            sum.store(Checks::of(bytes), Relaxed);
        }
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.sums.len() as u64
    }

    /// The checksum of one block.
    pub fn of(bytes: &[u8]) -> u32 {
        // The algorithm has 32 bits.
        crc_fast::checksum(Crc32Iscsi, bytes) as u32
    }

    /// The checksum of each block of memory that begins where a block does.
    pub fn of_memory(region: &HostRegion) -> Vec<u32> {
        let mut block = [0; BLOCK_BYTES as usize];
        let starts = (0..region.len()).step_by(BLOCK_BYTES as usize);
        let sums = starts.map(|start| {
            let here = &mut block[..BLOCK_BYTES.min(region.len() - start) as usize];
            region.copy_to(start, here);
            Checks::of(here)
        });
        sums.collect()
    }

    /// Whether the bytes of a block are those that were written.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn agrees(&self, block: u64, bytes: &[u8]) -> bool {
        self.sums[block as usize].load(Relaxed) == Checks::of(bytes)
    }

    /// How many blocks so many bytes are.
    pub fn blocks(bytes: u64) -> u64 {
        bytes.div_ceil(BLOCK_BYTES)
    }
}
