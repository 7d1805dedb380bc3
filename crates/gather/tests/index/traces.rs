//! Traces of keys, the same in each run.

/// splitmix64 (Steele et al., OOPSLA 2014).
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// In [0, 1).
    fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// Keys drawn with weights `rank^-exponent`.
fn drawn(keys: u64, exponent: f64, requests: usize, seed: u64) -> Vec<u64> {
    let mut sums = Vec::with_capacity(keys as usize);
    let mut sum = 0.0;
    for rank in 1..=keys {
        sum += (rank as f64).powf(-exponent);
        sums.push(sum);
    }
    let mut numbers = Numbers(seed);
    let mut draw = || {
        let at = numbers.fraction() * sum;
        sums.partition_point(|&sum| sum <= at) as u64
    };
    (0..requests).map(|_| draw() << 20 | 7 << 48).collect()
}

pub(crate) fn zipf(keys: u64, requests: usize, seed: u64) -> Vec<u64> {
    drawn(keys, 1.0, requests, seed)
}

/// Lookups of a graph's nodes by their degrees, which follow a power law with exponent 2.3: the
/// degree of the node at a rank is proportional to `rank^(-1/1.3)`.
pub(crate) fn degrees(keys: u64, requests: usize, seed: u64) -> Vec<u64> {
    drawn(keys, 1.0 / 1.3, requests, seed)
}

/// Rounds over the same keys, with an occasional lookup of a few others.
pub(crate) fn scans(keys: u64, rounds: u64, seed: u64) -> Vec<u64> {
    let mut numbers = Numbers(seed);
    let mut trace = Vec::new();
    for _ in 0..rounds {
        for key in 0..keys {
            trace.push(key);
            if numbers.next().is_multiple_of(4) {
                trace.push(keys + numbers.next() % 32);
            }
        }
    }
    trace
}
