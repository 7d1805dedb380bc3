//! Recently evicted keys.

use std::collections::VecDeque;

use hashbrown::HashMap;

/// The last evicted keys, up to a capacity.
#[derive(Debug)]
pub(super) struct Ghost {
    /// When each key was evicted.
    went: HashMap<u64, u32>,
    /// Keys in the order of eviction, including those that returned or were evicted again.
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

    /// Remembers an evicted key.
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

    /// Whether a returning key was evicted recently; forgets it.
    pub(super) fn take(&mut self, key: u64) -> bool {
        self.went.remove(&key).is_some()
    }
}
