//! The gated delta rule, and the layer around it.

use super::Result;
use crate::{View, ViewMut};

/// Heads of a layer of the delta rule. Value head h reads key head `h / group()`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaSpec {
    /// Heads of queries and keys (G).
    pub key_heads: usize,
    /// Heads of values (H), a multiple of G.
    pub value_heads: usize,
    /// Elements of a query and of a key (K), at most [`KEY_SIZE_MAX`](Self::KEY_SIZE_MAX).
    pub key_size: usize,
    /// Elements of a value (V).
    pub value_size: usize,
}

impl DeltaSpec {
    /// Most elements of a key: on a card a column of a state stays in registers.
    pub const KEY_SIZE_MAX: usize = 256;

    /// Widest convolution in front of the rule.
    pub const TAPS_MAX: usize = 32;

    /// Channels of a position (C): queries `[G, K]`, keys `[G, K]`, values `[H, V]`.
    #[must_use]
    pub const fn channels(&self) -> usize {
        2 * self.key_heads * self.key_size + self.value_heads * self.value_size
    }

    /// Value heads of a key head.
    #[must_use]
    pub const fn group(&self) -> usize {
        self.value_heads / self.key_heads
    }
}

/// What a recurrent layer carries from one pass of a generation to the next, one state for every sequence, in N slots.
#[derive(Debug)]
pub struct Carried<'a> {
    /// `[N, …]`, as the operation says.
    pub state: ViewMut<'a>,
    /// i32 `[B]`: the slot of each sequence, all different.
    pub slots: View<'a>,
    /// i32 `[B]`: the position of each sequence's first token of this pass. Where it is 0 the state counts as zeros, whatever is there.
    pub starts: View<'a>,
    /// i32 `[B]`: the row, of all B·S, of each sequence's last token. What follows it in the sequence is padding: it does not change the
    /// state, and what comes out there is of use to nobody.
    pub last: View<'a>,
}

/// The gated delta rule (Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv 2412.06464; the layer around it as in
/// `transformers/models/qwen3_5/modeling_qwen3_5.py`): attention whose memory is a matrix for each head. It forgets by a factor, and
/// what it holds for a key is corrected towards the key's value.
///
/// B sequences of S positions, T = B·S; heads and channels (C) as [`DeltaSpec`] has them; W taps of a convolution, 1 to
/// [`TAPS_MAX`](DeltaSpec::TAPS_MAX). A [`Carried`] that names a slot twice, or a row of another sequence, the CPU refuses by a panic; a
/// card does not look.
pub trait DeltaRule: Send + Sync {
    /// `out[b,s,c] = silu(Σ_w weight[c,w]·x[b, s−W+1+w, c])`, w ascending: x and out `[B,S,C]`, weight `[C,W]`.
    ///
    /// What is before the first position is zero or, with a [`Carried`] of states `[N, W−1, C]` of x's dtype, the rows of the sequence's
    /// state, oldest first; the state is then the last W−1 inputs, up to the last token.
    ///
    /// # Errors
    /// The backend failed.
    fn convolve(
        &self,
        x: View<'_>,
        weight: View<'_>,
        carried: Option<Carried<'_>>,
        out: ViewMut<'_>,
    ) -> Result;

    /// Its gradients, where nothing was carried: dx is written, dweight f32 `[C,W]` added to.
    ///
    /// # Errors
    /// The backend failed.
    fn convolve_backward(
        &self,
        x: View<'_>,
        weight: View<'_>,
        dout: View<'_>,
        dx: ViewMut<'_>,
        dweight: ViewMut<'_>,
    ) -> Result;

    /// `decay[t,h] = −exp(a_log[h])·softplus(a[t,h] + dt_bias[h])`, the logarithm of the factor by which a state is kept, and
    /// `beta[t,h] = σ(b[t,h])`: a and b `[T,H]`, a_log and dt_bias `[H]`, decay and beta f32 `[T,H]`. softplus is `ln(1 + eˣ)`, and x above
    /// 20.
    ///
    /// # Errors
    /// The backend failed.
    fn gates(
        &self,
        a: View<'_>,
        b: View<'_>,
        a_log: View<'_>,
        dt_bias: View<'_>,
        decay: ViewMut<'_>,
        beta: ViewMut<'_>,
    ) -> Result;

    /// Its gradients: da and db `[T,H]` are written, da_log and ddt_bias f32 `[H]` added to; ddecay and dbeta are f32 `[T,H]`.
    ///
    /// # Errors
    /// The backend failed.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    fn gates_backward(
        &self,
        a: View<'_>,
        b: View<'_>,
        a_log: View<'_>,
        dt_bias: View<'_>,
        ddecay: View<'_>,
        dbeta: View<'_>,
        da: ViewMut<'_>,
        db: ViewMut<'_>,
        da_log: ViewMut<'_>,
        ddt_bias: ViewMut<'_>,
    ) -> Result;

    /// The rule. With q, k and v of a position, which are its channels in the order of [`DeltaSpec::channels`],
    /// `q̂ = q/√(Σq² + 1e-6)·K^−½` and `k̂ = k/√(Σk² + 1e-6)`, each value head takes its state S `[K,V]` from position to position:
    ///
    /// `S ← exp(decay)·S`, `δ = beta·(v − Sᵀk̂)`, `S ← S + k̂·δᵀ`, `out = Sᵀq̂`.
    ///
    /// qkv `[B,S,C]`, decay and beta f32 `[T,H]`, out `[B,S,H,V]`. States are zeros at first or, with a [`Carried`] of states f32
    /// `[N,H,K,V]`, the sequence's, which is left as it is after the last token; what comes out after that one is zero.
    ///
    /// # Errors
    /// The backend failed.
    fn scan(
        &self,
        qkv: View<'_>,
        decay: View<'_>,
        beta: View<'_>,
        spec: DeltaSpec,
        carried: Option<Carried<'_>>,
        out: ViewMut<'_>,
    ) -> Result;

    /// Its gradients, where nothing was carried: dqkv `[B,S,C]`, ddecay and dbeta f32 `[T,H]` are written. States are computed again, and
    /// never found by dividing by a factor, which may be 0. `scratch` is f32 of [`delta_scratch`] elements; what is in it does not matter.
    ///
    /// # Errors
    /// The backend failed.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    fn scan_backward(
        &self,
        qkv: View<'_>,
        decay: View<'_>,
        beta: View<'_>,
        spec: DeltaSpec,
        dout: View<'_>,
        dqkv: ViewMut<'_>,
        ddecay: ViewMut<'_>,
        dbeta: ViewMut<'_>,
        scratch: ViewMut<'_>,
    ) -> Result;
}

/// What is added to the sum of squares of a query or a key.
pub(crate) const SQUARES_EPS: f64 = 1e-6;

/// Pairs of a sequence and a value head that go backward at a time, unless those of one key head are more.
const PAIRS_AT_ONCE: usize = 32;

/// f32 elements of the scratch of [`DeltaRule::scan_backward`], for every backend.
///
/// Pairs (b, h) go backward in waves of as many key heads as have 32 value heads (one, if it has more). For each pair of a wave there are,
/// with stretches of c = ⌈√S⌉ positions, n = ⌈S/c⌉ of them, and K rounded up to a multiple of 16: a state for each stretch and
/// each position of a stretch, and for each position of a stretch and every 32 columns of a state, the sums of these columns for the
/// gradients of query, key and both gates.
///
/// `min(B·H, 32)·((n + c)·K·V + c·⌈V/32⌉·(2·K + 2))`
#[must_use]
pub fn delta_scratch(sequences: usize, length: usize, spec: DeltaSpec) -> usize {
    let waves = Waves::new(sequences, length, spec);
    waves.pairs * waves.of_pair()
}

/// How [`DeltaRule::scan_backward`] is cut up, and what is where in its scratch: of each pair of a wave states `[stretches + positions][V·K]`
/// and sums `[parts][positions][2·K + 2]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Waves {
    /// Pairs of a wave, at most; those of a key head are in one.
    pub pairs: usize,
    /// Positions of a stretch (c).
    pub positions: usize,
    /// Stretches of a sequence.
    pub stretches: usize,
    /// Parts of the columns of a state.
    pub parts: usize,
    /// K, rounded up.
    pub key_size: usize,
    /// V.
    pub value_size: usize,
}

impl Waves {
    /// Columns of a part.
    pub const COLUMNS: usize = 32;

    pub fn new(sequences: usize, length: usize, spec: DeltaSpec) -> Self {
        let positions = length.isqrt() + usize::from(length.isqrt().pow(2) < length);
        let key_heads = (PAIRS_AT_ONCE / spec.group()).max(1);
        Self {
            pairs: spec.group() * key_heads.min(sequences * spec.key_heads),
            positions,
            stretches: length.div_ceil(positions.max(1)),
            parts: spec.value_size.div_ceil(Self::COLUMNS),
            key_size: spec.key_size.next_multiple_of(16),
            value_size: spec.value_size,
        }
    }

    /// Elements of a state.
    pub fn of_state(&self) -> usize {
        self.key_size * self.value_size
    }

    /// Elements of the sums of a part at a position.
    pub fn of_sums(&self) -> usize {
        2 * self.key_size + 2
    }

    /// Elements of all states of a pair.
    pub fn of_states(&self) -> usize {
        (self.stretches + self.positions) * self.of_state()
    }

    /// Elements of a pair.
    pub fn of_pair(&self) -> usize {
        self.of_states() + self.parts * self.positions * self.of_sums()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_is_what_the_formula_says() {
        let spec = DeltaSpec { key_heads: 16, value_heads: 32, key_size: 128, value_size: 128 };
        assert_eq!(delta_scratch(1, 2048, spec), 32 * ((45 + 46) * 128 * 128 + 46 * 4 * 258));
        // Fewer pairs than a wave has; K and V rounded up where they are.
        let spec = DeltaSpec { key_heads: 2, value_heads: 6, key_size: 5, value_size: 33 };
        assert_eq!(delta_scratch(2, 10, spec), 12 * ((3 + 4) * 16 * 33 + 4 * 2 * 34));
        // Waves of whole key heads, and of one.
        let spec = DeltaSpec { key_heads: 40, value_heads: 120, key_size: 16, value_size: 1 };
        assert_eq!(Waves::new(1, 1, spec).pairs, 30);
        let spec = DeltaSpec { key_heads: 2, value_heads: 80, key_size: 16, value_size: 1 };
        assert_eq!(Waves::new(3, 1, spec).pairs, 40);
    }

    #[test]
    fn stretches_cover_a_sequence() {
        let spec = DeltaSpec { key_heads: 1, value_heads: 1, key_size: 1, value_size: 1 };
        for length in 0..2000 {
            let Waves { positions, stretches, .. } = Waves::new(1, length, spec);
            assert!(positions * positions >= length && positions * stretches >= length, "{length}");
            assert!(length == 0 || (stretches - 1) * positions < length, "{length}");
            assert!(length == 0 || (positions - 1).pow(2) < length, "{length}");
        }
    }
}
