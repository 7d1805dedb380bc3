//! The `io_uring` backend: one ring, used by the thread that opened it.
//!
//! Operations stay in a slab from submission until the kernel returns their index, along with the
//! buffers and open files that the kernel uses. The ring has an entry for every operation that may
//! be in flight, so neither of its queues can overflow.
//!
//! Dropping the engine waits for every operation. If the kernel refuses even to wait, the buffers
//! are leaked: memory that the kernel may still write to is never freed.

#![allow(unsafe_code)]

mod entry;
mod registered;
mod setup;

use std::io;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{Builder, EnterFlags, IoUring, opcode};
use rustix::event::{EventfdFlags, PollFlags};
use rustix::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use rustix::io::Errno;
use slab::Slab;

use super::{Capabilities, Completion, Deadline, Engine, Op, Rejected, Wake};
use crate::buffer::IoBuf;
use crate::file::File;
use crate::{Error, Result};
use entry::prepare;
use registered::{REGISTERED_BUFFERS_MAX, REGISTERED_BYTES_MAX, Registered};
use setup::{check, disabled_setting, explain, kinds, set_up};

/// Transfers of at least this size are submitted at once, so that they run while the caller
/// prepares the next one.
const SENT_AT_ONCE_BYTES_MIN: usize = 64 << 10;

/// This many smaller transfers are submitted with one system call; a poll submits the rest. Holding
/// them all until the next poll would keep the device idle while each is prepared.
const SENT_TOGETHER_MAX: usize = 4;

/// While the device has many operations, it is not idle for want of a few more: one part in this
/// many of those in flight is submitted with one system call.
const SENT_PART: usize = 8;

/// How many refusals for lack of kernel memory polling takes before it reports an error.
const REFUSALS_MAX: u32 = 1000;

/// The pause before requests are submitted again to a kernel that is out of memory for them.
const REFUSAL_PAUSE: Timespec = Timespec::new().nsec(1_000_000);

/// An `io_uring` and its operations in flight.
pub(super) struct Uring {
    ring: IoUring,
    setup: &'static str,
    queue_depth: usize,
    /// Dropped after the ring, which pins the memory.
    registered: Registered,
    flying: Slab<Flying>,
    /// Ends a wait, if a waker was requested.
    waker: Option<Arc<Waker>>,
    /// Whether the current wait, or the next one, was ended by the waker.
    is_woken: bool,
}

/// Marks the waker's completion, in the field in which operations have their index.
const WAKE: u64 = u64::MAX;

/// An event counter (`eventfd`) that the ring polls like a file.
struct Waker {
    counter: OwnedFd,
}

impl Wake for Waker {
    fn wake(&self) {
        // A counter at its maximum was not read yet: a wake is already pending.
        let _ = rustix::io::write(&self.counter, &1_u64.to_ne_bytes());
    }
}

/// The memory and file that the kernel may use until the operation's completion.
struct Flying {
    token: u64,
    buf: Option<IoBuf>,
    _file: Arc<File>,
}

impl Uring {
    /// Opens the best kind of ring that this kernel supports.
    pub(super) fn open(queue_depth: usize) -> Result<Uring> {
        Uring::open_kind(&kinds(), queue_depth)
    }

    /// Opens one of `kinds` and checks that it supports what this backend needs.
    fn open_kind(kinds: &[(Builder, &'static str)], queue_depth: usize) -> Result<Uring> {
        let unavailable = |source: io::Error| Error::EngineUnavailable {
            engine: "uring",
            reason: explain(&source, disabled_setting().as_deref()),
            source,
        };
        // One extra, for the waker.
        let entries = u32::try_from(queue_depth + 1).expect("bounded by QUEUE_DEPTH_MAX");
        let (ring, setup) = set_up(kinds, entries).map_err(unavailable)?;
        check(&ring).map_err(unavailable)?;
        Ok(Uring {
            ring,
            setup,
            queue_depth,
            registered: Registered::default(),
            flying: Slab::with_capacity(queue_depth),
            waker: None,
            is_woken: false,
        })
    }

    /// Submits a poll of the waker's counter, which one wake completes.
    fn listen(&mut self) {
        let Some(waker) = &self.waker else { return };
        let flags = u32::from(PollFlags::IN.bits());
        let entry = opcode::PollAdd::new(Fd(waker.counter.as_raw_fd()), flags);
        let entry = entry.build().user_data(WAKE);
        loop {
            // SAFETY: the entry names no memory, and a descriptor that lives as long as the ring.
            let pushed = unsafe { self.ring.submission().push(&entry) };
            match pushed {
                Ok(()) => return,
                // The queue is full of operations that are not submitted yet.
                Err(_) => drop(self.ring.submit()),
            }
        }
    }

    /// Moves completions out of the ring, without a system call.
    fn reap(&mut self, completed: &mut Vec<Completion>) -> usize {
        let before = completed.len();
        let mut is_heard = false;
        for entry in self.ring.completion() {
            if entry.user_data() == WAKE {
                is_heard = true;
                continue;
            }
            let key = usize::try_from(entry.user_data()).expect("an index this backend gave");
            let Flying { token, buf, .. } = self.flying.remove(key);
            let result = usize::try_from(entry.result())
                .map_err(|_| io::Error::from_raw_os_error(-entry.result()));
            completed.push(Completion { token, buf, result });
        }
        if is_heard {
            if let Some(waker) = &self.waker {
                // Resets the counter to zero; where it is zero already, the read fails, which is
                // fine.
                let _ = rustix::io::read(&waker.counter, &mut [0; 8]);
            }
            self.is_woken = true;
            self.listen();
        }
        completed.len() - before
    }

    /// Submits queued entries and waits for `wanted` completions or for the timeout.
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

    /// Waits briefly for a completion without submitting anything: a kernel that is out of memory
    /// for requests gets some back when requests complete.
    fn pause(&mut self) {
        let flags = EnterFlags::EXT_ARG | EnterFlags::GETEVENTS;
        let args = SubmitArgs::new().timespec(&REFUSAL_PAUSE);
        let submitter = self.ring.submitter();
        // SAFETY: nothing is submitted, and with EXT_ARG the argument is the structure that
        // `SubmitArgs` wraps; it and the time it points to outlive the call.
        let waited = unsafe { submitter.enter(0, 1, flags.bits(), Some(&args)) };
        // A timeout, an interruption or a completion: the caller checks.
        drop(waited);
    }
}

impl Engine for Uring {
    fn submit(&mut self, mut op: Op) -> std::result::Result<(), Rejected> {
        if self.flying.len() == self.queue_depth {
            return Err(Rejected { op });
        }
        let (entry, bytes) = prepare(&mut op, &self.registered);
        let Op { token, file, kind } = op;
        let buf = kind.into_buf();
        let key = self.flying.insert(Flying {
            token,
            buf,
            _file: file,
        });
        let entry = entry.user_data(key as u64);
        let mut queue = self.ring.submission();
        // SAFETY: the slab now holds the buffer and the file that the entry names, and keeps them,
        // untouched and alive, until the completion of this very entry was reaped; `drop` leaks
        // those it cannot wait for. Moving an `IoBuf` does not move the memory that it is a window
        // on.
        let pushed = unsafe { queue.push(&entry) };
        pushed.expect("the ring has an entry for every operation in flight");
        let queued = queue.len();
        drop(queue);
        let is_small = bytes.is_some_and(|bytes| bytes < SENT_AT_ONCE_BYTES_MIN);
        let together = SENT_TOGETHER_MAX.max(self.flying.len() / SENT_PART);
        if !is_small || queued >= together {
            // After a refusal the entry stays queued: the next poll submits it, or reports the
            // error.
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
            if std::mem::take(&mut self.is_woken) {
                wanted = 0;
            }
            let queue = self.ring.submission();
            let idle = queue.is_empty() && !queue.taskrun();
            drop(queue);
            if wanted == 0 && idle {
                return Ok(());
            }
            let left = deadline.left();
            // A wake is one completion, so with a waker any completion has to end the wait.
            let step = match self.waker {
                Some(_) => wanted.min(1),
                None => wanted,
            };
            let entered = self.enter(step, left);
            let errno = entered
                .err()
                .map(|error| (Errno::from_io_error(&error), error));
            match errno {
                None | Some((Some(Errno::TIME | Errno::INTR), _)) => {}
                // The kernel is out of memory for requests, for now.
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

    fn register(&mut self, buffers: &[&IoBuf], files: &[Arc<File>]) -> io::Result<()> {
        let mut ranges: Vec<Range<usize>> = buffers
            .iter()
            .flat_map(|buf| {
                let end = buf.address() + buf.capacity();
                let starts = (buf.address()..end).step_by(REGISTERED_BYTES_MAX);
                starts.map(move |start| start..end.min(start + REGISTERED_BYTES_MAX))
            })
            .collect();
        ranges.sort_unstable_by_key(|range| range.start);
        if ranges.len() > REGISTERED_BUFFERS_MAX {
            return Err(Errno::NOBUFS.into());
        }
        let vectors: Vec<libc::iovec> = ranges
            .iter()
            .map(|range| libc::iovec {
                iov_base: ptr::with_exposed_provenance_mut(range.start),
                iov_len: range.len(),
            })
            .collect();
        let mut fds: Vec<RawFd> = files.iter().map(|file| file.as_fd().as_raw_fd()).collect();
        fds.sort_unstable();
        fds.dedup();
        let submitter = self.ring.submitter();
        if !vectors.is_empty() {
            // SAFETY: the kernel pins the pages of the vectors, and moves bytes only for operations
            // that name them; those own a window inside (`prepare`). The memory stays mapped as
            // long as the owners kept below, which are dropped after the ring.
            unsafe { submitter.register_buffers(&vectors) }?;
        }
        if !fds.is_empty()
            && let Err(error) = submitter.register_files(&fds)
        {
            if !vectors.is_empty() {
                submitter.unregister_buffers()?;
            }
            return Err(error);
        }
        self.registered = Registered {
            buffers: ranges,
            files: fds,
            _kept: (
                buffers.iter().map(|buf| buf.owner()).collect(),
                files.to_vec(),
            ),
        };
        Ok(())
    }

    fn waker(&mut self) -> io::Result<Arc<dyn Wake>> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let counter = rustix::event::eventfd(0, flags)?;
        let waker = Arc::new(Waker { counter });
        self.waker = Some(Arc::clone(&waker));
        self.listen();
        Ok(waker)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::OpKind;

    /// The kinds of ring that older kernels support pass the suite as well.
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

    /// Registered memory and files, unregistered ones, and windows that reach beyond registered
    /// memory.
    #[test]
    fn what_is_registered_moves_the_same_bytes() {
        use crate::buffer::Memory;
        use crate::file::Direct;

        let Ok(mut ring) = Uring::open(4) else {
            eprintln!("SKIPPED registered buffers: no io_uring here");
            return;
        };
        let directory = tempfile::tempdir().unwrap();
        let create = |name| File::create(&directory.path().join(name), Direct::Off).unwrap();
        let files = [Arc::new(create("known")), Arc::new(create("other"))];
        let (_, mut known) = Memory::allocate(8192).unwrap().share();
        let (_, other) = Memory::allocate(4096).unwrap().share();
        let upper = known.split_off(4096);
        if let Err(error) = ring.register(&[&known, &upper], &files[..1]) {
            eprintln!("SKIPPED registered buffers: {error}");
            return;
        }
        let mut completed = Vec::new();
        for (file, mut buf) in [(0, known), (1, upper), (0, other)] {
            for round in 0..2 {
                let offset = 4096 * round;
                buf.as_mut_slice().fill(7 + round as u8);
                let ops = [
                    |offset, buf| OpKind::Write { offset, buf },
                    |offset, buf| OpKind::Read { offset, buf },
                ];
                for make in ops {
                    let op = Op {
                        token: 3,
                        file: Arc::clone(&files[file]),
                        kind: make(offset, buf),
                    };
                    ring.submit(op).unwrap();
                    ring.poll(1, None, &mut completed).unwrap();
                    let completion = completed.pop().unwrap();
                    assert_eq!((completion.token, completion.result.unwrap()), (3, 4096));
                    buf = completion.buf.unwrap();
                }
                assert!(buf.as_slice().iter().all(|&byte| byte == 7 + round as u8));
            }
        }
        assert_eq!(files[0].len().unwrap(), 8192);
        assert_eq!(ring.registered.buffer(0, 1), None);
    }
}
