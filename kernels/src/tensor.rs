//! Typed, shaped views of device memory.
//!
//! A [`Tensor`] owns a [`Region`] of an arena; a [`View`] or [`ViewMut`] borrows any bytes, such as a parameter
//! inside a group's flat weights that lie where the disk engine put them. All are dense and row-major.

use crate::Packed;
use std::fmt;
use terrace_device::{Arena, Bytes, BytesMut, DeviceError, Region};

/// Element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// bfloat16.
    BF16,
    /// IEEE half precision.
    F16,
    /// IEEE double precision (losses and norms).
    F64,
    /// Signed 32-bit integer (token ids, labels, positions).
    I32,
}

impl DType {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::BF16 | Self::F16 => 2,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::BF16 => "bf16",
            Self::F16 => "f16",
            Self::F64 => "f64",
            Self::I32 => "i32",
        })
    }
}

/// Up to four dimensions, outermost first.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; 4],
    rank: u8,
}

/// Elements of a tensor at most: what 47 bits of address hold of the smallest type, and 16 bytes for each do not wrap.
const ELEMENTS_MAX: usize = 1 << 47;

impl Shape {
    /// A shape of the given dimensions.
    ///
    /// # Panics
    /// With more than four dimensions, or more elements than memory has bytes; dimensions of 0 count as 1 there.
    pub fn new(dims: &[usize]) -> Self {
        assert!(dims.len() <= 4, "tensors have at most four dimensions");
        // What is computed from it, bytes of any type and rows, then does not wrap.
        let elements = dims.iter().try_fold(1_usize, |product, dim| product.checked_mul(*dim.max(&1)));
        assert!(elements.is_some_and(|all| all <= ELEMENTS_MAX), "a tensor of {dims:?} is too large");
        let mut all = [1; 4];
        all[..dims.len()].copy_from_slice(dims);
        Self { dims: all, rank: dims.len() as u8 }
    }

    /// The dimensions.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..usize::from(self.rank)]
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.dims().iter().product()
    }

    /// Size of the last dimension (1 for a scalar).
    pub fn last(&self) -> usize {
        self.dims().last().copied().unwrap_or(1)
    }

    /// Product of all dimensions but the last.
    pub fn rows(&self) -> usize {
        self.dims().split_last().map_or(1, |(_, outer)| outer.iter().product())
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

/// An owned tensor in an arena; its memory returns to the arena when it is dropped.
#[derive(Debug)]
pub struct Tensor {
    region: Region,
    dtype: DType,
    shape: Shape,
}

/// A borrowed tensor.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    bytes: Bytes<'a>,
    dtype: DType,
    shape: Shape,
    /// Where all of it, in this shape, may stay packed.
    pub(crate) packed: Option<&'a Packed<'a>>,
}

/// A mutably borrowed tensor.
#[derive(Debug)]
pub struct ViewMut<'a> {
    bytes: BytesMut<'a>,
    dtype: DType,
    shape: Shape,
}

impl Tensor {
    /// Takes memory for a tensor from the arena. The contents are unspecified.
    ///
    /// # Errors
    /// The arena is exhausted: the plan was too small, which is a bug of whoever planned.
    pub fn new(arena: &Arena, dtype: DType, dims: &[usize]) -> Result<Self, DeviceError> {
        let shape = Shape::new(dims);
        Ok(Self { region: arena.alloc(shape.elements() * dtype.size())?, dtype, shape })
    }

    /// A tensor over memory that already holds its elements.
    ///
    /// # Panics
    /// If the region has another size.
    pub fn from_region(region: Region, dtype: DType, dims: &[usize]) -> Self {
        let shape = Shape::new(dims);
        assert_eq!(
            region.len(),
            shape.elements() * dtype.size(),
            "bytes match the shape {shape:?} of {dtype}"
        );
        Self { region, dtype, shape }
    }

    /// The memory of the tensor.
    pub fn into_region(self) -> Region {
        self.region
    }

    /// Where its memory begins in its arena.
    pub fn start(&self) -> usize {
        self.region.start()
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Borrows it.
    pub fn view(&self) -> View<'_> {
        View { bytes: self.region.bytes(), dtype: self.dtype, shape: self.shape, packed: None }
    }

    /// Borrows it mutably.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        ViewMut { bytes: self.region.bytes_mut(), dtype: self.dtype, shape: self.shape }
    }

    /// The same elements under another shape.
    ///
    /// # Panics
    /// If the number of elements differs.
    #[must_use]
    pub fn reshape(mut self, dims: &[usize]) -> Self {
        self.shape = reshaped(self.shape, dims);
        self
    }
}

impl<'a> View<'a> {
    /// A view of `bytes` as `dtype` elements.
    ///
    /// # Panics
    /// If the byte count does not match the shape.
    pub fn new(bytes: Bytes<'a>, dtype: DType, dims: &[usize]) -> Self {
        let shape = Shape::new(dims);
        assert_eq!(
            bytes.len(),
            shape.elements() * dtype.size(),
            "bytes match the shape {shape:?} of {dtype}"
        );
        Self { bytes, dtype, shape, packed: None }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The bytes.
    pub fn bytes(&self) -> Bytes<'a> {
        self.bytes
    }

    /// The same tensor, whose elements stay what they are while `place` lives: as the right side of products, as a whole, it may stay
    /// packed there. A place is for one tensor.
    #[must_use]
    pub fn kept_packed(self, place: &'a Packed<'a>) -> Self {
        Self { packed: Some(place), ..self }
    }

    /// The same elements under another shape.
    ///
    /// # Panics
    /// If the number of elements differs.
    #[must_use]
    pub fn reshape(self, dims: &[usize]) -> Self {
        Self { shape: reshaped(self.shape, dims), packed: None, ..self }
    }

    /// Rows `start..end` when the tensor is seen as `[rows, last]`; the result has that two-dimensional shape.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[must_use]
    pub fn rows(self, start: usize, end: usize) -> Self {
        let width = self.shape.last();
        let row_bytes = width * self.dtype.size();
        Self {
            bytes: self.bytes.slice(start * row_bytes, end * row_bytes),
            shape: Shape::new(&[end - start, width]),
            packed: None,
            ..self
        }
    }
}

impl<'a> ViewMut<'a> {
    /// A mutable view of `bytes` as `dtype` elements.
    ///
    /// # Panics
    /// If the byte count does not match the shape.
    pub fn new(bytes: BytesMut<'a>, dtype: DType, dims: &[usize]) -> Self {
        let shape = Shape::new(dims);
        assert_eq!(
            bytes.len(),
            shape.elements() * dtype.size(),
            "bytes match the shape {shape:?} of {dtype}"
        );
        Self { bytes, dtype, shape }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The bytes.
    pub fn into_bytes(self) -> BytesMut<'a> {
        self.bytes
    }

    /// A shared view of the same elements.
    pub fn view(&self) -> View<'_> {
        View { bytes: self.bytes.as_bytes(), dtype: self.dtype, shape: self.shape, packed: None }
    }

    /// A shorter-lived mutable view.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { bytes: self.bytes.reborrow(), dtype: self.dtype, shape: self.shape }
    }

    /// The same elements under another shape.
    ///
    /// # Panics
    /// If the number of elements differs.
    #[must_use]
    pub fn reshape(self, dims: &[usize]) -> Self {
        Self { shape: reshaped(self.shape, dims), ..self }
    }

    /// Rows `start..end` when the tensor is seen as `[rows, last]`; the result has that two-dimensional shape.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[must_use]
    pub fn rows(self, start: usize, end: usize) -> Self {
        let width = self.shape.last();
        let row_bytes = width * self.dtype.size();
        Self {
            bytes: self.bytes.slice(start * row_bytes, end * row_bytes),
            shape: Shape::new(&[end - start, width]),
            dtype: self.dtype,
        }
    }

    /// The first `row` rows and the others, as [`rows`](Self::rows) gives them.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    pub fn split_rows(self, row: usize) -> (Self, Self) {
        let (width, dtype) = (self.shape.last(), self.dtype);
        let left = self.shape.rows() - row;
        let (first, others) = self.bytes.split_at(row * width * dtype.size());
        (Self::new(first, dtype, &[row, width]), Self::new(others, dtype, &[left, width]))
    }
}

fn reshaped(shape: Shape, dims: &[usize]) -> Shape {
    let new = Shape::new(dims);
    assert_eq!(shape.elements(), new.elements(), "a reshape from {shape:?} to {new:?} keeps the elements");
    new
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Products that wrap made views of whatever lay behind some bytes, or none.
    #[test]
    fn shapes_of_more_than_there_is() {
        for dims in
            [&[1 << 31, 1 << 31, 4][..], &[1 << 32, 1 << 30], &[usize::MAX, 2], &[0, 1 << 40, 1 << 40]]
        {
            let made = std::panic::catch_unwind(|| Shape::new(dims));
            let message = *made.expect_err("refused").downcast::<String>().unwrap();
            assert!(message.contains("is too large"), "{message}");
        }
        assert_eq!((Shape::new(&[1 << 30, 1 << 17]).rows(), Shape::new(&[0, 5]).elements()), (1 << 30, 0));
    }
}
