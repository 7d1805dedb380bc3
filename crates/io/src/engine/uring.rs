//! The `io_uring` backend: one ring, used by the thread that opened it.
//!
//! Operations stay in a slab from submission until the kernel hands their index back, and with them
//! the buffers and open files that the kernel works on. The ring has an entry for every operation
//! that may be in flight, so neither of its queues can overflow.
//!
//! Dropping the engine waits for every operation. Should the kernel refuse even to wait, the
//! buffers are leaked: memory that the kernel may still write to is never freed.

#![allow(unsafe_code)]

use std::io;
use std::sync::Arc;
use std::time::Duration;

use io_uring::types::{Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{Builder, EnterFlags, IoUring, Probe, opcode, squeue};
use rustix::fd::{AsFd, AsRawFd};
use rustix::io::Errno;
use slab::Slab;

use super::{Capabilities, Completion, Deadline, Engine, Op, OpKind, Rejected, TRANSFER_BYTES_MAX};
use crate::buffer::IoBuf;
use crate::file::File;
use crate::{Error, Result};

/// Transfers from this size on are sent to the kernel at once, so that they run while the caller
/// prepares the next one. Of smaller ones a poll sends many with one system call.
const SENT_AT_ONCE_BYTES_MIN: usize = 64 << 10;

/// How long the kernel may be out of memory for requests before polling reports it.
const REFUSALS_MAX: u32 = 1000;

/// The wait between attempts to hand requests to a kernel that is out of memory for them.
const REFUSAL_PAUSE: Timespec = Timespec::new().nsec(1_000_000);

/// An `io_uring` and what it is working on.
pub(super) struct Uring {
    ring: IoUring,
    setup: &'static str,
    queue_depth: usize,
    flying: Slab<Flying>,
}

/// What the kernel may touch until the operation's completion.
struct Flying {
    token: u64,
    buf: Option<IoBuf>,
    _file: Arc<File>,
}

impl Uring {
    /// Sets the best ring up that this kernel has.
    pub(super) fn open(queue_depth: usize) -> Result<Uring> {
        Uring::open_kind(&kinds(), queue_depth)
    }

    /// Sets one of `kinds` up and makes sure that it can do what this backend asks of it.
    fn open_kind(kinds: &[(Builder, &'static str)], queue_depth: usize) -> Result<Uring> {
        let unavailable = |source: io::Error| Error::EngineUnavailable {
            engine: "uring",
            reason: explain(&source, disabled_setting().as_deref()),
            source,
        };
        let entries = u32::try_from(queue_depth).expect("bounded by QUEUE_DEPTH_MAX");
        let (ring, setup) = set_up(kinds, entries).map_err(unavailable)?;
        check(&ring).map_err(unavailable)?;
        Ok(Uring {
            ring,
            setup,
            queue_depth,
            flying: Slab::with_capacity(queue_depth),
        })
    }

    /// Moves completions out of the ring; no system call.
    fn reap(&mut self, completed: &mut Vec<Completion>) -> usize {
        let before = completed.len();
        for entry in self.ring.completion() {
            let key = usize::try_from(entry.user_data()).expect("an index this backend gave");
            let Flying { token, buf, .. } = self.flying.remove(key);
            let result = usize::try_from(entry.result())
                .map_err(|_| io::Error::from_raw_os_error(-entry.result()));
            completed.push(Completion { token, buf, result });
        }
        completed.len() - before
    }

    /// Sends what is queued and waits for `wanted` completions or for the time to pass.
    fn enter(&mut self, wanted: usize, timeout: Option<Duration>) -> io::Result<usize> {
        match timeout {
            Some(timeout) if wanted > 0 => {
                let timespec = Timespec::from(timeout);
                let args = SubmitArgs::new().timespec(&timespec);
                self.ring.submitter().submit_with_args(wanted, &args)
            }
            _ => self.ring.submitter().submit_and_wait(wanted),
        }
    }

    /// Waits a moment for a completion without sending anything: a kernel that is out of memory for
    /// requests gets some back when requests complete.
    fn pause(&mut self) {
        let flags = EnterFlags::EXT_ARG | EnterFlags::GETEVENTS;
        let args = SubmitArgs::new().timespec(&REFUSAL_PAUSE);
        let submitter = self.ring.submitter();
        // SAFETY: nothing is submitted, and with EXT_ARG the argument is what `SubmitArgs` wraps;
        // it and the time it points to outlive the call.
        let waited = unsafe { submitter.enter(0, 1, flags.bits(), Some(&args)) };
        // A timeout, an interruption or a completion: the caller looks for itself.
        drop(waited);
    }
}

impl Engine for Uring {
    fn submit(&mut self, mut op: Op) -> std::result::Result<(), Rejected> {
        if self.flying.len() == self.queue_depth {
            return Err(Rejected { op });
        }
        let (entry, bytes) = prepare(&mut op);
        let Op { token, file, kind } = op;
        let buf = kind.into_buf();
        let key = self.flying.insert(Flying {
            token,
            buf,
            _file: file,
        });
        let entry = entry.user_data(key as u64);
        // SAFETY: the buffer and the file that the entry names are in the slab now, which keeps
        // them, untouched and alive, until the completion of this very entry was reaped; `drop`
        // leaks what it cannot wait for. An `IoBuf` is a window on memory that does not move with
        // it.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.expect("the ring has an entry for every operation in flight");
        if bytes.is_none_or(|bytes| bytes >= SENT_AT_ONCE_BYTES_MIN) {
            // A refusal leaves the entry queued: the next poll sends it, or reports why not.
            drop(self.ring.submit());
        }
        Ok(())
    }

    fn poll(
        &mut self,
        min: usize,
        timeout: Option<Duration>,
        completed: &mut Vec<Completion>,
    ) -> Result<()> {
        let deadline = Deadline::after(timeout);
        let mut wanted = min.min(self.flying.len());
        let mut refusals = 0;
        loop {
            let reaped = self.reap(completed);
            if reaped > 0 {
                refusals = 0;
            }
            wanted = wanted.saturating_sub(reaped);
            let queue = self.ring.submission();
            let idle = queue.is_empty() && !queue.taskrun();
            drop(queue);
            if wanted == 0 && idle {
                return Ok(());
            }
            let left = deadline.left();
            let entered = self.enter(wanted, left);
            let errno = entered
                .err()
                .map(|error| (Errno::from_io_error(&error), error));
            match errno {
                None | Some((Some(Errno::TIME | Errno::INTR), _)) => {}
                // Out of memory for requests, for now.
                Some((Some(Errno::AGAIN | Errno::BUSY), _)) if refusals < REFUSALS_MAX => {
                    refusals += 1;
                    self.pause();
                }
                Some((_, source)) => {
                    self.reap(completed);
                    return Err(Error::Engine {
                        operation: "io_uring_enter",
                        source,
                    });
                }
            }
            if wanted == 0 || left.is_some_and(|left| left.is_zero()) {
                self.reap(completed);
                return Ok(());
            }
        }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: "uring",
            queue_depth_max: self.queue_depth,
            setup: self.setup,
        }
    }

    fn in_flight(&self) -> usize {
        self.flying.len()
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        let mut completed = Vec::new();
        while !self.flying.is_empty() {
            if self.poll(self.flying.len(), None, &mut completed).is_err() {
                std::mem::forget(std::mem::take(&mut self.flying));
            }
        }
    }
}

/// The submission entry for an operation, and the bytes that it moves.
fn prepare(op: &mut Op) -> (squeue::Entry, Option<usize>) {
    let fd = Fd(op.file.as_fd().as_raw_fd());
    match &mut op.kind {
        OpKind::Read { offset, buf } => {
            let len = buf.len().min(TRANSFER_BYTES_MAX);
            let entry = opcode::Read::new(fd, buf.as_mut_slice().as_mut_ptr(), len as u32);
            (entry.offset(position(*offset)).build(), Some(len))
        }
        OpKind::Write { offset, buf } => {
            let len = buf.len().min(TRANSFER_BYTES_MAX);
            let entry = opcode::Write::new(fd, buf.as_slice().as_ptr(), len as u32);
            (entry.offset(position(*offset)).build(), Some(len))
        }
        OpKind::SyncData => (
            opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
            None,
        ),
    }
}

/// The offset as the ring understands it: all ones would mean "where the file stands", so it
/// becomes the next lower one, which the kernel refuses as it should (`EINVAL`).
fn position(offset: u64) -> u64 {
    offset.min(u64::MAX - 1)
}

/// The kinds of ring to try, each with its name for reports: completions are processed when this
/// thread asks for them, or at any of its system calls, or by interrupting it.
fn kinds() -> [(Builder, &'static str); 3] {
    let mut deferred = IoUring::builder();
    deferred
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag();
    let mut cooperative = IoUring::builder();
    cooperative.setup_coop_taskrun().setup_taskrun_flag();
    [
        (deferred, "single_issuer, defer_taskrun"),
        (cooperative, "coop_taskrun"),
        (IoUring::builder(), "plain"),
    ]
}

/// The first of `kinds` that the kernel knows.
fn set_up(kinds: &[(Builder, &'static str)], entries: u32) -> io::Result<(IoUring, &'static str)> {
    for (builder, setup) in kinds {
        match builder.build(entries) {
            Ok(ring) => return Ok((ring, setup)),
            // A kernel older than the flags of this kind (6.1, 5.19).
            Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => {}
            Err(error) => return Err(error),
        }
    }
    Err(Errno::INVAL.into())
}

/// Makes sure that the ring can wait with a timeout and knows our operations.
fn check(ring: &IoUring) -> io::Result<()> {
    if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "its waits have no timeout",
        ));
    }
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let used = [opcode::Read::CODE, opcode::Write::CODE, opcode::Fsync::CODE];
    if used.into_iter().all(|code| probe.is_supported(code)) {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::Unsupported,
        "it lacks read, write or fsync",
    ))
}

/// `kernel.io_uring_disabled`, where the kernel has that switch (6.6).
fn disabled_setting() -> Option<String> {
    std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").ok()
}

/// Why there is no ring, in words a user can act on.
fn explain(error: &io::Error, disabled: Option<&str>) -> String {
    let disabled = disabled.map_or("0", str::trim);
    match Errno::from_io_error(error) {
        Some(Errno::PERM) if disabled != "0" => format!(
            "io_uring is switched off on this machine (EPERM, kernel.io_uring_disabled={disabled})"
        ),
        Some(Errno::PERM) => "io_uring is forbidden here (EPERM), most likely by the seccomp \
             profile of the container"
            .to_owned(),
        Some(Errno::NOSYS) => "io_uring is not built into this kernel, or a seccomp profile hides \
             it (ENOSYS)"
            .to_owned(),
        Some(Errno::NOMEM) => "io_uring found too little memory that may be locked (ENOMEM); \
             raise the limit with ulimit -l"
            .to_owned(),
        _ => format!("io_uring cannot be used here: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_explained() {
        let because = |errno, disabled| explain(&io::Error::from_raw_os_error(errno), disabled);
        assert!(because(1, Some("2\n")).contains("kernel.io_uring_disabled=2"));
        assert!(because(1, Some("0\n")).contains("seccomp"));
        assert!(because(1, None).contains("seccomp"));
        assert!(because(38, Some("0\n")).contains("not built into this kernel"));
        assert!(because(12, None).contains("ulimit -l"));
        assert!(because(24, None).contains("os error 24"));
    }

    /// The kinds of ring that an older kernel would leave us pass the suite as well.
    #[cfg(feature = "conformance")]
    #[test]
    fn every_kind_of_ring_conforms() {
        use crate::conformance::{self as suite, Subject};

        fn open<const KIND: usize>(queue_depth: usize) -> Box<dyn Engine> {
            Box::new(Uring::open_kind(&kinds()[KIND..=KIND], queue_depth).unwrap())
        }
        let cases: [fn(&Subject); 6] = [
            suite::round_trip,
            suite::queue_full,
            suite::dropped_in_flight,
            suite::many_out_of_order,
            suite::poll_minimum,
            suite::poll_without_waiting,
        ];
        let opens: [fn(usize) -> Box<dyn Engine>; 3] = [open::<0>, open::<1>, open::<2>];
        for (kind, open) in kinds().into_iter().zip(opens) {
            if let Err(error) = Uring::open_kind(std::slice::from_ref(&kind), 1) {
                eprintln!("SKIPPED rings of kind {:?}: {error}", kind.1);
                continue;
            }
            for case in cases {
                let directory = tempfile::tempdir().unwrap();
                let direct = crate::file::Direct::Auto;
                case(&Subject {
                    open,
                    directory: directory.path().to_owned(),
                    direct,
                });
            }
        }
    }

    #[test]
    fn no_offset_means_the_position_of_the_file() {
        assert_eq!(position(u64::MAX), u64::MAX - 1);
        assert_eq!(position(4096), 4096);
    }
}
