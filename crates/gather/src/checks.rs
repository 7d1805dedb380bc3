//! A checksum for each block of a table: what is read of a row is compared, whatever else it is part of.
//!
//! The digests of checkpoints cover a mebibyte each, which no read of a row can afford. CRC-32C of
//! 4 KiB takes a thousandth of the room.

use crc_fast::CrcAlgorithm::Crc32Iscsi;
use penstock_io::buffer::HostRegion;

/// Bytes that share a checksum: those of a page, which is the least that most devices read.
pub const BLOCK_BYTES: u64 = 4096;

/// CRC-32C of every block of the rows of a table, one segment behind the other. The last block of a
/// segment may be shorter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checks {
    sums: Box<[u32]>,
}

impl Checks {
    /// Those that were stored.
    pub fn new(sums: impl Into<Box<[u32]>>) -> Checks {
        Checks { sums: sums.into() }
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
        self.sums[block as usize] == Checks::of(bytes)
    }

    /// How many blocks so many bytes are.
    pub fn blocks(bytes: u64) -> u64 {
        bytes.div_ceil(BLOCK_BYTES)
    }
}
