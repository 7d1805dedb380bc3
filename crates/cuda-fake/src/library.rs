//! Finds the library that tests load.

use std::env;
use std::path::{Path, PathBuf};

const NAME: &str = "libpenstock_cuda_fake.so";

/// The path of the library, for callers that load a driver by path.
///
/// Cargo builds it with everything that uses this crate, tests among them, and puts it into
/// `target/<profile>/deps`, where the executables of tests are. Only a build of this crate itself
/// (`cargo build -p penstock-cuda-fake`) also puts a copy next to that folder, for programs in
/// other languages. This function searches the folder of the running executable, and the one above.
///
/// # Panics
///
/// If the library is in neither place.
pub fn library() -> PathBuf {
    let executable = env::current_exe().expect("a running executable has a path");
    let folders = executable.ancestors().skip(1).take(2);
    // `deps` first: the copy may be of an older build.
    let deps = executable
        .ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join("deps"));
    let places = deps.chain(folders.map(Path::to_path_buf));
    let found = places
        .map(|folder| folder.join(NAME))
        .find(|path| path.is_file());
    found.unwrap_or_else(|| panic!("{NAME} is not near {}", executable.display()))
}
