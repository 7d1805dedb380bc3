//! Options as they cross the boundary: a dictionary that `penstock.Options` has validated.

use std::path::Path;

use penstock_store::options::Options;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::{Map, Value};

use crate::errors;

/// An option about ranks, which only Python uses.
const OF_RANKS: &str = "rank_timeout_seconds";

/// `Options` from a dictionary; an unknown name is refused, so no option is silently ignored.
#[derive(Clone)]
pub(crate) struct NativeOptions(pub(crate) Options);

impl FromPyObject<'_, '_> for NativeOptions {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, '_, PyAny>) -> PyResult<NativeOptions> {
        let mut values = Map::new();
        for (name, value) in given.cast::<PyDict>()?.iter() {
            values.insert(name.extract()?, plain(&value)?);
        }
        values.remove(OF_RANKS);
        serde_json::from_value(Value::Object(values))
            .map(NativeOptions)
            .map_err(|error| PyValueError::new_err(format!("options: {error}")))
    }
}

impl NativeOptions {
    /// The options of a call about the checkpoint at `path`, adapted to its file system.
    pub(crate) fn at(self, py: Python<'_>, path: &Path) -> PyResult<Options> {
        self.0.at(path).map_err(|error| errors::raise(py, &error))
    }
}

/// A word, a number, a flag or nothing.
fn plain(value: &Bound<'_, PyAny>) -> PyResult<Value> {
    if value.is_none() {
        return Ok(Value::Null);
    }
    if let Ok(flag) = value.extract::<bool>() {
        return Ok(flag.into());
    }
    if let Ok(number) = value.extract::<u64>() {
        return Ok(number.into());
    }
    Ok(value.extract::<String>()?.into())
}
