//! Keys that sign a text, and keys that such signatures are checked with.
//!
//! Two forms, each of which other tools check: an OpenSSF bundle (DSSE, EC P-256), which
//! `model_signing verify key` accepts, and an ssh signature (Ed25519), which `ssh-keygen -Y verify`
//! accepts. The text is a statement about files; this crate does not read it.

mod bundle;
mod ec;
mod key;
mod signers;
mod ssh;

use std::fmt;

pub use key::{SignatureForm, SigningKey, SigningKeyring};
pub use signers::Signers;
pub use ssh::NAMESPACE;

/// A signature is not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SignatureFlaw {
    /// It was made with a key that is none of the expected ones.
    #[error("{signer} signed it, which is none of the expected keys")]
    Untrusted {
        /// The key in public, as the signature names it.
        signer: String,
    },
    /// It does not belong to the text, or is no signature.
    #[error("{0}")]
    Bad(String),
}

fn bad(reason: impl Into<String>) -> SignatureFlaw {
    SignatureFlaw::Bad(reason.into())
}

/// An error of a library about bytes of others, which it may repeat.
fn shown(error: impl fmt::Display) -> String {
    error.to_string().escape_debug().take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SSH: &str = "\
-----BEGIN OPENSSH PRIVATE KEY-----\n\
b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtzc2gtZW\n\
QyNTUxOQAAACCsz6Ts8dYv82KOybjuRu7nkFEncPMcPO+GxE/2w+m8RwAAAIgke6MeJHuj\n\
HgAAAAtzc2gtZWQyNTUxOQAAACCsz6Ts8dYv82KOybjuRu7nkFEncPMcPO+GxE/2w+m8Rw\n\
AAAEAaDCuwALEMPVKRimQAvSQOAf7ArsTWF4SGkHv00/bDZKzPpOzx1i/zYo7JuO5G7ueQ\n\
USdw8xw874bET/bD6bxHAAAAAAECAwQF\n\
-----END OPENSSH PRIVATE KEY-----\n";
    const SSH_PUBLIC: &str =
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKzPpOzx1i/zYo7JuO5G7ueQUSdw8xw874bET/bD6bxH";
    const OTHER_SSH_PUBLIC: &str =
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILH4Cpmf1Fu76S1WpM+7NF6of8uBQpizQ+TSirnFO9gk";
    const EC: &str = "\
-----BEGIN PRIVATE KEY-----\n\
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg3MgKBtuqFpSpVGfc\n\
v6QO12D/Mu6XRm5ekFGmUlQqxT2hRANCAAQFz4KXV5ze4ohyUfmPTAZobSu85C6C\n\
1bJPDLqYCkaEZhpjXFyAH0olJGYoDuquIGddeeJ3WnLc1v31xE51Y7H1\n\
-----END PRIVATE KEY-----\n";
    const EC_PUBLIC: &str = "\
-----BEGIN PUBLIC KEY-----\n\
MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEBc+Cl1ec3uKIclH5j0wGaG0rvOQu\n\
gtWyTwy6mApGhGYaY1xcgB9KJSRmKA7qriBnXXnid1py3Nb99cROdWOx9Q==\n\
-----END PUBLIC KEY-----\n";
    const OTHER_EC_PUBLIC: &str = "\
-----BEGIN PUBLIC KEY-----\n\
MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEuI8u1Z8H1ICZlxebe22U/erk6kdM\n\
qLHzmJk8bsqfLrBRor8Q83CQpPkap499VCN/Xn3eyxrSRsGVedheAiKQKQ==\n\
-----END PUBLIC KEY-----\n";

    const STATEMENT: &[u8] = b"{\"a statement\": 1}";

    fn key(text: &str) -> SigningKey {
        SigningKey::from_content("key", text.as_bytes()).unwrap()
    }

    fn signers(texts: &[&str]) -> Signers {
        let mut signers = Signers::new();
        for text in texts {
            signers.add_content("signers", text.as_bytes()).unwrap();
        }
        signers
    }

    /// Checks both forms of signature alike; a bundle has the statement in it.
    fn verify(
        signers: &Signers,
        statement: &[u8],
        form: SignatureForm,
        signature: &[u8],
    ) -> Result<String, SignatureFlaw> {
        match form {
            SignatureForm::Ssh => signers.verify_ssh(statement, signature),
            SignatureForm::Bundle => {
                let (found, signer) = signers.verify_bundle(signature)?;
                assert_eq!(found, statement);
                Ok(signer)
            }
        }
    }

    #[test]
    fn a_signature_is_accepted_from_the_keys_that_are_named() {
        let all = [SSH_PUBLIC, OTHER_SSH_PUBLIC, EC_PUBLIC, OTHER_EC_PUBLIC];
        for (private, public) in [(SSH, SSH_PUBLIC), (EC, EC_PUBLIC)] {
            let key = key(private);
            let (signature, form) = (key.sign(STATEMENT).unwrap(), key.form());
            let check =
                |names: &[&str]| verify(&signers(names), STATEMENT, form, signature.as_bytes());
            assert_eq!(check(&[public]), Ok(key.signer()));
            assert_eq!(check(&all), Ok(key.signer()));
            let others: Vec<&str> = all.into_iter().filter(|one| *one != public).collect();
            for names in [&others[..], &others[..1], &others[1..], &[]] {
                let flaw = check(names).unwrap_err();
                assert!(matches!(flaw, SignatureFlaw::Untrusted { .. }), "{flaw}");
            }
        }
    }

    #[test]
    fn a_signature_of_another_statement_is_refused() {
        let ssh = key(SSH).sign(STATEMENT).unwrap();
        let flaw = signers(&[SSH_PUBLIC]).verify_ssh(b"another", ssh.as_bytes());
        assert!(matches!(flaw, Err(SignatureFlaw::Bad(_))), "{flaw:?}");
        // The statement of one bundle with the signature of another.
        let bundle = |text: &[u8]| -> serde_json::Value {
            serde_json::from_str(&key(EC).sign(text).unwrap()).unwrap()
        };
        let (mut exchanged, other) = (bundle(STATEMENT), bundle(b"another"));
        exchanged["dsseEnvelope"]["payload"] = other["dsseEnvelope"]["payload"].clone();
        let flaw = signers(&[EC_PUBLIC]).verify_bundle(exchanged.to_string().as_bytes());
        assert!(matches!(flaw, Err(SignatureFlaw::Bad(_))), "{flaw:?}");
    }

    #[test]
    fn a_bundle_of_another_kind_is_refused() {
        let bundle: serde_json::Value =
            serde_json::from_str(&key(EC).sign(STATEMENT).unwrap()).unwrap();
        let changes: &[fn(&mut serde_json::Value)] = &[
            |bundle| bundle["mediaType"] = "application/json".into(),
            |bundle| bundle["dsseEnvelope"]["payloadType"] = "text/plain".into(),
            |bundle| bundle["dsseEnvelope"]["signatures"] = serde_json::json!([]),
            |bundle| {
                let signatures = bundle["dsseEnvelope"]["signatures"].as_array_mut().unwrap();
                signatures.push(signatures[0].clone());
            },
        ];
        let signers = signers(&[EC_PUBLIC]);
        for (number, change) in changes.iter().enumerate() {
            let mut changed = bundle.clone();
            change(&mut changed);
            let flaw = signers.verify_bundle(changed.to_string().as_bytes());
            assert!(
                matches!(flaw, Err(SignatureFlaw::Bad(_))),
                "{number}: {flaw:?}"
            );
        }
    }

    /// `ssh-keygen -Y sign -n file` with the key of this test.
    const FOR_FILES: &str = "\
-----BEGIN SSH SIGNATURE-----\n\
U1NIU0lHAAAAAQAAADMAAAALc3NoLWVkMjU1MTkAAAAgrM+k7PHWL/Nijsm47kbu55BRJ3\n\
DzHDzvhsRP9sPpvEcAAAAEZmlsZQAAAAAAAAAGc2hhNTEyAAAAUwAAAAtzc2gtZWQyNTUx\n\
OQAAAECYcNt0C8f6WFFFnP/OZjBXNYhdeNTuKYwBpSlXWFVhNuhR5KukY1ZEjySkIkobRb\n\
ec/ryoTwMbf3Q9kthIUMkK\n\
-----END SSH SIGNATURE-----\n";

    #[test]
    fn a_signature_for_another_purpose_is_refused() {
        let flaw = signers(&[SSH_PUBLIC]).verify_ssh(STATEMENT, FOR_FILES.as_bytes());
        let Err(SignatureFlaw::Bad(reason)) = flaw else {
            panic!("{flaw:?}")
        };
        assert!(reason.contains("file"), "{reason}");
    }
}
