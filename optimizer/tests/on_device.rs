//! Kernels leave the bytes of state that the loops of this crate leave, and sums of squares their bits: on the host in a device's
//! place, and with `cargo xtask cuda-mock` on the CUDA backend, over a driver that plays a card.
//!
//! Every array lies between guards, and the CUDA backend runs a second time with arrays that begin at odd places.

mod common;

use std::sync::Arc;

use common::{State, layout, layouts, noise};
use half::{bf16, f16};
use terrace_device::cuda::{CudaDevice, CudaStream};
use terrace_device::{Arena, Bytes, BytesMut, Device, Region, Stream};
use terrace_kernels::update::{Adam as AdamKernel, AdamState, AdamStep, UpdateKernels};
use terrace_kernels::{DType, View, ViewMut, cuda};
use terrace_optimizer::{
    Adam, AdamW, Algorithm, DeviceOptimizer, Gradient, Lion, NORM_BLOCK, OptimizerError, StateFormat,
    StateLayout, StepArgs, SumOfSquares, WeightType, host_kernels, optimizer,
};

/// Set by `cargo xtask cuda-mock`: the kernels' library.
const VARIABLE: &str = "TERRACE_SHIM_LIBRARY";

/// Around a vector, the threads of a block of 64, the block, and a few launches' blocks.
const SIZES: [usize; 10] = [1, 2, 22, 63, 64, 65, 127, 130, 1000, 4099];

const GRADIENTS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

const GUARD: usize = 256;
const GUARD_BYTE: u8 = 0xA5;

/// Where kernels run.
struct Place {
    name: &'static str,
    kernels: UpdateKernels,
    card: Option<Card>,
}

struct Card {
    arena: Arena,
    stream: Arc<CudaStream>,
    /// Elements that arrays begin after a multiple of 256 bytes.
    misplaced: usize,
}

fn pool() -> Arc<rayon::ThreadPool> {
    Arc::new(rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("threads"))
}

fn places() -> Vec<Place> {
    let mut places = vec![Place { name: "host", kernels: host_kernels(pool()), card: None }];
    if std::env::var_os(VARIABLE).is_some() {
        let device = CudaDevice::open(0).expect("the driver that was asked for");
        for (name, misplaced) in [("cuda", 0), ("cuda, arrays at odd places", 1)] {
            let stream = Arc::clone(device.compute_stream());
            let kernels = cuda::update_kernels(&device, &stream).expect("kernels that compile");
            let arena = device.arena(16 << 20).expect("memory for operands");
            places.push(Place { name, kernels, card: Some(Card { arena, stream, misplaced }) });
        }
    }
    places
}

/// An array where kernels reach it.
enum Array {
    Host(Vec<u64>),
    Card(Region),
}

/// An array between guards.
struct Guarded {
    array: Array,
    start: usize,
    len: usize,
}

impl Place {
    /// Copies `bytes`, whose elements have `element` bytes.
    fn copy(&self, bytes: &[u8], element: usize) -> Guarded {
        let start = GUARD + self.card.as_ref().map_or(0, |card| card.misplaced * element);
        let mut whole = vec![u64::from_ne_bytes([GUARD_BYTE; 8]); (start + bytes.len() + GUARD).div_ceil(8)];
        bytemuck::cast_slice_mut(&mut whole)[start..start + bytes.len()].copy_from_slice(bytes);
        let array = match &self.card {
            None => Array::Host(whole),
            Some(card) => {
                let mut region = card.arena.alloc(8 * whole.len()).expect("operands that fit");
                let from = Bytes::from_host(bytemuck::cast_slice(&whole));
                // SAFETY: both ends live until the stream has done the copy.
                unsafe { card.stream.copy(from, region.bytes_mut()) }.expect("a copy");
                card.stream.synchronize().expect("a copy");
                Array::Card(region)
            }
        };
        Guarded { array, start, len: bytes.len() }
    }

    /// The bytes that are there now; the guards must be whole.
    fn back(&self, guarded: &Guarded) -> Vec<u8> {
        let whole: Vec<u8> = match (&guarded.array, &self.card) {
            (Array::Host(words), _) => bytemuck::cast_slice(words).to_vec(),
            (Array::Card(region), Some(card)) => {
                let mut whole = vec![0; region.bytes().len()];
                // SAFETY: as in `copy`.
                unsafe { card.stream.copy(region.bytes(), BytesMut::from_host(&mut whole)) }.expect("a copy");
                card.stream.synchronize().expect("a copy");
                whole
            }
            (Array::Card(_), None) => unreachable!("only a card has regions"),
        };
        let (before, rest) = whole.split_at(guarded.start);
        let (bytes, after) = rest.split_at(guarded.len);
        let guards = before.iter().chain(&after[..GUARD]);
        assert!(guards.copied().all(|byte| byte == GUARD_BYTE), "{}: a write beyond an array", self.name);
        bytes.to_vec()
    }
}

impl Guarded {
    fn bytes(&self) -> Bytes<'_> {
        let whole = match &self.array {
            Array::Host(words) => Bytes::from_host(bytemuck::cast_slice(words)),
            Array::Card(region) => region.bytes(),
        };
        whole.slice(self.start, self.start + self.len)
    }

    fn bytes_mut(&mut self) -> BytesMut<'_> {
        let whole = match &mut self.array {
            Array::Host(words) => BytesMut::from_host(bytemuck::cast_slice_mut(words)),
            Array::Card(region) => region.bytes_mut(),
        };
        whole.slice(self.start, self.start + self.len)
    }
}

/// Gradients of one type, from values in f32 or straight from bits.
struct Gradients {
    dtype: DType,
    words: Vec<u64>,
    count: usize,
}

impl Gradients {
    fn of(dtype: DType, values: &[f32]) -> Self {
        let mut gradients =
            Self { dtype, words: vec![0; (values.len() * dtype.size()).div_ceil(8)], count: values.len() };
        let bytes: Vec<u8> = match dtype {
            DType::F32 => bytemuck::cast_slice(values).to_vec(),
            DType::BF16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_ne_bytes()).collect(),
            _ => values.iter().flat_map(|x| f16::from_f32(*x).to_ne_bytes()).collect(),
        };
        bytemuck::cast_slice_mut(&mut gradients.words)[..bytes.len()].copy_from_slice(&bytes);
        gradients
    }

    /// Any bits: NaNs, infinities and subnormals of the type among them.
    fn of_bits(dtype: DType, seed: u32, count: usize) -> Self {
        let words = (0..(count * dtype.size()).div_ceil(8)).map(|i| hash(seed, 2 * i as u32)).collect();
        Self { dtype, words, count }
    }

    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.count * self.dtype.size()]
    }

    fn on_host(&self) -> Gradient<'_> {
        match self.dtype {
            DType::F32 => Gradient::F32(bytemuck::cast_slice(self.bytes())),
            DType::BF16 => Gradient::Bf16(bytemuck::cast_slice(self.bytes())),
            _ => Gradient::F16(bytemuck::cast_slice(self.bytes())),
        }
    }
}

/// 64 bits as good as random.
fn hash(seed: u32, i: u32) -> u64 {
    let x = (u64::from(seed) << 32 | u64::from(i)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// A step in one place and by the loops, from parameter `first` on; the bytes of both states must be the same.
fn step(
    place: &Place,
    algorithm: Algorithm,
    args: &StepArgs,
    gradients: &Gradients,
    first: usize,
    state: &mut State,
    what: &str,
) {
    let layout = *optimizer(algorithm, state.layout()).unwrap().layout();
    let on_device = DeviceOptimizer::new(&place.kernels, algorithm, layout).unwrap();
    let mut arrays: Vec<Guarded> = state
        .slices()
        .iter()
        .zip(layout.kinds())
        .map(|(slice, kind)| place.copy(slice, if kind.params == 1 { kind.bytes } else { 1 }))
        .collect();
    let gradient = place.copy(gradients.bytes(), gradients.dtype.size());
    {
        let kinds = arrays.iter_mut().zip(layout.kinds());
        let runs = kinds
            .map(|(array, kind)| {
                let len = array.len;
                array.bytes_mut().slice(kind.bytes_for(first), len)
            })
            .collect();
        let all = gradient.bytes();
        let run = all.slice(first * gradients.dtype.size(), all.len());
        let view = View::new(run, gradients.dtype, &[gradients.count - first]);
        on_device.update(args, view, runs).unwrap();
    }
    assert_eq!(place.back(&gradient), gradients.bytes(), "{}: a gradient was written", place.name);
    let found: Vec<Vec<u8>> = arrays.iter().map(|array| place.back(array)).collect();
    let (_, gradient) = gradients.on_host().split_at(first);
    let mut slices: Vec<&mut [u8]> = state.slices();
    let mut runs: Vec<&mut [u8]> = slices
        .iter_mut()
        .zip(layout.kinds())
        .map(|(slice, kind)| &mut slice[kind.bytes_for(first)..])
        .collect();
    optimizer(algorithm, layout).unwrap().update(args, gradient, &mut runs).unwrap();
    for ((found, expected), kind) in found.iter().zip(&slices).zip(layout.kinds()) {
        if let Some(at) = found.iter().zip(&**expected).position(|(a, b)| a != b) {
            panic!(
                "{}: {what}: byte {at} of {} ({:?}, {} gradients) differs: {:#04x}, not {:#04x}",
                place.name, kind.kind, layout, gradients.dtype, found[at], expected[at]
            );
        }
    }
}

/// Adam in both ways, with and without decay, and betas on either side of a half.
fn algorithms() -> [Algorithm; 4] {
    let (adamw, adam) = (AdamW::default(), Adam::default());
    [
        Algorithm::AdamW(adamw),
        Algorithm::AdamW(AdamW { beta1: 0.3, beta2: 0.9, eps: 1e-3, weight_decay: 0.0 }),
        Algorithm::Adam(Adam { weight_decay: 0.1, ..adam }),
        Algorithm::Adam(adam),
    ]
}

#[test]
fn every_format_at_every_size() {
    for place in places() {
        for (layout, dtype) in combinations() {
            for size in SIZES {
                for (a, algorithm) in algorithms().into_iter().enumerate() {
                    if a > 0 && size > 200 {
                        continue;
                    }
                    let loops = optimizer(algorithm, layout).unwrap();
                    let mut state = State::initialized(loops.as_ref(), &noise(3, size));
                    for t in 1..=4 {
                        // Magnitudes over many binades, so that blocks are uneven; clipped from the third step on.
                        let spread = |(i, x): (usize, &f32)| x * 2f32.powi(-((i * 7 % 23) as i32));
                        let values: Vec<f32> =
                            noise(20 + t as u32, size).iter().enumerate().map(spread).collect();
                        let gradients = Gradients::of(dtype, &values);
                        let grad_scale = if t < 3 { 1.0 } else { 0.371 };
                        let args = StepArgs { grad_scale, ..algorithm.step(t, 1e-2 / t as f64) };
                        let what = format!("{algorithm} {a} of {size}, step {t}");
                        step(&place, algorithm, &args, &gradients, 0, &mut state, &what);
                    }
                }
            }
        }
    }
}

/// A run may begin at any pair or block of a state, where addresses are no multiples of much.
#[test]
fn runs_within_a_state() {
    for place in places() {
        for (layout, dtype) in combinations() {
            for (first, size) in [(64, 65), (64, 200), (192, 64 * 7 + 1), (128, 1000)] {
                let algorithm = algorithms()[0];
                let loops = optimizer(algorithm, layout).unwrap();
                let mut state = State::initialized(loops.as_ref(), &noise(5, first + size));
                for t in 1..=3 {
                    let gradients = Gradients::of(dtype, &noise(30 + t as u32, first + size));
                    let what = format!("parameters {first} to {}, step {t}", first + size);
                    let args = algorithm.step(t, 1e-3);
                    step(&place, algorithm, &args, &gradients, first, &mut state, &what);
                }
            }
        }
    }
}

/// Whatever bits state and gradients have: NaNs with payloads, infinities, subnormals, negative second moments, ties.
#[test]
fn any_bits() {
    for place in places() {
        for (layout, dtype) in combinations() {
            for (round, scale) in [1.0, 0.371, 1e-30, 3e38, f32::MAX, 0.0].into_iter().enumerate() {
                let algorithm = algorithms()[round % 4];
                let seed = 100 + round as u32;
                let mut state = State::zeroed(layout, 1000);
                fill(&mut state, seed);
                for t in 1..=3 {
                    let gradients = Gradients::of_bits(dtype, seed ^ t as u32, 1000);
                    let args = StepArgs { grad_scale: scale, ..algorithm.step(t, 1e-2) };
                    let what = format!("{algorithm}, any bits, scale {scale}, step {t}");
                    step(&place, algorithm, &args, &gradients, 0, &mut state, &what);
                }
            }
        }
    }
}

/// Values at which something is decided: zeros, the smallest and largest numbers, ties of both roundings, powers of two.
#[test]
fn decisive_values() {
    const VALUES: [u32; 20] = [
        0,
        1,
        0x0040_0000,
        0x007f_ffff,
        0x0080_0000,
        0x3300_0000,
        0x3380_0000,
        0x3800_0000,
        0x387f_e000,
        0x3f80_0000,
        0x3f80_8000,
        0x3f81_8000,
        0x3f80_7fff,
        0x3fff_ffff,
        0x477f_f000,
        0x5f80_0000,
        0x7f00_0000,
        0x7f7f_ffff,
        0x7f80_0000,
        0x7fc0_0001,
    ];
    let value = |i: usize, step: usize| {
        let bits = VALUES[i / step % VALUES.len()];
        f32::from_bits(bits | ((i / step / VALUES.len()) as u32 & 1) << 31)
    };
    // Every weight with every gradient, each of either sign.
    let size = 4 * VALUES.len() * VALUES.len();
    let weights: Vec<f32> = (0..size).map(|i| value(i, 1)).collect();
    for place in places() {
        for (layout, dtype) in combinations() {
            for (a, algorithm) in algorithms().into_iter().enumerate() {
                let loops = optimizer(algorithm, layout).unwrap();
                let mut state = State::initialized(loops.as_ref(), &weights);
                for t in 1..=2 {
                    let values: Vec<f32> = (0..size).map(|i| value(i, 2 * VALUES.len())).collect();
                    let what = format!("{algorithm} {a}, decisive values, step {t}");
                    let (args, gradients) = (algorithm.step(t, 1e-3), Gradients::of(dtype, &values));
                    step(&place, algorithm, &args, &gradients, 0, &mut state, &what);
                }
            }
        }
    }
}

fn combinations() -> impl Iterator<Item = (StateLayout, DType)> {
    layouts().into_iter().flat_map(|layout| GRADIENTS.map(|dtype| (layout, dtype)))
}

/// Random bytes, but for scales, which are those of numbers.
fn fill(state: &mut State, seed: u32) {
    let kinds = state.layout().kinds();
    for (k, (slice, kind)) in state.slices().into_iter().zip(kinds).enumerate() {
        for (i, byte) in slice.iter_mut().enumerate() {
            *byte = hash(seed + k as u32, i as u32) as u8;
        }
        if kind.bytes > kind.params && kind.params > 1 {
            for (b, block) in slice.chunks_mut(kind.bytes).enumerate() {
                let exponent = (hash(seed, b as u32) % 240) as u16;
                block[kind.params..].copy_from_slice(&(exponent << 7).to_ne_bytes());
            }
        }
    }
}

/// A kernel that is wrong in the last bit of one scalar.
struct Wrong(Arc<dyn AdamKernel>, fn(&mut AdamStep));

impl AdamKernel for Wrong {
    fn update(&self, step: &AdamStep, gradient: View<'_>, state: AdamState<'_>) -> terrace_kernels::Result {
        let mut step = *step;
        self.1(&mut step);
        self.0.update(&step, gradient, state)
    }
}

fn wrong(format: StateFormat, change: fn(&mut AdamStep)) {
    let algorithm = algorithms()[1];
    let layout = layout(format, WeightType::Bf16);
    for mut place in places().into_iter().rev() {
        place.kernels.adam = Arc::new(Wrong(Arc::clone(&place.kernels.adam), change));
        let mut state = State::initialized(optimizer(algorithm, layout).unwrap().as_ref(), &noise(3, 100));
        let gradients = Gradients::of(DType::BF16, &noise(4, 100));
        let args = algorithm.step(1, 1e-2);
        step(&place, algorithm, &args, &gradients, 0, &mut state, "a wrong kernel");
    }
}

#[test]
#[should_panic(expected = "differs")]
fn canary_another_epsilon_is_seen() {
    wrong(StateFormat::Split, |step| step.eps = step.eps.next_up());
}

#[test]
#[should_panic(expected = "differs")]
fn canary_other_noise_is_seen() {
    wrong(StateFormat::Compact, |step| step.seed ^= 0x8000);
}

#[test]
fn sums_of_squares() {
    const B: usize = NORM_BLOCK;
    for place in places() {
        for dtype in GRADIENTS {
            for size in [0, 1, 7, 8, 9, 63, 64, 65, 1000, B - 1, B, B + 1, 3 * B + 77, 9 * B] {
                let spread = |(i, x): (usize, &f32)| x * 2f32.powi(-((i * 7 % 23) as i32));
                let values: Vec<f32> = noise(40, size).iter().enumerate().map(spread).collect();
                let gradients = Gradients::of(dtype, &values);
                let mut expected = SumOfSquares::new();
                expected.add(gradients.on_host());
                let all = place.copy(gradients.bytes(), dtype.size());
                // In chunks of whole blocks, as gradients of parts of a group come.
                for chunk in [4 * B, B] {
                    let mut total = place.copy(bytemuck::bytes_of(&0f64), 8);
                    for start in (0..size).step_by(chunk) {
                        let end = size.min(start + chunk);
                        let bytes = all.bytes().slice(start * dtype.size(), end * dtype.size());
                        let view = View::new(bytes, dtype, &[end - start]);
                        let to = ViewMut::new(total.bytes_mut(), DType::F64, &[1]);
                        place.kernels.sum_of_squares.add(view, to).unwrap();
                    }
                    let found: f64 = bytemuck::pod_read_unaligned(&place.back(&total));
                    let found = SumOfSquares::from_total(found).total();
                    assert_eq!(
                        found.to_bits(),
                        expected.total().to_bits(),
                        "{}: {size} of {dtype} in chunks of {chunk}: {found}, not {}",
                        place.name,
                        expected.total()
                    );
                }
            }
        }
    }
}

#[test]
fn sums_show_what_is_not_finite() {
    for place in places() {
        for dtype in GRADIENTS {
            for (bad, infinite) in [(f32::INFINITY, true), (f32::NEG_INFINITY, true), (f32::NAN, false)] {
                let mut values = noise(41, NORM_BLOCK + 99);
                values[NORM_BLOCK + 17] = bad;
                let gradients = place.copy(Gradients::of(dtype, &values).bytes(), dtype.size());
                let mut total = place.copy(bytemuck::bytes_of(&1f64), 8);
                let to = ViewMut::new(total.bytes_mut(), DType::F64, &[1]);
                let view = View::new(gradients.bytes(), dtype, &[values.len()]);
                place.kernels.sum_of_squares.add(view, to).unwrap();
                let found: f64 = bytemuck::pod_read_unaligned(&place.back(&total));
                assert!(if infinite { found == f64::INFINITY } else { found.is_nan() }, "{}", place.name);
            }
        }
    }
}

#[test]
fn what_cannot_be_updated_is_refused() {
    let kernels = host_kernels(pool());
    let layout = layout(StateFormat::Compact, WeightType::Bf16);
    let lion = DeviceOptimizer::new(&kernels, Algorithm::Lion(Lion::default()), layout).err();
    assert_eq!(lion, Some(OptimizerError::NotOnDevice("lion".to_owned())));
    let algorithm = algorithms()[0];
    let on_device = DeviceOptimizer::new(&kernels, algorithm, layout).unwrap();
    let gradient = [0u8; 4 * 65];
    let view = View::new(Bytes::from_host(&gradient[..2 * 65]), DType::BF16, &[65]);
    let mut state = State::zeroed(layout, 65);
    let mut slices = state.slices();
    slices.pop();
    let few = slices.into_iter().map(BytesMut::from_host).collect();
    let found = on_device.update(&algorithm.step(1, 1e-3), view, few);
    assert_eq!(found, Err(OptimizerError::KindCount { expected: 4, found: 3 }));
    let mut short = State::zeroed(layout, 64);
    let short = short.slices().into_iter().map(BytesMut::from_host).collect();
    let found = on_device.update(&algorithm.step(1, 1e-3), view, short);
    assert!(matches!(found, Err(OptimizerError::KindLength { params: 65, .. })), "{found:?}");
    let whole = state.slices().into_iter().map(BytesMut::from_host).collect();
    let found = on_device.update(&algorithm.step(0, 1e-3), view, whole);
    assert!(matches!(found, Err(OptimizerError::Hyperparameter { name: "step", .. })), "{found:?}");
}

/// The tests above were run on the card that was asked for.
#[test]
#[ignore = "needs a driver: `cargo xtask cuda-mock`"]
fn the_card_is_there() {
    assert_eq!(places().len(), 3);
}
