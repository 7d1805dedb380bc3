//! Files with keys of their own: sealed as they are written, by blocks or by chunks, and opened.

use std::sync::Arc;

use penstock_gather::OpenBlocks;
use penstock_store::format::digest::CHUNK_BYTES;
use penstock_store::load::open::FileBlocks;
use penstock_store::save::LinkedSeal;
use penstock_store::seal::{BlockSealer, FileSeal};
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

/// Seals a file by the chunks of its digests, with a key of its own, and opens them.
#[pyclass(frozen, name = "FileSeal", module = "penstock._native")]
pub struct NativeFileSeal {
    inner: Arc<FileSeal>,
}

impl NativeFileSeal {
    pub(crate) fn new(inner: Arc<FileSeal>) -> NativeFileSeal {
        NativeFileSeal { inner }
    }

    fn check(&self, first: u64, bytes: u64) -> PyResult<()> {
        let end = first
            .checked_mul(CHUNK_BYTES)
            .and_then(|begin| begin.checked_add(bytes));
        let is_whole = |end: u64| {
            end == self.inner.file_bytes()
                || (end < self.inner.file_bytes() && end.is_multiple_of(CHUNK_BYTES))
        };
        if end.is_some_and(is_whole) {
            return Ok(());
        }
        Err(PyValueError::new_err(
            "they are not whole chunks of the file",
        ))
    }
}

#[pymethods]
impl NativeFileSeal {
    #[new]
    fn py_new(py: Python<'_>, nbytes: u64, header_bytes: u64) -> PyResult<NativeFileSeal> {
        if header_bytes > nbytes.min(CHUNK_BYTES) {
            return Err(PyValueError::new_err(format!(
                "header_bytes={header_bytes}: it must fit into the first chunk"
            )));
        }
        let inner = FileSeal::new(nbytes, header_bytes, CHUNK_BYTES);
        let inner = inner.map_err(|error| errors::raise_key(py, &error))?;
        Ok(NativeFileSeal::new(Arc::new(inner)))
    }

    /// Seals consecutive chunks in contiguous memory, in place. No chunk may be sealed twice.
    fn seal(&self, py: Python<'_>, first: u64, memory: TensorTarget) -> PyResult<()> {
        let mut memory = tensor::target(memory)?.into_buf();
        self.check(first, memory.as_slice().len() as u64)?;
        call::without_gil(py, || self.inner.seal(first, memory.as_mut_slice()))
    }

    /// Opens consecutive sealed chunks in contiguous memory, in place; returns the number of the
    /// first one that does not open, which is zeros then.
    fn open(&self, py: Python<'_>, first: u64, memory: TensorTarget) -> PyResult<Option<u64>> {
        let mut memory = tensor::target(memory)?.into_buf();
        self.check(first, memory.as_slice().len() as u64)?;
        call::without_gil(py, || Ok(self.inner.open(first, memory.as_mut_slice())))
    }

    fn __repr__(&self) -> &'static str {
        "FileSeal(..)"
    }
}

/// The seal of a linked file.
#[derive(FromPyObject)]
pub(crate) enum NativeSeal {
    Blocks(Py<NativeBlockSealer>),
    Chunks(Py<NativeFileSeal>),
}

impl NativeSeal {
    pub(crate) fn shared(&self) -> LinkedSeal {
        match self {
            NativeSeal::Blocks(sealer) => LinkedSeal::Blocks(Arc::clone(&sealer.get().inner)),
            NativeSeal::Chunks(seal) => LinkedSeal::Chunks(Arc::clone(&seal.get().inner)),
        }
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
