//! Float operands of any dtype, read as f32 and written from f32.

use super::threads::SharedMut;
use super::{Isa, vector};
use crate::{DType, View, ViewMut};
use half::{bf16, f16};

/// Elements that go through a small buffer at a time: f32 copies of a few operands stay in the first-level cache.
pub const BLOCK: usize = 1024;

/// Elements per task of an element-wise operation: large enough that handing it out does not matter.
pub const CHUNK: usize = 16 * BLOCK;

/// An operand to read.
#[derive(Clone, Copy)]
pub enum Floats<'a> {
    F32(&'a [f32]),
    BF16(&'a [bf16]),
    F16(&'a [f16]),
}

impl<'a> Floats<'a> {
    pub fn new(view: View<'a>) -> Self {
        let bytes = view.bytes().host();
        match view.dtype() {
            DType::F32 => Self::F32(typed(bytes)),
            DType::BF16 => Self::BF16(typed(bytes)),
            DType::F16 => Self::F16(typed(bytes)),
            other => unreachable!("{other} operands do not pass the checks"),
        }
    }

    pub fn slice(self, at: usize, len: usize) -> Self {
        match self {
            Self::F32(all) => Self::F32(&all[at..at + len]),
            Self::BF16(all) => Self::BF16(&all[at..at + len]),
            Self::F16(all) => Self::F16(&all[at..at + len]),
        }
    }

    pub fn len(self) -> usize {
        match self {
            Self::F32(all) => all.len(),
            Self::BF16(all) => all.len(),
            Self::F16(all) => all.len(),
        }
    }

    /// Widens all elements into `out`.
    pub fn widen(self, isa: Isa, out: &mut [f32]) {
        match self {
            Self::F32(all) => out.copy_from_slice(all),
            Self::BF16(all) => vector::widen_bf16(isa, all, out),
            Self::F16(all) => vector::widen_f16(isa, all, out),
        }
    }

    /// Asks for elements that will be read soon. Rows of one head lie far apart in keys and values, where the processor's
    /// own prefetching does not follow.
    pub fn prefetch(self) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let (start, bytes) = match self {
                Self::F32(all) => (all.as_ptr().cast::<i8>(), size_of_val(all)),
                Self::BF16(all) => (all.as_ptr().cast(), size_of_val(all)),
                Self::F16(all) => (all.as_ptr().cast(), size_of_val(all)),
            };
            for line in (0..bytes).step_by(64) {
                // SAFETY: within the operand; a prefetch reads nothing.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(start.add(line)) };
            }
        }
    }

    /// Elements `at..at + len` as f32: themselves if they are, else widened into `buffer`.
    pub fn read<'b>(self, isa: Isa, at: usize, len: usize, buffer: &'b mut [f32]) -> &'b [f32]
    where
        'a: 'b,
    {
        if let Self::F32(all) = self {
            return &all[at..at + len];
        }
        self.slice(at, len).widen(isa, &mut buffer[..len]);
        &buffer[..len]
    }
}

/// An operand that several tasks write (and may read back), each its own elements.
#[derive(Clone, Copy)]
pub enum FloatsMut<'a> {
    F32(SharedMut<'a, f32>),
    BF16(SharedMut<'a, bf16>),
    F16(SharedMut<'a, f16>),
}

impl<'a> FloatsMut<'a> {
    pub fn new(view: ViewMut<'a>) -> Self {
        let dtype = view.dtype();
        let bytes = view.into_bytes().into_host();
        match dtype {
            DType::F32 => Self::F32(SharedMut::new(typed_mut(bytes))),
            DType::BF16 => Self::BF16(SharedMut::new(typed_mut(bytes))),
            DType::F16 => Self::F16(SharedMut::new(typed_mut(bytes))),
            other => unreachable!("{other} operands do not pass the checks"),
        }
    }

    /// Rounds `values` to nearest even into the elements from `at`.
    ///
    /// # Safety
    /// No other task touches those elements, and no slice of them is alive.
    pub unsafe fn write(&self, isa: Isa, at: usize, values: &[f32]) {
        match self {
            // SAFETY: the caller's promise.
            Self::F32(all) => unsafe { all.slice(at, values.len()) }.copy_from_slice(values),
            // SAFETY: as above.
            Self::BF16(all) => vector::narrow_bf16(isa, values, unsafe { all.slice(at, values.len()) }),
            // SAFETY: as above.
            Self::F16(all) => vector::narrow_f16(isa, values, unsafe { all.slice(at, values.len()) }),
        }
    }

    /// Widens the elements from `at` into `out`.
    ///
    /// # Safety
    /// As for [`write`](Self::write).
    pub unsafe fn read(&self, isa: Isa, at: usize, out: &mut [f32]) {
        match self {
            // SAFETY: the caller's promise.
            Self::F32(all) => out.copy_from_slice(unsafe { all.slice(at, out.len()) }),
            // SAFETY: as above.
            Self::BF16(all) => vector::widen_bf16(isa, unsafe { all.slice(at, out.len()) }, out),
            // SAFETY: as above.
            Self::F16(all) => vector::widen_f16(isa, unsafe { all.slice(at, out.len()) }, out),
        }
    }
}

/// The f32 elements of a view that the checks know to be f32.
pub fn floats(view: View<'_>) -> &[f32] {
    typed(view.bytes().host())
}

/// As [`floats`], to write.
pub fn floats_mut(view: ViewMut<'_>) -> &mut [f32] {
    typed_mut(view.into_bytes().into_host())
}

/// The i32 elements of a view that the checks know to be i32.
pub fn ints(view: View<'_>) -> &[i32] {
    typed(view.bytes().host())
}

/// As [`ints`], to write.
pub fn ints_mut(view: ViewMut<'_>) -> &mut [i32] {
    typed_mut(view.into_bytes().into_host())
}

fn typed<T: bytemuck::AnyBitPattern>(bytes: &[u8]) -> &[T] {
    bytemuck::try_cast_slice(bytes).expect("a tensor is aligned to its elements and holds whole ones")
}

fn typed_mut<T: bytemuck::Pod>(bytes: &mut [u8]) -> &mut [T] {
    bytemuck::try_cast_slice_mut(bytes).expect("a tensor is aligned to its elements and holds whole ones")
}
