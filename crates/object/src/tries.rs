//! How often a request is sent, and when.

use std::time::{Duration, Instant};

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};

use crate::refusal::Refusal;

const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// The longest that a store's own wish counts.
const WISH_MAX: Duration = Duration::from_secs(30);

/// How long the first repetition waits; who has little patience sees some of them too.
pub(crate) fn first_pause(patience: Duration) -> Duration {
    PAUSE_MIN.min(patience / 16)
}

/// The time for which a 404 is not believed for an object that has to be there: longer than a replica is behind
/// the others, and not as long as a server takes to start again.
const DENIED_MAX: Duration = Duration::from_secs(2);

/// However long they take, as one that gets no answer may use up all patience by itself.
const TRIES_MIN: u32 = 3;

/// The tries of one request: as many as patience lasts for, with pauses that grow and are drawn by
/// chance, so that those who were refused together do not come back together.
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

    /// Waits until it is time for another try.
    ///
    /// # Errors
    /// With what refused the last one where another would be no use, or patience is at its end.
    pub(crate) async fn again(&mut self, refusal: Refusal) -> Result<(), Refusal> {
        self.again_within(refusal, self.patience).await
    }

    /// As [`again`](Tries::again), of an object that has to be there: that there is none may be an answer of
    /// nonsense, too.
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

    /// How often a request is sent that fails so, each time after so long.
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
