//! Scrubbing: reads all steps of a store back periodically, before somebody needs them.
//!
//! Steps that were never read back come first, newest first, then those with the oldest marks. Each
//! step is marked before the next begins, so a scrub that is stopped resumes there.

use std::time::{Duration, Instant};

use crate::care::verify::verify_as;
use crate::error::{Error, Result};
use crate::options::Options;
use crate::pipeline::read::OnDamage;
use crate::progress::Progress;
use crate::report::{Problem, VerifyReport};
use crate::steps::marks::{Mark, now_seconds};
use crate::steps::store::{StepState, Store};

/// Limits of a scrub.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scrub {
    /// Read rate limit in bytes per second; unlimited if absent.
    pub bytes_per_second: Option<u64>,
    /// Steps read back more recently are skipped; if absent, all that were ever read back.
    pub max_age: Option<Duration>,
}

/// The outcome of a scrub for a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The step was read and is right.
    Verified,
    /// The step was not read, and nothing shows that it is damaged.
    Skipped,
    /// The step is damaged: found now, or recently and not read again.
    Damaged,
    /// The system could not read it, so its state is unknown.
    Failed,
}

/// A step and the outcome of its scrub.
#[derive(Debug)]
pub struct ScrubbedStep {
    /// The step.
    pub step: u64,
    /// The outcome.
    pub outcome: Outcome,
    /// The reason, in words, if it was not verified.
    pub reason: Option<String>,
    /// Time of its last read, in seconds since 1970, if known.
    pub read_at_seconds: Option<u64>,
    /// The damage, if it was read now.
    pub problems: Vec<Problem>,
    /// Bytes whose digest was checked.
    pub bytes_checked: u64,
    /// Duration in seconds.
    pub seconds: f64,
}

impl ScrubbedStep {
    fn unread(step: u64, outcome: Outcome, reason: String, mark: Option<&Mark>) -> ScrubbedStep {
        ScrubbedStep {
            step,
            outcome,
            reason: Some(reason),
            read_at_seconds: mark.map(|mark| mark.at_seconds).filter(|&at| at > 0),
            problems: Vec::new(),
            bytes_checked: 0,
            seconds: 0.0,
        }
    }
}

/// The result of a scrub.
#[derive(Debug)]
pub struct ScrubReport {
    /// The steps, ascending.
    pub steps: Vec<ScrubbedStep>,
    /// Duration in seconds.
    pub seconds: f64,
}

/// A step to be read.
struct Due {
    step: u64,
    id: String,
    bytes: u64,
    /// Time of its last read, in seconds since 1970; 0 for never.
    at_seconds: u64,
}

impl Store {
    /// Reads steps back, compares them with their digests, and records the results.
    ///
    /// # Errors
    /// [`Error::Interrupted`]; earlier results are recorded. System errors; one step that cannot be
    /// read does not stop the reading of others.
    pub fn scrub(
        &self,
        scrub: &Scrub,
        options: &Options,
        progress: &Progress,
    ) -> Result<ScrubReport> {
        let begun = Instant::now();
        if let Some(bytes_per_second) = scrub.bytes_per_second {
            progress.limit(bytes_per_second);
        }
        let (mut due, mut steps) = self.sort_out(scrub)?;
        due.sort_by_key(|due| (due.at_seconds, std::cmp::Reverse(due.step)));
        progress.expect(due.iter().map(|due| due.bytes).sum());
        for due in due {
            progress.check()?;
            let scrubbed = self.scrub_step(&due, options, progress)?;
            steps.push(scrubbed);
        }
        steps.sort_by_key(|scrubbed| scrubbed.step);
        Ok(ScrubReport {
            steps,
            seconds: begun.elapsed().as_secs_f64(),
        })
    }

    /// The steps to read, and those to skip with the reason.
    fn sort_out(&self, scrub: &Scrub) -> Result<(Vec<Due>, Vec<ScrubbedStep>)> {
        let marks = match self.marks() {
            // The marks are lost: all steps are read again.
            Err(Error::Corrupt { .. }) => {
                self.forget_marks()?;
                Vec::new()
            }
            result => result?,
        };
        let now_seconds = now_seconds();
        let mark_of = |step: u64| marks.iter().find(|mark| mark.step == step);
        let (mut due, mut steps) = (Vec::new(), Vec::new());
        for step in self.steps()? {
            let mark = mark_of(step);
            let unread = |outcome, reason| ScrubbedStep::unread(step, outcome, reason, mark);
            match self.state(step) {
                Ok(StepState::Complete(checkpoint)) => match mark {
                    Some(mark) if !is_old(mark, scrub.max_age, now_seconds) => {
                        steps.push(match mark.is_damaged {
                            true => unread(Outcome::Damaged, "it was found damaged".to_owned()),
                            false => unread(Outcome::Skipped, "it was read back".to_owned()),
                        });
                    }
                    _ => due.push(Due {
                        step,
                        id: checkpoint.manifest().id.clone(),
                        bytes: checkpoint.part().files.iter().map(|file| file.bytes).sum(),
                        at_seconds: mark.map_or(0, |mark| mark.at_seconds.max(1)),
                    }),
                },
                Ok(StepState::Incomplete) => {
                    steps.push(unread(Outcome::Skipped, "it is not complete".to_owned()));
                }
                Ok(StepState::Damaged(error @ Error::Partial { .. }))
                | Ok(StepState::Newer(error)) => {
                    steps.push(unread(Outcome::Skipped, error.to_string()));
                }
                Ok(StepState::Damaged(error)) => {
                    steps.push(unread(Outcome::Damaged, error.to_string()));
                }
                Err(Error::NotFound { .. }) => {}
                Ok(StepState::Unreadable(error)) | Err(error) => {
                    steps.push(unread(Outcome::Failed, error.full_message()));
                }
            }
        }
        Ok((due, steps))
    }

    fn scrub_step(
        &self,
        due: &Due,
        options: &Options,
        progress: &Progress,
    ) -> Result<ScrubbedStep> {
        let (step, path) = (due.step, self.step_path(due.step));
        let unread = |outcome, reason| Ok(ScrubbedStep::unread(step, outcome, reason, None));
        let report = match verify_as(&path, OnDamage::Survey, options, progress) {
            Ok(report) => report,
            Err(Error::NotFound { .. } | Error::Incomplete { .. } | Error::Replaced { .. }) => {
                return unread(Outcome::Skipped, "it was removed meanwhile".to_owned());
            }
            Err(error @ Error::Storage { .. }) => {
                return unread(Outcome::Failed, error.full_message());
            }
            Err(error) => return Err(error),
        };
        let VerifyReport {
            problems,
            bytes_checked,
            seconds,
            ..
        } = report;
        // A checkpoint that is invalid behind matching digests stays so, and must not be
        // quarantined as damaged.
        let marked = match problems.iter().any(|problem| problem.is_proven) {
            true => self.mark_damaged(step, &due.id),
            false if problems.is_empty() => self.mark_verified(step, &due.id),
            false => Ok(()),
        };
        let (outcome, reason) = match (problems.first(), marked) {
            (Some(first), _) => (Outcome::Damaged, Some(first.detail.clone())),
            // The step is right even if the mark could not be written; a store may be read-only.
            (None, Err(error)) => {
                let reason = format!("but not remembered: {}", error.full_message());
                (Outcome::Verified, Some(reason))
            }
            (None, Ok(())) => (Outcome::Verified, None),
        };
        Ok(ScrubbedStep {
            step,
            outcome,
            reason,
            read_at_seconds: Some(now_seconds()),
            problems,
            bytes_checked,
            seconds,
        })
    }
}

/// Whether a mark is due for another read. A mark of unknown age is older than any other.
fn is_old(mark: &Mark, max_age: Option<Duration>, now_seconds: u64) -> bool {
    max_age.is_some_and(|max_age| mark.age(now_seconds).is_none_or(|age| age >= max_age))
}
