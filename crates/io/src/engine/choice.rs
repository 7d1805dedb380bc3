//! Selects a backend by configuration and by what the system offers.

use std::fmt;
use std::str::FromStr;

use super::Engine;
use super::sync::Sync;
use super::threads::Threads;
#[cfg(feature = "uring")]
use super::uring::Uring;
use crate::{Error, Result};

/// The most operations that a backend keeps in flight, whatever the configuration. A ring can have
/// 32768 entries; no storage needs an eighth of them from one thread.
const QUEUE_DEPTH_MAX: usize = 4096;

/// Which backend to open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// `io_uring` where the kernel allows it, threads elsewhere.
    #[default]
    Auto,
    /// `io_uring` or an error.
    Uring,
    /// The thread pool.
    Threads,
    /// The submitting thread, which suits files in memory. It has no waker.
    Sync,
}

impl fmt::Display for EngineChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EngineChoice::Auto => "auto",
            EngineChoice::Uring => "uring",
            EngineChoice::Threads => "threads",
            EngineChoice::Sync => "sync",
        })
    }
}

impl FromStr for EngineChoice {
    type Err = Error;

    fn from_str(word: &str) -> Result<EngineChoice> {
        match word {
            "auto" => Ok(EngineChoice::Auto),
            "uring" => Ok(EngineChoice::Uring),
            "threads" => Ok(EngineChoice::Threads),
            "sync" => Ok(EngineChoice::Sync),
            _ => Err(Error::UnknownWord {
                setting: "engine",
                word: word.to_owned(),
                expected: "\"auto\", \"uring\", \"threads\" or \"sync\"",
            }),
        }
    }
}

/// How to open an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Which backend.
    pub choice: EngineChoice,
    /// The most operations in flight; clamped to 1..=4096.
    pub queue_depth: usize,
}

impl Default for EngineConfig {
    fn default() -> EngineConfig {
        EngineConfig {
            choice: EngineChoice::Auto,
            queue_depth: 32,
        }
    }
}

/// An engine, and the reason that a better one was unavailable.
pub struct Opened {
    /// The engine, bare: wrap it in [`WholeTransfers`](crate::transfer::WholeTransfers) for whole
    /// counts.
    pub engine: Box<dyn Engine>,
    /// Why [`EngineChoice::Auto`] did not choose `io_uring`, for a report.
    pub fallback: Option<String>,
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opened")
            .field("engine", &self.engine.capabilities())
            .field("fallback", &self.fallback)
            .finish()
    }
}

/// Opens an engine for the calling thread.
///
/// # Errors
/// [`Error::EngineUnavailable`] when the system refuses the named backend, or, under
/// [`EngineChoice::Auto`], every backend.
pub fn open(config: &EngineConfig) -> Result<Opened> {
    let queue_depth = config.queue_depth.clamp(1, QUEUE_DEPTH_MAX);
    match config.choice {
        EngineChoice::Uring => Ok(Opened {
            engine: open_uring(queue_depth)?,
            fallback: None,
        }),
        EngineChoice::Threads => Ok(Opened {
            engine: open_threads(queue_depth)?,
            fallback: None,
        }),
        EngineChoice::Sync => Ok(Opened {
            engine: Box::new(Sync::new(queue_depth)),
            fallback: None,
        }),
        EngineChoice::Auto => match open_uring(queue_depth) {
            Ok(engine) => Ok(Opened {
                engine,
                fallback: None,
            }),
            Err(Error::EngineUnavailable { reason, .. }) => Ok(Opened {
                engine: open_threads(queue_depth)?,
                fallback: Some(reason),
            }),
            Err(error) => Err(error),
        },
    }
}

fn open_threads(queue_depth: usize) -> Result<Box<dyn Engine>> {
    Ok(Box::new(Threads::open(queue_depth)?))
}

#[cfg(feature = "uring")]
fn open_uring(queue_depth: usize) -> Result<Box<dyn Engine>> {
    Ok(Box::new(Uring::open(queue_depth)?))
}

#[cfg(not(feature = "uring"))]
fn open_uring(_queue_depth: usize) -> Result<Box<dyn Engine>> {
    Err(Error::EngineUnavailable {
        engine: "uring",
        reason: "io_uring was left out of this build".to_owned(),
        source: std::io::ErrorKind::Unsupported.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_have_words() {
        for choice in [
            EngineChoice::Auto,
            EngineChoice::Uring,
            EngineChoice::Threads,
            EngineChoice::Sync,
        ] {
            assert_eq!(choice.to_string().parse::<EngineChoice>().unwrap(), choice);
        }
        let error = "aio".parse::<EngineChoice>().unwrap_err();
        assert!(
            error
                .to_string()
                .contains("\"auto\", \"uring\", \"threads\" or \"sync\""),
            "{error}"
        );
    }

    #[test]
    fn any_queue_depth_is_brought_into_bounds() {
        for (asked, given) in [(0, 1), (1, 1), (7, 7), (usize::MAX, QUEUE_DEPTH_MAX)] {
            for choice in [
                EngineChoice::Auto,
                EngineChoice::Threads,
                EngineChoice::Sync,
            ] {
                let opened = open(&EngineConfig {
                    choice,
                    queue_depth: asked,
                })
                .unwrap();
                assert_eq!(opened.engine.capabilities().queue_depth_max, given);
            }
        }
    }
}
