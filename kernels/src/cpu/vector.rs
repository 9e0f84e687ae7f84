//! Loops over slices of f32 that the compiler vectorizes, compiled once per instruction set.
//!
//! Sums run in [`LANES`] accumulators (lane i takes elements i, i + LANES, …) that are added pairwise at the end, so
//! their order depends on the length alone.

use super::isa::fma;
use half::{bf16, f16};

/// Accumulators of a sum: one 512-bit or two 256-bit registers.
pub const LANES: usize = 16;

multiversion! {
    /// Exact.
    pub fn widen_bf16(src: &[bf16], dst: &mut [f32]) {
        assert_eq!(src.len(), dst.len());
        for (dst, src) in dst.iter_mut().zip(src) {
            *dst = f32::from_bits(u32::from(src.to_bits()) << 16);
        }
    }
}

multiversion! {
    /// To nearest even; NaNs stay NaNs (quiet), overflow gives infinity: the bits of `half::bf16::from_f32`.
    pub fn narrow_bf16(src: &[f32], dst: &mut [bf16]) {
        assert_eq!(src.len(), dst.len());
        for (dst, src) in dst.iter_mut().zip(src) {
            let bits = src.to_bits();
            let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
            let quiet = bits >> 16 | 0x40;
            let nan = bits & 0x7FFF_FFFF > 0x7F80_0000;
            *dst = bf16::from_bits(if nan { quiet } else { rounded } as u16);
        }
    }
}

multiversion! {
    /// Exact.
    pub fn widen_f16(src: &[f16], dst: &mut [f32]) {
        half::slice::HalfFloatSliceExt::convert_to_f32_slice(src, dst);
    }
}

multiversion! {
    /// To nearest even.
    pub fn narrow_f16(src: &[f32], dst: &mut [f16]) {
        half::slice::HalfFloatSliceExt::convert_from_f32_slice(dst, src);
    }
}

multiversion! {
    /// Whether no element is infinite or NaN.
    pub fn is_finite(x: &[f32]) -> bool {
        const EXPONENT: i32 = 0x7F80_0000;
        x.iter().fold(0, |most: i32, x| most.max(x.to_bits() as i32 & EXPONENT)) < EXPONENT
    }
}

multiversion! {
    /// `a += b`.
    pub fn add_assign(a: &mut [f32], b: &[f32]) {
        for (a, b) in a.iter_mut().zip(b) {
            *a += b;
        }
    }
}

multiversion! {
    /// `out = a + b`.
    pub fn add(a: &[f32], b: &[f32], out: &mut [f32]) {
        for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
            *out = a + b;
        }
    }
}

multiversion! {
    /// `out = a·b`.
    pub fn multiply(a: &[f32], b: &[f32], out: &mut [f32]) {
        for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
            *out = a * b;
        }
    }
}

multiversion! {
    /// `a *= factor`.
    pub fn scale(a: &mut [f32], factor: f32) {
        for a in a {
            *a *= factor;
        }
    }
}

multiversion! {
    /// `a = factor·a + offset`, each rounded.
    pub fn affine(a: &mut [f32], factor: f32, offset: f32) {
        for a in a {
            *a = *a * factor + offset;
        }
    }
}

multiversion! {
    /// `x = cap·tanh(x/cap)`.
    pub fn cap(x: &mut [f32], cap: f32) {
        for x in x {
            *x = cap * tanh::<FMA>(*x / cap);
        }
    }
}

multiversion! {
    /// `x = cap·tanh(scale·x/cap)`.
    pub fn cap_scaled(x: &mut [f32], scale: f32, cap: f32) {
        let factor = scale / cap;
        for x in x {
            *x = cap * tanh::<FMA>(*x * factor);
        }
    }
}

multiversion! {
    /// `d *= 1 − (capped/cap)²`.
    pub fn cap_gradient(d: &mut [f32], capped: &[f32], cap: f32) {
        for (d, capped) in d.iter_mut().zip(capped) {
            let t = capped / cap;
            *d *= fma::<FMA>(-t, t, 1.0);
        }
    }
}

multiversion! {
    /// `Σ a·b`.
    pub fn dot(a: &[f32], b: &[f32]) -> f32 {
        reduce2(a, b, |acc, a, b| fma::<FMA>(a, b, acc))
    }
}

multiversion! {
    /// The largest element, `-∞` if there is none; NaNs are passed over.
    pub fn max(x: &[f32]) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        let (chunks, tail) = x.as_chunks::<LANES>();
        for chunk in chunks {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                *lane = if *x > *lane { *x } else { *lane };
            }
        }
        lanes.iter().chain(tail).fold(f32::NEG_INFINITY, |max, x| if *x > max { *x } else { max })
    }
}

multiversion! {
    /// `x = exp(scale·x − shift)` in place; returns the sum of the results.
    pub fn exp_sum(x: &mut [f32], scale: f32, shift: f32) -> f32 {
        let mut lanes = [0.0f32; LANES];
        let (chunks, tail) = x.as_chunks_mut::<LANES>();
        for chunk in chunks {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                *x = exp::<FMA>(fma::<FMA>(*x, scale, -shift));
                *lane += *x;
            }
        }
        for (lane, x) in lanes.iter_mut().zip(tail) {
            *x = exp::<FMA>(fma::<FMA>(*x, scale, -shift));
            *lane += *x;
        }
        sum_lanes(lanes)
    }
}

multiversion! {
    /// `Σ x`.
    pub fn sum(x: &[f32]) -> f32 {
        reduce2(x, x, |acc, x, _| acc + x)
    }
}

multiversion! {
    /// `out += x − shift`.
    pub fn add_shifted(out: &mut [f32], x: &[f32], shift: f32) {
        for (out, x) in out.iter_mut().zip(x) {
            *out += x - shift;
        }
    }
}

multiversion! {
    /// `Σ exp(x − shift)`.
    pub fn sum_exp(x: &[f32], shift: f32) -> f32 {
        reduce2(x, x, |acc, x, _| acc + exp::<FMA>(x - shift))
    }
}

multiversion! {
    /// `x = exp(x − shift)·factor`.
    pub fn softmax_gradient(x: &mut [f32], shift: f32, factor: f32) {
        for x in x {
            *x = exp::<FMA>(*x - shift) * factor;
        }
    }
}

multiversion! {
    /// `x = 1 / (1 + exp(−x))`.
    pub fn sigmoids(x: &mut [f32]) {
        for x in x {
            *x = sigmoid::<FMA>(*x);
        }
    }
}

multiversion! {
    /// `scores = exp(scale·scores − lse)·(dp − delta)`: the gradient of a row of scaled scores. Leaves the probabilities in `dp`.
    pub fn score_gradient(scores: &mut [f32], dp: &mut [f32], scale: f32, lse: f32, delta: f32) {
        for (score, dp) in scores.iter_mut().zip(dp) {
            let p = exp::<FMA>(fma::<FMA>(*score, scale, -lse));
            *score = p * (*dp - delta);
            *dp = p;
        }
    }
}

multiversion! {
    /// The same with scores that are capped: `s = cap·t`, `t = tanh(scale·score/cap)`, `scores = exp(s − lse)·(dp − delta)·(1 − t²)`.
    pub fn capped_score_gradient(
        scores: &mut [f32],
        dp: &mut [f32],
        scale: f32,
        cap: f32,
        lse: f32,
        delta: f32,
    ) {
        let factor = scale / cap;
        for (score, dp) in scores.iter_mut().zip(dp) {
            let t = tanh::<FMA>(*score * factor);
            let p = exp::<FMA>(fma::<FMA>(t, cap, -lse));
            *score = p * (*dp - delta) * fma::<FMA>(-t, t, 1.0);
            *dp = p;
        }
    }
}

multiversion! {
    /// `acc[i] += Σ_j weights[j]·rows[j, i]`, j ascending. A few accumulators at a time stay in registers over all j.
    pub fn add_weighted_rows(acc: &mut [f32], weights: &[f32], rows: &[f32]) {
        let width = acc.len();
        let (chunks, tail) = acc.as_chunks_mut::<LANES>();
        for (chunk, acc) in chunks.iter_mut().enumerate() {
            let mut sums = *acc;
            for (weight, row) in weights.iter().zip(rows.chunks_exact(width)) {
                let row = &row[chunk * LANES..][..LANES];
                for i in 0..LANES {
                    sums[i] = fma::<FMA>(*weight, row[i], sums[i]);
                }
            }
            *acc = sums;
        }
        let first = width - tail.len();
        for (weight, row) in weights.iter().zip(rows.chunks_exact(width)) {
            for (acc, x) in tail.iter_mut().zip(&row[first..]) {
                *acc = fma::<FMA>(*weight, *x, *acc);
            }
        }
    }
}

multiversion! {
    /// `out = x·factor·weight`.
    pub fn scale_by(x: &[f32], factor: f32, weight: &[f32], out: &mut [f32]) {
        for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
            *out = x * factor * weight;
        }
    }
}

multiversion! {
    /// `Σ a·b·c`.
    pub fn dot3(a: &[f32], b: &[f32], c: &[f32]) -> f32 {
        let mut lanes = [0.0f32; LANES];
        let ((a_chunks, a_tail), (b_chunks, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
        let (c_chunks, c_tail) = c.as_chunks::<LANES>();
        for ((a, b), c) in a_chunks.iter().zip(b_chunks).zip(c_chunks) {
            for i in 0..LANES {
                lanes[i] = fma::<FMA>(a[i] * b[i], c[i], lanes[i]);
            }
        }
        for (((lane, a), b), c) in lanes.iter_mut().zip(a_tail).zip(b_tail).zip(c_tail) {
            *lane = fma::<FMA>(a * b, *c, *lane);
        }
        sum_lanes(lanes)
    }
}

multiversion! {
    /// `dx += rstd·(dout·weight − x·correction)`, the gradient of a normalized row.
    pub fn norm_gradient(
        dout: &[f32],
        x: &[f32],
        weight: &[f32],
        rstd: f32,
        correction: f32,
        dx: &mut [f32],
    ) {
        for (((dx, dout), x), weight) in dx.iter_mut().zip(dout).zip(x).zip(weight) {
            *dx += rstd * (dout * weight - x * correction);
        }
    }
}

multiversion! {
    /// `acc += a·b·factor`.
    pub fn multiply_add(acc: &mut [f32], a: &[f32], b: &[f32], factor: f32) {
        for ((acc, a), b) in acc.iter_mut().zip(a).zip(b) {
            *acc = fma::<FMA>(a * factor, *b, *acc);
        }
    }
}

multiversion! {
    /// Turns the pair `(low, high)` by the angles whose cosines and sines are given.
    pub fn rotate(low: &mut [f32], high: &mut [f32], cos: &[f32], sin: &[f32]) {
        for (((low, high), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
            let (a, b) = (*low, *high);
            *low = a * cos - b * sin;
            *high = b * cos + a * sin;
        }
    }
}

multiversion! {
    /// The same of pairs `(x[2i], x[2i + 1])`.
    pub fn rotate_neighbours(x: &mut [f32], cos: &[f32], sin: &[f32]) {
        for (([low, high], cos), sin) in x.as_chunks_mut().0.iter_mut().zip(cos).zip(sin) {
            let (a, b) = (*low, *high);
            *low = a * cos - b * sin;
            *high = b * cos + a * sin;
        }
    }
}

/// Folds two slices of equal length in [`LANES`] accumulators.
#[inline(always)]
fn reduce2(a: &[f32], b: &[f32], step: impl Fn(f32, f32, f32) -> f32) -> f32 {
    assert_eq!(a.len(), b.len());
    let mut lanes = [0.0f32; LANES];
    let ((a_chunks, a_tail), (b_chunks, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for i in 0..LANES {
            lanes[i] = step(lanes[i], a[i], b[i]);
        }
    }
    for ((lane, a), b) in lanes.iter_mut().zip(a_tail).zip(b_tail) {
        *lane = step(*lane, *a, *b);
    }
    sum_lanes(lanes)
}

/// Adds lanes pairwise.
#[inline(always)]
pub fn sum_lanes<const N: usize>(mut lanes: [f32; N]) -> f32 {
    let mut width = N / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// `1 / (1 + exp(−x))`.
#[inline(always)]
pub fn sigmoid<const FMA: bool>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<FMA>(-x))
}

/// `eˣ` within 2 units in the last place (2.4e-7) for results from 2⁻¹²⁶ to 2¹²⁷·⁵; 0 below, infinity above, NaN for NaN.
///
/// `x = n·ln 2 + r`, `|r| ≤ ln 2 / 2`; `eʳ` by Cephes' polynomial of degree 7 (`expf.c`), 2ⁿ through the exponent bits, which say
/// infinity for n = 128. Results from 2¹²⁷·⁵ to 2¹²⁸ would need another multiplication and nobody asks for them: exponents are
/// differences from a maximum, or those of [`sigmoid`].
#[inline(always)]
pub fn exp<const FMA: bool>(x: f32) -> f32 {
    /// Adding it leaves the integer part in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const LOWEST: f32 = -87.336_54;
    const HIGHEST: f32 = 88.7;

    let clamped = if x > HIGHEST { HIGHEST } else { x };
    let shifted = fma::<FMA>(clamped, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = fma::<FMA>(n, -LN2_LOW, fma::<FMA>(n, -LN2_HIGH, clamped));
    let mut p = 1.987_569_2e-4;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = fma::<FMA>(p, r, c);
    }
    let fraction = fma::<FMA>(p * r, r, r) + 1.0;
    let power = (shifted.to_bits() << 23).wrapping_add(1.0f32.to_bits());
    let result = fraction * f32::from_bits(power);
    if x < LOWEST { 0.0 } else { result }
}

/// `tanh x` within 2.4e-7 of itself, relatively; NaN for NaN.
///
/// Below 0.625 by Cephes' polynomial (`tanhf.c`), which loses nothing to the difference that `1 − 2/(e²ˣ + 1)` is above.
#[inline(always)]
pub fn tanh<const FMA: bool>(x: f32) -> f32 {
    let (size, square) = (x.abs(), x * x);
    let mut p = -5.704_988_7e-3;
    for c in [2.063_908_8e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1] {
        p = fma::<FMA>(p, square, c);
    }
    let near = fma::<FMA>(p * square, x, x);
    let far = 1.0 - 2.0 / (exp::<FMA>(2.0 * size) + 1.0);
    if size < 0.625 { near } else { far.copysign(x) }
}

/// `ln(1 + e)` for e from 0 to 1, NaN for NaN, within 3e-7 of itself.
///
/// It is `2·artanh z` with `z = e/(2 + e)`, at most ⅓, whose series `2z·(1 + z²/3 + z⁴/5 + …)` leaves 1.5e-8 of it after seven terms.
#[inline(always)]
pub fn ln_1p<const FMA: bool>(e: f32) -> f32 {
    let z = e / (2.0 + e);
    let square = z * z;
    let mut series = 1.0 / 13.0;
    for term in [1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0, 1.0] {
        series = fma::<FMA>(series, square, term);
    }
    2.0 * z * series
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    #[test]
    fn exp_is_close_over_the_whole_range() {
        let xs: Vec<f32> = (0..400_000).map(|i| -90.0 + i as f32 * 4.46e-4).collect();
        for isa in Isa::available() {
            let mut ys = xs.clone();
            exp_sum(isa, &mut ys, 1.0, 0.0);
            for (x, y) in xs.iter().zip(&ys).filter(|(x, _)| **x > -87.33 && **x < 88.37) {
                let exact = f64::from(*x).exp();
                let error = (f64::from(*y) - exact).abs() / exact;
                assert!(error < 2.4e-7, "{}: exp({x}) = {y}, {exact}", isa.name());
            }
        }
    }

    #[test]
    fn exp_of_extremes() {
        for isa in Isa::available() {
            let mut x = [0.0, f32::NEG_INFINITY, -1e30, -87.34, 88.4, 89.0, 3e38, f32::INFINITY, f32::NAN];
            exp_sum(isa, &mut x, 1.0, 0.0);
            assert_eq!(x[..4], [1.0, 0.0, 0.0, 0.0], "{}", isa.name());
            assert_eq!(x[4..8], [f32::INFINITY; 4], "{}", isa.name());
            assert!(x[8].is_nan(), "{}", isa.name());
        }
    }

    #[test]
    fn narrowing_gives_the_bits_of_half() {
        let mut bits: Vec<u32> = (0..65_536u32)
            .flat_map(|high| [0, 1, 0x7FFF, 0x8000, 0x8001].map(|low| high << 16 | low))
            .collect();
        bits.push(0x7F80_0001);
        let values: Vec<f32> = bits.iter().map(|bits| f32::from_bits(*bits)).collect();
        for isa in Isa::available() {
            let mut narrow = vec![bf16::ZERO; values.len()];
            narrow_bf16(isa, &values, &mut narrow);
            let mut narrow_half = vec![f16::ZERO; values.len()];
            narrow_f16(isa, &values, &mut narrow_half);
            for ((x, a), b) in values.iter().zip(&narrow).zip(&narrow_half) {
                assert_eq!(a.to_bits(), bf16::from_f32(*x).to_bits(), "{x} ({:#x})", x.to_bits());
                assert!(b.to_bits() == f16::from_f32(*x).to_bits() || x.is_nan() && b.is_nan(), "{x}");
            }
        }
    }

    #[test]
    fn logarithms_near_one_keep_their_digits() {
        for i in 0..=100_000 {
            let e = i as f32 / 100_000.0;
            for found in [ln_1p::<false>(e), ln_1p::<true>(e)] {
                let exact = f64::from(e).ln_1p();
                assert!((f64::from(found) - exact).abs() <= 3e-7 * exact, "ln(1 + {e}) = {found}, {exact}");
            }
        }
    }
}
