//! Gated activations (Shazeer, arXiv 2002.05202), element by element in f32, one rounding per result.
//!
//! Every function is `x·share(x)`: the shares are σ(x) for SiLU, Φ(x) for GELU, for its approximation by a tanh
//! `½(1 + tanh u) = σ(2u)`, which unlike the left side loses nothing where it is small, and σ(1.702·x) for the clamped swish, which
//! has loops of its own, since what it does to up the others do not pay for; so has σ(x) alone, which is no multiple of x.
//!
//! Tolerance against f64, before the rounding: a few units in the last place of f32, from the exponential (see [`exp`]), as long as
//! its exponent is small; that of a share near 0 has an error of half a unit of its own, so that shares of 10⁻³⁰ are within 2e-5.
//! Slopes are within 2e-6.

use super::Cpu;
use super::elementwise::blocks;
use super::floats::{Floats, FloatsMut};
use super::isa::fma;
use super::vector::{exp, sigmoid};
use crate::check;
use crate::{Activation, GateFunction, Result, View, ViewMut};

impl Activation for Cpu {
    fn gated(&self, f: GateFunction, gate: View<'_>, up: View<'_>, out: ViewMut<'_>) -> Result {
        let operands = [check::read("gate", gate), check::read("up", up), check::write("out", &out)];
        let elements = check::elementwise("gated", &operands);
        let (gate, up, out) = (Floats::new(gate), Floats::new(up), FloatsMut::new(out));
        let isa = self.threads.isa();
        blocks(&self.threads, elements, |at, len, [of_gate, of_up, result]| {
            let gate = gate.read(isa, at, len, of_gate);
            forward(isa, f, gate, up.read(isa, at, len, of_up), &mut result[..len]);
            // SAFETY: blocks are disjoint.
            unsafe { out.write(isa, at, &result[..len]) };
        });
        Ok(())
    }

    fn gated_backward(
        &self,
        f: GateFunction,
        gate: View<'_>,
        up: View<'_>,
        dout: View<'_>,
        dgate: ViewMut<'_>,
        dup: ViewMut<'_>,
    ) -> Result {
        let reads = [check::read("gate", gate), check::read("up", up), check::read("dout", dout)];
        let writes = [check::write("dgate", &dgate), check::write("dup", &dup)];
        let elements = check::elementwise("gated backward", &[&reads[..], &writes[..]].concat());
        let (gate, up, dout) = (Floats::new(gate), Floats::new(up), Floats::new(dout));
        let (dgate, dup, isa) = (FloatsMut::new(dgate), FloatsMut::new(dup), self.threads.isa());
        blocks(&self.threads, elements, |at, len, [of_gate, of_up, of_dout, to_gate, to_up]| {
            backward(
                isa,
                f,
                gate.read(isa, at, len, of_gate),
                up.read(isa, at, len, of_up),
                dout.read(isa, at, len, of_dout),
                &mut to_gate[..len],
                &mut to_up[..len],
            );
            // SAFETY: blocks are disjoint.
            unsafe { dgate.write(isa, at, &to_gate[..len]) };
            // SAFETY: as above.
            unsafe { dup.write(isa, at, &to_up[..len]) };
        });
        Ok(())
    }
}

multiversion! {
    /// See [`Activation::gated`].
    fn forward(f: GateFunction, gate: &[f32], up: &[f32], out: &mut [f32]) {
        match f {
            GateFunction::Silu => forward_by(gate, up, out, sigmoid::<FMA>),
            GateFunction::Gelu => forward_by(gate, up, out, normal::<FMA>),
            GateFunction::GeluTanh => forward_by(gate, up, out, |x| sigmoid::<FMA>(tanh_exponent::<FMA>(x))),
            GateFunction::ClampedSwish => clamped_forward::<FMA>(gate, up, out),
            GateFunction::Sigmoid => {
                for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
                    *out = sigmoid::<FMA>(*gate) * up;
                }
            }
        }
    }
}

multiversion! {
    /// See [`Activation::gated_backward`].
    fn backward(f: GateFunction, gate: &[f32], up: &[f32], dout: &[f32], dgate: &mut [f32], dup: &mut [f32]) {
        let operands = (gate, up, dout);
        match f {
            GateFunction::Silu => backward_by(operands, dgate, dup, |x| {
                let share = sigmoid::<FMA>(x);
                (share, [share, fma::<FMA>(x, 1.0 - share, 1.0)])
            }),
            GateFunction::Gelu => backward_by(operands, dgate, dup, |x| {
                let share = normal::<FMA>(x);
                (share, [fma::<FMA>(x, bell::<FMA>(x) * DENSITY, share), 1.0])
            }),
            GateFunction::GeluTanh => backward_by(operands, dgate, dup, |x| {
                let share = sigmoid::<FMA>(tanh_exponent::<FMA>(x));
                let x = within(x);
                let slope = fma::<FMA>(x * x, 3.0 * TANH_CUBIC, TANH_LINEAR);
                (share, [fma::<FMA>(share * (1.0 - share), x * slope, share), 1.0])
            }),
            GateFunction::ClampedSwish => clamped_backward::<FMA>(operands, dgate, dup),
            GateFunction::Sigmoid => {
                for ((((gate, up), dout), dgate), dup) in gate.iter().zip(up).zip(dout).zip(dgate).zip(dup) {
                    let share = sigmoid::<FMA>(*gate);
                    *dgate = dout * up * (share * (1.0 - share));
                    *dup = dout * share;
                }
            }
        }
    }
}

#[inline(always)]
fn forward_by(gate: &[f32], up: &[f32], out: &mut [f32], share: impl Fn(f32) -> f32) {
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = gate * share(*gate) * up;
    }
}

/// `parts` gives the share, and two factors of the slope.
#[inline(always)]
fn backward_by(
    (gate, up, dout): (&[f32], &[f32], &[f32]),
    dgate: &mut [f32],
    dup: &mut [f32],
    parts: impl Fn(f32) -> (f32, [f32; 2]),
) {
    for ((((gate, up), dout), dgate), dup) in gate.iter().zip(up).zip(dout).zip(dgate).zip(dup) {
        let (share, slope) = parts(*gate);
        *dgate = dout * up * slope[0] * slope[1];
        *dup = dout * gate * share;
    }
}

const SWISH_SLOPE: f32 = GateFunction::SWISH_SLOPE as f32;
const SWISH_LIMIT: f32 = GateFunction::SWISH_LIMIT as f32;

#[inline(always)]
fn clamped_forward<const FMA: bool>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        let (g, u) = (at_most(*gate), -at_most(-at_most(*up)));
        *out = g * sigmoid::<FMA>(SWISH_SLOPE * g) * (u + 1.0);
    }
}

/// The slope is `share + 1.702·g·share·(1 − share)`, where nothing overflows: far below zero a share of 0 comes first.
#[inline(always)]
fn clamped_backward<const FMA: bool>(
    (gate, up, dout): (&[f32], &[f32], &[f32]),
    dgate: &mut [f32],
    dup: &mut [f32],
) {
    for ((((gate, up), dout), dgate), dup) in gate.iter().zip(up).zip(dout).zip(dgate).zip(dup) {
        let (g, u) = (at_most(*gate), -at_most(-at_most(*up)));
        let share = sigmoid::<FMA>(SWISH_SLOPE * g);
        let slope = fma::<FMA>(share * (1.0 - share) * SWISH_SLOPE, g, share);
        let (of_gate, of_up) = (dout * (u + 1.0) * slope, dout * g * share);
        *dgate = if *gate > SWISH_LIMIT { 0.0 } else { of_gate };
        *dup = if up.abs() > SWISH_LIMIT { 0.0 } else { of_up };
    }
}

/// x up to the limit. NaN stays, which it would not of `f32::min`.
#[inline(always)]
fn at_most(x: f32) -> f32 {
    if x > SWISH_LIMIT { SWISH_LIMIT } else { x }
}

/// `2√(2/π)`, and 0.044715 times that.
const TANH_LINEAR: f32 = 1.595_769_2;
const TANH_CUBIC: f32 = 0.071_354_81;
/// `1/√(2π)`.
const DENSITY: f32 = 0.398_942_3;

/// `2u`, `u = √(2/π)·(x + 0.044715·x³)`.
#[inline(always)]
fn tanh_exponent<const FMA: bool>(x: f32) -> f32 {
    let x = within(x);
    x * fma::<FMA>(x * x, TANH_CUBIC, TANH_LINEAR)
}

/// x held where σ(2u) is 0 or 1 in f32 and nothing overflows: an infinite slope times a share of 0 is no number.
#[inline(always)]
fn within(x: f32) -> f32 {
    const MOST: f32 = 16.0;
    let x = if x > MOST { MOST } else { x };
    if x < -MOST { -MOST } else { x }
}

/// `exp(−x²/2)`.
#[inline(always)]
fn bell<const FMA: bool>(x: f32) -> f32 {
    exp::<FMA>(-0.5 * (x * x))
}

/// Φ(x), within 4e-7 of it for x ≥ −4; beyond, the error of x²/2 in the exponent counts, 4e-6 at −13.
///
/// `Φ(−t) = exp(−t²/2)·s(t)` for t ≥ 0. s is a polynomial in `w = 1/(1 + 0.35·t)` without constant term, of degree 9, fitted to
/// `½·erfc(t/√2)·exp(t²/2)` over 0 ≤ t ≤ 14 for the least largest relative error, which is 3.2e-8.
#[inline(always)]
fn normal<const FMA: bool>(x: f32) -> f32 {
    const COEFFICIENTS: [f32; 8] = [
        0.143_971_68,
        -0.255_714_24,
        0.159_174_13,
        -0.023_109_814,
        0.105_507_99,
        0.119_832_866,
        0.139_861_87,
        0.139_621_4,
    ];
    let w = 1.0 / fma::<FMA>(x.abs(), 0.35, 1.0);
    let mut s = -0.029_145_928;
    for c in COEFFICIENTS {
        s = fma::<FMA>(s, w, c);
    }
    let below = s * w * bell::<FMA>(x);
    if x < 0.0 { below } else { 1.0 - below }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    /// Relative errors of shares and absolute ones of slopes, as far as stated.
    #[test]
    fn shares_and_slopes_are_as_close_as_stated() {
        let gate: Vec<f32> = (0..80_000).map(|i| -13.0 + i as f32 * 3.25e-4).filter(|x| *x != 0.0).collect();
        let ones = vec![1.0f32; gate.len()];
        for isa in Isa::available() {
            for f in GateFunction::ALL {
                // What makes the factor 1.
                let up = vec![if f == GateFunction::ClampedSwish { 0.0f32 } else { 1.0 }; gate.len()];
                let (mut slope, mut value) = (ones.clone(), ones.clone());
                backward(isa, f, &gate, &up, &ones, &mut slope, &mut value);
                let mut again = ones.clone();
                forward(isa, f, &gate, &up, &mut again);
                assert_eq!(value, again, "{f:?} {}", isa.name());
                for ((x, value), slope) in gate.iter().zip(&value).zip(&slope) {
                    let (exact, exact_slope) = crate::reference::gate(f, f64::from(*x));
                    let error = (f64::from(*value) / exact - 1.0).abs();
                    let usual = if *x > -4.0 { 2e-6 } else { 2e-5 };
                    assert!(error < usual || exact.abs() < 1e-37, "{f:?}({x}) = {value}, {exact}: {error:e}");
                    let error = (f64::from(*slope) - exact_slope).abs();
                    assert!(error < 2e-6, "{f:?}'({x}) = {slope}, {exact_slope}: {error:e}");
                }
            }
        }
    }
}
