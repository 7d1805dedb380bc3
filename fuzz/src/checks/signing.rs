//! Signatures, which are read before anybody vouches for them, and files of public keys.

use std::sync::LazyLock;

use penstock_keys::Signers;
use penstock_store::sign::statement_files;

/// The text that the seeds sign, with the private keys of these public ones.
const STATEMENT: &[u8] = b"{\"a statement\": 1}";
const SSH: &str =
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKzPpOzx1i/zYo7JuO5G7ueQUSdw8xw874bET/bD6bxH";
const EC: &str = "\
-----BEGIN PUBLIC KEY-----\n\
MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEBc+Cl1ec3uKIclH5j0wGaG0rvOQu\n\
gtWyTwy6mApGhGYaY1xcgB9KJSRmKA7qriBnXXnid1py3Nb99cROdWOx9Q==\n\
-----END PUBLIC KEY-----\n";

static SIGNERS: LazyLock<Signers> = LazyLock::new(|| {
    let mut signers = Signers::new();
    for text in [SSH, EC] {
        let added = signers.add_content("signers", text.as_bytes());
        added.expect("a public key");
    }
    signers
});

/// Any JSON as a bundle: the keys have signed one statement alone.
pub fn bundle(text: &[u8]) {
    match SIGNERS.verify_bundle(text) {
        Ok((statement, _)) => assert_eq!(statement, STATEMENT),
        Err(flaw) => check_message(&flaw.to_string()),
    }
}

/// Any bytes as an ssh signature, which counts for one statement alone.
pub fn ssh_signature(text: &[u8]) {
    if let Err(flaw) = SIGNERS.verify_ssh(STATEMENT, text) {
        check_message(&flaw.to_string());
    }
    let other = SIGNERS.verify_ssh(b"another statement", text);
    other.expect_err("nobody signed it");
}

/// Any JSON as a statement: refused, or a list of files.
pub fn statement(text: &[u8]) {
    if let Err(flaw) = statement_files(text) {
        check_message(&flaw);
    }
}

/// Any bytes as a file of public keys: refused, or at least one key.
pub fn signers(content: &[u8]) {
    let mut signers = Signers::new();
    match signers.add_content("given", content) {
        Ok(()) => assert!(signers.count() > 0),
        Err(error) => check_message(&error.to_string()),
    }
}

/// The text of a stranger is not repeated at length, nor with characters of control.
fn check_message(shown: &str) {
    assert!(shown.len() < 4 << 10, "{} bytes of error", shown.len());
    assert!(!shown.chars().any(char::is_control), "{shown:?}");
}
