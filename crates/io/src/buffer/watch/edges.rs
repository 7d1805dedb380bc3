//! Pages at the edges of regions, which the regions share with other memory.

use crate::buffer::HostRegion;

/// The bytes, by region, of shared pages at the moment a [`Watch`](super::Watch) began.
#[derive(Default)]
pub struct Edges(pub(super) Vec<Edge>);

impl Edges {
    /// Puts the saved bytes over a copy of a region's content from byte `start` on.
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

/// Bytes of a shared page, as they were.
pub(super) struct Edge {
    pub(super) region: usize,
    pub(super) address: usize,
    pub(super) bytes: Vec<u8>,
}
