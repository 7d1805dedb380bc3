//! `Ids`: row numbers, as integers of any type.

use penstock_gather::Error;
use penstock_io::buffer::HostRegion;
use pyo3::prelude::*;

use crate::tensor::{self, NativeArray};

/// Integers in memory of Python.
pub(crate) struct Ids {
    region: HostRegion,
    width: usize,
    is_signed: bool,
}

impl Ids {
    /// The integers of a contiguous array.
    pub(crate) fn of(array: NativeArray, is_signed: bool) -> PyResult<Ids> {
        let width = array.3;
        let region = tensor::contiguous(array)?;
        Ok(Ids::new(region, width, is_signed))
    }

    /// The integers of `width` bytes in a region.
    pub(crate) fn new(region: HostRegion, width: usize, is_signed: bool) -> Ids {
        Ids {
            region,
            width,
            is_signed,
        }
    }

    /// Number of ids.
    pub(crate) fn count(&self) -> u64 {
        self.region.len() / self.width as u64
    }

    /// The row numbers, all below `rows`.
    pub(crate) fn numbers(&self, rows: u64) -> Result<Vec<u64>, Error> {
        const PIECE: usize = 4096;
        let Ids {
            width, is_signed, ..
        } = *self;
        let count = self.count() as usize;
        let mut found = Vec::with_capacity(count);
        let mut bytes = vec![0; PIECE.min(count) * width];
        for first in (0..count).step_by(PIECE) {
            let here = PIECE.min(count - first) * width;
            self.region
                .copy_to((first * width) as u64, &mut bytes[..here]);
            let bytes = &bytes[..here];
            match (width, is_signed) {
                (1, true) => push(&mut found, bytes, rows, i8::from_ne_bytes)?,
                (1, false) => push(&mut found, bytes, rows, u8::from_ne_bytes)?,
                (2, true) => push(&mut found, bytes, rows, i16::from_ne_bytes)?,
                (2, false) => push(&mut found, bytes, rows, u16::from_ne_bytes)?,
                (4, true) => push(&mut found, bytes, rows, i32::from_ne_bytes)?,
                (4, false) => push(&mut found, bytes, rows, u32::from_ne_bytes)?,
                (_, true) => push(&mut found, bytes, rows, i64::from_ne_bytes)?,
                (_, false) => push(&mut found, bytes, rows, u64::from_ne_bytes)?,
            }
        }
        Ok(found)
    }
}

/// A copy of a contiguous array of `float64`.
pub(crate) fn doubles(array: NativeArray) -> PyResult<Vec<f64>> {
    let region = tensor::contiguous(array)?;
    let mut bytes = vec![0; region.len() as usize];
    region.copy_to(0, &mut bytes);
    let doubles = bytes.as_chunks::<8>().0;
    Ok(doubles.iter().map(|one| f64::from_ne_bytes(*one)).collect())
}

fn push<const N: usize, Id: Copy + Into<i128> + TryInto<u64>>(
    found: &mut Vec<u64>,
    bytes: &[u8],
    rows: u64,
    id: impl Fn([u8; N]) -> Id,
) -> Result<(), Error> {
    for one in bytes.as_chunks::<N>().0 {
        let id = id(*one);
        // Arithmetic of 128 bits is for the error alone: it would be a tenth of a small batch.
        match id.try_into() {
            Ok(row) if row < rows => found.push(row),
            _ => {
                let (position, id) = (found.len(), id.into());
                return Err(Error::OutOfRange { position, id, rows });
            }
        }
    }
    Ok(())
}
