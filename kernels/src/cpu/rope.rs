//! Rotary position embedding (Su et al., arXiv 2104.09864) of 2P elements of each head.
//!
//! The angle is the f32 product of position and frequency, as Hugging Face computes it; its sine and cosine are taken
//! in f64 and rounded, once per token and pair, for all heads. Those of angles up to a million and a half are computed here, in vectors and
//! with the same bits on every instruction set; one by one from the system's library they were a hundredth of a training step.
//! Tolerance against f64: 2 units in the last place of f32 of the longer of the pair, before the rounding.

use super::Cpu;
use super::floats::{CHUNK, FloatsMut, floats, ints};
use super::isa::Isa;
use super::threads::Carver;
use super::vector;
use crate::check;
use crate::{Result, Rope, RopeDirection, RopeLayout, RopePairs, View, ViewMut};

impl Rope for Cpu {
    fn rotate(
        &self,
        x: ViewMut<'_>,
        positions: View<'_>,
        inv_freq: View<'_>,
        layout: RopeLayout,
        scale: f32,
        direction: RopeDirection,
    ) -> Result {
        let dims = check::rope(&x, positions, inv_freq, layout);
        let (positions_t, inv_freq_i) = (ints(positions), floats(inv_freq));
        let (x, isa, half) = (FloatsMut::new(x), self.threads.isa(), dims.half);
        let token_len = dims.heads * dims.head_size;
        if token_len == 0 || half == 0 {
            return Ok(());
        }
        let sign = if direction == RopeDirection::Forward { 1.0 } else { -1.0 };
        // A sine and a cosine cost about as much as rotating four elements.
        let task_tokens = (CHUNK / (token_len + 4 * half)).max(1);
        self.threads.run_ranges(dims.tokens, task_tokens, |tokens, scratch| {
            let mut carver = Carver::new(scratch);
            let (cos, sin, row) = (carver.take(half), carver.take(half), carver.take(2 * half));
            for t in tokens {
                let angles = |inv_freq: &f32| positions_t[t] as f32 * inv_freq;
                cos.iter_mut().zip(inv_freq_i).for_each(|(angle, inv_freq)| *angle = angles(inv_freq));
                circle(isa, cos, sin, scale, sign * scale);
                for h in 0..dims.heads {
                    let at = t * token_len + h * dims.head_size + layout.first;
                    // SAFETY: token t belongs to this task.
                    unsafe { x.read(isa, at, row) };
                    match layout.pairs {
                        RopePairs::Halves => {
                            let (low, high) = row.split_at_mut(half);
                            vector::rotate(isa, low, high, cos, sin);
                        }
                        RopePairs::Neighbours => vector::rotate_neighbours(isa, row, cos, sin),
                    }
                    // SAFETY: as above.
                    unsafe { x.write(isa, at, row) };
                }
            }
        });
        Ok(())
    }
}

/// The largest angle for which [`reduced`] has the integer multiples of a quarter turn's upper parts exactly: some below 2²⁰ of them.
const ANGLE_MAX: f32 = 1.5e6;

/// Replaces angles by their cosines times `cos_scale`; their sines times `sin_scale` go to `sin`.
fn circle(isa: Isa, angles: &mut [f32], sin: &mut [f32], cos_scale: f32, sin_scale: f32) {
    if angles.iter().all(|angle| angle.abs() <= ANGLE_MAX) {
        return reduced(isa, angles, sin, cos_scale, sin_scale);
    }
    for (angle, sin) in angles.iter_mut().zip(sin) {
        let (s, c) = f64::from(*angle).sin_cos();
        (*angle, *sin) = ((c * f64::from(cos_scale)) as f32, (s * f64::from(sin_scale)) as f32);
    }
}

multiversion! {
    /// [`circle`] of angles up to [`ANGLE_MAX`], in f64 with an error below 2⁻⁵⁰, without fused multiply-adds.
    fn reduced(angles: &mut [f32], sin: &mut [f32], cos_scale: f32, sin_scale: f32) {
        for (angle, sin) in angles.iter_mut().zip(sin) {
            let (s, c) = sine_and_cosine(f64::from(*angle));
            (*angle, *sin) = ((c * f64::from(cos_scale)) as f32, (s * f64::from(sin_scale)) as f32);
        }
    }
}

/// Of what is left of an angle without its quarter turns, the Taylor series, and then sine or cosine with either sign (Cody and Waite,
/// Software Manual for the Elementary Functions, 1980).
#[inline(always)]
fn sine_and_cosine(angle: f64) -> (f64, f64) {
    /// 1.5·2⁵²: what is added to it is rounded to an integer, which is in the lowest bits then.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    /// π/2 in parts, of which the first two have 33 bits each.
    const QUARTER: [f64; 3] = [
        f64::from_bits(0x3ff9_21fb_5440_0000),
        f64::from_bits(0x3dd0_b461_1a60_0000),
        f64::from_bits(0x3ba3_198a_2e03_7073),
    ];
    /// 1/n! for n = 2 to 16, with the signs of the series.
    const COS: [f64; 8] = [
        -1.0 / 2.0,
        1.0 / 24.0,
        -1.0 / 720.0,
        1.0 / 40_320.0,
        -1.0 / 3_628_800.0,
        1.0 / 479_001_600.0,
        -1.0 / 87_178_291_200.0,
        1.0 / 20_922_789_888_000.0,
    ];
    const SIN: [f64; 7] = [
        -1.0 / 6.0,
        1.0 / 120.0,
        -1.0 / 5_040.0,
        1.0 / 362_880.0,
        -1.0 / 39_916_800.0,
        1.0 / 6_227_020_800.0,
        -1.0 / 1_307_674_368_000.0,
    ];
    let rounded = angle * std::f64::consts::FRAC_2_PI + ROUND;
    let turns = rounded - ROUND;
    let x = ((angle - turns * QUARTER[0]) - turns * QUARTER[1]) - turns * QUARTER[2];
    let x2 = x * x;
    let cos = 1.0 + x2 * COS.iter().rev().fold(0.0, |sum, c| sum * x2 + c);
    let sin = x + x * (x2 * SIN.iter().rev().fold(0.0, |sum, c| sum * x2 + c));
    let quarter = rounded.to_bits();
    let (s, c) = if quarter & 1 == 1 { (cos, sin) } else { (sin, cos) };
    let sign = |bit: u64| (bit & 2) << 62;
    (f64::from_bits(s.to_bits() ^ sign(quarter)), f64::from_bits(c.to_bits() ^ sign(quarter + 1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Angles of all positions and of both ends, near multiples of a quarter turn above all.
    fn angles() -> Vec<f32> {
        let near = |n: u32| (f64::from(n) * std::f64::consts::FRAC_PI_2) as f32;
        let multiples = (0..900_000).step_by(7).map(near);
        let small = (0..400).map(|n| 1.5f32.powi(n - 200));
        let neighbours = |x: f32| [x.next_down(), x, x.next_up(), -x];
        multiples
            .chain(small)
            .chain([0.0, 1.0, ANGLE_MAX.next_down()])
            .flat_map(neighbours)
            .filter(|x| x.abs() <= ANGLE_MAX)
            .collect()
    }

    #[test]
    fn sines_and_cosines_are_those_of_the_library() {
        for angle in angles() {
            let (sin, cos) = sine_and_cosine(f64::from(angle));
            let (s, c) = f64::from(angle).sin_cos();
            let error = (sin - s).abs().max((cos - c).abs());
            assert!(error < 2f64.powi(-50), "{angle}: {sin} and {cos} instead of {s} and {c}");
        }
    }

    #[test]
    fn every_instruction_set_has_the_same_bits() {
        let all = angles();
        let on = |isa| {
            let (mut cos, mut sin) = (all.clone(), vec![0.0; all.len()]);
            circle(isa, &mut cos, &mut sin, 1.5, -1.5);
            cos.iter().chain(&sin).map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        let expected = on(Isa::GENERIC);
        for isa in Isa::available() {
            assert!(on(isa) == expected, "{}", isa.name());
        }
    }

    #[test]
    fn angles_beyond_are_the_librarys() {
        let (mut cos, mut sin) = ([1.0, 3e9], [0.0; 2]);
        circle(Isa::best(), &mut cos, &mut sin, 1.0, 1.0);
        assert_eq!((cos[1], sin[1]), (3e9f64.cos() as f32, 3e9f64.sin() as f32));
        assert_eq!((cos[0], sin[0]), (1f64.cos() as f32, 1f64.sin() as f32));
    }
}
