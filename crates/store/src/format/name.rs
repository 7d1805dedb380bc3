//! Names of files and directories, and which stored names are accepted.
//!
//! Names read from a manifest or a part are untrusted input: only the exact forms below are ever
//! joined to a path, so no stored name can point outside its own checkpoint.

use uuid::Uuid;

/// The manifest: commit point of a checkpoint.
pub const MANIFEST: &str = "manifest.json";

/// Marker file in the directory of a step that is protected from deletion.
pub(crate) const PROTECTED: &str = "protected";

/// Scrub results of a store: which steps were read and found good or damaged.
pub(crate) const MARKS: &str = "verified.json";

/// Draws a fresh attempt id: 32 lower-case hexadecimal digits.
pub(crate) fn draw_attempt() -> String {
    Uuid::new_v4().simple().to_string()
}

/// Name of a rank's part.
pub fn part_file(rank: u32, attempt: &str) -> String {
    format!("part-{rank:05}.{attempt}.json")
}

/// Name of a shard of a rank.
pub fn shard_file(rank: u32, index: usize, attempt: &str) -> String {
    format!("shard-{rank:05}-{index:02}.{attempt}.safetensors")
}

pub(crate) fn temporary_manifest(attempt: &str) -> String {
    format!("manifest.{attempt}.tmp")
}

/// Name of an attempt's sidecar that is also copied to `name`.
pub(crate) fn sidecar_file(attempt: &str, name: &str) -> String {
    format!("beside.{attempt}.{name}")
}

/// The name of the copy if a file with this name is an attempt's sidecar.
pub(crate) fn sidecar_of(name: &str) -> Option<&str> {
    let (attempt, own) = name.strip_prefix("beside.")?.split_once('.')?;
    (is_attempt(attempt) && is_sidecar(own)).then_some(own)
}

/// Whether a sidecar may have this name: plain characters, none of our own names, and no name that
/// readers take for weights.
pub(crate) fn is_sidecar(name: &str) -> bool {
    const NAME_BYTES_MAX: usize = 200;
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    let is_ours = name == MANIFEST || name == PROTECTED || name == MARKS || is_attempt_file(name);
    (1..=NAME_BYTES_MAX).contains(&name.len())
        && name.bytes().all(is_plain)
        && !name.starts_with('.')
        && !name.ends_with(".safetensors")
        && !is_ours
        && step_of(name).is_none()
}

/// Names of the files of a signature: an OpenSSF bundle; the statement and the signature of ssh.
pub(crate) fn bundle_file(attempt: &str) -> String {
    format!("signature.{attempt}.json")
}

pub(crate) fn statement_file(attempt: &str) -> String {
    format!("signed.{attempt}.json")
}

pub(crate) fn ssh_signature_file(attempt: &str) -> String {
    format!("signed.{attempt}.sig")
}

/// All files that the signatures of an attempt can have.
pub fn signature_files(attempt: &str) -> [String; 3] {
    [
        bundle_file(attempt),
        statement_file(attempt),
        ssh_signature_file(attempt),
    ]
}

/// Temporary name of a file of a signature.
pub(crate) fn temporary_signature(attempt: &str) -> String {
    format!("signature.{attempt}.tmp")
}

/// Temporary name of a copy of a sidecar.
pub(crate) fn temporary_copy(attempt: &str) -> String {
    format!("copy.{attempt}.tmp")
}

pub(crate) fn temporary_part(rank: u32, attempt: &str) -> String {
    format!("part-{rank:05}.{attempt}.tmp")
}

/// A new name for a manifest that is renamed in order to delete this attempt's checkpoint. It
/// counts as a file of the attempt.
pub(crate) fn tombstone_file(attempt: &str) -> String {
    format!("deleted-{}.{attempt}.json", draw_attempt())
}

pub(crate) fn is_tombstone(name: &str) -> bool {
    name.starts_with("deleted-") && is_attempt_file(name)
}

/// Name of the file that shows that an attempt is live where no lock does.
pub(crate) fn lease(attempt: &str) -> String {
    format!("lease.{attempt}.tmp")
}

pub(crate) fn is_lease(name: &str) -> bool {
    name.starts_with("lease.") && is_attempt_file(name)
}

/// A new name for a file that signals the removal of an attempt's files. Lists return it before all
/// other files of the attempt.
pub(crate) fn fence(attempt: &str) -> String {
    format!("fence-{}.{attempt}.tmp", draw_attempt())
}

pub(crate) fn is_fence(name: &str) -> bool {
    name.starts_with("fence-") && is_attempt_file(name)
}

/// A new name in a store for a file that reads the storage's clock.
pub(crate) fn clock() -> String {
    format!("clock.{}.tmp", draw_attempt())
}

pub(crate) fn is_clock(name: &str) -> bool {
    is_temporary_of(name, "clock.")
}

/// A new name for the next version of a store's scrub results.
pub(crate) fn temporary_marks() -> String {
    format!("verified.{}.tmp", draw_attempt())
}

pub(crate) fn is_temporary_marks(name: &str) -> bool {
    is_temporary_of(name, "verified.")
}

/// A new name in a store for a step that is being quarantined file by file.
pub(crate) fn unfinished_quarantine() -> String {
    format!("aside.{}.tmp", draw_attempt())
}

pub(crate) fn is_unfinished_quarantine(name: &str) -> bool {
    is_temporary_of(name, "aside.")
}

fn is_temporary_of(name: &str, prefix: &str) -> bool {
    let drawn = name
        .strip_prefix(prefix)
        .and_then(|rest| rest.strip_suffix(".tmp"));
    drawn.is_some_and(is_attempt)
}

/// Name of a step's directory inside a store.
pub fn step_directory(step: u64) -> String {
    format!("step-{step:010}")
}

/// The step of a directory name; only the canonical form counts.
pub fn parse_step(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (step_directory(step) == name).then_some(step)
}

/// Name of a damaged, quarantined step; later ones have higher numbers.
pub(crate) fn quarantined(step: u64, number: u64) -> String {
    format!("damaged-{step:010}-{number:04}")
}

/// The step and number of a quarantined step's name; only the canonical form counts.
pub(crate) fn parse_quarantined(name: &str) -> Option<(u64, u64)> {
    let (step, number) = name.strip_prefix("damaged-")?.split_once('-')?;
    let (step, number) = (step.parse().ok()?, number.parse().ok()?);
    (quarantined(step, number) == name).then_some((step, number))
}

/// The step that a directory of this name holds or held, quarantined ones included.
pub fn step_of(name: &str) -> Option<u64> {
    parse_step(name).or_else(|| parse_quarantined(name).map(|(step, _)| step))
}

pub(crate) fn is_step(name: &str) -> bool {
    parse_step(name).is_some()
}

pub(crate) fn is_attempt(text: &str) -> bool {
    text.len() == 32
        && text
            .bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

pub(crate) fn is_part(name: &str, rank: u32, attempt: &str) -> bool {
    is_attempt(attempt) && name == part_file(rank, attempt)
}

pub(crate) fn is_shard(name: &str, rank: u32, attempt: &str) -> bool {
    let Some(rest) = name.strip_prefix(&format!("shard-{rank:05}-")) else {
        return false;
    };
    let index = rest
        .split('.')
        .next()
        .and_then(|digits| digits.parse().ok());
    is_attempt(attempt) && index.is_some_and(|index| name == shard_file(rank, index, attempt))
}

/// Whether some attempt gives this name to a file of its own, which may be removed once the attempt
/// is dead. Files of other programs never match.
pub(crate) fn is_attempt_file(name: &str) -> bool {
    attempt_of(name).is_some()
}

/// Whether a file with this name is a part.
pub fn is_part_file(name: &str) -> bool {
    name.starts_with("part-") && name.ends_with(".json") && is_attempt_file(name)
}

/// The rank that a file with this name belongs to, if it is an attempt's file of a rank.
pub fn rank_of_file(name: &str) -> Option<u32> {
    attempt_of(name)?;
    name.split(['-', '.']).nth(1)?.parse().ok()
}

/// The attempt that a file with this name belongs to, if any.
pub(crate) fn attempt_of(name: &str) -> Option<&str> {
    if sidecar_of(name).is_some() {
        return name.split('.').nth(1);
    }
    let mut fields = name.split('.');
    let (Some(stem), Some(attempt), Some(extension), None) =
        (fields.next(), fields.next(), fields.next(), fields.next())
    else {
        return None;
    };
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let stem_is_ours = match stem.split('-').collect::<Vec<_>>()[..] {
        ["manifest" | "copy" | "lease"] => extension == "tmp",
        ["signature"] => matches!(extension, "json" | "tmp"),
        ["signed"] => matches!(extension, "json" | "sig"),
        ["fence", drawn] => is_attempt(drawn) && extension == "tmp",
        ["part", rank] => digits(rank) && matches!(extension, "json" | "tmp"),
        ["deleted", drawn] => is_attempt(drawn) && extension == "json",
        ["shard", rank, index] => digits(rank) && digits(index) && extension == "safetensors",
        _ => false,
    };
    (stem_is_ours && is_attempt(attempt)).then_some(attempt)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_names_are_recognised() {
        let attempt = draw_attempt();
        assert!(is_part(&part_file(3, &attempt), 3, &attempt));
        assert!(is_shard(&shard_file(3, 117, &attempt), 3, &attempt));
        for name in [
            part_file(0, &attempt),
            shard_file(0, 0, &attempt),
            temporary_manifest(&attempt),
            temporary_part(9, &attempt),
            tombstone_file(&attempt),
            temporary_copy(&attempt),
            lease(&attempt),
            fence(&attempt),
            sidecar_file(&attempt, "config.json"),
            sidecar_file(&attempt, "model.safetensors.index.json"),
        ] {
            assert!(is_attempt_file(&name), "{name}");
            assert_eq!(attempt_of(&name), Some(&*attempt));
        }
        assert!(is_lease(&lease(&attempt)) && is_fence(&fence(&attempt)));
        assert!(is_clock(&clock()) && !is_attempt_file(&clock()));
        assert_eq!(rank_of_file(&lease(&attempt)), None);
        assert_eq!(rank_of_file(&fence(&attempt)), None);
        assert!(is_tombstone(&tombstone_file(&attempt)));
        assert!(!is_tombstone(&part_file(0, &attempt)));
        assert_eq!(rank_of_file(&tombstone_file(&attempt)), None);
        assert_eq!(rank_of_file(&sidecar_file(&attempt, "config.json")), None);
        assert_eq!(
            sidecar_of(&sidecar_file(&attempt, "a_b-1.json")),
            Some("a_b-1.json")
        );
        assert!(is_part_file(&part_file(3, &attempt)));
        assert!(!is_part_file(&temporary_part(3, &attempt)));
        assert!(!is_part_file("part-00003.json"));
        assert_eq!(parse_step(&step_directory(7)), Some(7));
        assert_eq!(parse_step(&step_directory(u64::MAX)), Some(u64::MAX));
        assert_eq!(
            parse_quarantined(&quarantined(7, 12_345)),
            Some((7, 12_345))
        );
        assert_eq!(
            parse_quarantined(&quarantined(u64::MAX, 1)),
            Some((u64::MAX, 1))
        );
    }

    #[test]
    fn foreign_names_are_not() {
        let attempt = draw_attempt();
        for name in [
            "../../etc/passwd".to_owned(),
            format!("../{}", shard_file(0, 0, &attempt)),
            format!("shard-00000-0/0.{attempt}.safetensors"),
            format!("shard-00000-+1.{attempt}.safetensors"),
            format!("shard-00001-00.{attempt}.safetensors"),
        ] {
            assert!(!is_shard(&name, 0, &attempt), "{name}");
        }
        for name in [
            "manifest.json",
            "notes.txt",
            "shard-00000-00.safetensors",
            "part-0..json",
            "deleted-0.0123456789abcdef0123456789abcdef.json",
            "beside.config.json",
            "beside.0123456789abcdef0123456789abcdef.",
            "beside.0123456789abcdef0123456789abcdef.../../passwd",
            "beside.0123456789abcdef0123456789abcdef.manifest.json",
        ] {
            assert!(!is_attempt_file(name), "{name}");
        }
        let own = part_file(0, &attempt);
        let sidecars = sidecar_file(&attempt, "config.json");
        for name in [
            "",
            ".hidden",
            "a/b",
            "ü",
            "a b",
            "manifest.json",
            "protected",
            "verified.json",
            "model.safetensors",
            "step-0000000001",
            &own,
            &sidecars,
        ] {
            assert!(!is_sidecar(name), "{name}");
        }
        for name in [
            "step-1",
            "step-00000000001",
            "step--000000001",
            "step-+000000001",
            "x",
        ] {
            assert_eq!(parse_step(name), None, "{name}");
        }
        for name in [
            "damaged-7-0001",
            "damaged-0000000007",
            "damaged-0000000007-1",
            "x",
        ] {
            assert_eq!(parse_quarantined(name), None, "{name}");
        }
    }
}
