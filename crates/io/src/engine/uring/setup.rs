//! Sets a ring up, and explains why there is none.

use std::io;

use io_uring::{Builder, IoUring, Probe, opcode};
use rustix::io::Errno;

/// The kinds of ring to try, each with its name for reports. They differ in when completions are
/// processed: when this thread asks for them, at any of its system calls, or by interrupting it.
pub(super) fn kinds() -> [(Builder, &'static str); 3] {
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

/// Opens the first of `kinds` that the kernel supports.
pub(super) fn set_up(
    kinds: &[(Builder, &'static str)],
    entries: u32,
) -> io::Result<(IoUring, &'static str)> {
    for (builder, setup) in kinds {
        match builder.build(entries) {
            Ok(ring) => return Ok((ring, setup)),
            // The kernel is older than the flags of this kind (6.1, 5.19).
            Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => {}
            Err(error) => return Err(error),
        }
    }
    Err(Errno::INVAL.into())
}

/// Checks that the ring can wait with a timeout and supports this crate's operations.
pub(super) fn check(ring: &IoUring) -> io::Result<()> {
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

/// `kernel.io_uring_disabled`, where the kernel has that setting (6.6).
pub(super) fn disabled_setting() -> Option<String> {
    std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").ok()
}

/// The reason that there is no ring, with a remedy for the user.
pub(super) fn explain(error: &io::Error, disabled: Option<&str>) -> String {
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
}
