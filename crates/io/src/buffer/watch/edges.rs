//! Pages at the edges of regions, which others have a part of.

use crate::buffer::HostRegion;

/// What lay in the pages that are not a region's alone when a [`Watch`](super::Watch) began, by
/// region.
#[derive(Default)]
pub struct Edges(pub(super) Vec<Edge>);

impl Edges {
    /// Puts it over a copy of a region's content from byte `start` on.
    pub fn put_over(&self, index: usize, region: &HostRegion, start: u64, copy: &mut [u8]) {
        let first = self.0.partition_point(|edge| edge.region < index);
        for edge in self.0[first..]
            .iter()
            .take_while(|edge| edge.region == index)
        {
            region.overlay(start, copy, edge.address, &edge.bytes);
        }
    }
}

/// Bytes of a page that is not a region's alone, as they were.
pub(super) struct Edge {
    pub(super) region: usize,
    pub(super) address: usize,
    pub(super) bytes: Vec<u8>,
}
