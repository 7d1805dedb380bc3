//! Compiles the kernels for the host, and keeps the library in memory for good once it is loaded: its streams
//! are threads, and whoever unloads it would take the code from under them.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=kernels");
    println!("cargo:rerun-if-changed=../io/kernels");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    cc::Build::new()
        .file("kernels/kernels.c")
        .std("c11")
        .warnings_into_errors(true)
        .compile("penstock_kernels");
}
