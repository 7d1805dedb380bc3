//! Options as they cross the boundary: a dictionary that `penstock.Options` has validated.

use penstock_store::options::Options;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct NativeOptions {
    engine: String,
    direct: String,
    queue_depth: Option<usize>,
    extent_bytes: Option<usize>,
    io_threads: Option<usize>,
    staging_bytes: Option<usize>,
    shard_bytes: Option<u64>,
    verify: bool,
}

impl NativeOptions {
    pub(crate) fn convert(&self) -> PyResult<Options> {
        let invalid =
            |name: &str, value: &str| PyValueError::new_err(format!("{name} cannot be {value:?}"));
        Ok(Options {
            engine: self
                .engine
                .parse()
                .map_err(|_| invalid("engine", &self.engine))?,
            direct: self
                .direct
                .parse()
                .map_err(|_| invalid("direct", &self.direct))?,
            queue_depth: self.queue_depth,
            extent_bytes: self.extent_bytes,
            io_threads: self.io_threads,
            staging_bytes: self.staging_bytes,
            shard_bytes: self.shard_bytes,
            verify: self.verify,
            ..Options::default()
        })
    }
}
