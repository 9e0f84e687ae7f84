//! Shared by the tests: owned state of one run of parameters, made data, and the algorithms written once more in f64.

#![allow(dead_code, reason = "each test binary uses its own part")]

pub mod fixtures;
pub mod reference;

use half::{bf16, f16};
use terrace_optimizer::{
    Adagrad, Adam, Algorithm, COMPACT_BLOCK, Gradient, KindLayout, Lion, Moments, Optimizer, Sgd,
    StateFormat, StateKind, StateLayout, WeightType, split,
};

pub fn layout(format: StateFormat, weight: WeightType) -> StateLayout {
    StateLayout::new(format, weight).expect("a supported pair")
}

/// Every format with every type of weight that it can have, the lossless ones first.
pub const LAYOUTS: [(StateFormat, WeightType); 6] = [
    (StateFormat::Fp32, WeightType::F32),
    (StateFormat::Fp32, WeightType::Bf16),
    (StateFormat::Fp32, WeightType::F16),
    (StateFormat::Split, WeightType::Bf16),
    (StateFormat::Bf16, WeightType::Bf16),
    (StateFormat::Compact, WeightType::Bf16),
];

/// Every layout with both moments.
pub fn layouts() -> [StateLayout; 6] {
    LAYOUTS.map(|(format, weight)| layout(format, weight))
}

/// The layouts that keep every bit of masters and moments.
pub fn lossless_layouts() -> [StateLayout; 4] {
    let [a, b, c, d, ..] = layouts();
    [a, b, c, d]
}

/// Every layout for the algorithm.
pub fn every_layout(algorithm: &Algorithm) -> [StateLayout; 6] {
    LAYOUTS.map(|(format, weight)| StateLayout::with_moments(format, weight, algorithm.moments()).unwrap())
}

/// One of each but AdamW, with everything switched on.
pub fn algorithms() -> [Algorithm; 4] {
    [
        Algorithm::Adam(Adam { weight_decay: 0.1, ..Adam::default() }),
        Algorithm::Adagrad(Adagrad { weight_decay: 0.1, ..Adagrad::default() }),
        Algorithm::Lion(Lion { weight_decay: 0.1, ..Lion::default() }),
        Algorithm::Sgd(Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.1 }),
    ]
}

/// The moments that the algorithm keeps.
pub fn moments(algorithm: &Algorithm) -> &'static [StateKind] {
    match algorithm.moments() {
        Moments::First => &[StateKind::Moment1],
        Moments::Second => &[StateKind::Moment2],
        Moments::Both => &[StateKind::Moment1, StateKind::Moment2],
    }
}

/// The state of a run of parameters, one aligned buffer per kind.
#[derive(Clone, PartialEq, Debug)]
pub struct State {
    layout: StateLayout,
    params: usize,
    buffers: Vec<Vec<u64>>,
}

impl State {
    pub fn zeroed(layout: StateLayout, params: usize) -> Self {
        let buffer = |kind: &KindLayout| vec![0u64; kind.bytes_for(params).div_ceil(8)];
        Self { layout, params, buffers: layout.kinds().iter().map(buffer).collect() }
    }

    pub fn initialized(optimizer: &dyn Optimizer, weights: &[f32]) -> Self {
        let mut state = Self::zeroed(*optimizer.layout(), weights.len());
        optimizer.initialize(weights, &mut state.slices()).expect("slices match the layout");
        state
    }

    pub fn layout(&self) -> StateLayout {
        self.layout
    }

    /// Exactly as long as the parameters need, in the order of the layout.
    pub fn slices(&mut self) -> Vec<&mut [u8]> {
        let kinds = self.layout.kinds();
        let slices = self.buffers.iter_mut().zip(kinds);
        slices
            .map(|(words, kind)| &mut bytemuck::cast_slice_mut(words)[..kind.bytes_for(self.params)])
            .collect()
    }

    pub fn set<T: bytemuck::Pod>(&mut self, kind: StateKind, values: &[T]) {
        let index =
            self.layout.kinds().iter().position(|k| k.kind == kind).expect("the layout has this kind");
        self.slices()[index].copy_from_slice(bytemuck::cast_slice(values));
    }

    pub fn kind<T: bytemuck::Pod>(&self, kind: StateKind) -> &[T] {
        let index =
            self.layout.kinds().iter().position(|k| k.kind == kind).expect("the layout has this kind");
        let bytes: &[u8] = bytemuck::cast_slice(&self.buffers[index]);
        bytemuck::cast_slice(&bytes[..self.layout.kinds()[index].bytes_for(self.params)])
    }

    /// The f32 master weights, whichever way they are stored.
    pub fn master(&self) -> Vec<f32> {
        match (self.layout.format(), self.layout.weight()) {
            (StateFormat::Fp32, WeightType::F32) => self.kind(StateKind::Weight).to_vec(),
            (StateFormat::Fp32, _) => self.kind(StateKind::Master).to_vec(),
            (StateFormat::Compact, _) => {
                let (hi, low) = (self.kind::<u16>(StateKind::Weight), self.kind::<i8>(StateKind::MasterLow8));
                let bits = |hi: u16, low: i8| (i64::from(hi) << 16) + (i64::from(low) << 8);
                let byte = |i: usize| low[i / COMPACT_BLOCK * COMPACT_BLOCK + byte_of(i % COMPACT_BLOCK)];
                (0..self.params).map(|i| f32::from_bits(bits(hi[i], byte(i)) as u32)).collect()
            }
            _ => {
                let (hi, low) = (self.kind(StateKind::Weight), self.kind(StateKind::MasterLow));
                hi.iter().zip(low).map(|(hi, low)| split::join(*hi, *low)).collect()
            }
        }
    }

    /// A moment, whichever way it is stored; the codes of the compact format decoded as its documentation says.
    pub fn moment(&self, kind: StateKind) -> Vec<f64> {
        match self.layout.format() {
            StateFormat::Bf16 => self.kind::<bf16>(kind).iter().map(|x| x.to_f64()).collect(),
            StateFormat::Compact => {
                let blocks = self.kind::<u8>(kind).chunks(COMPACT_BLOCK + 2);
                let values = blocks.flat_map(|block| {
                    let (codes, scale) = block.split_at(COMPACT_BLOCK);
                    let scale = bf16::from_ne_bytes([scale[0], scale[1]]).to_f64();
                    (0..COMPACT_BLOCK).map(move |i| scale * decoded(kind, codes[byte_of(i)]))
                });
                values.take(self.params).collect()
            }
            _ => self.kind::<f32>(kind).iter().map(|x| f64::from(*x)).collect(),
        }
    }

    /// Every byte of the state.
    pub fn bytes(&mut self) -> Vec<u8> {
        self.slices().concat()
    }

    /// The weight as compute sees it.
    pub fn weight(&self) -> Vec<f32> {
        match self.layout.weight() {
            WeightType::F32 => self.kind(StateKind::Weight).to_vec(),
            WeightType::Bf16 => self.kind::<bf16>(StateKind::Weight).iter().map(|w| w.to_f32()).collect(),
            WeightType::F16 => self.kind::<f16>(StateKind::Weight).iter().map(|w| w.to_f32()).collect(),
        }
    }

    /// A hash of the numbers (masters and moments), the same for every format that stores the same ones.
    pub fn hash(&self) -> u64 {
        let mut bits: Vec<u32> = self.master().iter().map(|x| x.to_bits()).collect();
        bits.extend(self.kind::<u32>(StateKind::Moment1));
        bits.extend(self.kind::<u32>(StateKind::Moment2));
        twox_hash::XxHash3_64::oneshot(bytemuck::cast_slice(&bits))
    }
}

/// Where the byte of parameter `i` of a compact block lies.
fn byte_of(i: usize) -> usize {
    i % 32 / 2 * 4 + i / 32 * 2 + i % 2
}

/// The value of a compact code with scale 1.
fn decoded(kind: StateKind, code: u8) -> f64 {
    let (sign, code, top) = match kind {
        StateKind::Moment1 => (if code & 0x80 == 0 { 1.0 } else { -1.0 }, code & 0x7f, 7),
        _ => (1.0, code, 15),
    };
    let (exponent, mantissa) = (i32::from(code >> 4), f64::from(code & 15) / 16.0);
    let magnitude = if exponent == 0 {
        mantissa * 2f64.powi(1 - top)
    } else {
        (1.0 + mantissa) * 2f64.powi(exponent - top)
    };
    sign * magnitude
}

/// The generator of `fixtures/make_fixtures.py`: multiples of 2^-23 in [-1, 1).
pub fn noise(seed: u32, n: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        ((state >> 8) as f32) / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// A gradient in the type in which it arrives.
pub enum Arrived {
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
    F32(Vec<f32>),
}

impl Arrived {
    /// `values` rounded to the type of that name.
    pub fn new(name: &str, values: Vec<f32>) -> Self {
        match name {
            "bf16" => Self::Bf16(values.iter().map(|x| bf16::from_f32(*x)).collect()),
            "f16" => Self::F16(values.iter().map(|x| f16::from_f32(*x)).collect()),
            "f32" => Self::F32(values),
            other => panic!("gradients are f32, bf16 or f16, not {other}"),
        }
    }

    pub fn gradient(&self) -> Gradient<'_> {
        match self {
            Self::Bf16(values) => Gradient::Bf16(values),
            Self::F16(values) => Gradient::F16(values),
            Self::F32(values) => Gradient::F32(values),
        }
    }

    /// The same, copied to `memory` from its `place`th element of this type.
    pub fn copied_to<'a>(&self, memory: &'a mut [u8], place: usize) -> Gradient<'a> {
        fn copy<'a, T: bytemuck::Pod>(values: &[T], memory: &'a mut [u8], place: usize) -> &'a [T] {
            let copied = &mut bytemuck::cast_slice_mut(memory)[place..place + values.len()];
            copied.copy_from_slice(values);
            copied
        }
        match self {
            Self::Bf16(values) => Gradient::Bf16(copy(values, memory, place)),
            Self::F16(values) => Gradient::F16(copy(values, memory, place)),
            Self::F32(values) => Gradient::F32(copy(values, memory, place)),
        }
    }
}
