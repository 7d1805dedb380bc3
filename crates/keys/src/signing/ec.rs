//! Keys on the curve P-256, in PEM.

use std::fmt::Write as _;

use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::encoding::AsDer;
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_ASN1, ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair,
    UnparsedPublicKey,
};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{PrivateKeyDer, SubjectPublicKeyInfoDer};

/// A public key on P-256 in DER (RFC 5480), up to its point.
const PREFIX: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a,
    0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];
/// The point, uncompressed.
const POINT_BYTES: usize = 65;

/// A private key.
pub(super) struct EcKey {
    pair: EcdsaKeyPair,
    public: EcPublic,
}

/// A public key.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct EcPublic {
    der: Vec<u8>,
}

impl EcKey {
    /// Reads a private key in PKCS #8 or as openssl writes keys of curves.
    pub(super) fn from_pem(pem: &[u8]) -> Result<EcKey, String> {
        let key = PrivateKeyDer::from_pem_slice(pem)
            .map_err(|_| "it is no private key in PEM".to_owned())?;
        let not_p256 = |_| "it is no key on the curve P-256".to_owned();
        let pair =
            EcdsaKeyPair::from_private_key_der(&ECDSA_P256_SHA256_ASN1_SIGNING, key.secret_der())
                .map_err(not_p256)?;
        let der = pair.public_key().as_der();
        let der = der.map_err(|_| "its public key cannot be shown".to_owned())?;
        let public = EcPublic::from_der(der.as_ref())?;
        Ok(EcKey { pair, public })
    }

    pub(super) fn public(&self) -> &EcPublic {
        &self.public
    }

    /// Signs a text; the signature is in ASN.1.
    pub(super) fn sign(&self, text: &[u8]) -> Result<Vec<u8>, String> {
        let signed = self.pair.sign(&SystemRandom::new(), text);
        let signed = signed.map_err(|_| "the system gives no random numbers".to_owned())?;
        Ok(signed.as_ref().to_vec())
    }
}

impl EcPublic {
    /// Reads all public keys of a file in PEM.
    pub(super) fn all_from_pem(pem: &[u8]) -> Result<Vec<EcPublic>, String> {
        SubjectPublicKeyInfoDer::pem_slice_iter(pem)
            .map(|key| match key {
                Ok(key) => EcPublic::from_der(key.as_ref()),
                Err(_) => Err("it is no public key in PEM".to_owned()),
            })
            .collect()
    }

    fn from_der(der: &[u8]) -> Result<EcPublic, String> {
        match der.strip_prefix(&PREFIX) {
            Some([4, point @ ..]) if point.len() + 1 == POINT_BYTES => {
                Ok(EcPublic { der: der.to_vec() })
            }
            _ => Err("it is no key on the curve P-256".to_owned()),
        }
    }

    /// SHA-256 of the key in PEM, as `model_signing` names keys.
    pub(super) fn hint(&self) -> String {
        let mut pem = "-----BEGIN PUBLIC KEY-----\n".to_owned();
        let digits = STANDARD.encode(&self.der);
        for line in digits.as_bytes().chunks(64) {
            pem.push_str(std::str::from_utf8(line).expect("base64 is ASCII"));
            pem.push('\n');
        }
        pem.push_str("-----END PUBLIC KEY-----\n");
        let mut hint = String::with_capacity(64);
        for byte in digest(&SHA256, pem.as_bytes()).as_ref() {
            write!(hint, "{byte:02x}").expect("a string takes everything");
        }
        hint
    }

    pub(super) fn verifies(&self, text: &[u8], signature: &[u8]) -> bool {
        let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, &self.der[PREFIX.len()..]);
        key.verify(text, signature).is_ok()
    }
}
