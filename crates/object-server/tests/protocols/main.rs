//! The protocols that the server speaks, by foreign clients.

#[path = "../common/mod.rs"]
mod common;
mod google;
mod s3;
