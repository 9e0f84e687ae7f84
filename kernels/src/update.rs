//! Operations on training state that lies in device memory: Adam's update, and the norm of gradients.
//!
//! They are apart from [`KernelSet`](crate::KernelSet) because a layer needs none of them, and because terrace-optimizer is the
//! one place that knows formulas, formats and their rounding: it fills in an [`AdamStep`], and its loops are the host's
//! implementation, which every other one equals **bit for bit**. A backend makes [`UpdateKernels`] for the stream that updates
//! run on.

use crate::{BytesMut, DType, Result, View, ViewMut};
use std::sync::Arc;

/// Parameters that share a scale in [`AdamFormat::Compact`].
pub const COMPACT_BLOCK: usize = 64;

/// Values of a gradient whose squares are added before the sum meets others: see [`SumOfSquares`].
pub const NORM_BLOCK: usize = 16_384;

/// How weights' masters and both moments are stored; in bytes and in what they mean, terrace-optimizer's `StateFormat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AdamFormat {
    /// Weights f32, or bf16 or f16 beside a master in f32; moments f32.
    Fp32,
    /// Weights bf16, the lower 16 bits of the master, moments f32.
    Split,
    /// As [`Split`](Self::Split) with moments bf16, rounded at random.
    Bf16,
    /// Weights bf16, an 8-bit remainder, moments in blocks of [`COMPACT_BLOCK`] 8-bit codes and a bf16 scale.
    Compact,
}

impl AdamFormat {
    /// Bytes of the masters' rests and of each moment for `params` parameters.
    pub const fn bytes(self, params: usize) -> (usize, usize) {
        let blocks = params.div_ceil(COMPACT_BLOCK);
        match self {
            Self::Fp32 => (4 * params, 4 * params),
            Self::Split => (2 * params, 4 * params),
            Self::Bf16 => (2 * params, 2 * params),
            Self::Compact => (COMPACT_BLOCK * blocks, (COMPACT_BLOCK + 2) * blocks),
        }
    }
}

/// The scalars of a step of Adam or AdamW, as terrace-optimizer computes and rounds them.
///
/// ```text
/// g ← grad_scale·gradient;  g ← g + decay·p       the sum unless decoupled or the decay is 0
/// v ← v·beta2 + (beta2_rest·g)·g
/// p ← p·decay                                     if decoupled
/// m ← (lerp_from_gradient ? g : m) + lerp·(g − m)
/// p ← p + (step_size_negative·m) / (√v·bias2_sqrt_inverse + eps)
/// ```
///
/// Every operation rounds to f32 by itself, subnormals are kept.
#[derive(Debug, Clone, Copy, PartialEq)]
#[expect(missing_docs, reason = "the names of the formula")]
pub struct AdamStep {
    pub grad_scale: f32,
    pub decay: f32,
    /// Decay multiplies the weight instead of being added to its gradient.
    pub decoupled: bool,
    pub lerp_from_gradient: bool,
    pub lerp: f32,
    pub beta2: f32,
    pub beta2_rest: f32,
    pub bias2_sqrt_inverse: f32,
    pub eps: f32,
    pub step_size_negative: f32,
    /// What the step contributes to the noise of formats that round at random.
    pub seed: u32,
}

/// The state of a run of P parameters, each kind from the run's first parameter on.
///
/// The run begins at a multiple of two parameters in [`AdamFormat::Bf16`], of [`COMPACT_BLOCK`] in [`AdamFormat::Compact`].
#[derive(Debug)]
pub struct AdamState<'a> {
    /// The format of what follows.
    pub format: AdamFormat,
    /// `[P]`, as compute uses them: f32, bf16 or f16 in [`AdamFormat::Fp32`], else bf16.
    pub weight: ViewMut<'a>,
    /// What of the masters is not in the weights; none where weights are f32.
    pub rest: Option<BytesMut<'a>>,
    /// First moments.
    pub m: BytesMut<'a>,
    /// Second moments.
    pub v: BytesMut<'a>,
}

/// Adam (Kingma and Ba, arXiv 1412.6980) and AdamW (Loshchilov and Hutter, arXiv 1711.05101).
pub trait Adam: Send + Sync {
    /// Replaces the state of P parameters by that after one step; gradient f32, bf16 or f16 `[P]`.
    ///
    /// Bytes: the gradient and all of the state once, the state written once; weights with an f32 master are only written.
    /// About 15 FLOPs a parameter.
    ///
    /// # Errors
    /// The backend failed.
    ///
    /// # Panics
    /// The operands are no P parameters of the format, or an array is not aligned for its elements.
    fn update(&self, step: &AdamStep, gradient: View<'_>, state: AdamState<'_>) -> Result;
}

/// Sums for the global norm of gradients.
pub trait SumOfSquares: Send + Sync {
    /// `total[0] += Σ_b Σ_i gradient[b, i]²`, f64 `[1]`; gradient f32, bf16 or f16 of any shape, in blocks b of
    /// [`NORM_BLOCK`] values.
    ///
    /// Within a block, value i goes to lane i mod 8, each lane adds its squares in f64 from first to last, and the lanes a … h
    /// are added as `((a + e) + (c + g)) + ((b + f) + (d + h))`; sums of blocks are added to the total one after the other.
    /// Calls for consecutive chunks of a gradient that begin at multiples of a block thus give the bits of one call.
    ///
    /// Bytes: the gradient once. Two FLOPs a value.
    ///
    /// # Errors
    /// The backend failed.
    fn add(&self, gradient: View<'_>, total: ViewMut<'_>) -> Result;
}

/// One backend's operations on training state.
#[derive(Clone)]
#[expect(missing_docs, reason = "each field is its trait")]
pub struct UpdateKernels {
    pub adam: Arc<dyn Adam>,
    pub sum_of_squares: Arc<dyn SumOfSquares>,
}

impl std::fmt::Debug for UpdateKernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UpdateKernels")
    }
}

impl AdamState<'_> {
    /// Asserts that state and gradient are as many parameters, stored as the format says. Returns their number.
    ///
    /// # Panics
    /// They are not.
    pub fn check(&self, gradient: View<'_>) -> usize {
        let (format, params) = (self.format, self.weight.shape().elements());
        let weight = self.weight.dtype();
        assert_eq!(gradient.shape().elements(), params, "adam: as many gradients as weights");
        let floats = [DType::F32, DType::BF16, DType::F16];
        assert!(floats.contains(&gradient.dtype()), "adam: gradients are f32, bf16 or f16");
        let stored = if format == AdamFormat::Fp32 { &floats[..] } else { &[DType::BF16] };
        assert!(stored.contains(&weight), "adam: {format:?} has no weights of {weight}");
        assert_eq!(self.rest.is_some(), weight != DType::F32, "adam: weights other than f32 have a rest");
        let (rest_bytes, moment_bytes) = format.bytes(params);
        let (rest_align, moment_align) = match format {
            AdamFormat::Fp32 => (4, 4),
            AdamFormat::Split => (2, 4),
            AdamFormat::Bf16 => (2, 2),
            AdamFormat::Compact => (1, 1),
        };
        let moments =
            [("m", &self.m), ("v", &self.v)].map(|(name, bytes)| (name, bytes, moment_bytes, moment_align));
        let rest = self.rest.iter().map(|bytes| ("rest", bytes, rest_bytes, rest_align));
        for (name, bytes, expected, align) in rest.chain(moments) {
            assert_eq!(bytes.len(), expected, "adam: bytes of {name} for {params} parameters in {format:?}");
            let address = bytes.address().as_ptr().addr();
            assert!(address.is_multiple_of(align), "adam: {name} is aligned to {align} bytes");
        }
        params
    }
}
