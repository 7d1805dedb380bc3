//! Options for reaching an object store, beyond its URL.

pub(crate) mod connection;
pub(crate) mod credentials;
pub(crate) mod env_bool;
mod profile;

use std::env;
use std::io;
use std::time::Duration;

use self::connection::Connection;
use self::credentials::Credentials;
use self::profile::Profile;
use crate::provider::Provider;
use crate::request_error::RequestError;

/// Options of a bucket.
#[derive(Clone, Debug, Default)]
pub struct Remote {
    /// URL of the store, such as `http://127.0.0.1:7070`; the provider's own by default.
    pub endpoint: Option<String>,
    /// The region of the bucket.
    pub region: Option<String>,
    /// Source of the key. By default, in this order: the environment (a key, a web identity), a
    /// profile in AWS's files, a container's role, the instance's role.
    pub credentials: Option<Credentials>,
    /// Bytes of an upload part, a whole number of MiB.
    pub part_bytes: Option<usize>,
    /// Number of concurrent requests.
    pub connections: Option<usize>,
    /// How long an unanswered request is retried.
    pub patience: Option<Duration>,
    /// Whether uploads carry a checksum for the store to verify; false for a store that refuses
    /// such requests.
    pub checksums: Option<bool>,
}

/// Default bytes of a part: one retry repeats at most so much, and many parts are in flight.
const PART_BYTES: usize = 8 << 20;

/// S3 accepts smaller parts only as the last of an object.
const PART_BYTES_MIN: usize = 5 << 20;

const MIB: usize = 1 << 20;

/// Default number of concurrent requests.
const CONNECTIONS: usize = 24;

const CONNECTIONS_MAX: usize = 256;

/// Long enough for a server to restart.
const PATIENCE: Duration = Duration::from_secs(60);

/// Variables for the store's URL.
const ENDPOINTS: [&str; 3] = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];

const REGIONS: [&str; 2] = ["AWS_REGION", "AWS_DEFAULT_REGION"];

/// Variables for the source of a key; one that is set precedes any file.
const KEYS: [&str; 2] = ["AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"];

/// Variables for the source of Google's key.
const GOOGLE_KEYS: [&str; 7] = [
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_BEARER_TOKEN",
    "SERVICE_ACCOUNT",
    "GOOGLE_APPLICATION_DEFAULT_CREDENTIALS",
];

fn env_value(names: &[&str]) -> Option<String> {
    let value = |name: &&str| env::var(name).ok().filter(|value| !value.is_empty());
    names.iter().find_map(value)
}

/// The URL of Google's emulator from its tools' variable, with or without a scheme.
fn emulator() -> Option<String> {
    let host = env_value(&["STORAGE_EMULATOR_HOST"])?;
    Some(match host.contains("://") {
        true => host,
        false => format!("http://{host}"),
    })
}

impl Remote {
    /// Fills unset options from the environment and the provider's files, as far as the client
    /// library does not read them itself.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for an option that this provider does not have, and for
    /// malformed files.
    pub(crate) fn completed(&self, provider: Provider) -> io::Result<Remote> {
        let mut remote = self.clone();
        let env_value = match provider {
            Provider::Amazon => return self.completed_for_amazon(),
            Provider::Google => emulator().or_else(|| env_value(&["GOOGLE_BASE_URL"])),
            Provider::Azure => Connection::of_environment()
                .endpoint()
                .or_else(|| env_value(&["AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"])),
        };
        remote.endpoint = remote.endpoint.or(env_value);
        match remote.region {
            None => Ok(remote),
            Some(_) => {
                let text = format!("{}:// has no regions: leave it out", provider.scheme());
                Err(RequestError::new(io::ErrorKind::InvalidInput, text).into())
            }
        }
    }

    /// Whether this is Google's emulator without credentials. Like Google's own tools, this crate
    /// then fetches and sends no key.
    pub(crate) fn is_of_emulator(&self) -> bool {
        let is_there = self.endpoint.is_some() && self.endpoint == emulator();
        is_there && self.credentials.is_none() && env_value(&GOOGLE_KEYS).is_none()
    }

    fn completed_for_amazon(&self) -> io::Result<Remote> {
        let mut remote = self.clone();
        remote.endpoint = remote.endpoint.or_else(|| env_value(&ENDPOINTS));
        remote.region = remote.region.or_else(|| env_value(&REGIONS));
        if remote.credentials.is_some() || env_value(&KEYS).is_some() {
            return Ok(remote);
        }
        let profile = Profile::of_environment()?;
        remote.credentials = profile.credentials;
        remote.endpoint = remote.endpoint.or(profile.endpoint);
        remote.region = remote.region.or(profile.region);
        Ok(remote)
    }

    /// Bytes of a part: whole MiB, so that chunk digests are part digests.
    pub fn part_bytes(&self) -> usize {
        let wanted = self.part_bytes.unwrap_or(PART_BYTES);
        wanted.clamp(PART_BYTES_MIN, 1 << 30).next_multiple_of(MIB)
    }

    /// Number of concurrent requests.
    pub fn connections(&self) -> usize {
        self.connections
            .unwrap_or(CONNECTIONS)
            .clamp(1, CONNECTIONS_MAX)
    }

    /// How long an unanswered request is retried.
    pub fn patience(&self) -> Duration {
        self.patience.unwrap_or(PATIENCE)
    }

    /// Whether uploads carry a checksum.
    pub fn has_checksums(&self) -> bool {
        self.checksums.unwrap_or(true)
    }
}
