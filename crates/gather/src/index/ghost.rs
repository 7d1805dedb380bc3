//! Keys that have gone not long ago.

use std::collections::VecDeque;

use hashbrown::HashMap;

/// The last keys that have gone, so many and no more.
#[derive(Debug)]
pub(super) struct Ghost {
    /// When each one went.
    went: HashMap<u64, u32>,
    /// In the order in which they went; those that came back, or went again, are still in it.
    order: VecDeque<u64>,
    capacity: usize,
    /// How many have left `order`.
    gone: u32,
}

impl Ghost {
    pub(super) fn new(capacity: usize) -> Ghost {
        Ghost {
            went: HashMap::new(),
            order: VecDeque::new(),
            capacity,
            gone: 0,
        }
    }

    /// A key goes.
    pub(super) fn remember(&mut self, key: u64) {
        if self.capacity == 0 {
            return;
        }
        if self.order.len() == self.capacity
            && let Some(oldest) = self.order.pop_front()
        {
            if self.went.get(&oldest) == Some(&self.gone) {
                self.went.remove(&oldest);
            }
            self.gone = self.gone.wrapping_add(1);
        }
        let now = self.gone.wrapping_add(self.order.len() as u32);
        self.order.push_back(key);
        self.went.insert(key, now);
    }

    /// A key comes: whether it went not long ago. It is not remembered any more.
    pub(super) fn take(&mut self, key: u64) -> bool {
        self.went.remove(&key).is_some()
    }
}
