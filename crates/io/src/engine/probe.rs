//! The `io_uring` features of this system, tried rather than derived from a version.

use std::io;

/// A feature that was tried.
#[derive(Debug)]
pub struct Trial {
    /// The feature's name: `"ring"`, `"defer_taskrun"`, `"registered_buffers"`, …
    pub name: &'static str,
    /// Success, or the kernel's error.
    pub outcome: io::Result<()>,
}

/// Tries every feature that this crate, or a benchmark, may use.
///
/// The first trial is the plain ring; if that fails, no other is tried.
#[cfg(feature = "uring")]
pub fn try_all() -> Vec<Trial> {
    trials::all()
}

/// Reports that this build has no ring.
#[cfg(not(feature = "uring"))]
pub fn try_all() -> Vec<Trial> {
    vec![Trial {
        name: "ring",
        outcome: Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "io_uring was left out of this build",
        )),
    }]
}

#[cfg(feature = "uring")]
mod trials {
    use std::io;
    use std::sync::Arc;

    use io_uring::{Builder, IoUring, Probe, opcode};

    use super::Trial;
    use crate::buffer::Memory;
    use crate::engine::uring::Uring;
    use crate::engine::{Engine, Op, OpKind};
    use crate::file::{Direct, File};

    const ENTRIES: u32 = 8;

    /// The least that a benchmark or a pool registers.
    const REGISTERED_BYTES: usize = 1 << 20;

    pub(super) fn all() -> Vec<Trial> {
        let plain = IoUring::builder().build(ENTRIES);
        let ring = match plain {
            Ok(ring) => ring,
            Err(error) => {
                return vec![Trial {
                    name: "ring",
                    outcome: Err(error),
                }];
            }
        };
        let trial = |name, outcome| Trial { name, outcome };
        vec![
            trial("ring", Ok(())),
            trial("ext_arg", flag(ring.params().is_feature_ext_arg())),
            trial("nodrop", flag(ring.params().is_feature_nodrop())),
            trial("read_write_fsync", opcodes(&ring)),
            trial("coop_taskrun", build(|ring| ring.setup_coop_taskrun())),
            trial(
                "defer_taskrun",
                build(|ring| ring.setup_single_issuer().setup_defer_taskrun()),
            ),
            trial("sqpoll", build(|ring| ring.setup_sqpoll(1))),
            trial("iopoll", build(|ring| ring.setup_iopoll())),
            trial("registered_buffers", registered()),
            trial("transfer", transfer()),
        ]
    }

    fn flag(is_set: bool) -> io::Result<()> {
        match is_set {
            true => Ok(()),
            false => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    fn build(set_up: impl FnOnce(&mut Builder) -> &mut Builder) -> io::Result<()> {
        let mut builder = IoUring::builder();
        set_up(&mut builder);
        builder.build(ENTRIES).map(drop)
    }

    fn opcodes(ring: &IoUring) -> io::Result<()> {
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let used = [opcode::Read::CODE, opcode::Write::CODE, opcode::Fsync::CODE];
        flag(used.into_iter().all(|code| probe.is_supported(code)))
    }

    fn registered() -> io::Result<()> {
        let memory = Memory::allocate(REGISTERED_BYTES).map_err(io::Error::other)?;
        let (_, buf) = memory.share();
        let mut engine = Uring::open(1).map_err(io::Error::other)?;
        engine.register(&[&buf], &[])
    }

    /// Reads from a file that every process can read: a ring may be created and still not work.
    fn transfer() -> io::Result<()> {
        let mut engine = Uring::open(1).map_err(io::Error::other)?;
        let own = std::env::current_exe()?;
        let file = File::open(&own, Direct::Off).map_err(io::Error::other)?;
        let memory = Memory::allocate(4096).map_err(io::Error::other)?;
        let (_, buf) = memory.share();
        let op = Op {
            token: 0,
            file: Arc::new(file),
            kind: OpKind::Read { offset: 0, buf },
        };
        engine.submit(op).expect("nothing is in flight");
        let mut completed = Vec::new();
        engine
            .poll(1, None, &mut completed)
            .map_err(io::Error::other)?;
        let completion = completed.pop().expect("one was waited for");
        completion.result.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_is_tried_first_and_nothing_without_it() {
        let trials = try_all();
        assert_eq!(trials[0].name, "ring");
        assert_eq!(trials[0].outcome.is_ok(), trials.len() > 1);
    }
}
