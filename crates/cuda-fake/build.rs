//! Keeps the library in memory for good once it is loaded: its streams are threads, and whoever unloads it
//! would take the code from under them.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
