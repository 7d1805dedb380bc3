//! Memory that the system can still give to this process.
//!
//! This estimate sizes a cache; it is no promise, as other processes allocate too. Only control
//! groups of version 2 are read.

use std::fs;
use std::path::Path;

/// Bytes available without swapping, by the kernel's and the control groups' figures; `None` where
/// neither gives one.
pub fn available_bytes() -> Option<usize> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok();
    let system = meminfo.and_then(|text| in_meminfo(&text));
    let groups = fs::read_to_string("/proc/self/cgroup").ok();
    let group = groups.as_deref().and_then(group_path);
    let limits = group.into_iter().flat_map(|group| {
        let ancestors = Path::new(group).ancestors();
        ancestors.filter_map(|ancestor| in_group(&Path::new("/sys/fs/cgroup").join(ancestor)))
    });
    limits.chain(system).min()
}

/// `MemAvailable` of `/proc/meminfo`.
fn in_meminfo(text: &str) -> Option<usize> {
    let kibibytes = field(text, "MemAvailable:")?;
    kibibytes.checked_mul(1024)
}

/// The group of version 2, relative to where the groups are mounted.
fn group_path(text: &str) -> Option<&str> {
    text.lines().find_map(|line| line.strip_prefix("0::/"))
}

/// Bytes that a group's limit leaves; `None` where it has no limit.
fn in_group(directory: &Path) -> Option<usize> {
    let read = |name: &str| fs::read_to_string(directory.join(name)).ok();
    let limit: usize = read("memory.max")?.trim().parse().ok()?;
    let used: usize = read("memory.current")?.trim().parse().ok()?;
    // Page cache counts as used, but the kernel reclaims it on demand.
    let cached = read("memory.stat").and_then(|text| field(&text, "inactive_file"));
    Some(limit.saturating_sub(used.saturating_sub(cached.unwrap_or(0))))
}

/// The number after a name.
fn field(text: &str, name: &str) -> Option<usize> {
    let mut lines = text.lines().map(str::split_ascii_whitespace);
    lines.find_map(|mut words| (words.next() == Some(name)).then(|| words.next()?.parse().ok())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_s_words_are_read() {
        let meminfo = "MemTotal:  24 kB\nMemAvailable:    16 kB\n";
        assert_eq!(in_meminfo(meminfo), Some(16 << 10));
        assert_eq!(in_meminfo("MemTotal: 24 kB\n"), None);
        assert_eq!(group_path("3:cpu:/x\n0::/a/b\n"), Some("a/b"));
        assert_eq!(group_path("0::/\n"), Some(""));
        assert_eq!(group_path("3:cpu:/x\n"), None);
    }

    #[test]
    fn a_group_has_what_its_limit_leaves() {
        let group = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(group.path().join(name), text).unwrap();
        assert_eq!(in_group(group.path()), None);
        write("memory.current", "700\n");
        write("memory.max", "max\n");
        assert_eq!(in_group(group.path()), None);
        write("memory.max", "1000\n");
        assert_eq!(in_group(group.path()), Some(300));
        write("memory.stat", "anon 500\ninactive_file 200\n");
        assert_eq!(in_group(group.path()), Some(500));
        write("memory.current", "2000\n");
        assert_eq!(in_group(group.path()), Some(0));
    }
}
