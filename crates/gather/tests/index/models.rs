//! Policies as their papers describe them, without regard to speed.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};

/// A cache of keys.
pub(crate) trait Model {
    /// Looks up a key and admits it if it is missing; returns whether it was a hit.
    fn get(&mut self, key: u64) -> bool;
    fn forget(&mut self, key: u64);
}

/// Figure 5 of the paper on SIEVE: the head is the newest.
pub(crate) struct Sieve {
    slots: usize,
    /// From the tail to the head, with their marks.
    queue: Vec<(u64, bool)>,
    hand: Option<u64>,
}

impl Sieve {
    pub(crate) fn new(slots: usize) -> Sieve {
        Sieve {
            slots,
            queue: Vec::new(),
            hand: None,
        }
    }

    fn position(&self, key: u64) -> Option<usize> {
        self.queue.iter().position(|&(one, _)| one == key)
    }

    fn evict(&mut self) {
        let mut at = self.hand.and_then(|hand| self.position(hand)).unwrap_or(0);
        while self.queue[at].1 {
            self.queue[at].1 = false;
            at = (at + 1) % self.queue.len();
        }
        self.hand = self.queue.get(at + 1).map(|&(key, _)| key);
        self.queue.remove(at);
    }
}

impl Model for Sieve {
    fn get(&mut self, key: u64) -> bool {
        if let Some(at) = self.position(key) {
            self.queue[at].1 = true;
            return true;
        }
        if self.queue.len() == self.slots {
            self.evict();
        }
        self.queue.push((key, false));
        false
    }

    fn forget(&mut self, key: u64) {
        if let Some(at) = self.position(key) {
            if self.hand == Some(key) {
                self.hand = self.queue.get(at + 1).map(|&(key, _)| key);
            }
            self.queue.remove(at);
        }
    }
}

/// Algorithm 1 of the paper on S3-FIFO, with a small queue of a tenth of the rows. Its main queue
/// is never full, because it receives nothing while the small one has less than that. Before the
/// first eviction, it takes the rows for which the small one has no room, as in the authors'
/// simulator.
pub(crate) struct S3Fifo {
    slots: usize,
    /// From the tail to the head, with their numbers of uses.
    small: VecDeque<(u64, u8)>,
    main: VecDeque<(u64, u8)>,
    /// All keys ever evicted from the small queue; those that returned are `None`.
    ghost: Vec<Option<u64>>,
    has_evicted: bool,
}

impl S3Fifo {
    pub(crate) fn new(slots: usize) -> S3Fifo {
        S3Fifo {
            slots,
            small: VecDeque::new(),
            main: VecDeque::new(),
            ghost: Vec::new(),
            has_evicted: false,
        }
    }

    fn take_ghost(&mut self, key: u64) -> bool {
        let remembered = self.slots - self.slots / 10;
        let from = self.ghost.len().saturating_sub(remembered);
        let found = self.ghost[from..].iter_mut().find(|one| **one == Some(key));
        found.is_some_and(|one| one.take().is_some())
    }

    fn evict_small(&mut self) -> bool {
        while let Some((key, uses)) = self.small.pop_front() {
            if uses <= 1 {
                self.ghost.push(Some(key));
                return true;
            }
            self.main.push_back((key, 0));
        }
        false
    }

    fn evict_main(&mut self) {
        while let Some((key, uses)) = self.main.pop_front() {
            if uses == 0 {
                return;
            }
            self.main.push_back((key, uses - 1));
        }
    }
}

impl Model for S3Fifo {
    fn get(&mut self, key: u64) -> bool {
        let mut all = self.small.iter_mut().chain(self.main.iter_mut());
        if let Some((_, uses)) = all.find(|(one, _)| *one == key) {
            *uses = 3.min(*uses + 1);
            return true;
        }
        let rows = self.small.len() + self.main.len();
        self.has_evicted |= rows == self.slots;
        let is_first = !self.has_evicted && self.small.len() >= self.slots / 10;
        if rows == self.slots && !(self.small.len() * 10 >= rows && self.evict_small()) {
            self.evict_main();
        }
        match self.take_ghost(key) || is_first {
            true => self.main.push_back((key, 0)),
            false => self.small.push_back((key, 0)),
        }
        false
    }

    fn forget(&mut self, key: u64) {
        self.small.retain(|&(one, _)| one != key);
        self.main.retain(|&(one, _)| one != key);
    }
}

/// The most hits of any cache that knows all future lookups and need not admit.
pub(crate) fn belady_hits(keys: &[u64], slots: usize) -> u64 {
    let mut nexts = vec![usize::MAX; keys.len()];
    let mut later = HashMap::new();
    for (at, &key) in keys.iter().enumerate().rev() {
        nexts[at] = later.insert(key, at).unwrap_or(usize::MAX);
    }
    let mut cached = BTreeSet::new();
    let mut keys_there = HashSet::new();
    let mut hits = 0;
    for (at, &key) in keys.iter().enumerate() {
        if keys_there.contains(&key) {
            hits += 1;
            cached.remove(&(at, key));
        } else if cached.len() == slots {
            match cached.last().copied() {
                Some((next, gone)) if next > nexts[at] => {
                    cached.remove(&(next, gone));
                    keys_there.remove(&gone);
                }
                _ => continue,
            }
        }
        keys_there.insert(key);
        cached.insert((nexts[at], key));
    }
    hits
}
