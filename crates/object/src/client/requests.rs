//! Requests that the client library makes, retried until their responses make sense.
//!
//! The library sends each request once. Its own retries cover broken connections, but no
//! unintelligible response: a flipped bit in a status line or listing, a truncated response, 404
//! for a listing. This module retries all of them until `patience` has passed.

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;

use bytes::Bytes;
use object_store::list::{PaginatedListOptions, PaginatedListResult};
use object_store::path::Path as Key;
use object_store::{Attributes, GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt, PutPayload};

use super::BucketClient;
use crate::request_error::RequestError;

const DELIMITER: &str = "/";

/// An object, as far as a response contains it.
pub(crate) struct Got {
    pub(crate) meta: ObjectMeta,
    pub(crate) attributes: Attributes,
    pub(crate) bytes: Bytes,
}

/// The objects directly below a key, and the common prefixes.
pub(crate) struct Listed {
    pub(crate) directories: BTreeSet<Key>,
    pub(crate) objects: Vec<ObjectMeta>,
}

impl BucketClient {
    /// Retries a request until it succeeds. The request must be idempotent.
    async fn ask<T, F>(&self, ask: impl Fn(Arc<dyn ObjectStore>) -> F) -> Result<T, RequestError>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let mut retry = self.signed.retry();
        loop {
            match ask(Arc::clone(&self.store)).await {
                Ok(answer) => return Ok(answer),
                Err(error) => retry.back_off(RequestError::of_request(&error)).await?,
            }
        }
    }

    /// The metadata of an object.
    pub(crate) async fn head(&self, key: &Key) -> Result<Got, RequestError> {
        let head = GetOptions {
            head: true,
            ..GetOptions::default()
        };
        self.get(key, &head, 0).await
    }

    /// The metadata of an object that must exist: its absence may be an unintelligible response,
    /// so a 404 is retried for a while.
    pub(crate) async fn head_of_known(&self, key: &Key) -> Result<Got, RequestError> {
        let mut retry = self.signed.retry();
        loop {
            match self.head(key).await {
                Err(request_error) if request_error.is_of_nothing() => {
                    retry.back_off_for_known(request_error).await?;
                }
                found => return found,
            }
        }
    }

    /// An object, or the range that the options name; without its bytes if there are more than
    /// `bytes_max`.
    pub(crate) async fn get(
        &self,
        key: &Key,
        options: &GetOptions,
        bytes_max: u64,
    ) -> Result<Got, RequestError> {
        self.ask(|store| {
            let (key, options) = (key.clone(), options.clone());
            async move {
                let found = store.get_opts(&key, options).await?;
                let (meta, attributes) = (found.meta.clone(), found.attributes.clone());
                let bytes = match meta.size <= bytes_max {
                    true => found.bytes().await?,
                    false => Bytes::new(),
                };
                Ok(Got {
                    meta,
                    attributes,
                    bytes,
                })
            }
        })
        .await
    }

    /// Puts an object unconditionally.
    pub(crate) async fn put(&self, key: &Key, bytes: Bytes) -> Result<(), RequestError> {
        self.ask(|store| {
            let (key, payload) = (key.clone(), PutPayload::from(bytes.clone()));
            async move { store.put(&key, payload).await.map(drop) }
        })
        .await
    }

    /// Lists the objects directly below a key.
    pub(crate) async fn list(&self, below: &Key) -> Result<Listed, RequestError> {
        let mut listed = Listed {
            directories: BTreeSet::new(),
            objects: Vec::new(),
        };
        let mut token = None;
        loop {
            let page = self.page(below, Some(DELIMITER), token).await?;
            listed.directories.extend(page.result.common_prefixes);
            listed.objects.extend(page.result.objects);
            token = page.page_token;
            if token.is_none() {
                return Ok(listed);
            }
        }
    }

    /// Some of the keys below one; none only if no such key exists.
    pub(crate) async fn some_below(&self, below: &Key) -> Result<Vec<Key>, RequestError> {
        let mut token = None;
        loop {
            let page = self.page(below, None, token).await?;
            let objects = page.result.objects.into_iter();
            let keys: Vec<Key> = objects.map(|meta| meta.location).collect();
            token = page.page_token;
            if !keys.is_empty() || token.is_none() {
                return Ok(keys);
            }
        }
    }

    async fn page(
        &self,
        below: &Key,
        delimiter: Option<&'static str>,
        page_token: Option<String>,
    ) -> Result<PaginatedListResult, RequestError> {
        let prefix = match below.as_ref() {
            "" => None,
            key => Some(format!("{key}{DELIMITER}")),
        };
        let options = PaginatedListOptions {
            delimiter: delimiter.map(Into::into),
            page_token,
            ..PaginatedListOptions::default()
        };
        let mut retry = self.signed.retry();
        loop {
            let page = self
                .lists
                .list_paginated(prefix.as_deref(), options.clone());
            match page.await {
                Ok(page) => return Ok(page),
                Err(error) => retry.back_off(RequestError::of_request(&error)).await?,
            }
        }
    }
}
