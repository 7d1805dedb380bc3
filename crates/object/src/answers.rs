//! Answers of a store that refuse, told apart before the client library sees them.
//!
//! It keeps of them a text that repeats itself, and no header: not the region that a bucket is in.

use async_trait::async_trait;
use http::StatusCode;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    ReqwestConnector,
};
use object_store::{ClientOptions, Result};

use crate::refusal::Refusal;

/// What every signed request has. Those for credentials have not, and their answers mean something to
/// the library.
const SIGNED: &str = "x-amz-content-sha256";

/// Makes clients that tell why a store refused.
#[derive(Debug)]
pub(crate) struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Answers(client)))
    }
}

#[derive(Debug)]
struct Answers(HttpClient);

#[async_trait]
impl HttpService for Answers {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let is_of_store = request.headers().contains_key(SIGNED);
        let answer = self.0.execute(request).await?;
        let status = answer.status();
        let means_something = matches!(
            status,
            StatusCode::NOT_MODIFIED | StatusCode::PRECONDITION_FAILED | StatusCode::CONFLICT
        );
        if !is_of_store || status.is_success() || means_something {
            return Ok(answer);
        }
        let (parts, body) = answer.into_parts();
        let body = body.bytes().await?;
        let refusal = Refusal::of_answer(status, &parts.headers, &body);
        if status == StatusCode::NOT_FOUND && refusal.kind() != std::io::ErrorKind::InvalidInput {
            // No such object, which is an answer.
            return Ok(HttpResponse::from_parts(parts, body.into()));
        }
        let kind = match refusal.is_passing {
            true => HttpErrorKind::Request,
            false => HttpErrorKind::Unknown,
        };
        Err(HttpError::new(kind, refusal))
    }
}
