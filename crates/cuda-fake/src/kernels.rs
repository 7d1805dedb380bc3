//! All kernels, by the name of their entry in a module.
//!
//! **To add one**: write its source in `crates/io/kernels/gather.cu`, and add a row here.

use crate::kernel::Kernel;

unsafe extern "C" {
    fn penstock_gather(fifo: u64, ids: u64, id_bytes: u64, count: u64, out: u64);
    fn penstock_pack(out: u64, table: u64, ids: u64, count: u64, row_bytes: u64);
    fn penstock_collect(out: u64, out_stride: u64, sources: u64, count: u64, row_bytes: u64);
}

pub(crate) const KERNELS: &[Kernel] = &[
    Kernel {
        name: "penstock_gather",
        entry: penstock_gather,
    },
    Kernel {
        name: "penstock_pack",
        entry: penstock_pack,
    },
    Kernel {
        name: "penstock_collect",
        entry: penstock_collect,
    },
];
