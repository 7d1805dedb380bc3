//! OpenSSF bundles: a DSSE envelope with the key that it names.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use super::ec::{EcKey, EcPublic};
use super::{SignatureFlaw, bad, shown};

const MEDIA_TYPE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";
const PAYLOAD_TYPE: &str = "application/vnd.in-toto+json";

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Bundle {
    media_type: String,
    verification_material: Material,
    dsse_envelope: Envelope,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Material {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    public_key: Option<PublicKey>,
    /// Entries of transparency logs, which signatures with keys have none of. Those of others are
    /// not read: a value of JSON takes a hundred times the memory of its text.
    #[serde(skip_deserializing)]
    tlog_entries: [(); 0],
}

#[derive(Serialize, Deserialize)]
struct PublicKey {
    #[serde(default)]
    hint: String,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope {
    payload: String,
    payload_type: String,
    signatures: Vec<EnvelopeSignature>,
}

#[derive(Serialize, Deserialize)]
struct EnvelopeSignature {
    sig: String,
    #[serde(default)]
    keyid: String,
}

/// The bundle that holds a statement and its signature.
pub(super) fn sign(key: &EcKey, statement: &[u8]) -> Result<String, String> {
    let signature = key.sign(&encoded(statement))?;
    let bundle = Bundle {
        media_type: MEDIA_TYPE.to_owned(),
        verification_material: Material {
            public_key: Some(PublicKey {
                hint: key.public().hint(),
            }),
            tlog_entries: [],
        },
        dsse_envelope: Envelope {
            payload: STANDARD.encode(statement),
            payload_type: PAYLOAD_TYPE.to_owned(),
            signatures: vec![EnvelopeSignature {
                sig: STANDARD.encode(signature),
                keyid: String::new(),
            }],
        },
    };
    Ok(serde_json::to_string(&bundle).expect("a bundle always serialises"))
}

/// The statement of a bundle that one of the keys has signed, and the key.
pub(super) fn verify(bundle: &[u8], keys: &[EcPublic]) -> Result<(Vec<u8>, String), SignatureFlaw> {
    let bundle: Bundle = serde_json::from_slice(bundle).map_err(|error| {
        bad(format!(
            "it is no bundle of a signature with a key: {}",
            shown(error)
        ))
    })?;
    let envelope = &bundle.dsse_envelope;
    if bundle.media_type != MEDIA_TYPE || envelope.payload_type != PAYLOAD_TYPE {
        return Err(bad("it is a bundle of another kind"));
    }
    // One, as `model_signing` reads the first one only.
    let [signature] = envelope.signatures.as_slice() else {
        return Err(bad("a bundle has one signature"));
    };
    let decode = |text: &str| {
        STANDARD
            .decode(text)
            .map_err(|error| bad(format!("it is no base64: {error}")))
    };
    let (statement, signature) = (decode(&envelope.payload)?, decode(&signature.sig)?);
    let text = encoded(&statement);
    match keys.iter().find(|key| key.verifies(&text, &signature)) {
        Some(key) => Ok((statement, signer(key))),
        None => Err(unaccepted(&bundle, keys)),
    }
}

/// The name of a key in messages.
pub(super) fn signer(key: &EcPublic) -> String {
    format!("P-256 key {}", key.hint())
}

/// Why no key accepts the bundle. Its own word for its key is not authentic.
fn unaccepted(bundle: &Bundle, keys: &[EcPublic]) -> SignatureFlaw {
    let key = bundle.verification_material.public_key.as_ref();
    let hint = key.map_or("", |key| key.hint.as_str());
    if keys.iter().any(|key| key.hint() == hint) {
        return bad("it is not a signature of this statement");
    }
    let named: String = hint.escape_debug().take(64).collect();
    SignatureFlaw::Untrusted {
        signer: match named.is_empty() {
            true => "a P-256 key that it does not name".to_owned(),
            false => format!("P-256 key {named}"),
        },
    }
}

/// The text that is signed (DSSE, protocol.md).
fn encoded(statement: &[u8]) -> Vec<u8> {
    let (kind, bytes) = (PAYLOAD_TYPE.len(), statement.len());
    let mut text = format!("DSSEv1 {kind} {PAYLOAD_TYPE} {bytes} ").into_bytes();
    text.extend_from_slice(statement);
    text
}
