//! `save`.

use std::path::PathBuf;
use std::sync::Arc;

use penstock_cuda::Foreign;
use penstock_store::format::digest::Digest;
use penstock_store::format::part::{Alias, View};
use penstock_store::plan::write::{Grouped, TensorSpec};
use penstock_store::save as store;
use penstock_store::save::{
    Authenticity, Linked, LinkedFile, LinkedTensor, Publication, SaveState, Sidecars,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::value::RawValue;

use crate::blocks::NativeSeal;
use crate::call::{self, Callback};
use crate::keys::AttemptKey;
use crate::options::NativeOptions;
use crate::owner::Owner;
use crate::report;
use crate::signing::SigningKeys;
use crate::tensor::device::Followed;
use crate::tensor::{self, NativeBox, TensorSource};

/// `(name, tensor, view)` with `view` either nothing or `(shape, strides, offset)` in items.
pub(crate) type NativeAlias = (String, usize, Option<(Vec<u64>, Vec<i64>, u64)>);

/// Files that become shards, as `(path, bytes, digests of chunks, owner)`, and the tensors in
/// them, as `(name, dtype, shape, bytes an item, index of the file, offset, name in the file,
/// box)`.
pub(crate) type NativeLinked = (Vec<NativeFile>, Vec<NativeFileTensor>);

pub(crate) type NativeFile = (PathBuf, u64, Vec<u64>, Py<PyAny>, Option<NativeSeal>);

pub(crate) type NativeFileTensor = (
    String,
    String,
    Vec<u64>,
    usize,
    usize,
    u64,
    String,
    Option<NativeBox>,
);

/// Index of a tensor, its group, and its name in the group.
pub(crate) type NativeGrouped = (usize, String, String);

/// Name and contents of a small file.
pub(crate) type NativeSidecar = (String, Vec<u8>);

/// Saves a flattened state; see `penstock.save`.
#[pyfunction]
#[pyo3(signature = (
    path, tensors, aliases, tree, *, linked=None, grouped=vec![], step, metadata, overwrite,
    files=vec![], index=None, sealing=None, signing=None, previous=vec![], options, progress
))]
#[expect(
    clippy::too_many_arguments,
    reason = "all but the first four are keywords"
)]
pub fn save<'py>(
    py: Python<'py>,
    path: PathBuf,
    tensors: Vec<TensorSource>,
    aliases: Vec<NativeAlias>,
    tree: String,
    linked: Option<NativeLinked>,
    grouped: Vec<NativeGrouped>,
    step: Option<u64>,
    metadata: String,
    overwrite: bool,
    files: Vec<NativeSidecar>,
    index: Option<String>,
    sealing: Option<PyRef<'_, AttemptKey>>,
    signing: Option<PyRef<'_, SigningKeys>>,
    previous: Vec<String>,
    options: NativeOptions,
    progress: Callback,
) -> PyResult<Bound<'py, PyDict>> {
    let (state, _) = state(py, tensors, aliases, tree, linked, grouped)?;
    let publication = Publication {
        path,
        step,
        metadata: json(metadata, "metadata")?,
        overwrite,
        sidecars: sidecars(files, index),
    };
    let options = options.at(py, &publication.path)?;
    let authenticity = Authenticity {
        sealing: sealing.map(|key| key.sealing()),
        signing: signing.map(|signing| Arc::clone(&signing.keys)),
        previous,
    };
    let saved = call::run(py, &progress, |progress| {
        store::save_authentic(state, &publication, authenticity, &options, progress)
    })?;
    report::of_save(py, &saved)
}

/// The state to save, and the streams that use its device tensors.
pub(crate) fn state(
    py: Python<'_>,
    tensors: Vec<TensorSource>,
    aliases: Vec<NativeAlias>,
    tree: String,
    linked: Option<NativeLinked>,
    grouped: Vec<NativeGrouped>,
) -> PyResult<(SaveState, Vec<Foreign>)> {
    let mut state = SaveState {
        tensors: Vec::with_capacity(tensors.len()),
        sources: Vec::with_capacity(tensors.len()),
        linked: linked.map(self::linked).transpose()?.unwrap_or_default(),
        aliases: aliases.into_iter().map(alias).collect(),
        tree: json(tree, "tree")?,
    };
    let mut followed = Followed::default();
    for tensor in tensors {
        let (spec, region) = tensor::source(py, tensor, &mut followed)?;
        state.tensors.push(spec);
        state.sources.push(region);
    }
    for (index, group, name) in grouped {
        // Tensors in files are numbered after the others.
        let in_files = index.wrapping_sub(state.tensors.len());
        let in_files = state.linked.tensors.get_mut(in_files);
        let in_files = in_files.map(|tensor| &mut tensor.spec);
        let Some(spec) = state.tensors.get_mut(index).or(in_files) else {
            return Err(PyValueError::new_err(format!(
                "{name}: there is no tensor {index}"
            )));
        };
        spec.group = Some(Grouped { group, name });
    }
    Ok((state, followed.streams()))
}

/// Sidecar files of a checkpoint, and the group that their index describes.
pub(crate) fn sidecars(files: Vec<NativeSidecar>, index: Option<String>) -> Sidecars {
    Sidecars {
        files,
        group: index,
    }
}

fn linked((files, tensors): NativeLinked) -> PyResult<Linked> {
    let mut linked = Linked::default();
    for (path, bytes, chunks, owner, sealer) in files {
        let chunks = chunks.into_iter().map(Digest).collect();
        linked.files.push(LinkedFile {
            path,
            bytes,
            chunks,
            sealer: sealer.map(|sealer| sealer.shared()),
        });
        linked.holders.push(Owner::of(owner));
    }
    for (name, dtype, shape, item_bytes, file, start, stored_name, region) in tensors {
        if file >= linked.files.len() {
            return Err(PyValueError::new_err(format!(
                "{name}: there is no file {file}"
            )));
        }
        linked.tensors.push(LinkedTensor {
            spec: TensorSpec {
                name,
                dtype,
                shape,
                item_bytes,
                region: region.map(tensor::region),
                group: None,
            },
            file,
            start,
            stored_name,
        });
    }
    Ok(linked)
}

fn alias((name, tensor, view): NativeAlias) -> Alias {
    let view = view.map(|(shape, strides, offset)| View {
        shape,
        strides,
        offset,
    });
    Alias { name, tensor, view }
}

pub(crate) fn json(text: String, what: &str) -> PyResult<Box<RawValue>> {
    RawValue::from_string(text)
        .map_err(|error| PyValueError::new_err(format!("{what} is not JSON: {error}")))
}
