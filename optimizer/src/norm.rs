//! The global gradient norm, with the same bits however the gradients were cut up, and clipping by it.
//!
//! Floating-point sums depend on their order, so the order is part of the definition: gradients are cut into blocks
//! of [`NORM_BLOCK`] values; within a block, value `i` goes to lane `i mod 8`, each lane adds its squares in f64
//! from first to last, and the lanes are added as a tree; the block sums are added in the order of the blocks. Where
//! chunks begin (at multiples of the block), how many threads work on the blocks and how wide their vectors are then changes
//! nothing.
//!
//! Squares of f32 values are exact enough and cannot overflow in f64: a norm that is not finite means that some
//! gradient is not.

use rayon::prelude::*;

use crate::error::{OptimizerError, Result};
use crate::isa::Isa;
use crate::store::{TILE, Widen};
use crate::update::Gradient;

/// Values per block of the sum. Chunks of a gradient must begin at multiples of it.
pub const NORM_BLOCK: usize = terrace_kernels::update::NORM_BLOCK;

/// Blocks that are divided over threads together: so many that they wait for the last of them a small part of the time, and
/// few enough for their sums to be on the stack.
const BLOCKS_AT_ONCE: usize = 512;

/// What torch adds to the norm before it divides by it.
const CLIP_EPS: f64 = 1e-6;

const LANES: usize = 8;

const _: () = assert!(TILE.is_multiple_of(LANES), "a tile is whole rows of lanes");

/// Adds the squares of a gradient that arrives in chunks.
///
/// Feed the chunks of one gradient in order. Gradients that arrive in any order (parameter groups during backward)
/// get an accumulator each, and [`merge`](Self::merge) adds them in the one order that the caller keeps fixed.
///
/// ```
/// use terrace_optimizer::{Gradient, SumOfSquares, clip_coefficient};
///
/// let mut sum = SumOfSquares::new();
/// sum.add(Gradient::F32(&[3.0, 4.0]));
/// assert_eq!(sum.norm()?, 5.0);
/// assert!((clip_coefficient(sum.norm()?, 1.0) - 0.2).abs() < 1e-6);
/// # Ok::<(), terrace_optimizer::OptimizerError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SumOfSquares {
    total: f64,
    /// The last chunk did not end at a block boundary, so nothing may follow it.
    ended: bool,
}

impl SumOfSquares {
    /// The sum over nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// The sum whose total so far is `total`, as a device computed it over whole blocks, or over all of a gradient.
    pub fn from_total(total: f64) -> Self {
        Self { total, ended: false }
    }

    /// Adds the next chunk of the gradient.
    ///
    /// # Panics
    /// When this chunk does not begin at a multiple of [`NORM_BLOCK`], that is, when an earlier chunk was not a
    /// whole number of blocks: the result would depend on the cut.
    pub fn add(&mut self, gradient: Gradient<'_>) {
        self.add_on(Isa::best(), gradient);
    }

    /// [`add`](Self::add) on an instruction set of choice: the bits are the same on all.
    ///
    /// # Panics
    /// As [`add`](Self::add).
    pub fn add_on(&mut self, isa: Isa, gradient: Gradient<'_>) {
        self.begin(gradient);
        for block in gradient.chunks(NORM_BLOCK) {
            self.total += block_sum(isa, block);
        }
    }

    /// [`add`](Self::add) of chunks that follow each other, with their blocks divided over the threads of `pool`: the same bits.
    ///
    /// # Panics
    /// As [`add`](Self::add).
    pub fn add_threaded(&mut self, pool: &rayon::ThreadPool, chunks: &[Gradient<'_>]) {
        chunks.iter().for_each(|chunk| self.begin(*chunk));
        let isa = Isa::best();
        let mut blocks = chunks.iter().flat_map(|chunk| chunk.chunks(NORM_BLOCK));
        let mut at_once = Vec::with_capacity(BLOCKS_AT_ONCE);
        pool.install(|| {
            loop {
                at_once.extend(blocks.by_ref().take(BLOCKS_AT_ONCE));
                if at_once.is_empty() {
                    return;
                }
                let mut sums = [0.0; BLOCKS_AT_ONCE];
                let sums = &mut sums[..at_once.len()];
                sums.par_iter_mut().zip(&at_once).for_each(|(sum, block)| *sum = block_sum(isa, *block));
                for sum in sums {
                    self.total += *sum;
                }
                at_once.clear();
            }
        });
    }

    /// Adds the finished sum of another gradient. The order of merges is part of the result.
    pub fn merge(&mut self, other: &Self) {
        self.total += other.total;
        self.ended = true;
    }

    /// The sum so far; infinite or NaN when a gradient was.
    pub fn total(&self) -> f64 {
        self.total
    }

    /// The norm: the square root of the sum.
    ///
    /// # Errors
    /// [`OptimizerError::NonFiniteNorm`] when some gradient was infinite or not a number.
    pub fn norm(&self) -> Result<f64> {
        let norm = self.total.sqrt();
        if norm.is_finite() { Ok(norm) } else { Err(OptimizerError::NonFiniteNorm(norm)) }
    }

    fn begin(&mut self, gradient: Gradient<'_>) {
        assert!(
            !self.ended || gradient.is_empty(),
            "a chunk must begin at a multiple of {NORM_BLOCK} values: only the last chunk may end within a block"
        );
        self.ended |= !gradient.len().is_multiple_of(NORM_BLOCK);
    }
}

/// The factor that brings a gradient of this global norm down to `max_norm`, as `torch.nn.utils.clip_grad_norm_`
/// computes it: `max_norm / (norm + 1e-6)`, at most 1.
///
/// Computed in f64 and rounded once, so it may differ from torch's, which divides in f32, by an ulp or two. A NaN
/// norm gives NaN and an infinite one 0, as in torch; [`SumOfSquares::norm`] refuses both.
pub fn clip_coefficient(norm: f64, max_norm: f64) -> f32 {
    let coefficient = max_norm / (norm + CLIP_EPS);
    // Not `min`, which would turn NaN into 1 and let it through as an unclipped step.
    if coefficient > 1.0 { 1.0 } else { coefficient as f32 }
}

/// The sum of squares of at most [`NORM_BLOCK`] values.
fn block_sum(isa: Isa, block: Gradient<'_>) -> f64 {
    match block {
        Gradient::Bf16(values) => isa.run(BlockSum(values)),
        Gradient::F16(values) => isa.run(BlockSum(values)),
        Gradient::F32(values) => isa.run(BlockSum(values)),
    }
}

/// The sum over one block, to be instantiated for an instruction set.
struct BlockSum<'a, G>(&'a [G]);

impl<G: Widen> pulp::NullaryFnOnce for BlockSum<'_, G> {
    type Output = f64;

    #[inline(always)]
    fn call(self) -> f64 {
        let mut lanes = [0.0f64; LANES];
        let (tiles, rest) = self.0.as_chunks::<TILE>();
        for tile in tiles {
            // Apart from the sums, so that as many are widened at once as a vector holds.
            let wide = tile.map(Widen::widen);
            for row in wide.as_chunks::<LANES>().0 {
                for (lane, value) in lanes.iter_mut().zip(row) {
                    *lane += square(*value);
                }
            }
        }
        for row in rest.chunks(LANES) {
            for (lane, value) in lanes.iter_mut().zip(row) {
                *lane += square(value.widen());
            }
        }
        let [a, b, c, d, e, f, g, h] = lanes;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }
}

#[inline(always)]
fn square(value: f32) -> f64 {
    let value = f64::from(value);
    value * value
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    fn noise(n: usize) -> Vec<f32> {
        let mut bits = 1u32;
        let mut next = || {
            bits = bits.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
            (bits >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        (0..n).map(|_| next() * 10f32.powi((next() * 8.0) as i32)).collect()
    }

    #[test]
    fn independent_of_chunks_and_threads() {
        let wide = noise(7 * NORM_BLOCK + 4321);
        let narrow: Vec<_> = wide.iter().map(|x| bf16::from_f32(*x)).collect();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        for gradient in [Gradient::F32(&wide), Gradient::Bf16(&narrow)] {
            let mut whole = SumOfSquares::new();
            whole.add(gradient);
            for blocks in 1..9 {
                let (mut serial, mut threaded) = (SumOfSquares::new(), SumOfSquares::new());
                for chunk in gradient.chunks(blocks * NORM_BLOCK) {
                    serial.add(chunk);
                    threaded.add_threaded(&pool, &[chunk]);
                }
                assert_eq!(serial.total().to_bits(), whole.total().to_bits(), "{blocks} blocks a chunk");
                assert_eq!(threaded, serial);
                let mut together = SumOfSquares::new();
                let chunks: Vec<_> = gradient.chunks(blocks * NORM_BLOCK).collect();
                together.add_threaded(&pool, &chunks);
                assert_eq!(together, serial);
            }
        }
    }

    #[test]
    fn more_blocks_than_threads_take_at_once() {
        const AT_ONCE: usize = BLOCKS_AT_ONCE * NORM_BLOCK;
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let values: Vec<f32> = noise(4321).into_iter().cycle().take(AT_ONCE + NORM_BLOCK + 7).collect();
        for length in [AT_ONCE, AT_ONCE + 1, values.len()] {
            let (mut serial, mut threaded) = (SumOfSquares::new(), SumOfSquares::new());
            serial.add(Gradient::F32(&values[..length]));
            threaded.add_threaded(&pool, &[Gradient::F32(&values[..length])]);
            assert_eq!(threaded, serial, "{length}");
        }
    }

    #[test]
    fn close_to_a_compensated_sum() {
        let values = noise(50_001);
        let (mut sum, mut lost) = (0.0f64, 0.0f64);
        for x in &values {
            let term = f64::from(*x).powi(2) - lost;
            let next = sum + term;
            lost = (next - sum) - term;
            sum = next;
        }
        let mut ours = SumOfSquares::new();
        ours.add(Gradient::F32(&values));
        assert!((ours.total() / sum - 1.0).abs() < 1e-13);
    }

    #[test]
    #[should_panic(expected = "multiple of 16384")]
    fn a_chunk_after_a_partial_block_is_refused() {
        let mut sum = SumOfSquares::new();
        sum.add(Gradient::F32(&[1.0]));
        sum.add(Gradient::F32(&[1.0]));
    }

    #[test]
    fn non_finite_gradients_are_found() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = noise(NORM_BLOCK + 9);
            values[NORM_BLOCK + 8] = bad;
            let mut sum = SumOfSquares::new();
            sum.add(Gradient::F32(&values));
            assert!(matches!(sum.norm(), Err(OptimizerError::NonFiniteNorm(_))), "{bad}");
        }
        let mut largest = SumOfSquares::new();
        largest.add(Gradient::F32(&[f32::MAX; 100]));
        assert!(largest.norm().is_ok());
    }

    #[test]
    fn clips_as_torch_does() {
        assert_eq!(clip_coefficient(0.0, 1.0), 1.0);
        assert_eq!(clip_coefficient(0.5, 1.0), 1.0);
        assert_eq!(clip_coefficient(2.0, 1.0), (1.0f64 / 2.000001) as f32);
        assert_eq!(clip_coefficient(f64::INFINITY, 1.0), 0.0);
        assert!(clip_coefficient(f64::NAN, 1.0).is_nan());
    }
}
