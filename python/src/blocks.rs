//! Files that are sealed by blocks: sealing them as they are written, opening them row by row.

use std::sync::Arc;

use penstock_gather::OpenBlocks;
use penstock_store::load::open::FileBlocks;
use penstock_store::seal::BlockSealer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::call;
use crate::errors;
use crate::tensor::{self, TensorTarget};

/// Seals a file by blocks, with a key of its own.
#[pyclass(frozen, name = "BlockSealer", module = "penstock._native")]
pub struct NativeBlockSealer {
    inner: Arc<BlockSealer>,
}

impl NativeBlockSealer {
    pub(crate) fn shared(&self) -> Arc<BlockSealer> {
        Arc::clone(&self.inner)
    }
}

#[pymethods]
impl NativeBlockSealer {
    #[new]
    fn new(py: Python<'_>, header_bytes: u64, block_bytes: u64) -> PyResult<NativeBlockSealer> {
        if block_bytes == 0 {
            return Err(PyValueError::new_err("block_bytes=0: must be at least 1"));
        }
        let inner = BlockSealer::new(header_bytes, block_bytes)
            .map_err(|error| errors::raise_key(py, &error))?;
        Ok(NativeBlockSealer {
            inner: Arc::new(inner),
        })
    }

    /// Seals consecutive blocks in contiguous memory, in place; returns their tags. No block may be
    /// sealed twice.
    fn seal<'py>(
        &self,
        py: Python<'py>,
        first: u64,
        memory: TensorTarget,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let mut memory = tensor::target(memory)?.into_buf();
        let tags = call::without_gil(py, || self.inner.seal(first, memory.as_mut_slice()))?;
        Ok(PyBytes::new(py, tags.as_flattened()))
    }

    fn __repr__(&self) -> &'static str {
        "BlockSealer(..)"
    }
}

/// Opens a file that is sealed by blocks.
#[pyclass(frozen, name = "BlockOpener", module = "penstock._native")]
pub struct NativeBlockOpener {
    inner: Arc<FileBlocks>,
}

impl NativeBlockOpener {
    pub(crate) fn new(inner: FileBlocks) -> NativeBlockOpener {
        NativeBlockOpener {
            inner: Arc::new(inner),
        }
    }

    /// Opens the blocks of rows that begin with the file's first block.
    pub(crate) fn of_rows(&self, offset: u64) -> PyResult<Arc<dyn OpenBlocks>> {
        if self.inner.opener().header_bytes() != offset
            || self.inner.opener().block_bytes() != penstock_gather::BLOCK_BYTES
        {
            return Err(PyValueError::new_err(
                "its blocks are not those of the rows",
            ));
        }
        Ok(Arc::new(OfRows(Arc::clone(&self.inner))))
    }
}

#[pymethods]
impl NativeBlockOpener {
    fn __repr__(&self) -> &'static str {
        "BlockOpener(..)"
    }
}

/// The blocks of a file, as a table reads them.
#[derive(Debug)]
struct OfRows(Arc<FileBlocks>);

impl OpenBlocks for OfRows {
    fn open(&self, block: u64, sealed: &[u8], text: &mut [u8]) -> bool {
        self.0.opener().open(block, sealed, text)
    }

    fn open_in_place(&self, block: u64, text: &mut [u8]) -> bool {
        self.0.opener().open_in_place(block, text)
    }

    fn is_damaged(&self, block: u64) -> bool {
        self.0.is_damaged(block)
    }
}
