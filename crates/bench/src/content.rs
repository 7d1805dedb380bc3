//! File contents that identify their position.

use crate::job::WORD_BYTES;
use crate::plan::mix;

/// Seed of a file's content, different for each file.
#[derive(Clone, Copy)]
pub(crate) struct Tag(u64);

impl Tag {
    pub(crate) fn new(seed: u64, process: u32, file: u32) -> Tag {
        Tag(mix(mix(seed) ^ (u64::from(process) << 32 | u64::from(file))))
    }

    /// Fills `bytes` with the content at `offset` of the file; both are whole words.
    pub(crate) fn fill(self, bytes: &mut [u8], offset: u64) {
        let (words, rest) = bytes.as_chunks_mut();
        debug_assert!(rest.is_empty());
        for (word, number) in words.iter_mut().zip(offset / WORD_BYTES..) {
            *word = self.word(number);
        }
    }

    /// Offset in the file of the first word of `bytes` that is wrong.
    pub(crate) fn check(self, bytes: &[u8], offset: u64) -> Option<u64> {
        let (words, _) = bytes.as_chunks();
        let mut numbered = words.iter().zip(offset / WORD_BYTES..);
        let (_, number) = numbered.find(|&(word, number)| *word != self.word(number))?;
        Some(number * WORD_BYTES)
    }

    fn word(self, number: u64) -> [u8; WORD_BYTES as usize] {
        mix(self.0 ^ number).to_le_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_belongs_to_one_place() {
        let tag = Tag::new(1, 2, 3);
        let mut bytes = vec![0; 4096];
        tag.fill(&mut bytes, 8192);
        assert_eq!(tag.check(&bytes, 8192), None);
        assert_eq!(tag.check(&bytes[8..], 8200), None);
        assert_eq!(tag.check(&bytes, 4096), Some(4096));
        for other in [Tag::new(0, 2, 3), Tag::new(1, 0, 3), Tag::new(1, 2, 0)] {
            assert_eq!(other.check(&bytes, 8192), Some(8192));
        }
        bytes[1000] ^= 1;
        assert_eq!(tag.check(&bytes, 8192), Some(8192 + 1000));
    }
}
