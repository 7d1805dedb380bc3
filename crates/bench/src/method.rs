//! The ways to move bytes that a thread can take.

use std::time::Instant;

use penstock_store::Result;

use crate::batches::Batches;
use crate::job::Method;
use crate::outcome::Tally;
use crate::worker::Worker;

/// Does everything, once `go` returns the moment to count from.
pub(crate) fn run(mut worker: Worker<'_>, go: impl FnOnce() -> Instant) -> Result<Tally> {
    match worker.shared.job.method {
        Method::Posix => {
            worker.tally.setup = "pread, pwrite".to_owned();
            worker.start(go);
            match worker.staged.take() {
                Some(staged) => staged.run_blocking(&mut worker)?,
                None => worker.run_blocking()?,
            }
        }
        Method::Cufile => {
            worker.tally.setup = "cuFileRead, cuFileWrite".to_owned();
            let staged = worker.staged.take();
            worker.start(go);
            let staged = staged.expect("it is of devices alone");
            staged.run_cufile(&mut worker)?;
        }
        Method::Threads | Method::Uring | Method::UringRegistered => {
            let engine = worker.open_engine();
            // Whatever comes of it: the other threads wait for this one.
            worker.start(go);
            let mut engine = engine?;
            match worker.staged.take() {
                Some(staged) => staged.run_engine(&mut worker, engine.as_mut())?,
                None => worker.run_engine(engine.as_mut())?,
            }
        }
        Method::Executor => {
            let batches = Batches::open(worker.shared);
            worker.start(go);
            batches?.run(&mut worker)?;
        }
    }
    Ok(worker.tally)
}
