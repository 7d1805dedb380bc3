//! Ed25519 keys of ssh, and signatures as `ssh-keygen -Y sign` makes them.

use aws_lc_rs::signature::{ED25519, Ed25519KeyPair, UnparsedPublicKey};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ssh_key::public::KeyData;
use ssh_key::{Algorithm, HashAlg, LineEnding, PrivateKey, PublicKey, Signature, SshSig};
use zeroize::Zeroizing;

use super::{SignatureFlaw, bad, shown};
use crate::passphrase::Passphrase;

/// The namespace of ssh signatures: a signature made for anything else is not accepted.
pub const NAMESPACE: &str = "penstock-checkpoint";

/// A private key.
pub(super) struct SshKey {
    pair: Ed25519KeyPair,
    public: SshPublic,
}

/// A public key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SshPublic(KeyData);

impl SshKey {
    /// Reads a file of ssh-keygen; the passphrases are tried if it has one.
    pub(super) fn from_openssh(pem: &[u8], passphrases: &[Passphrase]) -> Result<SshKey, String> {
        let binary = decode(pem).ok_or_else(|| "it is no private key of ssh".to_owned())?;
        let mut key = PrivateKey::from_bytes(&binary)
            .map_err(|error| format!("it is no private key of ssh: {}", shown(error)))?;
        if key.is_encrypted() {
            let mut tried = passphrases.iter();
            let opened = tried.find_map(|passphrase| key.decrypt(passphrase.expose()).ok());
            key = opened.ok_or_else(|| match passphrases {
                [] => "it has a passphrase: give that before the key".to_owned(),
                _ => "no passphrase that stands before it opens it".to_owned(),
            })?;
        }
        let Some(pair) = key.key_data().ed25519() else {
            return Err(format!(
                "it is a key of {}; only ssh-ed25519 signs",
                key.algorithm()
            ));
        };
        let pair = Ed25519KeyPair::from_seed_and_public_key(pair.private.as_ref(), &pair.public.0);
        let pair = pair.map_err(|_| "its two halves do not belong together".to_owned())?;
        let public = SshPublic(key.public_key().key_data().clone());
        Ok(SshKey { pair, public })
    }

    pub(super) fn public(&self) -> &SshPublic {
        &self.public
    }

    /// The signature file of a text.
    pub(super) fn sign(&self, text: &[u8]) -> Result<String, String> {
        let signed = || -> ssh_key::Result<String> {
            let message = SshSig::signed_data(NAMESPACE, HashAlg::Sha512, text)?;
            let signature = self.pair.sign(&message);
            let signature = Signature::new(Algorithm::Ed25519, signature.as_ref())?;
            let key = self.public.0.clone();
            SshSig::new(key, NAMESPACE, HashAlg::Sha512, signature)?.to_pem(LineEnding::LF)
        };
        signed().map_err(|error| error.to_string())
    }
}

/// The bytes of a key's text. Programs break its lines at different places, and the library takes
/// those of ssh-keygen alone.
fn decode(pem: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    let text = str::from_utf8(pem).ok()?;
    let (_, rest) = text.split_once("-----BEGIN OPENSSH PRIVATE KEY-----")?;
    let (body, _) = rest.split_once("-----END OPENSSH PRIVATE KEY-----")?;
    // The vector has its final size at once: one that grows leaves copies in freed memory.
    let mut digits = Zeroizing::new(Vec::with_capacity(body.len()));
    digits.extend(body.bytes().filter(|byte| !byte.is_ascii_whitespace()));
    STANDARD.decode(&*digits).ok().map(Zeroizing::new)
}

impl SshPublic {
    /// Reads `ssh-ed25519 AAAA…`.
    pub(super) fn from_line(line: &str) -> Result<SshPublic, String> {
        let key = PublicKey::from_openssh(line)
            .map_err(|error| format!("it is no public key of ssh: {}", shown(error)))?;
        match key.key_data().ed25519() {
            Some(_) => Ok(SshPublic(key.key_data().clone())),
            None => Err(format!(
                "it is a key of {}; only ssh-ed25519 signs",
                key.algorithm()
            )),
        }
    }

    /// The fingerprint that ssh-keygen shows.
    pub(super) fn fingerprint(&self) -> String {
        self.0.fingerprint(HashAlg::Sha256).to_string()
    }

    /// The key in a file of `.pub`.
    fn bytes(&self) -> &[u8] {
        &self.0.ed25519().expect("other keys are refused").0
    }
}

/// The signature in a file, not checked yet.
pub(super) struct SshSignature(SshSig);

impl SshSignature {
    pub(super) fn parse(text: &[u8]) -> Result<SshSignature, SignatureFlaw> {
        let parsed = SshSig::from_pem(text);
        let signature =
            parsed.map_err(|error| bad(format!("it is no ssh signature: {}", shown(error))))?;
        Ok(SshSignature(signature))
    }

    /// The fingerprint of the key that it names.
    pub(super) fn signer(&self) -> String {
        self.0.public_key().fingerprint(HashAlg::Sha256).to_string()
    }

    pub(super) fn is_by(&self, key: &SshPublic) -> bool {
        *self.0.public_key() == key.0
    }

    /// Checks it with the key that it names.
    pub(super) fn verify(&self, key: &SshPublic, text: &[u8]) -> Result<(), SignatureFlaw> {
        let signature = &self.0;
        if signature.namespace() != NAMESPACE {
            let found: String = signature.namespace().escape_debug().take(100).collect();
            return Err(bad(format!(
                "it is a signature for {found:?}, not for {NAMESPACE:?}"
            )));
        }
        // Nothing is defined there; a signature that says more than we check is refused.
        if !signature.reserved().is_empty() || signature.algorithm() != Algorithm::Ed25519 {
            return Err(bad("it is a signature of another kind"));
        }
        let message = SshSig::signed_data(NAMESPACE, signature.hash_alg(), text)
            .map_err(|error| bad(shown(error)))?;
        let public = UnparsedPublicKey::new(&ED25519, key.bytes());
        public
            .verify(&message, signature.signature_bytes())
            .map_err(|_| bad("it is not a signature of this statement"))
    }
}
