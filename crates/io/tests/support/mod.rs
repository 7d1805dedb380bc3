//! What several tests share.

use std::io::Write;

/// Says that a test cannot run here, and why. Not with `eprintln`, which the test harness keeps to
/// itself: a skipped test has to be seen.
pub(crate) fn skip(test: &str, reason: &str) {
    let line = format!("SKIPPED {test}: {reason}\n");
    std::io::stderr().write_all(line.as_bytes()).unwrap();
}
