//! Stagers: threads that copy for a caller who waits to get the memory back.

use std::thread;

use penstock_io::buffer::IoBuf;
use penstock_io::trace::{self, Role};

use super::{StagingQueue, TURN, wait_timeout};
use crate::error::Result;

impl StagingQueue {
    /// Copies all extents that are not copied yet, with at most `threads` threads including this
    /// one; when it returns, the sources are no longer read.
    pub(crate) fn stage(&self, threads: usize) -> Result<()> {
        let rest = self.plan.extents() - self.lock().next;
        let runs = rest.div_ceil(self.run_extents());
        let helpers = (threads as u64).min(runs).saturating_sub(1);
        let copied: Vec<Result<()>> = thread::scope(|scope| {
            let help = |_| {
                thread::Builder::new().spawn_scoped(scope, || {
                    let _row = trace::enter(Role::Stager);
                    let _span = trace::span("work");
                    self.copy_runs()
                })
            };
            // If the system refuses more threads, fewer do the work.
            let helpers: Vec<_> = (0..helpers).map_while(|index| help(index).ok()).collect();
            let own = self.copy_runs();
            let join = |helper: thread::ScopedJoinHandle<'_, _>| {
                let joined = helper.join();
                joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            helpers.into_iter().map(join).chain([own]).collect()
        });
        self.wait(None);
        copied.into_iter().collect()
    }

    /// Copies all extents that are not copied yet: when it returns, the host has finished its
    /// copies, and those of devices are queued. The writing threads wait for the devices.
    pub(crate) fn queue(&self) -> Result<()> {
        self.lock().is_deferred = true;
        self.copy_runs()?;
        let mut state = self.lock();
        while !state.is_over() && (state.staging + state.filling > 0 || state.sources.is_checking())
        {
            state = wait_timeout(&self.supplied, state, TURN);
        }
        // The host's part is copied and may be changed from now on, so the check cannot come later.
        if let Some(watch) = state.begin_check() {
            drop(state);
            let written = watch.find_written();
            drop(watch);
            let mut state = self.lock();
            state.end_check(written);
            self.release_sources(state);
        } else {
            drop(state);
        }
        // Threads that wait for the release now wait for devices.
        self.released.notify_all();
        Ok(())
    }

    /// The loop of one stager: copies claims until none is left or the save is over.
    pub(crate) fn copy_runs(&self) -> Result<()> {
        while let Some(mut claim) = self.claim(self.run_extents(), true) {
            while !claim.numbers.is_empty() {
                let Some(buf) = self.take_buffer()? else {
                    return Ok(());
                };
                let mut bufs = vec![buf];
                // Several copies are queued on a device at once, but no thread waits for a buffer
                // while it holds others.
                while self.is_on_device
                    && (bufs.len() as u64) < claim.numbers.end - claim.numbers.start
                    && let Some(buf) = self.pool.take_unless_spent()?
                {
                    bufs.push(buf);
                }
                for filled in claim.copy_all(bufs, &[])? {
                    self.push(filled);
                }
            }
        }
        Ok(())
    }

    /// Extents that a stager claims at once.
    fn run_extents(&self) -> u64 {
        (self.run_bytes / self.plan.extent_bytes).max(1)
    }

    /// Takes a buffer for a stager, waiting until workers return one; `None` once the save is over.
    fn take_buffer(&self) -> Result<Option<IoBuf>> {
        let _span = trace::span("wait for memory");
        if let Some(buf) = self.pool.take_unless_spent()? {
            return Ok(Some(buf));
        }
        self.lock().is_open = true;
        self.supplied.notify_all();
        while self.check().is_ok() {
            if let Some(buf) = self.pool.take_timeout(TURN)? {
                return Ok(Some(buf));
            }
        }
        Ok(None)
    }
}
