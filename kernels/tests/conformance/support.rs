//! Host tensors, random contents, and comparison with the reference.

use bytemuck::{cast_slice, cast_slice_mut};
use half::{bf16, f16};
use terrace_device::{Bytes, BytesMut};
use terrace_kernels::cpu::{self, CpuConfig, Isa};
use terrace_kernels::{DType, KernelSet, View, ViewMut};

/// A tensor in ordinary memory.
#[derive(Clone)]
pub struct Host {
    words: Vec<u64>,
    dtype: DType,
    dims: Vec<usize>,
}

impl Host {
    pub fn zeros(dtype: DType, dims: &[usize]) -> Self {
        let bytes = dims.iter().product::<usize>() * dtype.size();
        Self { words: vec![0; bytes.div_ceil(8)], dtype, dims: dims.to_vec() }
    }

    pub fn of(dtype: DType, dims: &[usize], values: impl IntoIterator<Item = f64>) -> Self {
        let mut tensor = Self::zeros(dtype, dims);
        for (i, value) in values.into_iter().enumerate() {
            tensor.set(i, value);
        }
        tensor
    }

    /// Roughly normal values of standard deviation `scale`.
    pub fn random(dtype: DType, dims: &[usize], scale: f64, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let count = dims.iter().product();
        Self::of(dtype, dims, (0..count).map(|_| scale * random.normal()))
    }

    /// The same values in another dtype.
    pub fn cast(&self, dtype: DType) -> Self {
        Self::of(dtype, &self.dims, self.values())
    }

    pub fn view(&self) -> View<'_> {
        View::new(Bytes::from_host(self.bytes()), self.dtype, &self.dims)
    }

    pub fn view_mut(&mut self) -> ViewMut<'_> {
        let (dtype, dims) = (self.dtype, self.dims.clone());
        ViewMut::new(BytesMut::from_host(self.bytes_mut()), dtype, &dims)
    }

    pub fn bytes(&self) -> &[u8] {
        &cast_slice(&self.words)[..self.len() * self.dtype.size()]
    }

    /// Other bytes, one after the other.
    pub fn fill_bytes(&mut self, bytes: impl FnMut() -> u8) {
        self.bytes_mut().fill_with(bytes);
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = self.len() * self.dtype.size();
        &mut cast_slice_mut(&mut self.words)[..bytes]
    }

    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    pub fn len(&self) -> usize {
        self.dims.iter().product()
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub fn values(&self) -> Vec<f64> {
        let bytes = self.bytes();
        match self.dtype {
            DType::F32 => cast_slice::<_, f32>(bytes).iter().map(|x| f64::from(*x)).collect(),
            DType::BF16 => cast_slice::<_, bf16>(bytes).iter().map(|x| x.to_f64()).collect(),
            DType::F16 => cast_slice::<_, f16>(bytes).iter().map(|x| x.to_f64()).collect(),
            DType::F64 => cast_slice::<_, f64>(bytes).to_vec(),
            DType::I32 => cast_slice::<_, i32>(bytes).iter().map(|x| f64::from(*x)).collect(),
        }
    }

    pub fn set(&mut self, i: usize, value: f64) {
        let dtype = self.dtype;
        let bytes = self.bytes_mut();
        match dtype {
            DType::F32 => cast_slice_mut::<_, f32>(bytes)[i] = value as f32,
            DType::BF16 => cast_slice_mut::<_, bf16>(bytes)[i] = bf16::from_f64(value),
            DType::F16 => cast_slice_mut::<_, f16>(bytes)[i] = f16::from_f64(value),
            DType::F64 => cast_slice_mut::<_, f64>(bytes)[i] = value,
            DType::I32 => cast_slice_mut::<_, i32>(bytes)[i] = value as i32,
        }
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

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Sum of twelve uniforms: mean 0, deviation 1, within ±6.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.uniform()).sum::<f64>() - 6.0
    }
}

thread_local! {
    /// Of each test's thread, so that none waits for another's launches.
    static CUDA: Option<Vec<(String, KernelSet)>> = crate::cuda::backends();
}

/// Every backend that must agree with the reference: those of the CPU, or on the mock driver that of CUDA.
pub fn backends() -> Vec<(String, KernelSet)> {
    sets(Isa::available())
}

/// As [`backends`], and each with products of bf16 by emulated pairs.
pub fn backends_and_pairs() -> Vec<(String, KernelSet)> {
    sets(isas_and_pairs())
}

/// Every instruction set, and each with emulated pairs.
pub fn isas_and_pairs() -> Vec<Isa> {
    Isa::available().into_iter().flat_map(|isa| [isa, isa.with_emulated_pairs()]).collect()
}

fn sets(isas: Vec<Isa>) -> Vec<(String, KernelSet)> {
    if let Some(cuda) = CUDA.with(Clone::clone) {
        return cuda;
    }
    let mut all = Vec::new();
    for isa in isas {
        for threads in [1, 2] {
            let set = cpu::with_config(CpuConfig { isa: Some(isa), ..CpuConfig::new(threads) });
            all.push((format!("cpu {} with {threads} threads", isa.name()), set));
        }
    }
    all
}

/// Bound on the relative error of one rounding to `dtype`.
pub fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2f64.powi(-24),
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        DType::F64 | DType::I32 => 0.0,
    }
}

/// The first element that is further from `expected` (the reference's f32 result for the same operands) than one
/// rounding to the result's dtype plus `tolerance`, if any.
pub fn mismatch(expected: &Host, actual: &Host, tolerance: f64) -> Option<String> {
    mismatch_of_each(expected, actual, &vec![tolerance; expected.len()])
}

fn mismatch_of_each(expected: &Host, actual: &Host, tolerances: &[f64]) -> Option<String> {
    assert_eq!((expected.len(), tolerances.len()), (actual.len(), actual.len()));
    let tiny = if actual.dtype() == DType::F16 { 2f64.powi(-25) } else { 0.0 };
    let pairs = expected.values().into_iter().zip(actual.values()).zip(tolerances);
    pairs.enumerate().find_map(|(i, ((expected, actual_value), tolerance))| {
        let allowed = 1.01 * unit(actual.dtype()) * expected.abs() + tolerance + tiny;
        let close = (expected - actual_value).abs() <= allowed;
        (!close).then(|| format!("element {i}: {actual_value} instead of {expected} ± {allowed}"))
    })
}

/// # Panics
/// On a [`mismatch`].
pub fn assert_close(what: &str, expected: &Host, actual: &Host, tolerance: f64) {
    if let Some(found) = mismatch(expected, actual, tolerance) {
        panic!("{what}: {found}");
    }
}

/// As [`assert_close`], with a tolerance for each element.
///
/// # Panics
/// On an element that is further off.
pub fn assert_within(what: &str, expected: &Host, actual: &Host, tolerances: &[f64]) {
    if let Some(found) = mismatch_of_each(expected, actual, tolerances) {
        panic!("{what}: {found}");
    }
}

/// The dtypes of operands and results that the engine uses together.
pub const MIXES: [(DType, DType); 4] = [
    (DType::F32, DType::F32),
    (DType::BF16, DType::F32),
    (DType::BF16, DType::BF16),
    (DType::F16, DType::F16),
];
