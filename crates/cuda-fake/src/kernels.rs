//! All kernels that there are, by the name of their entry in a module.
//!
//! **To add one**: a file in `kernels/` with its function, and a row here with the width of each argument.

mod pack;

use crate::kernel::Kernel;

pub(crate) const KERNELS: &[Kernel] = &[Kernel {
    name: "penstock_pack",
    argument_bytes: &[8, 8, 8, 8, 8],
    run: pack::run,
}];
