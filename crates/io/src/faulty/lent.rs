//! Host memory whose owner changes it as soon as it is allowed to.

#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::mix;
use crate::buffer::{HostRegion, Memory};

/// Where in a page the words begin that are not aligned: behind the header of an allocator.
const UNALIGNED_BYTES: usize = 16;

/// Memory lent to a save and changed as soon as the save allows it, as a training loop does with
/// its tensors. A save that still reads it then stores a torn copy, which its content reveals.
pub struct Lent {
    words: Arc<Words>,
}

struct Words {
    memory: Memory,
    start: usize,
    count: usize,
}

impl Words {
    fn as_slice(&self) -> &[AtomicU64] {
        let first = ptr::with_exposed_provenance(self.memory.address() + self.start);
        // SAFETY: the words are in the memory, zeroed or changed through atomics, and nothing else
        // reaches them but regions, which only read.
        unsafe { std::slice::from_raw_parts(first, self.count) }
    }
}

impl Lent {
    /// Memory of `words` words of 8 bytes, with the content for `seed`, as an allocator returns it.
    pub fn new(seed: u64, words: usize) -> Lent {
        Lent::at(UNALIGNED_BYTES, seed, words)
    }

    /// The same at the start of a page.
    pub fn aligned(seed: u64, words: usize) -> Lent {
        Lent::at(0, seed, words)
    }

    /// The same at byte `start`, a multiple of 8, of a page.
    pub fn at(start: usize, seed: u64, count: usize) -> Lent {
        let bytes = start + count * size_of::<AtomicU64>();
        let memory = Memory::allocate(bytes.max(1)).expect("memory for a test");
        let words = Words {
            memory,
            start,
            count,
        };
        let lent = Lent {
            words: Arc::new(words),
        };
        lent.change(seed);
        lent
    }

    /// The content for `seed`, as bytes.
    pub fn content(seed: u64, words: usize) -> Vec<u8> {
        let words = contents(seed).take(words);
        words.flat_map(u64::to_ne_bytes).collect()
    }

    /// Changes every word to the content for `seed`.
    pub fn change(&self, seed: u64) {
        for (word, content) in self.words.as_slice().iter().zip(contents(seed)) {
            word.store(content, Ordering::Relaxed);
        }
    }

    /// Lends the memory.
    pub fn region(&self) -> HostRegion {
        let words = self.words.as_slice();
        let address = words.as_ptr().expose_provenance();
        let owner = Box::new(Arc::clone(&self.words));
        // SAFETY: the words live as long as the owner. They are only changed through atomics, and
        // the point of a test that changes them is that nothing reads them at that time.
        unsafe { HostRegion::contiguous(address, size_of_val(words), owner) }
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
