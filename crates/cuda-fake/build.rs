//! Compiles the kernels for the host, and keeps the library in memory once it is loaded: its
//! streams are threads, and unloading it would unmap their code.

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
