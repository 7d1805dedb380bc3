//! Counters: rates and levels over time, one value for each hundredth of a second.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::cell::{Cell, lock};
use super::record::{Gauge, Record, push};

/// The resolution of rates: a hundredth of a second holds some requests of a fast device.
const BUCKET_NS: u64 = 10_000_000;

const GIB: f64 = (1u64 << 30) as f64;

/// Records a level from `at_ns` on.
pub(super) fn gauge(gauge: Gauge, at_ns: u64, level: f64) {
    push(Record::Level {
        gauge,
        at_ns,
        level,
    });
}

#[derive(Default)]
struct Meter {
    /// Start of the bucket being filled; 0 before the first.
    bucket_ns: u64,
    submitted_bytes: u64,
    completed_bytes: u64,
    in_flight: u64,
    in_flight_max: u64,
    pool_bytes_max: u64,
}

static METER: Cell<Mutex<Meter>> = Cell::new();

/// Starts with new counts, in a forked child.
pub(super) fn forget() {
    METER.renew();
}

/// Bytes of all pools that are in use.
static POOL_BYTES: AtomicU64 = AtomicU64::new(0);

/// Counts memory taken from a pool.
pub(crate) fn taken(bytes: usize) {
    POOL_BYTES.fetch_add(bytes as u64, Ordering::Relaxed);
}

/// Counts memory returned to a pool.
pub(crate) fn returned(bytes: usize) {
    POOL_BYTES.fetch_sub(bytes as u64, Ordering::Relaxed);
}

pub(super) fn submitted(at_ns: u64, bytes: usize) {
    let mut meter = lock(METER.get());
    meter.advance(at_ns);
    meter.submitted_bytes += bytes as u64;
    meter.in_flight += 1;
    meter.in_flight_max = meter.in_flight_max.max(meter.in_flight);
    meter.pool_bytes_max = meter.pool_bytes_max.max(POOL_BYTES.load(Ordering::Relaxed));
}

pub(super) fn completed(at_ns: u64, bytes: usize) {
    let mut meter = lock(METER.get());
    meter.advance(at_ns);
    meter.completed_bytes += bytes as u64;
    meter.in_flight = meter.in_flight.saturating_sub(1);
}

/// Counts a request that was abandoned.
pub(super) fn dropped(at_ns: u64) {
    completed(at_ns, 0);
}

/// Records the open bucket if it is over.
pub(super) fn advance(at_ns: u64) {
    lock(METER.get()).advance(at_ns);
}

/// Records the open bucket.
pub(super) fn close(at_ns: u64) {
    advance(at_ns + 2 * BUCKET_NS);
}

/// Resets all counts.
pub(super) fn reset() {
    *lock(METER.get()) = Meter::default();
}

impl Meter {
    /// Records the bucket before `at_ns`, unless it is empty.
    fn advance(&mut self, at_ns: u64) {
        let bucket_ns = at_ns - at_ns % BUCKET_NS;
        if bucket_ns <= self.bucket_ns {
            return;
        }
        let pool_bytes = POOL_BYTES.load(Ordering::Relaxed);
        if self.submitted_bytes + self.completed_bytes + self.in_flight_max > 0 {
            let rate = |bytes: u64| bytes as f64 / GIB / (BUCKET_NS as f64 / 1e9);
            let pool_bytes_max = self.pool_bytes_max.max(pool_bytes);
            let (submitted, completed) = (rate(self.submitted_bytes), rate(self.completed_bytes));
            let levels = [
                submitted,
                completed,
                self.in_flight_max as f64,
                pool_bytes_max as f64,
            ];
            record(self.bucket_ns, levels);
            if bucket_ns > self.bucket_ns + BUCKET_NS {
                // A level is valid until the next one.
                let levels = [0.0, 0.0, self.in_flight as f64, pool_bytes as f64];
                record(self.bucket_ns + BUCKET_NS, levels);
            }
        }
        *self = Meter {
            bucket_ns,
            in_flight: self.in_flight,
            in_flight_max: self.in_flight,
            ..Meter::default()
        };
    }
}

fn record(at_ns: u64, levels: [f64; 4]) {
    let gauges = [
        Gauge::Submitted,
        Gauge::Completed,
        Gauge::Depth,
        Gauge::PoolBytes,
    ];
    for (one, level) in gauges.into_iter().zip(levels) {
        gauge(one, at_ns, level);
    }
}
