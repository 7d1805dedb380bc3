//! Addresses and signs the requests that the client library has no call for.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use http::header::{AUTHORIZATION, CONTENT_LENGTH, HeaderValue};
use http::{Method, Request};
use object_store::azure::{AzureAuthorizer, AzureCredential};
use object_store::client::{CredentialProvider, HttpRequest, HttpRequestBody};
use object_store::gcp::GcpCredential;
use object_store::signer::{SignedUrlOptions, Signer};
use url::Url;

use super::ask::Ask;
use crate::request_error::RequestError;

/// How long a signature is valid; the two clocks may differ by some minutes.
const SIGNATURE_MAX: Duration = Duration::from_secs(15 * 60);

/// Builds HTTP requests from an [`Ask`], each with its own signature.
#[async_trait]
pub(crate) trait Access: Send + Sync {
    /// A request to the store.
    ///
    /// # Errors
    /// No credentials could be obtained, or a header or URL is invalid.
    async fn request(&self, ask: &Ask<'_>) -> Result<HttpRequest, RequestError>;
}

/// S3: the URL carries the signature.
pub(crate) struct OfAmazon(pub(crate) Arc<dyn Signer>);

#[async_trait]
impl Access for OfAmazon {
    async fn request(&self, ask: &Ask<'_>) -> Result<HttpRequest, RequestError> {
        let mut options = SignedUrlOptions::new().with_query(ask.query.iter().cloned());
        options.signed_headers = ask.headers.clone();
        let signed = self
            .0
            .signed_url_opts(ask.method.clone(), ask.key, SIGNATURE_MAX, &options);
        let url = signed
            .await
            .map_err(|error| RequestError::of_store(&error))?;
        unsigned(ask, &url)
    }
}

type Provided<T> = Arc<dyn CredentialProvider<Credential = T>>;

/// Fetches the credential that requests are signed with, if any.
async fn had<T>(credentials: Option<&Provided<T>>) -> Result<Option<Arc<T>>, RequestError> {
    match credentials {
        Some(credentials) => match credentials.get_credential().await {
            Ok(credential) => Ok(Some(credential)),
            Err(error) => Err(RequestError::of_store(&error)),
        },
        None => Ok(None),
    }
}

/// Google: each request carries a bearer token.
pub(crate) struct OfGoogle {
    /// URL of the bucket.
    pub(crate) url: Url,
    /// `None` for anonymous requests.
    pub(crate) credentials: Option<Provided<GcpCredential>>,
}

#[async_trait]
impl Access for OfGoogle {
    async fn request(&self, ask: &Ask<'_>) -> Result<HttpRequest, RequestError> {
        let mut request = unsigned(ask, &url_of(&self.url, ask))?;
        if let Some(credential) = had(self.credentials.as_ref()).await? {
            let value = HeaderValue::from_str(&format!("Bearer {}", credential.bearer));
            let value =
                value.map_err(|_| invalid("the token is of other bytes than tokens are"))?;
            request.headers_mut().insert(AUTHORIZATION, value);
        }
        Ok(request)
    }
}

/// Azure: the request is signed as a whole, or carries a token or a shared access signature.
pub(crate) struct OfAzure {
    /// URL of the container.
    pub(crate) url: Url,
    pub(crate) account: String,
    /// `None` for anonymous requests.
    pub(crate) credentials: Option<Provided<AzureCredential>>,
}

#[async_trait]
impl Access for OfAzure {
    async fn request(&self, ask: &Ask<'_>) -> Result<HttpRequest, RequestError> {
        let mut request = unsigned(ask, &url_of(&self.url, ask))?;
        if let Some(credential) = had(self.credentials.as_ref()).await? {
            AzureAuthorizer::new(&credential, &self.account)
                .try_authorize(&mut request)
                .map_err(|error| RequestError::of_store(&error))?;
        }
        Ok(request)
    }
}

/// URL of an object, or of the bucket when the key is empty.
fn url_of(bucket: &Url, ask: &Ask<'_>) -> Url {
    let mut url = bucket.clone();
    if let Ok(mut path) = url.path_segments_mut() {
        path.extend(ask.key.parts());
    }
    for (name, value) in &ask.query {
        url.query_pairs_mut().append_pair(name, value);
    }
    url
}

fn unsigned(ask: &Ask<'_>, url: &Url) -> Result<HttpRequest, RequestError> {
    let request = Request::builder()
        .method(ask.method.clone())
        .uri(url.as_str())
        .body(HttpRequestBody::from(ask.body.clone()));
    let mut request = request.map_err(|error| invalid(&error.to_string()))?;
    let headers = request.headers_mut();
    headers.extend(ask.headers.clone());
    if matches!(ask.method, Method::POST | Method::PUT) {
        // The client omits the length of an empty body; Google answers that with 411, and Azure's
        // signature covers the length.
        headers.insert(CONTENT_LENGTH, HeaderValue::from(ask.body_bytes()));
    }
    Ok(request)
}

fn invalid(text: &str) -> RequestError {
    RequestError::new(io::ErrorKind::InvalidInput, text)
}
