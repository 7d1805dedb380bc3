//! The I/O methods of a thread.

use std::sync::Arc;
use std::time::Instant;

use penstock_io::buffer::DeviceStreams;
use penstock_store::Result;

use crate::batches::Batches;
use crate::job::Method;
use crate::outcome::Tally;
use crate::staged::Staged;
use crate::worker::Worker;

/// Makes all requests, after `go` has returned the start time.
pub(crate) fn run(mut worker: Worker<'_>, go: impl FnOnce() -> Instant) -> Result<Tally> {
    if let Some(device_streams) = worker.shared.device_streams {
        return run_staged(worker, device_streams, go);
    }
    match worker.shared.job.method {
        Method::Posix => {
            worker.tally.setup = "pread, pwrite".to_owned();
            worker.start(go);
            worker.run_blocking()?;
        }
        Method::Threads | Method::Uring | Method::UringRegistered => {
            let engine = worker.open_engine();
            // Start even after a failure, because the other threads wait for this one.
            worker.start(go);
            worker.run_engine(engine?.as_mut())?;
        }
        Method::Executor => {
            let batches = Batches::open(worker.shared);
            worker.start(go);
            batches?.run(&mut worker)?;
        }
        Method::Cufile => unreachable!("it is of devices alone"),
    }
    Ok(worker.tally)
}

/// Makes all requests of a worker whose bytes are in device memory.
fn run_staged(
    mut worker: Worker<'_>,
    device_streams: &Arc<DeviceStreams>,
    go: impl FnOnce() -> Instant,
) -> Result<Tally> {
    let staged = Staged::open(device_streams, &mut worker);
    match worker.shared.job.method {
        Method::Posix => {
            worker.tally.setup = "pread, pwrite, each copied by itself".to_owned();
            worker.start(go);
            staged?.run_blocking(&mut worker)?;
        }
        Method::Cufile => {
            worker.tally.setup = "cuFileRead, cuFileWrite".to_owned();
            worker.start(go);
            staged?.run_cufile(&mut worker)?;
        }
        Method::Threads | Method::Uring => {
            let engine = worker.open_engine();
            worker.tally.setup += ", copied while others are under way";
            worker.start(go);
            staged?.run_engine(&mut worker, engine?.as_mut())?;
        }
        Method::UringRegistered | Method::Executor => unreachable!("a job's check refuses it"),
    }
    Ok(worker.tally)
}
