//! `save`.

use std::path::PathBuf;

use penstock_store::format::part::{Alias, View};
use penstock_store::save::{Publication, State};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::value::RawValue;

use crate::call::{self, Callback};
use crate::options::NativeOptions;
use crate::report;
use crate::tensor::{self, TensorSource};

/// `(name, tensor, view)` with `view` either nothing or `(shape, strides, offset)` in items.
pub(crate) type NativeAlias = (String, usize, Option<(Vec<u64>, Vec<i64>, u64)>);

/// Saves a flattened state; see `penstock.save`.
#[pyfunction]
#[pyo3(signature = (path, tensors, aliases, tree, *, step, metadata, overwrite, options, progress))]
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
    step: Option<u64>,
    metadata: String,
    overwrite: bool,
    options: NativeOptions,
    progress: Callback,
) -> PyResult<Bound<'py, PyDict>> {
    let state = state(tensors, aliases, tree)?;
    let publication = Publication {
        path,
        step,
        metadata: json(metadata, "metadata")?,
        overwrite,
    };
    let options = options.0;
    let saved = call::run(py, &progress, |progress| {
        penstock_store::save::save(state, &publication, &options, progress)
    })?;
    report::of_save(py, &saved)
}

/// The state that a flattened one stands for.
pub(crate) fn state(
    tensors: Vec<TensorSource>,
    aliases: Vec<NativeAlias>,
    tree: String,
) -> PyResult<State> {
    let mut state = State {
        tensors: Vec::with_capacity(tensors.len()),
        sources: Vec::with_capacity(tensors.len()),
        aliases: aliases.into_iter().map(alias).collect(),
        tree: json(tree, "tree")?,
    };
    for tensor in tensors {
        let (spec, region) = tensor::source(tensor)?;
        state.tensors.push(spec);
        state.sources.push(region);
    }
    Ok(state)
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
