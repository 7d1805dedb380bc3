//! `open` and `Checkpoint`.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::Arc;

use penstock_io::buffer::{HostRegionMut, IoBuf};
use penstock_store::format::part::{TensorBox, View};
use penstock_store::load::checkpoint;
use penstock_store::plan::read::Placement;
use penstock_store::report::LoadReport;
use penstock_store::seal::Unsealing;
use penstock_store::{Error, tier};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

use crate::blocks::{NativeBlockOpener, NativeFileSeal};
use crate::call::{self, Callback};
use crate::errors;
use crate::keys::Identities;
use crate::options::NativeOptions;
use crate::owner::detached;
use crate::report;
use crate::rows::{BoxEntry, GroupEntry, MissingTensor, TensorEntry};
use crate::signing::Signers;
use crate::tensor::device::Followed;
use crate::tensor::{self, HostBuffer, LoadTarget, NativeArray, NativeFill, TensorTarget};

/// Buffers, the position of each tensor in them, and the report.
type Loaded<'py> = (
    Vec<HostBuffer>,
    Vec<Option<(usize, u64)>>,
    Bound<'py, PyDict>,
);

/// Opens a complete checkpoint without reading tensor data. Without identities it must not be
/// sealed, unless `sealed_ok`: then it shows its files and no tensors. Where a sealed one is
/// `demanded`, a clear one is refused. With `signers`, one of them must have signed it.
#[pyfunction]
#[pyo3(signature = (path, identities=None, *, demanded=false, sealed_ok=false, signers=None))]
pub fn open(
    py: Python<'_>,
    path: PathBuf,
    identities: Option<PyRef<'_, Identities>>,
    demanded: bool,
    sealed_ok: bool,
    signers: Option<PyRef<'_, Signers>>,
) -> PyResult<Checkpoint> {
    let unsealing = Unsealing {
        identities: identities.map(|identities| Arc::clone(&identities.unwrap)),
        is_demanded: demanded,
        signers: signers.map(|signers| Arc::clone(&signers.signers)),
    };
    let opened = detached(py, || {
        let opened =
            checkpoint::Checkpoint::open_with(&path, &tier::file_system(&path)?, &unsealing)?;
        match opened.is_closed() && !sealed_ok {
            true => Err(Error::Sealed { path }),
            false => Ok(opened),
        }
    });
    match opened {
        Ok(inner) => Ok(Checkpoint::of(inner)),
        Err(error) => Err(errors::raise(py, &error)),
    }
}

/// An open checkpoint.
#[pyclass(frozen, module = "penstock._native")]
pub struct Checkpoint {
    inner: checkpoint::Checkpoint,
}

impl Checkpoint {
    /// Wraps an opened checkpoint.
    pub(crate) fn of(inner: checkpoint::Checkpoint) -> Checkpoint {
        Checkpoint { inner }
    }
}

#[pymethods]
impl Checkpoint {
    /// The directory.
    #[getter]
    fn path(&self) -> &OsStr {
        self.inner.path().as_os_str()
    }

    /// The id of the checkpoint.
    #[getter]
    fn id(&self) -> &str {
        &self.inner.manifest().id
    }

    /// The training step, if one was recorded.
    #[getter]
    fn step(&self) -> Option<u64> {
        self.inner.manifest().step
    }

    /// Version of the format.
    #[getter]
    fn format_version(&self) -> u64 {
        self.inner.manifest().version
    }

    /// Ids of checkpoints that its writer knew before it, newest first.
    #[getter]
    fn previous(&self) -> Vec<String> {
        self.inner.manifest().previous.clone()
    }

    /// When it was committed.
    #[getter]
    fn created(&self) -> &str {
        &self.inner.manifest().created
    }

    /// The program that wrote it.
    #[getter]
    fn writer(&self) -> &str {
        &self.inner.manifest().writer
    }

    /// Number of ranks that wrote it.
    #[getter]
    fn world_size(&self) -> u32 {
        self.inner.manifest().world_size
    }

    /// The user's metadata as JSON text.
    #[getter]
    fn metadata(&self) -> &str {
        self.inner.manifest().metadata.get()
    }

    /// Structure and plain leaves of the first rank as JSON text.
    #[getter]
    fn tree(&self) -> &str {
        self.inner.tree(0).get()
    }

    /// Structure and plain leaves of a rank as JSON text.
    fn rank_tree(&self, rank: u32) -> PyResult<&str> {
        if rank >= self.inner.manifest().world_size {
            return Err(PyIndexError::new_err(format!("there is no rank {rank}")));
        }
        Ok(self.inner.tree(rank).get())
    }

    /// The index of each rank's first tensor and first alias among those of all ranks.
    fn offsets(&self) -> Vec<(usize, usize)> {
        self.inner.offsets()
    }

    /// Every entry that is a box of a global tensor, by its index.
    fn boxes(&self, py: Python<'_>) -> PyResult<Vec<BoxEntry>> {
        let entries = self.inner.part().tensors.iter().enumerate();
        let boxes = entries.filter_map(|(index, entry)| Some((index, entry.region.as_ref()?)));
        let row = |(index, region): (usize, &TensorBox)| {
            Ok(BoxEntry {
                index,
                tensor: region.tensor.clone(),
                shape: PyTuple::new(py, &region.shape)?.unbind(),
                start: PyTuple::new(py, &region.start)?.unbind(),
            })
        };
        boxes.map(row).collect()
    }

    /// Tensors of groups: their indices, their groups, and their names in the shards.
    fn grouped(&self) -> Vec<GroupEntry> {
        let entries = self.inner.part().tensors.iter().enumerate();
        entries
            .filter_map(|(index, entry)| {
                Some(GroupEntry {
                    index,
                    group: entry.group.clone()?,
                    name: entry.stored_name().to_owned(),
                })
            })
            .collect()
    }

    /// Indices of the tensors that shards store under another name, such as carriers.
    fn carried(&self) -> Vec<usize> {
        let entries = self.inner.part().tensors.iter().enumerate();
        let carried = entries.filter(|(_, entry)| !entry.is_under_its_own_name());
        carried.map(|(index, _)| index).collect()
    }

    /// For a salvaged checkpoint: the id of its source, if known, and whether it is unverified.
    #[getter]
    fn partial(&self) -> Option<(Option<&str>, bool)> {
        let partial = self.inner.manifest().partial.as_ref()?;
        Some((partial.source.as_deref(), partial.unverified))
    }

    /// The tensors that could not be salvaged.
    fn missing(&self, py: Python<'_>) -> PyResult<Vec<MissingTensor>> {
        report::missing_rows(py, self.inner.missing())
    }

    /// The content of a small file that was saved with it, compared with its digest and its signed
    /// hash; `None` without one.
    fn sidecar(&self, py: Python<'_>, name: &str) -> PyResult<Option<Vec<u8>>> {
        call::without_gil(py, || self.inner.sidecar(name))
    }

    /// The recipients of a sealed checkpoint; `None` for a clear one.
    #[getter]
    fn recipients(&self) -> Option<Vec<&str>> {
        let wraps = self.inner.manifest().wraps.as_ref()?;
        Some(wraps.iter().map(|wrap| wrap.recipient.as_str()).collect())
    }

    /// Whether it is sealed and was opened without identities.
    #[getter]
    fn is_closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Bytes of tensor data.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.tensor_bytes()
    }

    /// Releases the lease on its files, which may then be removed; loading works until they are.
    fn release(&self) {
        self.inner.release();
    }

    /// Names and sizes of all files, the manifest first.
    fn files(&self) -> Vec<(&str, u64)> {
        self.inner.files()
    }

    /// Every tensor, with its file and byte range.
    fn tensors(&self, py: Python<'_>) -> PyResult<Vec<TensorEntry>> {
        let part = self.inner.part();
        let text = |text: &str| PyString::new(py, text).unbind();
        // Many tensors have few files and few dtypes: they share the strings.
        let files: Vec<_> = part
            .files
            .iter()
            .map(|file| text(file.name.as_str()))
            .collect();
        let mut dtypes: HashMap<&str, Py<PyString>> = HashMap::new();
        let entries = part.tensors.iter().map(|tensor| {
            let dtype = tensor.dtype.as_str();
            let dtype = dtypes.entry(dtype).or_insert_with(|| text(dtype));
            let (begin, end) = tensor.range;
            Ok(TensorEntry {
                name: text(tensor.name.as_str()),
                dtype: dtype.clone_ref(py),
                shape: PyTuple::new(py, &tensor.shape)?.unbind(),
                file: files[tensor.file].clone_ref(py),
                begin,
                end,
            })
        });
        entries.collect()
    }

    /// Further names of tensors, and views into them.
    fn aliases<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let row = |alias: &penstock_store::format::part::Alias| {
            let view = match &alias.view {
                None => None,
                Some(View {
                    shape,
                    strides,
                    offset,
                }) => Some((
                    PyTuple::new(py, shape)?,
                    PyTuple::new(py, strides)?,
                    *offset,
                )),
            };
            Ok((alias.name.as_str(), alias.tensor, view)
                .into_pyobject(py)?
                .into_any())
        };
        self.inner.part().aliases.iter().map(row).collect()
    }

    /// Loads the tensors with these indices, or all tensors with every byte of every file.
    #[pyo3(signature = (indices, targets, *, options, progress))]
    fn load<'py>(
        &self,
        py: Python<'py>,
        indices: Option<Vec<usize>>,
        targets: Option<HashMap<usize, LoadTarget>>,
        options: NativeOptions,
        progress: Callback,
    ) -> PyResult<Loaded<'py>> {
        let mut followed = Followed::default();
        let convert = |(index, memory)| {
            let target = tensor::load_target(py, index, memory, &mut followed)?;
            Ok((index, target))
        };
        let targets: PyResult<HashMap<_, _>> = targets
            .unwrap_or_default()
            .into_iter()
            .map(convert)
            .collect();
        let (targets, options) = (targets?, options.at(py, self.inner.path())?);
        let loaded = call::run(py, &progress, |progress| {
            self.inner
                .load(indices.as_deref(), targets, &options, progress)
        })?;
        let place = |placement: &Placement| match *placement {
            Placement::Segment { segment, offset } => Some((segment, offset)),
            Placement::Target | Placement::Empty => None,
        };
        let places = loaded.placements.iter().map(place).collect();
        let buffers = loaded.segments.into_iter().map(HostBuffer::new).collect();
        let report = self.report(py, &loaded.report)?;
        Ok((buffers, places, report))
    }

    /// Loads boxes of tensors into memory.
    #[pyo3(signature = (requests, *, options, progress))]
    fn fill<'py>(
        &self,
        py: Python<'py>,
        requests: Vec<NativeFill>,
        options: NativeOptions,
        progress: Callback,
    ) -> PyResult<Bound<'py, PyDict>> {
        let mut followed = Followed::default();
        let fill = |request| tensor::fill(py, request, &mut followed);
        let fills: PyResult<Vec<_>> = requests.into_iter().map(fill).collect();
        let (fills, options) = (fills?, options.at(py, self.inner.path())?);
        let filled = call::run(py, &progress, |progress| {
            self.inner.fill(fills, &options, progress)
        })?;
        self.report(py, &filled)
    }

    /// Compares whole chunks of a file with their digests; `pieces` of memory hold its bytes from
    /// `start` on.
    fn check(
        &self,
        py: Python<'_>,
        file: &str,
        start: u64,
        pieces: Vec<TensorTarget>,
        wanted: (u64, u64),
    ) -> PyResult<()> {
        let regions: PyResult<Vec<_>> = pieces.into_iter().map(tensor::target).collect();
        let bufs: Vec<IoBuf> = regions?.into_iter().map(HostRegionMut::into_buf).collect();
        let pieces: Vec<&[u8]> = bufs.iter().map(IoBuf::as_slice).collect();
        let wanted = wanted.0..wanted.1;
        call::without_gil(py, || self.inner.check(file, start, &pieces, wanted))
    }

    /// Opens whole chunks of a sealed file in place; `pieces` of memory hold its bytes from `start`
    /// on.
    fn open_chunks(
        &self,
        py: Python<'_>,
        file: &str,
        start: u64,
        pieces: Vec<TensorTarget>,
        wanted: (u64, u64),
    ) -> PyResult<()> {
        let regions: PyResult<Vec<_>> = pieces.into_iter().map(tensor::target).collect();
        let mut bufs: Vec<IoBuf> = regions?.into_iter().map(HostRegionMut::into_buf).collect();
        let pieces = bufs.iter_mut().map(IoBuf::as_mut_slice).collect();
        let wanted = wanted.0..wanted.1;
        call::without_gil(py, || self.inner.open_chunks(file, start, pieces, wanted))
    }

    /// The seal of a file that is sealed by chunks with a key of its own; None for another file.
    fn file_seal(&self, py: Python<'_>, file: &str) -> PyResult<Option<NativeFileSeal>> {
        let seal = call::without_gil(py, || self.inner.file_seal(file))?;
        Ok(seal.map(NativeFileSeal::new))
    }

    /// The opener of a file that is sealed by blocks, with the tags of all blocks in order.
    fn open_blocks(
        &self,
        py: Python<'_>,
        file: &str,
        tags: NativeArray,
    ) -> PyResult<NativeBlockOpener> {
        let region = tensor::contiguous(tags)?;
        let mut bytes = vec![[0; 16]; region.len() as usize / 16];
        if region.len() % 16 != 0 {
            return Err(PyValueError::new_err("tags have 16 bytes each"));
        }
        region.copy_to(0, bytes.as_flattened_mut());
        let opener = call::without_gil(py, || self.inner.open_blocks(file, bytes))?;
        Ok(NativeBlockOpener::new(opener))
    }
}

impl Checkpoint {
    fn report<'py>(&self, py: Python<'py>, report: &LoadReport) -> PyResult<Bound<'py, PyDict>> {
        let report = report::of_load(py, report)?;
        report.set_item("path", self.path())?;
        report.set_item("step", self.step())?;
        report.set_item("checkpoint_id", self.id())?;
        Ok(report)
    }
}
