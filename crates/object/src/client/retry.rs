//! How often and when a request is retried.

use std::time::{Duration, Instant};

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};

use crate::request_error::RequestError;

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
pub(crate) struct Retry {
    pauses: ExponentialBackoff,
    begun: Instant,
    patience: Duration,
    made: u32,
}

impl Retry {
    pub(crate) fn new(patience: Duration) -> Retry {
        let pauses = ExponentialBuilder::new()
            .with_min_delay(first_pause(patience))
            .with_max_delay(PAUSE_MAX)
            .with_factor(2.0)
            .with_jitter()
            .without_max_times();
        Retry {
            pauses: pauses.build(),
            begun: Instant::now(),
            patience,
            made: 0,
        }
    }

    /// Waits for the time of the next attempt.
    ///
    /// # Errors
    /// Returns `request_error` if a retry cannot help or patience is used up.
    pub(crate) async fn back_off(
        &mut self,
        request_error: RequestError,
    ) -> Result<(), RequestError> {
        self.back_off_within(request_error, self.patience).await
    }

    /// As [`back_off`](Retry::back_off), for an object that must exist, where "not found" may be an
    /// unintelligible response.
    pub(crate) async fn back_off_for_known(
        &mut self,
        mut request_error: RequestError,
    ) -> Result<(), RequestError> {
        if !request_error.is_of_nothing() {
            return self.back_off(request_error).await;
        }
        request_error.is_passing = true;
        self.back_off_within(request_error, self.patience.min(DENIED_MAX))
            .await
    }

    async fn back_off_within(
        &mut self,
        request_error: RequestError,
        time: Duration,
    ) -> Result<(), RequestError> {
        self.made += 1;
        let elapsed = self.begun.elapsed();
        let has_tried = self.made >= TRIES_MIN || self.patience.is_zero();
        if !request_error.is_passing || (has_tried && elapsed >= time) {
            return Err(request_error.after(self.made, elapsed));
        }
        let pause = self.pauses.next().unwrap_or(PAUSE_MAX);
        let wish = request_error.pause.unwrap_or_default().min(WISH_MAX);
        tokio::time::sleep(pause.max(wish)).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    /// Attempts at a request that always fails so, each after `each`.
    fn attempts(request_error: &RequestError, patience: Duration, each: Duration) -> u32 {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build();
        runtime.unwrap().block_on(async {
            let mut retry = Retry::new(patience);
            loop {
                tokio::time::sleep(each).await;
                if retry.back_off(request_error.clone()).await.is_err() {
                    return retry.made;
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
            let nothing = RequestError::new(io::ErrorKind::NotFound, "");
            let mut retry = Retry::new(Duration::from_millis(1));
            while retry.back_off_for_known(nothing.clone()).await.is_ok() {}
            assert_eq!(retry.made, TRIES_MIN);
            let mut retry = Retry::new(Duration::MAX);
            assert!(retry.back_off(nothing).await.is_err());
        });
    }

    #[test]
    fn a_slow_failure_is_tried_again_too_and_a_lasting_one_is_not() {
        let passing = RequestError::passing(io::ErrorKind::TimedOut, "");
        let (none, some) = (Duration::ZERO, Duration::from_millis(1));
        assert_eq!(attempts(&passing, some, 2 * some), TRIES_MIN);
        assert_eq!(attempts(&passing, none, none), 1);
        assert!(attempts(&passing, Duration::from_secs(1), none) > TRIES_MIN);
        let lasting = RequestError::new(io::ErrorKind::InvalidInput, "");
        assert_eq!(attempts(&lasting, Duration::MAX, none), 1);
    }
}
