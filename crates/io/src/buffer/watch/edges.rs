//! Pages at the edges of regions, which the regions share with other memory.

use crate::buffer::HostRegion;

/// The bytes, by region, of shared pages at the moment a [`Watch`](super::Watch) began.
#[derive(Default)]
pub struct Edges(pub(super) Vec<Edge>);

impl Edges {
    /// Whether [`put_over`](Edges::put_over) may change a copy of `bytes` of a contiguous region's
    /// content from byte `start` on.
    pub fn may_be_over(&self, index: usize, region: &HostRegion, start: u64, bytes: u64) -> bool {
        let content = region.span().start + start as usize;
        let content = content..content + bytes as usize;
        let first = self.0.partition_point(|edge| edge.region < index);
        let mine = self.0[first..].iter();
        mine.take_while(|edge| edge.region == index).any(|edge| {
            edge.address < content.end && content.start < edge.address + edge.bytes.len()
        })
    }

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
