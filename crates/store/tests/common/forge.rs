//! Forged checkpoints with false contents and correct digests, as an attacker would make them.

use std::fs;
use std::path::{Path, PathBuf};

use penstock_store::MANIFEST;
use penstock_store::format::digest::{CHUNK_BYTES, Digest};
use serde_json::{Value, json};

/// The attempt id of forged checkpoints.
pub const ATTEMPT: &str = "0123456789abcdef0123456789abcdef";

/// Adds a digest to the text of a manifest that has none yet.
pub fn stamp(unstamped: &str) -> Vec<u8> {
    let text = unstamped.trim_end();
    let text = text.strip_suffix('}').expect("a manifest is an object");
    let digest = Digest::of(text.as_bytes());
    format!("{text},\"digest\":\"{digest}\"}}\n").into_bytes()
}

/// Changes a manifest and recomputes its digest.
pub fn edit_manifest(path: &Path, edit: impl FnOnce(&mut Value)) {
    let file = path.join(MANIFEST);
    let mut manifest: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    edit(&mut manifest);
    if let Some(members) = manifest.as_object_mut() {
        members.remove("digest");
    }
    fs::write(&file, stamp(&manifest.to_string())).unwrap();
}

/// The path of a checkpoint's part.
pub fn part_path(path: &Path) -> PathBuf {
    find(path, "part-")
}

/// The path of a checkpoint's first shard.
pub fn shard_path(path: &Path) -> PathBuf {
    find(path, "shard-00000-00")
}

fn find(path: &Path, prefix: &str) -> PathBuf {
    let names = super::names(path);
    let name = names.iter().find(|name| name.starts_with(prefix));
    path.join(name.unwrap_or_else(|| panic!("no {prefix} among {names:?}")))
}

/// Replaces the text of the part, and its digest in the manifest.
pub fn write_part(path: &Path, text: &[u8]) {
    fs::write(part_path(path), text).unwrap();
    edit_manifest(path, |manifest| {
        manifest["parts"][0]["bytes"] = text.len().into();
        manifest["parts"][0]["digest"] = Digest::of(text).to_string().into();
    });
}

/// Changes the part, and its digest in the manifest.
pub fn edit_part(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut part: Value = serde_json::from_slice(&fs::read(part_path(path)).unwrap()).unwrap();
    edit(&mut part);
    write_part(path, part.to_string().as_bytes());
}

/// Changes the part of a rank, and its digest in the manifest; returns its name.
pub fn edit_rank(path: &Path, rank: usize, edit: impl FnOnce(&mut Value)) -> String {
    let file = find(path, &format!("part-{rank:05}"));
    let mut part: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    edit(&mut part);
    let text = part.to_string();
    fs::write(&file, &text).unwrap();
    edit_manifest(path, |manifest| {
        manifest["parts"][rank]["bytes"] = text.len().into();
        manifest["parts"][rank]["digest"] = Digest::of(text.as_bytes()).to_string().into();
    });
    file.file_name().unwrap().to_str().unwrap().to_owned()
}

/// Replaces the bytes of the first shard, and its digests in the part.
pub fn write_shard(path: &Path, bytes: &[u8]) {
    fs::write(shard_path(path), bytes).unwrap();
    edit_part(path, |part| {
        let name = part["files"][0]["name"].as_str().unwrap().to_owned();
        part["files"][0] = file_entry(&name, bytes);
    });
}

/// The entry of a part for a file with these bytes.
pub fn file_entry(name: &str, bytes: &[u8]) -> Value {
    let chunks = bytes.chunks(CHUNK_BYTES as usize);
    let digests = chunks.map(|chunk| format!("{:016x}", Digest::of(chunk).0));
    json!({
        "name": name,
        "bytes": bytes.len(),
        "digest": Digest::of(bytes).to_string(),
        "chunk_bytes": CHUNK_BYTES,
        "chunks": digests.collect::<Vec<_>>(),
    })
}

/// Writes a forged checkpoint: one shard with these bytes, and `tensors` as the part's list.
pub fn checkpoint(path: &Path, shard: &[u8], tensors: &Value) {
    let shard_name = format!("shard-00000-00.{ATTEMPT}.safetensors");
    let part_name = format!("part-00000.{ATTEMPT}.json");
    let part = json!({
        "format": "penstock-part", "version": 1, "id": ATTEMPT, "rank": 0,
        "files": [file_entry(&shard_name, shard)],
        "tensors": tensors, "aliases": [], "tree": null,
    });
    let manifest = json!({
        "format": "penstock-checkpoint", "version": 1, "id": ATTEMPT, "step": null,
        "created": "2026-01-01T00:00:00Z", "writer": "by hand", "world_size": 1,
        "parts": [{"rank": 0, "file": part_name, "bytes": 0, "digest": Digest::EMPTY.to_string()}],
        "metadata": {},
    });
    fs::create_dir_all(path).unwrap();
    fs::write(path.join(shard_name), shard).unwrap();
    fs::write(path.join(part_name), "").unwrap();
    fs::write(path.join(MANIFEST), stamp(&manifest.to_string())).unwrap();
    write_part(path, part.to_string().as_bytes());
}
