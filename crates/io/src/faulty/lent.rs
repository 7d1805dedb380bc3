//! Host memory whose owner changes it as soon as it is allowed to.

#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::mix;
use crate::buffer::HostRegion;

/// Memory lent to a save and changed as soon as the save allows it, as a training loop does with
/// its tensors. A save that still reads it then stores a torn copy, which its content reveals.
pub struct Lent {
    words: Arc<[AtomicU64]>,
}

impl Lent {
    /// Memory of `words` words of 8 bytes, with the content for `seed`.
    pub fn new(seed: u64, words: usize) -> Lent {
        let words = contents(seed).take(words).map(AtomicU64::new).collect();
        Lent { words }
    }

    /// The content for `seed`, as bytes.
    pub fn content(seed: u64, words: usize) -> Vec<u8> {
        let words = contents(seed).take(words);
        words.flat_map(u64::to_ne_bytes).collect()
    }

    /// Changes every word to the content for `seed`.
    pub fn change(&self, seed: u64) {
        for (word, content) in self.words.iter().zip(contents(seed)) {
            word.store(content, Ordering::Relaxed);
        }
    }

    /// Lends the memory.
    pub fn region(&self) -> HostRegion {
        let address = self.words.as_ptr().expose_provenance();
        let owner = Box::new(Arc::clone(&self.words));
        // SAFETY: the words live as long as the owner. They are only changed through atomics, and
        // the point of a test that changes them is that nothing reads them at that time.
        unsafe { HostRegion::contiguous(address, size_of_val(&*self.words), owner) }
    }

    /// Whether all its regions are dropped.
    pub fn is_returned(&self) -> bool {
        Arc::strong_count(&self.words) == 1
    }
}

fn contents(seed: u64) -> impl Iterator<Item = u64> {
    let mut state = seed;
    std::iter::repeat_with(move || mix(&mut state))
}
