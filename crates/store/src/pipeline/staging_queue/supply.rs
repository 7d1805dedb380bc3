//! Supplying workers: the next extent to write, copied or lent for the worker that asks.

use std::time::Duration;

use penstock_io::buffer::IoBuf;
use penstock_io::trace;

use super::lending::{Lending, LentExtent};
use super::state::Filled;
use super::{StagingQueue, TURN, wait_timeout};
use crate::error::{Error, Result};
use crate::pipeline::Halt;
use crate::seal::ShardSealer;

/// The answer to a worker that asks for an extent.
pub(in crate::pipeline) enum Next<'a> {
    Filled(Filled),
    Lent(LentExtent<'a>),
    /// No extent now, but one will follow.
    Later,
    /// No further extents.
    End,
}

impl StagingQueue {
    /// The next extent for a worker to write. With `may_wait`, which only a worker without
    /// operations in flight sets, it is never [`Next::Later`]. An extent that is copied for this
    /// worker is sealed on the way as far as it can be, if there are sealers, one for each shard.
    pub(in crate::pipeline) fn next(
        &self,
        may_wait: bool,
        halt: &Halt<'_>,
        sealers: &[ShardSealer],
        lending: Option<&Lending>,
    ) -> Result<Next<'_>> {
        let patience = if may_wait { TURN } else { Duration::ZERO };
        while halt.check_running()? {
            let mut state = self.lock();
            if state.is_over() {
                return Err(Error::Interrupted);
            }
            let is_exhausted = state.is_exhausted();
            if state.is_open {
                if let Some(filled) = state.staged.pop_front() {
                    return Ok(Next::Filled(filled));
                }
                if is_exhausted && state.staging == 0 {
                    if state.is_deferred && state.is_last() {
                        self.drop_sources(state);
                    }
                    return Ok(Next::End);
                }
            }
            if self.is_lazy && !is_exhausted {
                let is_staged_beside = state.staging > 0;
                drop(state);
                let patience = match is_staged_beside {
                    true => Duration::ZERO,
                    false => patience,
                };
                let span = trace::span("wait for memory");
                let taken = self.pool.take_timeout(patience)?;
                drop(span);
                if let Some(buf) = taken {
                    if let Some(next) = self.fill(buf, sealers, lending)? {
                        return Ok(next);
                    }
                } else if may_wait && is_staged_beside {
                    // The stager takes the returned memory, and signals when it is filled.
                    let state = self.lock();
                    if state.staged.is_empty() && state.staging > 0 && !state.is_over() {
                        drop(wait_timeout(&self.supplied, state, TURN));
                    }
                }
            } else if may_wait {
                let _span = trace::span("wait for stage");
                drop(wait_timeout(&self.supplied, state, TURN));
            }
            if !may_wait {
                return Ok(Next::Later);
            }
        }
        Ok(Next::End)
    }

    /// Copies or lends the next extent for a worker, if one is left.
    fn fill(
        &self,
        buf: IoBuf,
        sealers: &[ShardSealer],
        lending: Option<&Lending>,
    ) -> Result<Option<Next<'_>>> {
        let Some(claim) = self.claim(1, false) else {
            return Ok(None);
        };
        let (mut claim, buf) = match lending {
            None => (claim, buf),
            Some(lending) => match claim.lend(buf, lending) {
                Ok(lent) => return Ok(Some(Next::Lent(lent))),
                Err(unlent) => unlent,
            },
        };
        claim
            .copy(buf, sealers)
            .map(|filled| Some(Next::Filled(filled)))
    }
}
