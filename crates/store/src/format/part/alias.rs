//! Another name of a stored tensor, or a view into it.

use serde::{Deserialize, Serialize};

use super::tensor::TensorEntry;
use crate::format::dtype;

/// Another name of a stored tensor, or a view into it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Alias {
    /// Dotted name.
    pub name: String,
    /// Index of the tensor.
    pub tensor: usize,
    /// The elements that the alias selects; all of them in the same order if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub view: Option<View>,
}

/// A strided window over a stored tensor's elements.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// Distance between neighbours along each dimension, in elements.
    pub strides: Vec<i64>,
    /// Index of the first element.
    pub offset: u64,
}

impl Alias {
    /// Checks that the alias is within its tensor.
    pub(super) fn check(&self, tensors: &[TensorEntry]) -> std::result::Result<(), String> {
        let tensor = tensors
            .get(self.tensor)
            .ok_or("its tensor is not in the list")?;
        let Some(view) = &self.view else {
            return Ok(());
        };
        if view.shape.len() != view.strides.len() {
            return Err("as many strides as dimensions are needed".into());
        }
        let items = dtype::nbytes(&tensor.shape, 1).ok_or("the tensor's shape is too large")?;
        let view_items = dtype::nbytes(&view.shape, 1).ok_or("the shape is too large")?;
        if view_items == 0 {
            return if view.offset <= items {
                Ok(())
            } else {
                Err("starts outside the tensor".into())
            };
        }
        // The first and last element of the view in memory; both must be within the tensor.
        let (mut lowest, mut highest) = (i128::from(view.offset), i128::from(view.offset));
        for (&dim, &stride) in view.shape.iter().zip(&view.strides) {
            let reach = i128::from(dim - 1) * i128::from(stride);
            lowest += reach.min(0);
            highest += reach.max(0);
        }
        if lowest < 0 || highest >= i128::from(items) {
            return Err("reaches outside the tensor".into());
        }
        Ok(())
    }
}
