//! Simulates a cache on a trace of keys.

use std::collections::VecDeque;

use super::{FETCHED, Index};

/// Looks up keys in batches of `batch_keys`, with `window` batches announced in advance. Every row
/// may be evicted.
///
/// # Returns
/// Number of hits.
///
/// # Panics
/// If `batch_keys` is 0.
pub fn replay(index: &mut Index, keys: &[u64], batch_keys: usize, window: usize) -> u64 {
    let mut ahead = keys.chunks(batch_keys);
    let mut numbers = VecDeque::new();
    let mut hits = 0;
    for batch in keys.chunks(batch_keys) {
        while window > 0
            && numbers.len() < window
            && let Some(next) = ahead.next()
        {
            numbers.push_back(index.hint(next));
        }
        let number = numbers.pop_front();
        if let Some(number) = number {
            index.reach(number);
        }
        for keys in batch.chunks(FETCHED) {
            index.fetch(keys);
            for &key in keys {
                match index.find(key) {
                    Some(_) => hits += 1,
                    None => drop(index.admit(key, |_| true)),
                }
            }
        }
        if let Some(number) = number {
            index.cancel(number);
        }
    }
    hits
}
