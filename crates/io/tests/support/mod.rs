//! Functions that several tests share.

use std::io::Write;

/// Prints that a test cannot run here, and why. It avoids `eprintln`, whose output the test harness
/// hides: a skipped test has to be seen.
pub(crate) fn skip(test: &str, reason: &str) {
    let line = format!("SKIPPED {test}: {reason}\n");
    std::io::stderr().write_all(line.as_bytes()).unwrap();
}
