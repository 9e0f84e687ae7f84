//! Where the sums of a product go, and what is added to them on the way.
//!
//! Every path of a product has a stretch of a row's sums in f32 when they are complete; adding there what belongs to it costs no
//! pass over the result. Each element is `round((sum + bias) + residual)` whatever the path and wherever the residual
//! lies.

use super::floats::{Floats, FloatsMut};
use super::{Isa, vector};
use crate::{Epilogue, Residual, ViewMut};

/// Elements that are widened at a time.
const RUN: usize = 256;

/// The result of a product with what is added to it.
#[derive(Clone, Copy)]
pub struct Output<'a> {
    pub to: FloatsMut<'a>,
    bias: Option<Floats<'a>>,
    residual: Added<'a>,
    /// Columns of the result.
    width: usize,
}

/// A [`Residual`].
#[derive(Clone, Copy)]
enum Added<'a> {
    None,
    InPlace,
    Of(Floats<'a>),
}

impl<'a> Output<'a> {
    /// Rows of `width` elements.
    pub fn new(out: ViewMut<'a>, width: usize, epilogue: Epilogue<'a>) -> Self {
        let residual = match epilogue.residual {
            Residual::None => Added::None,
            Residual::InPlace => Added::InPlace,
            Residual::Of(view) => Added::Of(Floats::new(view)),
        };
        Self { to: FloatsMut::new(out), bias: epilogue.bias.map(Floats::new), residual, width }
    }

    /// Whether elements are more than their sums.
    pub fn adds(&self) -> bool {
        self.bias.is_some() || !matches!(self.residual, Added::None)
    }

    /// Adds to complete sums what belongs to a row's elements from `column` on, and rounds them into the result.
    ///
    /// # Safety
    /// No other task touches those elements, and no slice of them is alive.
    pub unsafe fn write(&self, isa: Isa, (row, column): (usize, usize), sums: &mut [f32]) {
        let at = row * self.width + column;
        if self.adds() {
            for (index, sums) in sums.chunks_mut(RUN).enumerate() {
                // SAFETY: the caller's promise.
                unsafe { self.add(isa, (at + index * RUN, column + index * RUN), sums) };
            }
        }
        // SAFETY: as above.
        unsafe { self.to.write(isa, at, sums) };
    }

    /// # Safety
    /// See [`write`](Self::write).
    unsafe fn add(&self, isa: Isa, (at, column): (usize, usize), sums: &mut [f32]) {
        let mut buffer = [0.0; RUN];
        let count = sums.len();
        if let Some(bias) = self.bias {
            vector::add_assign(isa, sums, bias.read(isa, column, count, &mut buffer));
        }
        match self.residual {
            Added::None => {}
            Added::InPlace => {
                // SAFETY: the caller's promise.
                unsafe { self.to.read(isa, at, &mut buffer[..count]) };
                vector::add_assign(isa, sums, &buffer[..count]);
            }
            Added::Of(residual) => {
                vector::add_assign(isa, sums, residual.read(isa, at, count, &mut buffer));
            }
        }
    }
}
