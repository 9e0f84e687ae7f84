//! One call of an operation: its operands, its parameters and its results, and the file that they go to.

use crate::Rig;
use half::{bf16, f16};
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use std::collections::HashMap;
use std::fmt::Display;
use terrace_device::{Bytes, BytesMut, Region};
use terrace_kernels::{DType, QuantFormat, Tensor};

pub struct Case<'r> {
    rig: &'r Rig,
    number: usize,
    random: Random,
    metadata: HashMap<String, String>,
    operands: Vec<(String, Saved)>,
}

/// A tensor in ordinary memory.
struct Saved {
    dtype: DType,
    dims: Vec<usize>,
    bytes: Vec<u8>,
}

impl<'r> Case<'r> {
    /// `number` also seeds the operands.
    pub fn new(rig: &'r Rig, number: usize, op: &str, variant: &str, name: String) -> Self {
        let case = Self {
            rig,
            number,
            random: Random(number as u64),
            metadata: HashMap::new(),
            operands: Vec::new(),
        };
        case.with("op", op).with("variant", variant).with("name", name)
    }

    /// Adds a parameter. Numbers of 32 bits are to be widened first, so that their text is exact.
    pub fn with(mut self, key: &str, value: impl Display) -> Self {
        self.metadata.insert(key.to_owned(), value.to_string());
        self
    }

    /// A random operand of standard deviation `scale`.
    pub fn operand(&mut self, name: &str, dtype: DType, dims: &[usize], scale: f32) -> Tensor {
        let values: Vec<f32> = (0..dims.iter().product()).map(|_| scale * self.random.normal()).collect();
        self.operand_of(name, dtype, dims, &values)
    }

    /// An operand of these values, rounded to `dtype`.
    pub fn operand_of(&mut self, name: &str, dtype: DType, dims: &[usize], values: &[f32]) -> Tensor {
        self.upload(name, dtype, dims, bytes_of(dtype, values))
    }

    pub fn integers(&mut self, name: &str, dims: &[usize], values: &[i32]) -> Tensor {
        self.upload(name, DType::I32, dims, bytemuck::cast_slice(values).to_vec())
    }

    /// Random integers from 0 to `bound` - 1.
    pub fn random_integers(&mut self, bound: usize, count: usize) -> Vec<i32> {
        (0..count).map(|_| (self.random.next() % bound as u64) as i32).collect()
    }

    /// A quantized random matrix; the file gets the weights that its codes stand for.
    pub fn quantized(&mut self, name: &str, format: QuantFormat, [n, l]: [usize; 2]) -> Region {
        let row_bytes = format.row_bytes(l);
        let (mut codes, mut weights) = (vec![0; n * row_bytes], vec![0.0f32; n * l]);
        for (codes, weights) in codes.chunks_mut(row_bytes).zip(weights.chunks_mut(l)) {
            weights.fill_with(|| self.random.normal());
            format.quantize(weights, codes).expect("finite weights");
            format.dequantize(codes, weights);
        }
        let bytes = bytemuck::cast_slice(&weights).to_vec();
        self.operands.push((format!("in.{name}"), Saved { dtype: DType::F32, dims: vec![n, l], bytes }));
        let mut region = self.rig.arena.alloc(codes.len()).expect("the arena has room for every case");
        self.copy_up(&codes, region.bytes_mut());
        region
    }

    /// Memory for a result, of not-a-number.
    pub fn result(&self, dtype: DType, dims: &[usize]) -> Tensor {
        let mut tensor = self.empty(dtype, dims);
        self.copy_up(
            &vec![0xFF; dims.iter().product::<usize>() * dtype.size()],
            tensor.view_mut().into_bytes(),
        );
        tensor
    }

    /// Writes the file.
    pub fn finish(self, results: &[(&str, &Tensor)]) {
        let found = results.iter().map(|(name, tensor)| {
            let mut bytes = vec![0; tensor.view().bytes().len()];
            // SAFETY: both ends outlive the wait.
            unsafe { self.rig.stream.copy(tensor.view().bytes(), BytesMut::from_host(&mut bytes)) }
                .expect("the device gives results");
            self.rig.stream.synchronize().expect("the operation succeeds");
            let dims = tensor.shape().dims().to_vec();
            (format!("out.{name}"), Saved { dtype: tensor.dtype(), dims, bytes })
        });
        let found: Vec<_> = found.collect();
        let views = self.operands.iter().chain(&found).map(|(name, saved)| (name.as_str(), saved.view()));
        let path = self.rig.folder.join(format!("{:04}-{}.safetensors", self.number, self.metadata["op"]));
        serialize_to_file(views, Some(self.metadata), &path)
            .unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
    }

    fn upload(&mut self, name: &str, dtype: DType, dims: &[usize], bytes: Vec<u8>) -> Tensor {
        let mut tensor = self.empty(dtype, dims);
        self.copy_up(&bytes, tensor.view_mut().into_bytes());
        self.operands.push((format!("in.{name}"), Saved { dtype, dims: dims.to_vec(), bytes }));
        tensor
    }

    fn empty(&self, dtype: DType, dims: &[usize]) -> Tensor {
        Tensor::new(&self.rig.arena, dtype, dims).expect("the arena has room for every case")
    }

    fn copy_up(&self, from: &[u8], to: BytesMut<'_>) {
        // SAFETY: both ends outlive the wait.
        unsafe { self.rig.stream.copy(Bytes::from_host(from), to) }.expect("the device takes operands");
        self.rig.stream.synchronize().expect("the device takes operands");
    }
}

impl Saved {
    fn view(&self) -> TensorView<'_> {
        let dtype = match self.dtype {
            DType::F32 => Dtype::F32,
            DType::BF16 => Dtype::BF16,
            DType::F16 => Dtype::F16,
            DType::F64 => Dtype::F64,
            DType::I32 => Dtype::I32,
        };
        TensorView::new(dtype, self.dims.clone(), &self.bytes).expect("bytes match the shape")
    }
}

fn bytes_of(dtype: DType, values: &[f32]) -> Vec<u8> {
    let each = values.iter();
    match dtype {
        DType::F32 => bytemuck::cast_slice(values).to_vec(),
        DType::BF16 => each.flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        DType::F16 => each.flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        DType::F64 => each.flat_map(|x| f64::from(*x).to_le_bytes()).collect(),
        DType::I32 => unreachable!("integers are no floats"),
    }
}

/// Whether all values of a result are.
#[cfg(test)]
pub fn is_finite(dtype: Dtype, bytes: &[u8]) -> bool {
    let halves = || bytes.chunks_exact(2).map(|two| [two[0], two[1]]);
    match dtype {
        Dtype::F32 => bytes.chunks_exact(4).all(|x| f32::from_le_bytes(x.try_into().unwrap()).is_finite()),
        Dtype::F64 => bytes.chunks_exact(8).all(|x| f64::from_le_bytes(x.try_into().unwrap()).is_finite()),
        Dtype::BF16 => halves().all(|x| bf16::from_le_bytes(x).is_finite()),
        Dtype::F16 => halves().all(|x| f16::from_le_bytes(x).is_finite()),
        _ => true,
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// Roughly normal of deviation one, within ±3.5: the sum of four uniforms.
    fn normal(&mut self) -> f32 {
        let bits = self.next();
        let sum: u64 = (0..4).map(|i| bits >> (16 * i) & 0xFFFF).sum();
        (sum as f32 / 65_536.0 - 2.0) * 1.732
    }
}
