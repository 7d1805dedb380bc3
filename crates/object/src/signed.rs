//! Requests that the client library has no call for, signed and sent by what it offers.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::header::{HeaderName, HeaderValue, IF_MATCH};
use http::{Method, Request};
use object_store::client::{HttpClient, HttpConnector, HttpRequestBody, ReqwestConnector};
use object_store::path::Path as Key;
use object_store::signer::{SignedUrlOptions, Signer};
use object_store::{ClientOptions, Result};

/// How long a signature is good for: the clocks may differ by some minutes.
const SIGNATURE_MAX: Duration = Duration::from_secs(15 * 60);

/// Sends signed requests to S3.
#[derive(Clone)]
pub(crate) struct Signed {
    client: HttpClient,
    signer: Arc<dyn Signer>,
}

impl Signed {
    pub(crate) fn new(signer: Arc<dyn Signer>, options: &ClientOptions) -> Result<Signed> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(Signed { client, signer })
    }

    /// Removes an object if it is still the one with this tag.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] where there is none, or another one.
    pub(crate) async fn delete_if(&self, key: &Key, tag: &str) -> io::Result<()> {
        let tag = HeaderValue::from_str(tag).map_err(io::Error::other)?;
        let status = self.send(Method::DELETE, key, &[(IF_MATCH, tag)]).await?;
        match status.as_u16() {
            200..300 => Ok(()),
            404 | 409 | 412 => Err(io::ErrorKind::NotFound.into()),
            401 | 403 => Err(io::ErrorKind::PermissionDenied.into()),
            501 => Err(io::ErrorKind::Unsupported.into()),
            _ => Err(io::Error::other(format!("the store answered {status}"))),
        }
    }

    async fn send(
        &self,
        method: Method,
        key: &Key,
        headers: &[(HeaderName, HeaderValue)],
    ) -> io::Result<http::StatusCode> {
        let mut options = SignedUrlOptions::new();
        for (name, value) in headers {
            options = options.with_signed_header(name.clone(), value.clone());
        }
        let signed = self
            .signer
            .signed_url_opts(method.clone(), key, SIGNATURE_MAX, &options);
        let url = signed.await.map_err(io::Error::other)?;
        let mut request = Request::builder().method(method).uri(url.as_str());
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let request = request.body(HttpRequestBody::empty());
        let request = request.map_err(io::Error::other)?;
        let answer = self.client.execute(request).await;
        Ok(answer.map_err(io::Error::other)?.status())
    }
}
