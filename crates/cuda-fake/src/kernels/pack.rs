//! `penstock_pack(destination, source, ids, id_count, row_bytes)`: rows of a table, gathered by 64-bit ids
//! one behind the other. All arguments have 64 bits.

use crate::kernel::Reach;
use crate::status::{Answer, Status};

pub(super) fn run(arguments: &[u64], memory: &Reach<'_>) -> Answer {
    let [destination, source, ids, id_count, row_bytes] = *arguments else {
        return Err(Status::INVALID_VALUE);
    };
    for index in 0..id_count {
        let id = memory.number(ids + 8 * index)?;
        let skipped = id
            .checked_mul(row_bytes)
            .and_then(|bytes| bytes.checked_add(source));
        let row = skipped.ok_or(Status::ILLEGAL_ADDRESS)?;
        memory.copy(destination + index * row_bytes, row, row_bytes)?;
    }
    Ok(())
}
