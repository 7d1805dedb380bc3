//! States whose last tensors are in a separate file, which saves hard-link.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use penstock_store::format::digest::{CHUNK_BYTES, Digest};
use penstock_store::format::header::HeaderTensor;
use penstock_store::format::shard::encode_header;
use penstock_store::save::{Linked, LinkedFile, LinkedTensor, SaveState};

use super::{Sample, noise};

/// Size of an unrelated tensor at the start of each file.
const NOBODYS_BYTES: u64 = 100;

/// The name in the file of the tensor with an index.
fn label(index: usize) -> String {
    format!("moment.{index}")
}

/// The file of the last `count` tensors of a sample, and the offset of each. An unrelated tensor
/// precedes them.
pub fn file_of(sample: &Sample, count: usize) -> (Vec<u8>, Vec<u64>) {
    let members = || sample.specs.len() - count..sample.specs.len();
    let mut end = NOBODYS_BYTES;
    let mut tensors = vec![("nobody's".to_owned(), 0, end)];
    for index in members() {
        let bytes = sample.bytes[index].len() as u64;
        tensors.push((label(index), end, end + bytes));
        end += bytes;
    }
    let described = tensors.iter().map(|(name, begin, end)| {
        let tensor = HeaderTensor {
            dtype: "U8".to_owned(),
            shape: vec![end - begin],
            data_offsets: (*begin, *end),
        };
        (name.as_str(), tensor)
    });
    let mut file = encode_header(described);
    let data_start = file.len() as u64;
    file.extend(noise(1, NOBODYS_BYTES as usize));
    members().for_each(|index| file.extend(&sample.bytes[index]));
    let starts = tensors
        .iter()
        .skip(1)
        .map(|(_, begin, _)| data_start + begin);
    (file, starts.collect())
}

/// A state whose last `count` tensors are in the file at `path`.
pub fn state(sample: &Sample, count: usize, path: &Path) -> SaveState {
    let (file, starts) = file_of(sample, count);
    let first = sample.specs.len() - count;
    let tensors = starts
        .iter()
        .zip(first..)
        .map(|(&start, index)| LinkedTensor {
            spec: sample.specs[index].clone(),
            file: 0,
            start,
            stored_name: label(index),
        });
    let mut state = sample.state();
    state.tensors.truncate(first);
    state.sources.truncate(first);
    state.linked = Linked {
        files: vec![LinkedFile {
            path: path.to_owned(),
            bytes: file.len() as u64,
            chunks: file.chunks(CHUNK_BYTES as usize).map(Digest::of).collect(),
            sealer: None,
        }],
        tensors: tensors.collect(),
        holders: Vec::new(),
    };
    state
}

/// Writes the file, and returns the state.
pub fn write(sample: &Sample, count: usize, path: &Path) -> SaveState {
    fs::write(path, file_of(sample, count).0).unwrap();
    state(sample, count, path)
}

/// Counts the states that still hold their files.
#[derive(Clone, Default)]
pub struct Holds(Arc<AtomicUsize>);

struct Hold(Arc<AtomicUsize>);

impl Holds {
    /// Makes a state hold its files.
    pub fn hold(&self, state: &mut SaveState) {
        self.0.fetch_add(1, Ordering::Relaxed);
        state
            .linked
            .holders
            .push(Box::new(Hold(Arc::clone(&self.0))));
    }

    pub fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
