//! Rows that Python reads by the names of their fields.

use penstock_gather::Form;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

/// A stored tensor, with its file and its byte range there.
#[pyclass(frozen, get_all, module = "penstock._native")]
pub struct TensorEntry {
    pub(crate) name: Py<PyString>,
    pub(crate) dtype: Py<PyString>,
    pub(crate) shape: Py<PyTuple>,
    pub(crate) file: Py<PyString>,
    pub(crate) begin: u64,
    pub(crate) end: u64,
}

#[pymethods]
impl TensorEntry {
    #[new]
    fn new(
        name: Py<PyString>,
        dtype: Py<PyString>,
        shape: Py<PyTuple>,
        file: Py<PyString>,
        begin: u64,
        end: u64,
    ) -> TensorEntry {
        TensorEntry {
            name,
            dtype,
            shape,
            file,
            begin,
            end,
        }
    }
}

/// An entry that is a box of a global tensor: its index, and the tensor's name and shape.
#[pyclass(frozen, get_all, module = "penstock._native")]
pub struct BoxEntry {
    pub(crate) index: usize,
    pub(crate) tensor: String,
    pub(crate) shape: Py<PyTuple>,
    pub(crate) start: Py<PyTuple>,
}

/// An entry of a group: its index, its group, and its name in the shards.
#[pyclass(frozen, get_all, module = "penstock._native")]
pub struct GroupEntry {
    pub(crate) index: usize,
    pub(crate) group: String,
    pub(crate) name: String,
}

/// A tensor that could not be salvaged, with the owning rank if there are several.
#[pyclass(frozen, get_all, module = "penstock._native")]
pub struct MissingTensor {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Py<PyTuple>,
    pub(crate) reason: String,
    pub(crate) kind: &'static str,
    pub(crate) rank: Option<u32>,
}

/// A tensor that a survey read, with its defect, the owning rank if there are several, and whether
/// a digest covers it.
#[pyclass(frozen, get_all, module = "penstock._native")]
pub struct SurveyedTensor {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Py<PyTuple>,
    pub(crate) bytes: u64,
    pub(crate) hit: Option<String>,
    pub(crate) rank: Option<u32>,
    pub(crate) is_vouched_for: bool,
}

/// A tensor of a safetensors header: its type there, our dtype and the shape in elements of that
/// if we have one, else the header's shape, and its byte range in the data.
#[pyclass(frozen, get_all, module = "penstock._native")]
pub struct HeaderTensor {
    pub(crate) name: String,
    pub(crate) kind: String,
    pub(crate) dtype: Option<&'static str>,
    pub(crate) shape: Py<PyTuple>,
    pub(crate) begin: u64,
    pub(crate) end: u64,
}

/// Bytes that a transfer moved, how many of them passed through staging, through the page cache,
/// and between the host and devices; and the seconds taken.
#[pyclass(frozen, get_all, module = "penstock._native")]
pub struct TransferCounts {
    pub(crate) bytes: u64,
    pub(crate) staged_bytes: u64,
    pub(crate) cached_bytes: u64,
    pub(crate) device_bytes: u64,
    pub(crate) seconds: f64,
}

/// Counters of gathers.
#[pyclass(frozen, get_all, module = "penstock._native")]
pub struct GatherCounts {
    pub(crate) rows: u64,
    pub(crate) hits: u64,
    pub(crate) shared: u64,
    pub(crate) read_rows: u64,
    pub(crate) requests: u64,
    pub(crate) read_bytes: u64,
    pub(crate) read_again: u64,
}

/// Number of rows of a table, bytes of a row in its file, bytes of its values, rows of a piece.
#[pyclass(frozen, get_all, module = "penstock._native")]
pub struct RowTableForm {
    pub(crate) rows: u64,
    pub(crate) row_bytes: u64,
    pub(crate) value_bytes: u64,
    pub(crate) piece_rows: u64,
}

#[pymethods]
impl RowTableForm {
    #[new]
    fn new(rows: u64, row_bytes: u64, value_bytes: u64, piece_rows: u64) -> RowTableForm {
        RowTableForm {
            rows,
            row_bytes,
            value_bytes,
            piece_rows,
        }
    }
}

impl RowTableForm {
    /// The form that a table's directory states.
    pub(crate) fn of(form: Form) -> RowTableForm {
        RowTableForm {
            rows: form.rows,
            row_bytes: form.row_bytes,
            value_bytes: form.value_bytes,
            piece_rows: form.piece_rows,
        }
    }

    /// The form for a new table.
    pub(crate) fn form(&self) -> Form {
        Form {
            rows: self.rows,
            row_bytes: self.row_bytes,
            value_bytes: self.value_bytes,
            piece_rows: self.piece_rows,
        }
    }
}
