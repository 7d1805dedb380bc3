//! The client of S3, and of what speaks its protocol.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, Checksum};
use object_store::client::HttpConnector;
use object_store::path::Path as Key;
use object_store::signer::Signer;
use object_store::{BackoffConfig, ClientOptions, ObjectStore, RetryConfig};

use crate::address::Address;
use crate::answers::Connector;
use crate::refusal::Refusal;
use crate::remote::Remote;
use crate::signed::Signed;
use crate::tries::first_pause;

/// What is asked of it.
#[derive(Clone)]
pub(crate) struct Kin {
    pub(crate) store: Arc<dyn ObjectStore>,
    /// The same, which sends a request once: repeated by itself, one that is carried out once only may
    /// be refused for its own sake.
    pub(crate) once: Arc<dyn ObjectStore>,
    /// For how long a request is repeated that gets no answer.
    pub(crate) patience: Duration,
    /// For what the library has no call for.
    pub(crate) signed: Signed,
    /// Whether what is uploaded has checksums, if the store knows them.
    pub(crate) has_checksums: bool,
}

impl fmt::Debug for Kin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.store)
    }
}

impl Kin {
    /// The client of a bucket; what `remote` leaves open is taken from the environment.
    pub(crate) fn of(address: &Address, remote: &Remote) -> io::Result<Kin> {
        let remote = &remote.completed()?;
        s3(address, remote)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error.to_string()))
    }

    /// Removes an object if it is still the one with this tag.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] where there is none, or another one, and
    /// [`io::ErrorKind::Unsupported`] where objects have no tags.
    pub(crate) async fn delete_if(&self, key: &Key, tag: Option<&str>) -> io::Result<()> {
        let tag = tag.ok_or(io::ErrorKind::Unsupported)?;
        self.signed.delete_if(key, tag).await
    }
}

/// How long a store may be silent while it is read from.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

fn client(remote: &Remote) -> ClientOptions {
    // Who names an endpoint without TLS means it.
    let is_plain = remote
        .endpoint
        .as_ref()
        .is_some_and(|endpoint| endpoint.starts_with("http://"));
    // One connection for each request: HTTP/2 would have all share one.
    ClientOptions::new()
        .with_http1_only()
        .with_allow_http(is_plain)
        .with_pool_max_idle_per_host(remote.connections())
        .with_timeout_disabled()
}

/// How a request is repeated: for as long as a server takes to start again.
fn retry(remote: &Remote) -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig {
            init_backoff: first_pause(remote.patience()),
            max_backoff: Duration::from_secs(5),
            ..BackoffConfig::default()
        },
        // Pauses are drawn by chance, and many short ones may come in a row.
        max_retries: 1000,
        retry_timeout: remote.patience(),
    }
}

fn s3(address: &Address, remote: &Remote) -> object_store::Result<Kin> {
    let options = client(remote);
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(&address.bucket)
        .with_retry(retry(remote))
        // Of a request as a whole a time limit says nothing of a slow line, between two of its bytes it
        // does. Parts of uploads do not go this way.
        .with_client_options(options.clone().with_read_timeout(READ_TIMEOUT))
        .with_unsigned_payload(true);
    let skips = builder.get_config_value(&AmazonS3ConfigKey::SkipSignature);
    let connector = Connector::new(skips.as_deref() == Some("true"));
    builder = builder.with_http_connector(connector.clone());
    if remote.has_checksums() {
        builder = builder.with_checksum_algorithm(Checksum::CRC64NVME);
    }
    if let Some(endpoint) = &remote.endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    if let Some(region) = &remote.region {
        builder = builder.with_region(region);
    }
    if let Some(credentials) = &remote.credentials {
        builder = builder.with_credentials(credentials.provider());
    }
    let never = RetryConfig {
        max_retries: 0,
        ..retry(remote)
    };
    let once = Arc::new(builder.clone().with_retry(never).build()?);
    let client = Arc::new(builder.build()?);
    let signer = Arc::clone(&client) as Arc<dyn Signer>;
    let signed = Signed::new(signer, connector.connect(&options)?, remote.patience());
    Ok(Kin {
        store: client,
        once,
        patience: remote.patience(),
        signed,
        has_checksums: remote.has_checksums(),
    })
}

/// What a store's error is for who asked.
#[expect(clippy::needless_pass_by_value, reason = "it stands in `map_err`")]
pub(crate) fn kind_of(error: object_store::Error) -> io::Error {
    Refusal::of_store(&error).into()
}
