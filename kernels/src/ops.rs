//! The operations a backend provides.
//!
//! Legend for shapes: B sequences, S query positions, C capacity of a key/value row block, T = B·S tokens, D hidden size,
//! H query heads, G key/value heads (H is a multiple of G), K head size, F feed-forward size, V vocabulary,
//! M, N, L rows, columns and inner size of a product.
//!
//! Every operation is deterministic and gives the same bits for any number of threads (where something is not finite, those of attention
//! may differ): work is divided over
//! outputs, and sums over rows are taken in a fixed block order. bf16 and f16 operands are widened to f32,
//! sums are accumulated in f32 (f64 where said), and results are rounded to nearest even once at the end.
//! Operands of one call may have different dtypes unless a method says otherwise.

mod columns;
mod delta;

pub use columns::Columns;
pub use delta::{Carried, DeltaRule, DeltaSpec, delta_scratch};
pub(crate) use delta::{SQUARES_EPS, Waves};

use crate::{DType, QuantizedView, View, ViewMut};
use std::sync::Arc;

/// A kernel that could not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("kernel {op}: {detail}")]
pub struct KernelError {
    /// The operation.
    pub op: &'static str,
    /// What went wrong.
    pub detail: String,
}

/// Result of an operation.
pub type Result<T = (), E = KernelError> = std::result::Result<T, E>;

/// How a product reads its operands and writes its result.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MatmulSpec {
    /// `a` is stored `[L, M]` instead of `[M, L]`.
    pub trans_a: bool,
    /// `b` is stored `[N, L]` instead of `[L, N]`.
    pub trans_b: bool,
    /// Add to `out` instead of overwriting it. `out` is then f32.
    pub accumulate: bool,
}

impl MatmulSpec {
    /// `out[M,N] = a[M,L] · b[N,L]ᵀ`: a linear layer's forward, with a weight stored `[out, in]`.
    pub const NT: Self = Self { trans_a: false, trans_b: true, accumulate: false };
    /// `out[M,N] = a[M,L] · b[L,N]`: the gradient of a linear layer's input.
    pub const NN: Self = Self { trans_a: false, trans_b: false, accumulate: false };
    /// `out[M,N] += a[L,M]ᵀ · b[L,N]`: the gradient of a weight, accumulated in f32.
    pub const TN_ACCUMULATE: Self = Self { trans_a: true, trans_b: false, accumulate: true };
}

/// What is added to a product before it is rounded: `out = round((a·bᵀ + bias) + residual)`, the sums in f32.
///
/// A pass of its own for either would read and write the result once more (2·M·N elements) and round in between. On CUDA
/// cuBLASLt adds a bias after the residual, and rounds results of 16 bits in between, too, as `cuda/cublaslt.rs` says.
#[derive(Debug, Clone, Copy)]
pub struct Epilogue<'a> {
    /// `[N]`, f32, bf16 or f16; every row gets it.
    pub bias: Option<View<'a>>,
    /// Of as many elements as the result.
    pub residual: Residual<'a>,
}

impl Epilogue<'_> {
    /// Nothing.
    pub const NONE: Self = Self { bias: None, residual: Residual::None };

    /// Whether it adds nothing.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.bias.is_none() && matches!(self.residual, Residual::None)
    }
}

/// The tensor around which a product is a branch. Where it lies changes no bit.
#[derive(Debug, Clone, Copy)]
pub enum Residual<'a> {
    /// None.
    None,
    /// What the result's memory holds.
    InPlace,
    /// Another tensor, f32, bf16 or f16.
    Of(View<'a>),
}

impl<'a> Residual<'a> {
    /// The tensor that is added to the product in `out`, if any.
    pub(crate) fn view<'v>(self, out: &'v ViewMut<'_>) -> Option<View<'v>>
    where
        'a: 'v,
    {
        match self {
            Self::None => None,
            Self::InPlace => Some(out.view()),
            Self::Of(view) => Some(view),
        }
    }
}

/// One of [several products](Matmul::together): `out[M,N] (+)= Σ op(a)[M,L] · op(b)[L,N]`, and an epilogue.
#[derive(Debug)]
pub struct Product<'a> {
    /// Each a and b; L may differ. What has several is summed in f32 in their order, in an `out` of f32, as products that accumulate are.
    pub terms: &'a [(View<'a>, View<'a>)],
    /// The result.
    pub out: ViewMut<'a>,
    /// Of each term.
    pub spec: MatmulSpec,
    /// With [`MatmulSpec::NT`] and one term; else [`Epilogue::NONE`].
    pub epilogue: Epilogue<'a>,
}

/// The products of [`Matmul::together`], one after the other.
///
/// # Errors
/// The backend failed.
pub fn one_by_one<M: Matmul + ?Sized>(backend: &M, products: &mut [Product<'_>]) -> Result {
    for Product { terms, out, spec, epilogue } in products {
        for (index, &(a, b)) in terms.iter().enumerate() {
            let spec = MatmulSpec { accumulate: spec.accumulate || index > 0, ..*spec };
            if epilogue.is_none() {
                backend.matmul(a, b, out.reborrow(), spec)?;
            } else {
                assert_eq!(spec, MatmulSpec::NT, "a product with an epilogue is that of a linear layer");
                backend.matmul_nt(a, b, out.reborrow(), *epilogue)?;
            }
        }
    }
    Ok(())
}

/// Matrix products.
pub trait Matmul: Send + Sync {
    /// `out[M,N] (+)= op(a)[M,L] · op(b)[L,N]`; operands f32, bf16 or f16, leading dimensions flattened to rows.
    ///
    /// # Errors
    /// The backend failed.
    fn matmul(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>, spec: MatmulSpec) -> Result;

    /// `out[M,N] = a[M,L] · b[N,L]ᵀ` and an epilogue, rounded once: a linear layer with what is added to it. Without an epilogue
    /// it has the bits of [`MatmulSpec::NT`].
    ///
    /// FLOPs: 2·M·N·L, and M·N each for a bias and a residual. Bytes: a, b and out once, N elements of a bias, M·N of a
    /// residual.
    ///
    /// # Errors
    /// The backend failed.
    fn matmul_nt(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>, epilogue: Epilogue<'_>) -> Result;

    /// Several products, of which none reads or writes what another writes, with the bits of [one after the other](one_by_one). A
    /// backend whose threads wait for each other at the end of an operation has them wait once.
    ///
    /// # Errors
    /// The backend failed.
    fn together(&self, products: &mut [Product<'_>]) -> Result {
        one_by_one(self, products)
    }

    /// Bytes of [`Packing`](crate::Packing) in which a b of `[rows, cols]` can stay packed for products of its dtype with it and with its
    /// transpose; zero if this backend gains nothing from that.
    fn packed_bytes(&self, _: [usize; 2], _: DType) -> usize {
        0
    }
}

/// Matrix products with a quantized right side.
pub trait QuantizedMatmul: Send + Sync {
    /// `out[M,N] = a[M,L] · b[N,L]ᵀ` and an epilogue, rounded once; a and out f32, bf16 or f16, leading dimensions flattened
    /// to rows. FLOPs and bytes are those of [`Matmul::matmul_nt`], of b its codes.
    ///
    /// The product is that of the product with the dequantized b, whose elements are exact in f32, but for the rounding of sums; a
    /// backend may take elements of a of 16 bits with an error of up to 2⁻¹⁵ of the largest of the 128 that meet a block of b.
    ///
    /// # Errors
    /// The backend failed.
    fn matmul_nt(
        &self,
        a: View<'_>,
        b: QuantizedView<'_>,
        out: ViewMut<'_>,
        epilogue: Epilogue<'_>,
    ) -> Result;
}

/// Root-mean-square normalization (Zhang and Sennrich, arXiv 1910.07467).
pub trait RmsNorm: Send + Sync {
    /// `rstd[r] = 1/√(mean(x[r]²) + eps)`, `out[r] = x[r]·rstd[r]·weight`; x `[R, D]`, weight `[D]`, rstd f32 `[R]`.
    ///
    /// # Errors
    /// The backend failed.
    fn forward(&self, x: View<'_>, weight: View<'_>, eps: f32, out: ViewMut<'_>, rstd: ViewMut<'_>)
    -> Result;

    /// Gradients: `dx (+)= …`, adding when `accumulate_dx`, and `dweight[D] f32 += Σ_r dout·x·rstd`.
    ///
    /// # Errors
    /// The backend failed.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    fn backward(
        &self,
        dout: View<'_>,
        x: View<'_>,
        weight: View<'_>,
        rstd: View<'_>,
        dx: ViewMut<'_>,
        accumulate_dx: bool,
        dweight: ViewMut<'_>,
    ) -> Result;

    /// `out[r] (+)= x[r] − mean(x[r])`, adding when `accumulate`: what makes of this norm that of Ba et al., arXiv 1607.06450, and of a
    /// gradient behind it the gradient in front of it. x and out `[R, D]`.
    ///
    /// # Errors
    /// The backend failed.
    fn center(&self, x: View<'_>, out: ViewMut<'_>, accumulate: bool) -> Result;
}

/// Which way to rotate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeDirection {
    /// The rotation itself.
    Forward,
    /// Its transpose, for gradients: the other way round, and multiplied by the same scale.
    Backward,
}

/// How the rotated elements of a head, of which there are 2P, are paired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairs {
    /// `(i, i + P)`, as Hugging Face has them.
    Halves,
    /// `(2i, 2i + 1)`, as the paper and DeepSeek have them.
    Neighbours,
}

/// Which elements of a head are rotated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RopeLayout {
    /// The first that is.
    pub first: usize,
    /// Of those from there on.
    pub pairs: RopePairs,
}

impl RopeLayout {
    /// From the beginning of each head, in halves.
    pub const HALVES: Self = Self { first: 0, pairs: RopePairs::Halves };
}

/// Rotary position embedding (Su et al., arXiv 2104.09864).
pub trait Rope: Send + Sync {
    /// Rotates elements `first..first + 2P` of each head of `x[T, heads, K]` in place, first + 2P ≤ K. `positions` i32 `[T]`, `inv_freq` f32
    /// `[P]`. Pair i of the layout is turned by `positions[t]·inv_freq[i]`; cosine and sine are multiplied by `scale`. The others stay.
    ///
    /// # Errors
    /// The backend failed.
    fn rotate(
        &self,
        x: ViewMut<'_>,
        positions: View<'_>,
        inv_freq: View<'_>,
        layout: RopeLayout,
        scale: f32,
        direction: RopeDirection,
    ) -> Result;
}

/// Shape-independent settings of causal attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionSpec {
    /// Multiplies the scores, usually `1/√K`.
    pub scale: f32,
    /// Sliding window: a query sees the last `window` positions including its own. `None`: all before it.
    pub window: Option<usize>,
    /// Scores x, which have been multiplied by `scale`, become `cap·tanh(x/cap)`, and never leave ±cap (Gemma 2, arXiv 2408.00118).
    pub cap: Option<f32>,
    /// Chunks of so many positions, the first from position 0 on: a query sees those before it in its own. Not together with a window.
    pub chunk: Option<usize>,
}

impl AttentionSpec {
    /// The first key that a query at `position` sees.
    #[must_use]
    pub fn first_key(&self, position: usize) -> usize {
        match (self.chunk, self.window) {
            (Some(chunk), _) => position / chunk * chunk,
            (None, Some(window)) => (position + 1).saturating_sub(window),
            (None, None) => 0,
        }
    }

    /// Behind the last query that sees `key`; `None` where all that follow do.
    #[must_use]
    pub fn queries_end(&self, key: usize) -> Option<usize> {
        match (self.chunk, self.window) {
            (Some(chunk), _) => Some((key / chunk + 1).saturating_mul(chunk)),
            (None, window) => window.map(|window| key.saturating_add(window)),
        }
    }
}

/// Keys and values as attention reads them.
#[derive(Debug, Clone, Copy)]
pub struct KeyValues<'a> {
    /// Keys: `[B,C,G,K]`, or `[N,P,G,K]` in pages.
    pub k: View<'a>,
    /// Values, in the shape of the keys.
    pub v: View<'a>,
    /// In pages (Kwon et al., "PagedAttention", arXiv 2309.06180): i32 `[B,M]`, where key j of sequence b is row `j % P` of page
    /// `pages[b, j / P]`, so that C = M·P. P is a power of two, at least [`PAGE_MIN`](Self::PAGE_MIN). Negative: there is no page;
    /// keys and values there are zeros, which is of use to nobody but harms no other query.
    pub pages: Option<View<'a>>,
}

impl<'a> KeyValues<'a> {
    /// Fewest positions of a page.
    pub const PAGE_MIN: usize = 64;

    /// Keys and values of each sequence in one run, `[B,C,G,K]`.
    pub fn rows(k: View<'a>, v: View<'a>) -> Self {
        Self { k, v, pages: None }
    }
}

/// Causal attention with grouped keys and values, without an S×S matrix in memory (Dao et al., arXiv 2205.14135).
pub trait Attention: Send + Sync {
    /// q `[B,S,H,K]`, out like q, lse f32 `[B,H,S]` (log-sum-exp of each row of scores).
    ///
    /// `starts` i32 `[B]`: the position of each sequence's first query. Query i of sequence b sits at position
    /// `p = starts[b]+i` and sees keys `j ≤ p` (and `j > p − window`, or `j ≥ ⌊p / chunk⌋·chunk`); C > every p. Where keys lie changes no bit.
    ///
    /// Keys that no query sees are not read, so that they may be anything. A key that some queries see and others do not must be
    /// finite for the results of the others: on a card a NaN or an infinity in its value reaches those of the same tile.
    /// The CPU keeps it from them, here and in [`backward`](Self::backward).
    ///
    /// # Errors
    /// The backend failed.
    fn forward(
        &self,
        q: View<'_>,
        keys: KeyValues<'_>,
        starts: View<'_>,
        out: ViewMut<'_>,
        lse: ViewMut<'_>,
        spec: AttentionSpec,
    ) -> Result;

    /// Writes k and, if there are any, values `[B,S,G,K]` to positions `starts[b]..starts[b]+S` of each sequence's pages `[N,P,G,K]`, those of
    /// values given with them, rounded to nearest even; `pages` as in [`KeyValues`]. Positions without a page are left out.
    ///
    /// # Errors
    /// The backend failed.
    fn append(
        &self,
        k: View<'_>,
        values: Option<(View<'_>, ViewMut<'_>)>,
        starts: View<'_>,
        pages: View<'_>,
        to_k: ViewMut<'_>,
    ) -> Result;

    /// Gradients for training, where all starts are 0 and C = S: writes dq, dk, dv (shapes of q, k, v). `out` and `lse` are what
    /// [`forward`](Self::forward) wrote or, with sinks, what [`Sinks::add`] made of it.
    ///
    /// # Errors
    /// The backend failed.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    fn backward(
        &self,
        q: View<'_>,
        k: View<'_>,
        v: View<'_>,
        out: View<'_>,
        lse: View<'_>,
        dout: View<'_>,
        dq: ViewMut<'_>,
        dk: ViewMut<'_>,
        dv: ViewMut<'_>,
        spec: AttentionSpec,
    ) -> Result;
}

/// Attention sinks (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453; a learned number for
/// each head, as here, in gpt-oss, OpenAI, arXiv 2508.10925): every row of scores has one more, of a key whose value is zero, so that
/// a query need not attend to anything.
///
/// They are a pass of their own over what [`Attention::forward`] wrote, in one run or in pages alike, and not part of its kernels: it
/// reads and writes out and lse once, 2·B·S·H·K elements against 4·K operations for each pair of a query and a key.
///
/// sinks `[H]`, out and dout `[B,S,H,K]`, all f32, bf16 or f16; lse f32 `[B,H,S]`.
pub trait Sinks: Send + Sync {
    /// `lse = ln(exp(lse) + exp(sinks[h]))`, and `out = out·exp(old lse − lse) = out·σ(old lse − sinks[h])`, rounded once.
    ///
    /// Where nothing was seen, an lse of −∞, out becomes zero, whatever it was, and lse the sink. A sink of −∞ changes nothing.
    ///
    /// # Errors
    /// The backend failed.
    fn add(&self, sinks: View<'_>, out: ViewMut<'_>, lse: ViewMut<'_>) -> Result;

    /// The gradient of sinks, from what [`add`](Self::add) left in out and lse:
    /// `dsinks[h] −= Σ_bs exp(sinks[h] − lse[b,h,s])·Σ_k dout·out`, f32 `[H]`. Those of queries, keys and values are what
    /// [`Attention::backward`] makes of the same out and lse.
    ///
    /// # Errors
    /// The backend failed.
    fn backward(
        &self,
        sinks: View<'_>,
        out: View<'_>,
        lse: View<'_>,
        dout: View<'_>,
        dsinks: ViewMut<'_>,
    ) -> Result;
}

/// What is done to the gate before up is multiplied by it: `f(x) = x·share(x)` with a share that goes from 0 to 1, or that
/// share alone, and `out = f(gate)·up`. [`ClampedSwish`](Self::ClampedSwish) holds both of them first, and adds 1 to up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum GateFunction {
    /// `x·σ(x)`, σ the logistic function; also called swish. With it the activation is SwiGLU.
    #[default]
    Silu,
    /// `x·Φ(x)`, Φ the normal distribution (Hendrycks and Gimpel, arXiv 1606.08415): GELU, by the error function. GEGLU with it.
    Gelu,
    /// `x·½(1 + tanh(√(2/π)·(x + 0.044715·x³)))`, the same article's approximation of GELU.
    GeluTanh,
    /// That of gpt-oss (OpenAI, arXiv 2508.10925): `out = f(g)·(u + 1)` with `f(x) = x·σ(1.702·x)`, g the gate but at most 7, and u
    /// up, held between −7 and 7. Beyond these limits gradients are 0; at them they are not. NaNs stay NaNs.
    ClampedSwish,
    /// `σ(x)`: up is let through by a part. The gated linear unit (Dauphin et al., arXiv 1612.08083).
    Sigmoid,
}

impl GateFunction {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Silu, Self::Gelu, Self::GeluTanh, Self::ClampedSwish, Self::Sigmoid];
    /// What multiplies x in the σ of [`ClampedSwish`](Self::ClampedSwish): σ is Φ then, nearly.
    pub const SWISH_SLOPE: f64 = 1.702;
    /// The most that [`ClampedSwish`](Self::ClampedSwish) takes of a gate, and of an up of either sign.
    pub const SWISH_LIMIT: f64 = 7.0;
}

/// Gated activations (Shazeer, arXiv 2002.05202).
pub trait Activation: Send + Sync {
    /// `out = f(gate)·up`, all `[T, F]`, or as [`GateFunction::ClampedSwish`] says.
    ///
    /// It is a pass of its own and no [`Epilogue`] of the two products before it. A product of both would hold two tiles of sums
    /// where it holds one, so tiles of half the size, which pack an operand twice as often (`kernels/src/cpu/matmul.rs`)
    /// or need twice the registers, and no kernel of cuBLASLt has it. It would save reading gate and up, 2·T·F elements against
    /// 4·T·F·D operations, and writing them only where backward does not need them: not in a forward that keeps
    /// activations, nor in the one that backward repeats.
    ///
    /// # Errors
    /// The backend failed.
    fn gated(&self, f: GateFunction, gate: View<'_>, up: View<'_>, out: ViewMut<'_>) -> Result;

    /// Its gradients, `dgate = dout·up·f′(gate)` and `dup = dout·f(gate)`, which are overwritten. Those of
    /// [`GateFunction::ClampedSwish`] are `dout·(u + 1)·f′(g)` where gate ≤ 7 and `dout·f(g)` where −7 ≤ up ≤ 7, else 0.
    ///
    /// # Errors
    /// The backend failed.
    fn gated_backward(
        &self,
        f: GateFunction,
        gate: View<'_>,
        up: View<'_>,
        dout: View<'_>,
        dgate: ViewMut<'_>,
        dup: ViewMut<'_>,
    ) -> Result;
}

/// Table look-up.
pub trait Embedding: Send + Sync {
    /// `out[t] = table[ids[t]]`; ids i32 `[T]`, table `[V, D]`, out `[T, D]`. Ids are in range: the caller checked, as
    /// `TokenBatch` of `terrace-models` does. A card does not look.
    ///
    /// # Errors
    /// The backend failed.
    ///
    /// # Panics
    /// On the CPU: an id is out of range.
    fn gather(&self, ids: View<'_>, table: View<'_>, out: ViewMut<'_>) -> Result;

    /// `dtable[ids[t]] += dout[t]` in increasing t; dtable f32 `[V, D]`. Ids are in range, as for [`gather`](Self::gather).
    ///
    /// # Errors
    /// The backend failed.
    ///
    /// # Panics
    /// As [`gather`](Self::gather).
    fn scatter_add(&self, ids: View<'_>, dout: View<'_>, dtable: ViewMut<'_>) -> Result;
}

/// Softmax cross-entropy over rows of logits.
pub trait CrossEntropy: Send + Sync {
    /// `loss[0] += Σ_r (lse(logits[r]) − logits[r, labels[r]])` over rows with `labels[r] ≥ 0`; logits `[R, V]`
    /// (f32 or bf16), labels i32 `[R]` (negative: ignored), loss f64 `[1]`, rows added in order.
    ///
    /// # Errors
    /// The backend failed.
    fn loss(&self, logits: View<'_>, labels: View<'_>, loss: ViewMut<'_>) -> Result;

    /// As [`loss`](Self::loss), and replaces logits by `scale·(softmax(logits) − onehot(label))`, zero in ignored rows.
    ///
    /// Of logits that [`Elementwise::cap`] made by a `cap`, the gradient is that of what it was given: times `1 − (logit/cap)²`. It is
    /// taken here because the capped logits are, which this overwrites, so that no copy of them is kept.
    ///
    /// # Errors
    /// The backend failed.
    fn loss_and_gradient(
        &self,
        logits: ViewMut<'_>,
        labels: View<'_>,
        scale: f32,
        cap: Option<f32>,
        loss: ViewMut<'_>,
    ) -> Result;
}

/// Element by element. Shapes of all operands are equal unless said.
pub trait Elementwise: Send + Sync {
    /// `out = a + b`.
    ///
    /// # Errors
    /// The backend failed.
    fn add(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>) -> Result;

    /// `acc += x`.
    ///
    /// # Errors
    /// The backend failed.
    fn add_assign(&self, acc: ViewMut<'_>, x: View<'_>) -> Result;

    /// `x[r] += bias` for every row of x `[R, N]`; bias `[N]`.
    ///
    /// # Errors
    /// The backend failed.
    fn add_bias(&self, x: ViewMut<'_>, bias: View<'_>) -> Result;

    /// `x = factor·x + offset`, in f32. One of the two that changes nothing costs no rounding.
    ///
    /// # Errors
    /// The backend failed.
    fn affine(&self, x: ViewMut<'_>, factor: f32, offset: f32) -> Result;

    /// `out = a·b`, in f32.
    ///
    /// # Errors
    /// The backend failed.
    fn multiply(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>) -> Result;

    /// `x = factor·x` with a factor of one element, in f32.
    ///
    /// # Errors
    /// The backend failed.
    fn scale(&self, x: ViewMut<'_>, factor: View<'_>) -> Result;

    /// `x = cap·tanh(x/cap)`, in f32: nearly x where that is small, and never beyond ±cap. As Bello et al., arXiv 1611.09940, did to logits.
    /// For its gradient see [`CrossEntropy::loss_and_gradient`].
    ///
    /// # Errors
    /// The backend failed.
    fn cap(&self, x: ViewMut<'_>, cap: f32) -> Result;

    /// `out = x` with a change of dtype (f32, bf16, f16), rounding to nearest even; equal dtypes copy.
    ///
    /// # Errors
    /// The backend failed.
    fn cast(&self, x: View<'_>, out: ViewMut<'_>) -> Result;

    /// Sets every byte to zero.
    ///
    /// # Errors
    /// The backend failed.
    fn zero(&self, out: ViewMut<'_>) -> Result;
}

/// Sums.
pub trait Reduce: Send + Sync {
    /// `out[N] f32 += Σ_r x[r]`; x `[R, N]`: the gradient of a bias.
    ///
    /// # Errors
    /// The backend failed.
    fn sum_rows(&self, x: View<'_>, out: ViewMut<'_>) -> Result;
}

/// What makes scores of a token's logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scores {
    /// `exp(x) / Σ exp(x)` over all experts.
    Softmax,
    /// `1 / (1 + exp(−x))` of each by itself.
    Sigmoid,
}

/// What ranks groups of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupScore {
    /// The largest of what its experts are compared by (DeepSeek-V2, arXiv 2405.04434).
    Largest,
    /// The sum of the two largest scores, with biases if there are any (DeepSeek-V3, arXiv 2412.19437).
    TwoLargest,
}

/// Experts in groups of consecutive ones, as many in each, of which a token chooses from some groups only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Groups, which divide E; at most [`COUNT_MAX`](Self::COUNT_MAX).
    pub count: usize,
    /// Groups that a token chooses from: those of the largest scores, of equal ones the lower group.
    pub kept: usize,
    /// What a group's score is. One that is a NaN, which it is where all, or of two all but one, are, counts as less than everything else.
    pub by: GroupScore,
}

impl ExpertGroups {
    /// Most groups: on a card their scores are in a block's shared memory.
    pub const COUNT_MAX: usize = 512;
}

/// How experts are chosen, and what their weights are.
#[derive(Debug, Clone, Copy)]
pub struct Gating<'a> {
    /// What is compared, and weighs.
    pub scores: Scores,
    /// f32 `[E]`: what is added to scores where they are compared, and not where they weigh (Wang et al., arXiv 2408.15664).
    pub bias: Option<View<'a>>,
    /// The weights of a token are divided by their sum.
    pub normalize: bool,
    /// What they are multiplied by in the end.
    pub scale: f32,
    /// Where a token may not choose from all experts.
    pub groups: Option<ExpertGroups>,
}

impl Gating<'static> {
    /// The softmax of all logits, without bias or groups.
    pub const fn softmax(normalize: bool) -> Self {
        Self { scores: Scores::Softmax, bias: None, normalize, scale: 1.0, groups: None }
    }
}

/// Mixture of experts: each token goes through a few of many feed-forwards (Shazeer et al., arXiv 1701.06538; as here, Jiang et al.,
/// "Mixtral of Experts", arXiv 2401.04088).
///
/// E experts, X of them chosen by each token, R = T·X *routed rows*: one for each token and choice, those of expert 0 first, those of
/// one expert in the order of their tokens. `rows` i32 `[T, X]` names the routed row of each choice; each routed row is named once.
/// What is not so, and a `chosen` that is no expert, the CPU refuses by a panic where it would harm; a card does not look.
pub trait Experts: Send + Sync {
    /// What tokens choose, from `logits[T, E]`, whose scores `gating` makes in f32: `chosen` i32 `[T, X]`, the experts of the X largest
    /// logits, or, with a bias, of the X largest sums of score and bias, the largest first, of equal ones the lower expert; `weights` f32
    /// `[T, X]`, their scores, divided by the sum of the X if they are normalized, times the scale; `rows`; and `starts` i32 `[E + 1]`, the
    /// first routed row of each expert and R.
    ///
    /// With groups the X are those of the experts in the groups that are kept, at least X of them; that has no gradient.
    ///
    /// A NaN counts as less than everything else: whatever the logits are, each token chooses X different experts.
    ///
    /// # Errors
    /// The backend failed.
    fn route(
        &self,
        logits: View<'_>,
        gating: Gating<'_>,
        weights: ViewMut<'_>,
        chosen: ViewMut<'_>,
        rows: ViewMut<'_>,
        starts: ViewMut<'_>,
    ) -> Result;

    /// Writes the gradient of logits over `dlogits[T, E]`, from `dweights` f32 `[T, X]` and what [`route`](Self::route) was given and
    /// wrote. With p the scores, c the scale, and g zero for experts that were not chosen and, if normalized, `(c·dw − Σ dw·w) / Σ p` with
    /// sums over the chosen for those that were, else `c·dw`: `p·(g − Σ p·g)` of a softmax, `p·(1 − p)·g` of sigmoids.
    ///
    /// # Errors
    /// The backend failed.
    fn route_backward(
        &self,
        logits: View<'_>,
        gating: Gating<'_>,
        weights: View<'_>,
        chosen: View<'_>,
        dweights: View<'_>,
        dlogits: ViewMut<'_>,
    ) -> Result;

    /// `starts` of [`route`](Self::route), of which the last is `routed`, as numbers of the host: the one thing that it hears of a
    /// tensor's contents, because products of the rows of an expert need to know which they are. A card is waited for. A planning
    /// run gets equal shares.
    ///
    /// # Errors
    /// The backend failed, or has computed numbers that are none.
    fn starts(&self, starts: View<'_>, routed: usize) -> Result<Vec<usize>>;

    /// `out[rows[t, j]] = x[t]`: x `[T, D]`, out `[R, D]`.
    ///
    /// # Errors
    /// The backend failed.
    fn spread(&self, x: View<'_>, rows: View<'_>, out: ViewMut<'_>) -> Result;

    /// `out[t] = residual[t] + Σ_j x[rows[t, j]]`, j ascending, in f32, rounded once: x `[R, D]`, out and the residual `[T, D]`.
    ///
    /// # Errors
    /// The backend failed.
    fn collect(&self, x: View<'_>, rows: View<'_>, residual: Residual<'_>, out: ViewMut<'_>) -> Result;

    /// `out[r] = w·x[r]`, where r = `rows[t, j]` and w = `weights[t, j]`: x and out `[R, F]`, weights f32 `[T, X]`.
    ///
    /// # Errors
    /// The backend failed.
    fn weigh(&self, x: View<'_>, rows: View<'_>, weights: View<'_>, out: ViewMut<'_>) -> Result;

    /// Its gradients: `dweights[t, j] = Σ_f d[r]·x[r]`, f32 `[T, X]`, and then `d[r] = w·d[r]`, where `d[R, F]` is the gradient of what
    /// [`weigh`](Self::weigh) wrote, and becomes that of x.
    ///
    /// # Errors
    /// The backend failed.
    fn weigh_backward(
        &self,
        d: ViewMut<'_>,
        x: View<'_>,
        rows: View<'_>,
        weights: View<'_>,
        dweights: ViewMut<'_>,
    ) -> Result;
}

/// One backend's implementation of every operation.
#[derive(Clone)]
#[expect(missing_docs, reason = "each field is its trait")]
pub struct KernelSet {
    pub matmul: Arc<dyn Matmul>,
    pub quantized_matmul: Arc<dyn QuantizedMatmul>,
    pub rms_norm: Arc<dyn RmsNorm>,
    pub rope: Arc<dyn Rope>,
    pub columns: Arc<dyn Columns>,
    pub attention: Arc<dyn Attention>,
    pub sinks: Arc<dyn Sinks>,
    pub activation: Arc<dyn Activation>,
    pub embedding: Arc<dyn Embedding>,
    pub cross_entropy: Arc<dyn CrossEntropy>,
    pub elementwise: Arc<dyn Elementwise>,
    pub reduce: Arc<dyn Reduce>,
    pub experts: Arc<dyn Experts>,
    pub delta_rule: Arc<dyn DeltaRule>,
}

impl std::fmt::Debug for KernelSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("KernelSet")
    }
}
