//! Tensors with guards around them, and the error that a result may have.

use crate::shim::Argument;
use bytemuck::{cast_slice, cast_slice_mut};
use half::{bf16, f16};
use terrace_device::{Bytes, BytesMut};
use terrace_kernels::{DType, View, ViewMut};

/// A tensor that begins at a multiple of 16 bytes and has NaNs before and behind it.
#[derive(Clone)]
pub struct Tensor {
    words: Vec<u128>,
    dtype: DType,
    dims: Vec<usize>,
}

const GUARD_WORDS: usize = 16;

impl Tensor {
    /// Of NaNs, or of −1 where the elements are integers.
    pub fn new(dtype: DType, dims: &[usize]) -> Self {
        let bytes = dims.iter().product::<usize>() * dtype.size();
        Self { words: vec![u128::MAX; bytes.div_ceil(16) + 2 * GUARD_WORDS], dtype, dims: dims.to_vec() }
    }

    pub fn of(dtype: DType, dims: &[usize], values: impl IntoIterator<Item = f64>) -> Self {
        let mut tensor = Self::new(dtype, dims);
        let mut count = 0;
        for value in values {
            tensor.set(count, value);
            count += 1;
        }
        assert_eq!(count, tensor.len());
        tensor
    }

    /// Roughly normal values.
    pub fn random(dtype: DType, dims: &[usize], deviation: f64, random: &mut Random) -> Self {
        let count = dims.iter().product();
        Self::of(dtype, dims, (0..count).map(|_| deviation * random.normal()))
    }

    /// The same values, rounded to another dtype.
    pub fn cast(&self, dtype: DType) -> Self {
        Self::of(dtype, &self.dims, self.values())
    }

    pub fn len(&self) -> usize {
        self.dims.iter().product()
    }

    pub fn bytes(&self) -> &[u8] {
        &cast_slice(&self.words)[GUARD_WORDS * 16..][..self.len() * self.dtype.size()]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = self.len() * self.dtype.size();
        &mut cast_slice_mut(&mut self.words)[GUARD_WORDS * 16..][..bytes]
    }

    pub fn view(&self) -> View<'_> {
        View::new(Bytes::from_host(self.bytes()), self.dtype, &self.dims)
    }

    pub fn view_mut(&mut self) -> ViewMut<'_> {
        let (dtype, dims) = (self.dtype, self.dims.clone());
        ViewMut::new(BytesMut::from_host(self.bytes_mut()), dtype, &dims)
    }

    /// For a kernel that reads it.
    pub fn read(&self) -> Argument {
        Argument::Address(self.bytes().as_ptr() as u64)
    }

    /// For a kernel that writes it.
    pub fn write(&mut self) -> Argument {
        Argument::Address(self.bytes_mut().as_mut_ptr() as u64)
    }

    /// What kernels call its dtype.
    pub fn code(&self) -> Argument {
        Argument::Int(code(self.dtype))
    }

    pub fn values(&self) -> Vec<f64> {
        let bytes = self.bytes();
        match self.dtype {
            DType::F32 => cast_slice::<_, f32>(bytes).iter().map(|x| f64::from(*x)).collect(),
            DType::BF16 => cast_slice::<_, bf16>(bytes).iter().map(|x| x.to_f64()).collect(),
            DType::F16 => cast_slice::<_, f16>(bytes).iter().map(|x| x.to_f64()).collect(),
            DType::I32 => cast_slice::<_, i32>(bytes).iter().map(|x| f64::from(*x)).collect(),
            DType::F64 => unreachable!("no kernel here has f64 operands"),
        }
    }

    pub fn set(&mut self, i: usize, value: f64) {
        let dtype = self.dtype;
        let bytes = self.bytes_mut();
        match dtype {
            DType::F32 => cast_slice_mut::<_, f32>(bytes)[i] = value as f32,
            DType::BF16 => cast_slice_mut::<_, bf16>(bytes)[i] = bf16::from_f64(value),
            DType::F16 => cast_slice_mut::<_, f16>(bytes)[i] = f16::from_f64(value),
            DType::I32 => cast_slice_mut::<_, i32>(bytes)[i] = value as i32,
            DType::F64 => unreachable!("no kernel here has f64 operands"),
        }
    }

    /// Nothing was written around it.
    pub fn assert_guarded(&self, what: &str) {
        let all: &[u8] = cast_slice(&self.words);
        let (before, rest) = all.split_at(GUARD_WORDS * 16);
        let behind = &rest[self.len() * self.dtype.size()..];
        assert!(before.iter().chain(behind).all(|byte| *byte == 0xFF), "{what}: a write beyond the result");
    }

    /// Every element is within its bound of `expected`, plus one rounding to the dtype.
    pub fn assert_close(&self, what: &str, expected: &[f64], bound: impl Fn(usize) -> f64) {
        assert_eq!(self.len(), expected.len());
        let tiny = if self.dtype == DType::F16 { 2f64.powi(-25) } else { 0.0 };
        for (i, (found, expected)) in self.values().iter().zip(expected).enumerate() {
            let bound = bound(i);
            let allowed = bound + unit(self.dtype) * (expected.abs() + bound) + tiny;
            let close = (found - expected).abs() <= allowed;
            assert!(close, "{what}: element {i} is {found} instead of {expected} ± {allowed}");
        }
    }
}

/// Bound on the relative error of one rounding to nearest.
pub fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2f64.powi(-24),
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        DType::F64 | DType::I32 => 0.0,
    }
}

/// The code of a dtype in `common.cuh`.
pub fn code(dtype: DType) -> i32 {
    match dtype {
        DType::F32 => 0,
        DType::BF16 => 1,
        DType::F16 => 2,
        DType::F64 | DType::I32 => unreachable!("kernels take floats"),
    }
}

/// SplitMix64.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// From `low` to `high`, both included.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + (self.next() % (high - low + 1) as u64) as usize
    }

    /// Sum of twelve uniforms: mean 0, deviation 1, within ±6.
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| (self.next() >> 11) as f64 / (1u64 << 53) as f64).sum::<f64>() - 6.0
    }
}
