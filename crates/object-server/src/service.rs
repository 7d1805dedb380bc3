//! S3's protocol: its calls, as operations on a bucket's contents.

use std::sync::Arc;
use std::time::SystemTime;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::{Bytes, BytesMut};
use futures_util::TryStreamExt;
use http::{Extensions, StatusCode};
use s3s::auth::{S3Auth, SecretKey};
use s3s::dto::*;
use s3s::{S3, S3Error, S3ErrorCode, S3Request, S3Response, S3Result, s3_error};

use crate::bucket::{Bucket, Buckets};
use crate::contents::{Asserted, Condition, Named, Object, Rejection};
use crate::request::{Behind, Dialect};
use crate::token::SECRET;

/// The most entries of a listing.
const ENTRIES_MAX: i32 = 1000;

/// Every key has the same secret: its id identifies the client.
pub(crate) struct Keys;

#[async_trait::async_trait]
impl S3Auth for Keys {
    async fn get_secret_key(&self, _: &str) -> S3Result<SecretKey> {
        Ok(SecretKey::from(SECRET))
    }
}

/// The protocol over the buckets of a server. Data without a place in S3's types travels as
/// extensions: the conditions of a request, and the object of an answer.
pub(crate) struct Protocol {
    buckets: Arc<Buckets>,
    dialect: Dialect,
}

impl Protocol {
    pub(crate) fn new(buckets: &Arc<Buckets>, dialect: Dialect) -> Protocol {
        Protocol {
            buckets: Arc::clone(buckets),
            dialect,
        }
    }

    /// The checksum that S3 reports for an object; Google reports another one.
    fn crc(&self, object: &Object) -> Option<String> {
        (self.dialect == Dialect::S3).then(|| encoded(object.crc))
    }

    fn bucket(&self, name: &str) -> S3Result<Arc<Bucket>> {
        self.buckets
            .get(name)
            .ok_or_else(|| s3_error!(NoSuchBucket))
    }
}

impl From<Rejection> for S3Error {
    fn from(rejection: Rejection) -> S3Error {
        let mut error = S3Error::new(match rejection {
            Rejection::NoSuchKey => S3ErrorCode::NoSuchKey,
            Rejection::NoSuchUpload => S3ErrorCode::NoSuchUpload,
            Rejection::ConditionFailed => S3ErrorCode::PreconditionFailed,
            Rejection::BadDigest => S3ErrorCode::BadDigest,
            Rejection::WrongSize => S3ErrorCode::InvalidRequest,
            Rejection::InvalidPart => S3ErrorCode::InvalidPart,
            Rejection::PartTooSmall => S3ErrorCode::EntityTooSmall,
            Rejection::PartNumber => S3ErrorCode::InvalidArgument,
            Rejection::TooOften => S3ErrorCode::SlowDown,
        });
        if rejection == Rejection::TooOften {
            error.set_status_code(StatusCode::TOO_MANY_REQUESTS);
        }
        error
    }
}

#[async_trait::async_trait]
impl S3 for Protocol {
    async fn head_object(
        &self,
        request: S3Request<HeadObjectInput>,
    ) -> S3Result<S3Response<HeadObjectOutput>> {
        let input = request.input;
        let bucket = self.bucket(&input.bucket)?;
        let conditions = conditions(&request.extensions, input.if_match.as_ref(), None);
        let object = bucket.contents().get(&input.key, &conditions)?;
        let wants_checksum = input.checksum_mode.is_some();
        let output = HeadObjectOutput {
            accept_ranges: Some("bytes".to_owned()),
            checksum_crc64nvme: wants_checksum.then(|| encoded(object.crc)),
            checksum_type: wants_checksum.then(whole_object),
            content_length: Some(length(&object)),
            e_tag: Some(tag(&object)),
            last_modified: Some(Timestamp::from(object.modified)),
            ..HeadObjectOutput::default()
        };
        Ok(about(object, output))
    }

    async fn get_object(
        &self,
        request: S3Request<GetObjectInput>,
    ) -> S3Result<S3Response<GetObjectOutput>> {
        let input = request.input;
        let bucket = self.bucket(&input.bucket)?;
        let conditions = conditions(&request.extensions, input.if_match.as_ref(), None);
        let object = bucket.contents().get(&input.key, &conditions)?;
        let all = object.bytes.len() as u64;
        let range = match &input.range {
            Some(range) => Some(range.check(all)?),
            None => None,
        };
        let wants_checksum = input.checksum_mode.is_some() && range.is_none();
        let bytes = match &range {
            Some(range) => object.bytes.slice(range.start as usize..range.end as usize),
            None => object.bytes.clone(),
        };
        let content_range =
            range.map(|range| format!("bytes {}-{}/{all}", range.start, range.end - 1));
        let output = GetObjectOutput {
            accept_ranges: Some("bytes".to_owned()),
            checksum_crc64nvme: wants_checksum.then(|| encoded(object.crc)),
            checksum_type: wants_checksum.then(whole_object),
            content_length: Some(bytes.len() as i64),
            content_range,
            body: Some(StreamingBlob::from(s3s::Body::from(bytes))),
            e_tag: Some(tag(&object)),
            last_modified: Some(Timestamp::from(object.modified)),
            ..GetObjectOutput::default()
        };
        Ok(about(object, output))
    }

    async fn put_object(
        &self,
        request: S3Request<PutObjectInput>,
    ) -> S3Result<S3Response<PutObjectOutput>> {
        let input = request.input;
        let bucket = self.bucket(&input.bucket)?;
        let bytes = all(input.body).await?;
        let crc = decoded(input.checksum_crc64nvme.as_deref())?;
        let (there, absent) = (input.if_match.as_ref(), input.if_none_match.as_ref());
        let conditions = conditions(&request.extensions, there, absent);
        let object = {
            let mut contents = bucket.contents();
            contents.check_pace(&input.key)?;
            contents.put(&input.key, bytes, crc, &conditions)?
        };
        let output = PutObjectOutput {
            checksum_crc64nvme: self.crc(&object),
            checksum_type: self.crc(&object).map(|_| whole_object()),
            e_tag: Some(tag(&object)),
            ..PutObjectOutput::default()
        };
        Ok(about(object, output))
    }

    async fn copy_object(
        &self,
        request: S3Request<CopyObjectInput>,
    ) -> S3Result<S3Response<CopyObjectOutput>> {
        let input = request.input;
        let CopySource::Bucket { bucket, key, .. } = &input.copy_source else {
            return Err(s3_error!(NotImplemented));
        };
        let source = self.bucket(bucket)?;
        let there = input.copy_source_if_match.as_ref();
        let of_source = conditions(&Extensions::new(), there, None);
        let object = source.contents().get(key, &of_source)?;
        let target = self.bucket(&input.bucket)?;
        let of_target = conditions(&request.extensions, None, None);
        let object = {
            let mut contents = target.contents();
            contents.check_pace(&input.key)?;
            contents.put(&input.key, object.bytes, None, &of_target)?
        };
        let output = CopyObjectOutput {
            copy_object_result: Some(CopyObjectResult {
                checksum_crc64nvme: self.crc(&object),
                e_tag: Some(tag(&object)),
                last_modified: Some(Timestamp::from(object.modified)),
                ..CopyObjectResult::default()
            }),
            ..CopyObjectOutput::default()
        };
        Ok(about(object, output))
    }

    async fn delete_object(
        &self,
        request: S3Request<DeleteObjectInput>,
    ) -> S3Result<S3Response<DeleteObjectOutput>> {
        let input = request.input;
        let bucket = self.bucket(&input.bucket)?;
        let conditions = conditions(&request.extensions, input.if_match.as_ref(), None);
        let mut contents = bucket.contents();
        contents.check_pace(&input.key)?;
        contents.delete(&input.key, &conditions)?;
        Ok(S3Response::new(DeleteObjectOutput::default()))
    }

    async fn delete_objects(
        &self,
        request: S3Request<DeleteObjectsInput>,
    ) -> S3Result<S3Response<DeleteObjectsOutput>> {
        let input = request.input;
        let bucket = self.bucket(&input.bucket)?;
        let (mut deleted, mut errors) = (Vec::new(), Vec::new());
        for object in input.delete.objects {
            let conditions = object.e_tag.iter().map(|tag| Condition::Tag(value(tag)));
            let conditions: Vec<Condition> = conditions.collect();
            match bucket.contents().delete(&object.key, &conditions) {
                Ok(()) => deleted.push(DeletedObject {
                    key: Some(object.key),
                    ..DeletedObject::default()
                }),
                Err(rejection) => errors.push(Error {
                    code: Some(S3Error::from(rejection).code().as_str().to_owned()),
                    key: Some(object.key),
                    ..Error::default()
                }),
            }
        }
        Ok(S3Response::new(DeleteObjectsOutput {
            deleted: Some(deleted),
            errors: Some(errors),
            ..DeleteObjectsOutput::default()
        }))
    }

    async fn list_objects_v2(
        &self,
        request: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let input = request.input;
        let bucket = self.bucket(&input.bucket)?;
        let after = input.continuation_token.as_ref();
        let after = after.or(input.start_after.as_ref());
        let entries_max = input.max_keys.unwrap_or(ENTRIES_MAX).clamp(0, ENTRIES_MAX);
        let page = bucket.contents().list(
            input.prefix.as_deref().unwrap_or_default(),
            input.delimiter.as_deref(),
            after.map(String::as_str).unwrap_or_default(),
            entries_max as usize,
            request
                .extensions
                .get()
                .map_or(0, |Behind(changes)| *changes),
        );
        let contents = page.objects.iter().map(|(key, object)| s3s::dto::Object {
            e_tag: Some(tag(object)),
            key: Some(key.clone()),
            last_modified: Some(Timestamp::from(object.modified)),
            size: Some(length(object)),
            ..s3s::dto::Object::default()
        });
        let prefixes = page.prefixes.iter().map(|prefix| CommonPrefix {
            prefix: Some(prefix.clone()),
        });
        Ok(S3Response::new(ListObjectsV2Output {
            common_prefixes: Some(prefixes.collect()),
            contents: Some(contents.collect()),
            continuation_token: input.continuation_token,
            delimiter: input.delimiter,
            is_truncated: Some(page.next.is_some()),
            key_count: Some((page.objects.len() + page.prefixes.len()) as i32),
            max_keys: Some(entries_max),
            name: Some(input.bucket),
            next_continuation_token: page.next,
            prefix: input.prefix,
            start_after: input.start_after,
            ..ListObjectsV2Output::default()
        }))
    }

    async fn create_multipart_upload(
        &self,
        request: S3Request<CreateMultipartUploadInput>,
    ) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
        let input = request.input;
        let bucket = self.bucket(&input.bucket)?;
        let id = bucket.contents().begin_upload(&input.key);
        Ok(S3Response::new(CreateMultipartUploadOutput {
            bucket: Some(input.bucket),
            checksum_algorithm: input.checksum_algorithm,
            checksum_type: input.checksum_type,
            key: Some(input.key),
            upload_id: Some(id),
            ..CreateMultipartUploadOutput::default()
        }))
    }

    async fn upload_part(
        &self,
        request: S3Request<UploadPartInput>,
    ) -> S3Result<S3Response<UploadPartOutput>> {
        let input = request.input;
        let bucket = self.bucket(&input.bucket)?;
        let bytes = all(input.body).await?;
        let crc = decoded(input.checksum_crc64nvme.as_deref())?;
        let upload = (input.key.as_str(), input.upload_id.as_str());
        let put = bucket
            .contents()
            .put_part(upload, input.part_number, bytes, crc);
        let part = put?;
        let output = UploadPartOutput {
            checksum_crc64nvme: self.crc(&part),
            e_tag: Some(tag(&part)),
            ..UploadPartOutput::default()
        };
        Ok(about(part, output))
    }

    async fn complete_multipart_upload(
        &self,
        request: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        let input = request.input;
        let bucket = self.bucket(&input.bucket)?;
        let parts = input.multipart_upload.and_then(|upload| upload.parts);
        let parts = parts.ok_or_else(|| s3_error!(MalformedXML))?;
        let named = parts.iter().map(named).collect::<S3Result<Vec<_>>>()?;
        let asserted = Asserted {
            crc: decoded(input.checksum_crc64nvme.as_deref())?,
            bytes: input.mpu_object_size.map(|bytes| bytes as u64),
            conditions: conditions(
                &request.extensions,
                input.if_match.as_ref(),
                input.if_none_match.as_ref(),
            ),
        };
        let upload = (input.key.as_str(), input.upload_id.as_str());
        let completed = bucket.contents().complete(upload, &named, &asserted);
        let object = completed?;
        let output = CompleteMultipartUploadOutput {
            bucket: Some(input.bucket),
            checksum_crc64nvme: self.crc(&object),
            checksum_type: self.crc(&object).map(|_| whole_object()),
            e_tag: Some(tag(&object)),
            key: Some(input.key),
            ..CompleteMultipartUploadOutput::default()
        };
        Ok(about(object, output))
    }

    async fn abort_multipart_upload(
        &self,
        request: S3Request<AbortMultipartUploadInput>,
    ) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
        let input = request.input;
        let bucket = self.bucket(&input.bucket)?;
        let mut contents = bucket.contents();
        // Google confirms it at every repetition.
        let is_done = self.dialect == Dialect::Google && contents.was_aborted(&input.upload_id);
        if !is_done {
            contents.abort(&input.key, &input.upload_id)?;
        }
        Ok(S3Response::new(AbortMultipartUploadOutput::default()))
    }

    async fn list_parts(
        &self,
        request: S3Request<ListPartsInput>,
    ) -> S3Result<S3Response<ListPartsOutput>> {
        let input = request.input;
        let bucket = self.bucket(&input.bucket)?;
        let contents = bucket.contents();
        let upload = contents.upload(&input.key, &input.upload_id)?;
        let marker = input.part_number_marker.unwrap_or_default();
        let parts_max = input.max_parts.unwrap_or(ENTRIES_MAX).clamp(1, ENTRIES_MAX);
        let later = upload.parts.range(marker.saturating_add(1)..);
        let mut parts: Vec<Part> = later
            .take(parts_max as usize + 1)
            .map(|(number, part)| Part {
                checksum_crc64nvme: self.crc(part),
                e_tag: Some(tag(part)),
                last_modified: Some(Timestamp::from(part.modified)),
                part_number: Some(*number),
                size: Some(length(part)),
                ..Part::default()
            })
            .collect();
        let is_truncated = parts.len() > parts_max as usize;
        parts.truncate(parts_max as usize);
        let last = parts.last().and_then(|part| part.part_number);
        Ok(S3Response::new(ListPartsOutput {
            bucket: Some(input.bucket),
            is_truncated: Some(is_truncated),
            key: Some(input.key),
            max_parts: Some(parts_max),
            next_part_number_marker: last.filter(|_| is_truncated),
            parts: Some(parts),
            upload_id: Some(input.upload_id),
            ..ListPartsOutput::default()
        }))
    }

    async fn list_multipart_uploads(
        &self,
        request: S3Request<ListMultipartUploadsInput>,
    ) -> S3Result<S3Response<ListMultipartUploadsOutput>> {
        let input = request.input;
        let bucket = self.bucket(&input.bucket)?;
        let prefix = input.prefix.clone().unwrap_or_default();
        let after = (
            input.key_marker.clone().unwrap_or_default(),
            input.upload_id_marker.clone(),
        );
        // Without an upload id, the next page begins with the next key.
        let is_later = |key: &String, id: &String| match &after {
            (marker, Some(last)) => (key, id) > (marker, last),
            (marker, None) => key > marker,
        };
        let mut uploads: Vec<(String, String, SystemTime)> = bucket
            .contents()
            .uploads()
            .iter()
            .filter(|(id, upload)| upload.key.starts_with(&prefix) && is_later(&upload.key, id))
            .map(|(id, upload)| (upload.key.clone(), id.clone(), upload.initiated))
            .collect();
        uploads.sort();
        let uploads_max = input.max_uploads.unwrap_or(ENTRIES_MAX);
        let uploads_max = uploads_max.clamp(1, ENTRIES_MAX);
        let is_truncated = uploads.len() > uploads_max as usize;
        uploads.truncate(uploads_max as usize);
        let last = uploads.last().filter(|_| is_truncated).cloned();
        let uploads = uploads
            .into_iter()
            .map(|(key, id, initiated)| MultipartUpload {
                initiated: Some(Timestamp::from(initiated)),
                key: Some(key),
                upload_id: Some(id),
                ..MultipartUpload::default()
            });
        Ok(S3Response::new(ListMultipartUploadsOutput {
            bucket: Some(input.bucket),
            is_truncated: Some(is_truncated),
            key_marker: input.key_marker,
            max_uploads: Some(uploads_max),
            next_key_marker: last.as_ref().map(|(key, ..)| key.clone()),
            next_upload_id_marker: last.map(|(_, id, _)| id),
            prefix: input.prefix,
            upload_id_marker: input.upload_id_marker,
            uploads: Some(uploads.collect()),
            ..ListMultipartUploadsOutput::default()
        }))
    }
}

/// Reads all bytes of a body.
async fn all(body: Option<StreamingBlob>) -> S3Result<Bytes> {
    let Some(body) = body else {
        return Ok(Bytes::new());
    };
    let bytes = body.try_fold(BytesMut::new(), |mut bytes, chunk| async move {
        bytes.extend_from_slice(&chunk);
        Ok(bytes)
    });
    // A wrong checksum in a trailer ends the body with an error too.
    let bytes = bytes.await.map_err(|_| s3_error!(IncompleteBody))?;
    Ok(bytes.freeze())
}

/// An answer with its object attached.
fn about<T>(object: Object, output: T) -> S3Response<T> {
    let mut answer = S3Response::new(output);
    answer.extensions.insert(object);
    answer
}

fn conditions(
    extensions: &Extensions,
    if_match: Option<&ETagCondition>,
    if_none_match: Option<&ETagCondition>,
) -> Vec<Condition> {
    let there = if_match.map(|condition| match condition {
        ETagCondition::Any => Condition::Any,
        ETagCondition::ETag(tag) => Condition::Tag(value(tag)),
    });
    // For writes, S3 accepts only `*`.
    let absent = if_none_match.map(|_| Condition::Absent);
    let others = extensions.get::<Vec<Condition>>().into_iter().flatten();
    there
        .into_iter()
        .chain(absent)
        .chain(others.cloned())
        .collect()
}

fn named(part: &CompletedPart) -> S3Result<Named> {
    let (Some(number), Some(tag)) = (part.part_number, &part.e_tag) else {
        return Err(s3_error!(MalformedXML));
    };
    Ok(Named {
        number,
        tag: value(tag),
        crc: decoded(part.checksum_crc64nvme.as_deref())?,
    })
}

fn tag(object: &Object) -> ETag {
    ETag::Strong(object.tag.clone())
}

fn value(tag: &ETag) -> String {
    tag.value().to_owned()
}

fn length(object: &Object) -> i64 {
    object.bytes.len() as i64
}

fn whole_object() -> ChecksumType {
    ChecksumType::from_static(ChecksumType::FULL_OBJECT)
}

/// A checksum as in headers: eight bytes in base64, the highest first.
fn encoded(crc: u64) -> String {
    BASE64.encode(crc.to_be_bytes())
}

fn decoded(text: Option<&str>) -> S3Result<Option<u64>> {
    let Some(text) = text else {
        return Ok(None);
    };
    let bytes = BASE64.decode(text).ok();
    let bytes = bytes.and_then(|bytes| <[u8; 8]>::try_from(bytes).ok());
    let bytes = bytes.ok_or_else(|| s3_error!(InvalidRequest, "no CRC-64/NVME"))?;
    Ok(Some(u64::from_be_bytes(bytes)))
}
