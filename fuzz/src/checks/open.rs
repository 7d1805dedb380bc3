//! A complete checkpoint around any part: opened, loaded and verified.
//!
//! The manifest has the part's digest, whatever the part is. The shards never change: a part can
//! name them and describe their bytes in any way.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use penstock_io::engine::EngineChoice;
use penstock_io::file::Direct;
use penstock_store::care::verify::verify;
use penstock_store::format::digest::Digest;
use penstock_store::format::header::HeaderTensor;
use penstock_store::format::part::TensorEntry;
use penstock_store::format::shard::encode_header;
use penstock_store::load::checkpoint::{self, Loaded};
use penstock_store::options::Options;
use penstock_store::plan::read::Placement;
use penstock_store::{Error, MANIFEST, Progress};

use super::{ATTEMPT, stamp};

/// A directory with two shards.
pub struct Checkpoint {
    path: PathBuf,
    shards: [(String, Vec<u8>); 2],
}

impl Checkpoint {
    /// Writes the shards into an existing directory: one with two chunks, one without tensors.
    pub fn new(path: &Path) -> Checkpoint {
        let name = |index| format!("shard-00000-{index:02}.{ATTEMPT}.safetensors");
        let whole = shard(&[("a", 8192), ("b", (1 << 20) + 100), ("c", 28)]);
        let shards = [(name(0), whole), (name(1), shard(&[]))];
        for (name, bytes) in &shards {
            fs::write(path.join(name), bytes).expect("writing a shard");
        }
        let path = path.to_owned();
        Checkpoint { path, shards }
    }

    /// Opens the checkpoint with this text as its part; tensors that load must have the shards'
    /// bytes, and verify must return an answer. Returns whether the checkpoint loaded.
    pub fn check(&self, part: &[u8]) -> bool {
        let file = format!("part-00000.{ATTEMPT}.json");
        let manifest = format!(
            r#"{{"format":"penstock-checkpoint","version":1,"id":"{ATTEMPT}","step":null,"created":"","writer":"","world_size":1,"parts":[{{"rank":0,"file":"{file}","bytes":{},"digest":"{}"}}],"metadata":{{}}}}"#,
            part.len(),
            Digest::of(part),
        );
        fs::write(self.path.join(file), part).expect("writing the part");
        fs::write(self.path.join(MANIFEST), stamp(manifest.as_bytes())).expect("the manifest");
        let options = Options {
            engine: EngineChoice::Threads,
            direct: Direct::Off,
            io_threads: Some(1),
            queue_depth: Some(1),
            staging_bytes: Some(4 << 20),
            ..Options::default()
        };
        let opened = checkpoint::Checkpoint::open(&self.path);
        let loads = opened.is_ok_and(|opened| self.loads(&opened, &options));
        match verify(&self.path, &options, &Progress::default()) {
            // A part that needs a newer version is refused.
            Ok(_) | Err(Error::Unknown { .. } | Error::Version { .. }) => {}
            Err(error) => panic!("an answer, and not: {error}"),
        }
        loads
    }

    fn loads(&self, opened: &checkpoint::Checkpoint, options: &Options) -> bool {
        let loaded = opened.load(None, HashMap::new(), options, &Progress::default());
        if let Ok(loaded) = &loaded {
            self.compare(opened, loaded);
        }
        loaded.is_ok()
    }

    fn compare(&self, opened: &checkpoint::Checkpoint, loaded: &Loaded) {
        let part = opened.part();
        assert_eq!(loaded.placements.len(), part.tensors.len());
        for (placement, tensor) in loaded.placements.iter().zip(&part.tensors) {
            let name = &part.files[tensor.file].name;
            let shard = self.shards.iter().find(|(shard, _)| shard == name);
            let (_, shard) = shard.expect("a file that was there");
            assert_eq!(bytes_of(loaded, placement, tensor), stored(shard, tensor));
        }
    }
}

fn stored<'a>(shard: &'a [u8], tensor: &TensorEntry) -> &'a [u8] {
    &shard[tensor.range.0 as usize..tensor.range.1 as usize]
}

fn bytes_of<'a>(loaded: &'a Loaded, placement: &Placement, tensor: &TensorEntry) -> &'a [u8] {
    match *placement {
        Placement::Segment { segment, offset } => {
            let offset = offset as usize;
            &loaded.segments[segment].as_slice()[offset..offset + tensor.nbytes() as usize]
        }
        Placement::Empty => &[],
        Placement::Target => panic!("no target was given"),
    }
}

/// A shard of `uint8` tensors whose bytes identify their position.
fn shard(tensors: &[(&str, u64)]) -> Vec<u8> {
    let mut begin = 0;
    let entries = tensors.iter().map(|&(name, bytes)| {
        let data_offsets = (begin, begin + bytes);
        begin += bytes;
        let (dtype, shape) = ("U8".to_owned(), vec![bytes]);
        (
            name,
            HeaderTensor {
                dtype,
                shape,
                data_offsets,
            },
        )
    });
    let mut shard = encode_header(entries);
    shard.extend((0..begin).map(|at| (at % 251) as u8));
    shard
}
