//! How often and when a request is retried.

use std::time::{Duration, Instant};

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};

use crate::refusal::Refusal;

const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// The longest pause that a store may ask for.
const WISH_MAX: Duration = Duration::from_secs(30);

/// The pause before the first retry; short patience leaves time for several retries too.
pub(crate) fn first_pause(patience: Duration) -> Duration {
    PAUSE_MIN.min(patience / 16)
}

/// How long a 404 is not believed for an object that must exist: longer than a replica lags,
/// shorter than a server's restart.
const DENIED_MAX: Duration = Duration::from_secs(2);

/// Attempts made however long they take, because one unanswered request may use up all patience.
const TRIES_MIN: u32 = 3;

/// The retries of one request: as many as patience allows, with growing randomised pauses, so that
/// clients refused together do not return together.
pub(crate) struct Tries {
    pauses: ExponentialBackoff,
    begun: Instant,
    patience: Duration,
    made: u32,
}

impl Tries {
    pub(crate) fn new(patience: Duration) -> Tries {
        let pauses = ExponentialBuilder::new()
            .with_min_delay(first_pause(patience))
            .with_max_delay(PAUSE_MAX)
            .with_factor(2.0)
            .with_jitter()
            .without_max_times();
        Tries {
            pauses: pauses.build(),
            begun: Instant::now(),
            patience,
            made: 0,
        }
    }

    /// Waits for the time of the next attempt.
    ///
    /// # Errors
    /// Returns `refusal` if a retry cannot help or patience is used up.
    pub(crate) async fn again(&mut self, refusal: Refusal) -> Result<(), Refusal> {
        self.again_within(refusal, self.patience).await
    }

    /// As [`again`](Tries::again), for an object that must exist, where "not found" may be an
    /// unintelligible response.
    pub(crate) async fn again_for_known(&mut self, mut refusal: Refusal) -> Result<(), Refusal> {
        if !refusal.is_of_nothing() {
            return self.again(refusal).await;
        }
        refusal.is_passing = true;
        self.again_within(refusal, self.patience.min(DENIED_MAX))
            .await
    }

    async fn again_within(&mut self, refusal: Refusal, time: Duration) -> Result<(), Refusal> {
        self.made += 1;
        let elapsed = self.begun.elapsed();
        let has_tried = self.made >= TRIES_MIN || self.patience.is_zero();
        if !refusal.is_passing || (has_tried && elapsed >= time) {
            return Err(refusal.after(self.made, elapsed));
        }
        let pause = self.pauses.next().unwrap_or(PAUSE_MAX);
        let wish = refusal.pause.unwrap_or_default().min(WISH_MAX);
        tokio::time::sleep(pause.max(wish)).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    /// Attempts at a request that always fails so, each after `each`.
    fn tries(refusal: &Refusal, patience: Duration, each: Duration) -> u32 {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build();
        runtime.unwrap().block_on(async {
            let mut tries = Tries::new(patience);
            loop {
                tokio::time::sleep(each).await;
                if tries.again(refusal.clone()).await.is_err() {
                    return tries.made;
                }
            }
        })
    }

    #[test]
    fn what_has_to_be_there_is_asked_for_again_and_not_for_ever() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build();
        runtime.unwrap().block_on(async {
            let nothing = Refusal::new(io::ErrorKind::NotFound, "");
            let mut tries = Tries::new(Duration::from_millis(1));
            while tries.again_for_known(nothing.clone()).await.is_ok() {}
            assert_eq!(tries.made, TRIES_MIN);
            let mut tries = Tries::new(Duration::MAX);
            assert!(tries.again(nothing).await.is_err());
        });
    }

    #[test]
    fn a_slow_failure_is_tried_again_too_and_a_lasting_one_is_not() {
        let passing = Refusal::passing(io::ErrorKind::TimedOut, "");
        let (none, some) = (Duration::ZERO, Duration::from_millis(1));
        assert_eq!(tries(&passing, some, 2 * some), TRIES_MIN);
        assert_eq!(tries(&passing, none, none), 1);
        assert!(tries(&passing, Duration::from_secs(1), none) > TRIES_MIN);
        let lasting = Refusal::new(io::ErrorKind::InvalidInput, "");
        assert_eq!(tries(&lasting, Duration::MAX, none), 1);
    }
}
