//! The progress of a running call, its cancellation, and its rate limit.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// How long a rate-limited call may take to notice its cancellation.
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// Shared between a call and its observers; every field may be read at any time.
#[derive(Debug, Default)]
pub struct Progress {
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
    cancelled: AtomicBool,
    pace: Mutex<Option<Pace>>,
}

/// A limit on the rate of requested bytes.
#[derive(Debug)]
struct Pace {
    bytes_per_second: u64,
    /// When everything requested so far is within the rate.
    paid_at: Instant,
}

impl Progress {
    /// Bytes finished and bytes to do.
    pub fn bytes(&self) -> (u64, u64) {
        (
            self.done_bytes.load(Ordering::Relaxed),
            self.total_bytes.load(Ordering::Relaxed),
        )
    }

    /// Cancels the call: it returns [`Error::Interrupted`] soon, having committed nothing.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Limits the rate at which a verification or a scrub reads from here on.
    pub(crate) fn limit(&self, bytes_per_second: u64) {
        let pace = Pace {
            bytes_per_second: bytes_per_second.max(1),
            paid_at: Instant::now(),
        };
        *self.pace.lock().expect("nothing panics with the lock") = Some(pace);
    }

    /// Waits until `bytes` may be requested. The wait comes before the request: so no second
    /// exceeds the rate by more than the one request that ends in it, whatever went unused earlier.
    pub(crate) fn pay(&self, bytes: u64) -> Result<()> {
        let Some(paid_at) = self.charge(bytes) else {
            return Ok(());
        };
        loop {
            self.check()?;
            let left = paid_at.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            thread::sleep(left.min(PAUSE_MAX));
        }
    }

    /// When the next `bytes` are within the rate; `None` without a limit.
    fn charge(&self, bytes: u64) -> Option<Instant> {
        let mut pace = self.pace.lock().expect("nothing panics with the lock");
        let pace = pace.as_mut()?;
        let seconds = bytes as f64 / pace.bytes_per_second as f64;
        // A year is practically unlimited, and does not overflow.
        let price = Duration::from_secs_f64(seconds.min(365.0 * 86_400.0));
        pace.paid_at = pace.paid_at.max(Instant::now()) + price;
        Some(pace.paid_at)
    }

    /// Sets the total; a call that is part of a larger one keeps the larger total.
    pub(crate) fn expect(&self, total_bytes: u64) {
        self.total_bytes.fetch_max(total_bytes, Ordering::Relaxed);
    }

    pub(crate) fn advance(&self, bytes: u64) {
        self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.cancelled.load(Ordering::Relaxed) {
            Err(Error::Interrupted)
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_limit_nothing_waits() {
        assert_eq!(Progress::default().charge(u64::MAX), None);
    }

    /// In any order and from any number of threads, a request waits for all before it.
    #[test]
    fn requests_are_paid_for_one_after_the_other() {
        let progress = Progress::default();
        progress.limit(1_000_000);
        let begun = Instant::now();
        let mut last = begun;
        for _ in 0..100 {
            let paid_at = progress.charge(100_000).unwrap();
            assert!(paid_at >= last + Duration::from_millis(100));
            last = paid_at;
        }
        assert!(last >= begun + Duration::from_secs(10));
        assert!(last < Instant::now() + Duration::from_secs(11));
    }

    #[test]
    fn what_went_unused_is_not_saved_up() {
        let progress = Progress::default();
        progress.limit(1_000_000_000);
        thread::sleep(Duration::from_millis(20));
        let now = Instant::now();
        let paid_at = progress.charge(1_000_000_000).unwrap();
        assert!(paid_at >= now + Duration::from_secs(1));
    }

    #[test]
    fn who_waits_for_its_turn_can_be_stopped() {
        let progress = Progress::default();
        progress.limit(1);
        progress.cancel();
        assert!(matches!(progress.pay(u64::MAX), Err(Error::Interrupted)));
    }
}
