//! The in-memory server, which speaks S3's protocol, or Google's if `PENSTOCK_TORTURE_STORE` is set
//! to it.

use penstock_object::{Credentials, Keys, Remote};
use penstock_object_server::{SECRET, Server, token};

pub fn is_google() -> bool {
    std::env::var("PENSTOCK_TORTURE_STORE").is_ok_and(|store| store == "google")
}

pub fn start() -> Server {
    let started = match is_google() {
        true => Server::google(),
        false => Server::start(),
    };
    started.unwrap()
}

/// The URL of a key in a bucket.
pub fn url(bucket: &str, key: &str) -> String {
    let scheme = if is_google() { "gs" } else { "s3" };
    format!("{scheme}://{bucket}/{key}")
}

/// The configuration of a client with this name.
pub fn remote(endpoint: &str, client: &str) -> Remote {
    let (region, [id, secret], token) = match is_google() {
        true => (None, ["", ""], Some(token(client, 0))),
        false => (Some("us-east-1".into()), [client, SECRET], None),
    };
    let keys = Keys {
        id: id.to_owned(),
        secret: secret.to_owned(),
        token,
        expires: None,
    };
    Remote {
        endpoint: Some(endpoint.to_owned()),
        region,
        credentials: Some(Credentials::Given(keys)),
        ..Remote::default()
    }
}
