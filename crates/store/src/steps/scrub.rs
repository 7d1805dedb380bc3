//! Scrubbing: all steps of a store read back, now and then, before somebody needs them.
//!
//! Steps that were never read back come first, newest first, then those whose mark is oldest. Every
//! step leaves its mark before the next begins, so a scrub that is stopped goes on where it was.

use std::time::{Duration, Instant};

use crate::care::verify::verify_as;
use crate::error::{Error, Result};
use crate::options::Options;
use crate::pipeline::read::OnDamage;
use crate::progress::Progress;
use crate::report::{Problem, VerifyReport};
use crate::steps::marks::{Mark, now_seconds};
use crate::steps::store::{StepState, Store};

/// How a scrub is to go about.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scrub {
    /// Bytes to read in a second at most; as fast as it goes where absent.
    pub bytes_per_second: Option<u64>,
    /// What was read back more recently is left alone; where absent, whatever was ever read back.
    pub max_age: Option<Duration>,
}

/// What a scrub did with a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was read and is right.
    Verified,
    /// It was not read, and nothing says that it is wrong.
    Skipped,
    /// It is damaged: found so now, or not long ago and not read again.
    Damaged,
    /// The system refused to let it be read, so nobody knows.
    Failed,
}

/// A step with what came of it.
#[derive(Debug)]
pub struct ScrubbedStep {
    /// The step.
    pub step: u64,
    /// What came of it.
    pub outcome: Outcome,
    /// Why, in words, where it was not verified.
    pub reason: Option<String>,
    /// When it was read back last, in seconds since 1970, where that is known.
    pub read_at_seconds: Option<u64>,
    /// The damage, where it was read now.
    pub problems: Vec<Problem>,
    /// Bytes whose digest was checked.
    pub bytes_checked: u64,
    /// Time it took.
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

/// Everything that a scrub did.
#[derive(Debug)]
pub struct ScrubReport {
    /// The steps, ascending.
    pub steps: Vec<ScrubbedStep>,
    /// Time it took.
    pub seconds: f64,
}

/// A step that is to be read.
struct Due {
    step: u64,
    id: String,
    bytes: u64,
    /// When it was read back last; 0 for never.
    at_seconds: u64,
}

impl Store {
    /// Reads steps back and compares them with their digests, and remembers what it found.
    ///
    /// # Errors
    /// [`Error::Interrupted`]: what was verified until then is remembered. The system's errors; one
    /// step that cannot be read does not keep the others from being read.
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

    /// What is to be read, and what is not with the reason.
    fn sort_out(&self, scrub: &Scrub) -> Result<(Vec<Due>, Vec<ScrubbedStep>)> {
        let marks = match self.marks() {
            // What they said is lost: everything is read again.
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
        // What makes no sense behind right digests stays so, and is not to be kept as damaged.
        let marked = match problems.iter().any(|problem| problem.is_proven) {
            true => self.mark_damaged(step, &due.id),
            false if problems.is_empty() => self.mark_verified(step, &due.id),
            false => Ok(()),
        };
        let (outcome, reason) = match (problems.first(), marked) {
            (Some(first), _) => (Outcome::Damaged, Some(first.detail.clone())),
            // It is right all the same; a store may be read-only.
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

/// Whether what a mark says is to be looked at again. A mark of unknown age is older than any.
fn is_old(mark: &Mark, max_age: Option<Duration>, now_seconds: u64) -> bool {
    max_age.is_some_and(|max_age| mark.age(now_seconds).is_none_or(|age| age >= max_age))
}
