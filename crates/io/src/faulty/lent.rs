//! Memory of a caller who wants it back.

#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::mix;
use crate::buffer::HostRegion;

/// Memory that is lent to a save and changed as soon as the save says that it may be: what a training
/// loop does with its tensors. A save that still reads it then stores a torn copy, which the content
/// shows.
pub struct Lent {
    words: Arc<[AtomicU64]>,
}

impl Lent {
    /// So many words of 8 bytes, with the content that belongs to `seed`.
    pub fn new(seed: u64, words: usize) -> Lent {
        let words = contents(seed).take(words).map(AtomicU64::new).collect();
        Lent { words }
    }

    /// The content that belongs to `seed`, as bytes.
    pub fn content(seed: u64, words: usize) -> Vec<u8> {
        let words = contents(seed).take(words);
        words.flat_map(u64::to_ne_bytes).collect()
    }

    /// Changes every word to the content that belongs to `seed`.
    pub fn change(&self, seed: u64) {
        for (word, content) in self.words.iter().zip(contents(seed)) {
            word.store(content, Ordering::Relaxed);
        }
    }

    /// Lends it.
    pub fn region(&self) -> HostRegion {
        let address = self.words.as_ptr().expose_provenance();
        let owner = Box::new(Arc::clone(&self.words));
        // SAFETY: the words live as long as the owner. They are only changed through atomics, and a
        // test that does so while they are read tests just that this is never the case.
        unsafe { HostRegion::contiguous(address, size_of_val(&*self.words), owner) }
    }

    /// Whether every region on it is gone.
    pub fn is_returned(&self) -> bool {
        Arc::strong_count(&self.words) == 1
    }
}

fn contents(seed: u64) -> impl Iterator<Item = u64> {
    let mut state = seed;
    std::iter::repeat_with(move || mix(&mut state))
}
