//! Matrices of 8-bit or 4-bit codes with a scale per group of weights.
//!
//! A matrix `[N, L]` is stored row by row. A row is cut into *blocks* of [`BLOCK`] weights, the last one filled up with
//! zeros, and a block into four *groups* of [`GROUP`] weights that share a bf16 scale `s`. Weight = `s · q`, with q from −127
//! to 127 in int8, from −8 to 7 in int4 and one of 0, ±1, ±2, ±3, ±4, ±6, ±8, ±12 in mxfp4:
//!
//! ```text
//! byte  0    2    4    6    8                                         136 (int8) or 72 (int4, mxfp4)
//!       +----+----+----+----+------------------------------------------+
//!       | s0 | s1 | s2 | s3 | codes of 128 weights                     |   all little-endian
//!       +----+----+----+----+------------------------------------------+
//!
//! int8: byte 8 + e holds q of weight e, as a signed byte.
//!
//! int4, mxfp4: sixteen 32-bit words, word i at byte 8 + 4i. Each holds eight codes, two of every group: in int4 q + 8, in
//! mxfp4 the place of |q| in that list, from 0, and 8 more if q is negative (8 itself, which quantizing never writes, is 0):
//!
//!  bit 31      28 27      24 23      20 19      16 15      12 11       8 7        4 3        0
//!       +----------+----------+----------+----------+----------+----------+----------+----------+
//!       |  112 + i |   80 + i |   48 + i |   16 + i |   96 + i |   64 + i |   32 + i |        i |   weight
//!       +----------+----------+----------+----------+----------+----------+----------+----------+
//!         group 3    group 2    group 1    group 0    group 3    group 2    group 1    group 0
//! ```
//!
//! A register of words thus gives sixteen consecutive weights per mask, and no code has to cross a lane. The mask leaves
//! `16ᵍ·(q + 8)` of int4, exact as f32; the codes of mxfp4 are looked up.
//!
//! | format | bytes per weight | error of one weight, m the largest magnitude of its group | r.m.s. error, normal weights |
//! |---|---|---|---|
//! | int8 | 1.0625 | ≤ s/2, that is at most m/252 | 0.0054 σ |
//! | int4 | 0.5625 | ≤ 0.2265·m | 0.082 σ |
//! | mxfp4 | 0.5625 | < m/4 | 0.115 to 0.12 σ |
//!
//! Groups whose largest magnitude is below 2⁻¹⁰⁰ become zeros. The scale is bf16 because that widens with a shift on every
//! machine and covers the range of f32; its eight bits cost less than a hundredth of the error. `s·q` has at most fifteen
//! significant bits, so every weight is exact in f32, and a product with a quantized matrix is that with the dequantized one
//! but for the rounding of sums and, of few rows on the CPU, of activations to sixteen bits of the largest of a block.
//!
//! **mxfp4 is for weights that are published so.** They are those of the OCP Microscaling Formats (MX) Specification 1.0
//! (<https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf>): groups of 32 numbers E2M1, whose
//! scale is a power of two. q is twice such a number, and s half the scale, so that q is whole and what is done with the other
//! formats is done with this. Other weights are converted as the specification does it: s = 2^(⌊log₂ m⌋ − 3), q the nearest, of
//! two the one with an even code, ±12 beyond. So m is 8 to 16 times s, which is why weights from 12 times s on lose up to a
//! quarter. Weights that are MXFP4 come back exactly, whatever their scale was, since with a smaller m the larger exponents were
//! not used. That it has more error than int4 is the price of scales that are powers of two.
//!
//! **Groups of 32.** With 64, int8 loses 10 % and int4 11 % accuracy to save 3 and 6 % of the bytes.
//! **No minimum per group in int4.** Weights are nearly symmetric: at equal bytes (groups of 64 with scale and minimum) the
//! r.m.s. error is 0.090 σ; with groups of 32 it is 0.078 σ for 11 % more bytes. What helps more is that the scale may have
//! either sign, so that the largest magnitude can take the code −8, and that it is the best of five.

use crate::Shape;
use half::bf16;
use std::fmt;
use terrace_device::Bytes;

/// Weights that share a scale.
pub const GROUP: usize = 32;
/// Weights that are stored together.
pub const BLOCK: usize = 128;
/// Groups of a block.
pub(crate) const GROUPS: usize = BLOCK / GROUP;
/// Bytes of a block's scales.
pub(crate) const SCALE_BYTES: usize = 2 * GROUPS;

/// int4 scales that are tried, as the code that the largest magnitude would get: above 8 it is cut off, to the gain of all
/// other weights. The one with the least squared error is taken, the first of equals.
const SPANS: [f32; 5] = [8.0, 7.5, 8.5, 7.0, 9.0];

/// Groups below this are zeros: their scale would lose bits or vanish.
const SMALLEST: f32 = 1.0 / (1u128 << 100) as f32;

/// Twice the number E2M1 that each code of mxfp4 stands for.
pub(crate) const MXFP4_CODES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// How a quantized matrix is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QuantFormat {
    /// One byte per weight.
    Int8,
    /// Half a byte per weight, evenly spaced.
    Int4,
    /// Half a byte per weight, a float of four bits; scales are powers of two.
    Mxfp4,
}

/// A weight that is infinite or not a number, which no scale can hold.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("the weight {value} at place {index} of a row cannot be quantized")]
pub struct NotFinite {
    /// Its place in the row.
    pub index: usize,
    /// The weight.
    pub value: f32,
}

impl QuantFormat {
    /// Bytes of a block of [`BLOCK`] weights.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::Int8 => SCALE_BYTES + BLOCK,
            Self::Int4 | Self::Mxfp4 => SCALE_BYTES + BLOCK / 2,
        }
    }

    /// Bytes of a row of `cols` weights.
    pub const fn row_bytes(self, cols: usize) -> usize {
        cols.div_ceil(BLOCK) * self.block_bytes()
    }

    /// Bytes of a tensor whose rows are its last dimension.
    pub fn bytes(self, dims: &[usize]) -> usize {
        let shape = Shape::new(dims);
        shape.rows() * self.row_bytes(shape.last())
    }

    /// Quantizes a row, or part of one that begins at a multiple of [`BLOCK`]. The same bytes on every machine.
    ///
    /// # Errors
    /// A weight is not finite.
    ///
    /// # Panics
    /// If `out` has not the bytes of a row of `weights`.
    pub fn quantize(self, weights: &[f32], out: &mut [u8]) -> Result<(), NotFinite> {
        assert_eq!(out.len(), self.row_bytes(weights.len()), "room for {} weights", weights.len());
        for (index, (weights, out)) in
            weights.chunks(BLOCK).zip(out.chunks_exact_mut(self.block_bytes())).enumerate()
        {
            if let Some(at) = weights.iter().position(|w| !w.is_finite()) {
                return Err(NotFinite { index: index * BLOCK + at, value: weights[at] });
            }
            let mut block = [0.0; BLOCK];
            block[..weights.len()].copy_from_slice(weights);
            self.quantize_block(&block, out);
        }
        Ok(())
    }

    fn quantize_block(self, weights: &[f32; BLOCK], out: &mut [u8]) {
        let (scales, codes) = out.split_at_mut(SCALE_BYTES);
        codes.fill(0);
        let (groups, _) = weights.as_chunks::<GROUP>();
        for (g, group) in groups.iter().enumerate() {
            let (scale, of_group) = match self {
                Self::Int8 => {
                    let (scale, q) = int8_group(group);
                    (scale, q.map(|q| q as i8 as u8))
                }
                Self::Int4 => {
                    let (scale, q) = int4_group(group);
                    (scale, q.map(|q| (q as i8 + 8) as u8))
                }
                Self::Mxfp4 => mxfp4_group(group),
            };
            scales[2 * g..2 * g + 2].copy_from_slice(&scale.to_le_bytes());
            match self {
                Self::Int8 => codes[g * GROUP..][..GROUP].copy_from_slice(&of_group),
                Self::Int4 | Self::Mxfp4 => {
                    for (e, code) in of_group.into_iter().enumerate() {
                        let (byte, shift) = nibble(g * GROUP + e);
                        codes[byte] |= code << shift;
                    }
                }
            }
        }
    }

    /// The weights of a row, or of part of one that begins at a multiple of [`BLOCK`].
    ///
    /// # Panics
    /// If `codes` has not the bytes of a row of `out`.
    pub fn dequantize(self, codes: &[u8], out: &mut [f32]) {
        assert_eq!(codes.len(), self.row_bytes(out.len()), "the codes of {} weights", out.len());
        for (block, out) in codes.chunks_exact(self.block_bytes()).zip(out.chunks_mut(BLOCK)) {
            let (scales, codes) = block.split_at(SCALE_BYTES);
            for (e, out) in out.iter_mut().enumerate() {
                let g = e / GROUP;
                let scale = bf16::from_le_bytes([scales[2 * g], scales[2 * g + 1]]).to_f32();
                let (byte, shift) = nibble(e);
                let q = match self {
                    Self::Int8 => codes[e] as i8,
                    Self::Int4 => (codes[byte] >> shift & 0xF) as i8 - 8,
                    Self::Mxfp4 => MXFP4_CODES[usize::from(codes[byte] >> shift & 0xF)],
                };
                *out = scale * f32::from(q);
            }
        }
    }
}

impl fmt::Display for QuantFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Mxfp4 => "mxfp4",
        })
    }
}

/// Where a block of codes of four bits keeps weight `e`: the byte after the scales, and the bits to shift.
fn nibble(e: usize) -> (usize, usize) {
    let (group, half, word) = (e / GROUP, e / 16 % 2, e % 16);
    let bit = 4 * group + 16 * half;
    (4 * word + bit / 8, bit % 8)
}

/// The scale, a bf16, and the codes.
fn int8_group(weights: &[f32; GROUP]) -> (bf16, [f32; GROUP]) {
    let largest = largest(weights).abs();
    if largest < SMALLEST {
        return (bf16::ZERO, [0.0; GROUP]);
    }
    // Rounding the scale moves the largest code by less than a half, so nothing is cut off.
    let scale = bf16::from_f32(largest / 127.0);
    (scale, codes(weights, scale.to_f32(), -127.0, 127.0))
}

fn int4_group(weights: &[f32; GROUP]) -> (bf16, [f32; GROUP]) {
    let largest = largest(weights);
    if largest.abs() < SMALLEST {
        return (bf16::ZERO, [0.0; GROUP]);
    }
    let mut best = (bf16::ZERO, [0.0; GROUP]);
    let mut least = f32::INFINITY;
    for span in SPANS {
        let scale = bf16::from_f32(-largest / span);
        let codes = codes(weights, scale.to_f32(), -8.0, 7.0);
        let error = squared_error(weights, &codes, scale.to_f32(), largest.abs());
        if error < least {
            (best, least) = ((scale, codes), error);
        }
    }
    best
}

/// The scale and the codes. What becomes zero has no sign.
fn mxfp4_group(weights: &[f32; GROUP]) -> (bf16, [u8; GROUP]) {
    let largest = largest(weights).abs();
    if largest < SMALLEST {
        return (bf16::ZERO, [0; GROUP]);
    }
    // A normal number: its exponent is in these bits, and three less, or as much the other way, is one too.
    let exponent = largest.to_bits() >> 23;
    let scale = bf16::from_bits(((exponent - 3) << 7) as u16);
    let inverse = f32::from_bits((2 * 127 + 3 - exponent) << 23);
    (scale, weights.map(|w| mxfp4_code(w * inverse)))
}

/// The code whose q is nearest, of two the even one.
fn mxfp4_code(w: f32) -> u8 {
    let size = w.abs();
    let code = u8::from(size > 0.5)
        + u8::from(size >= 1.5)
        + u8::from(size > 2.5)
        + u8::from(size >= 3.5)
        + u8::from(size > 5.0)
        + u8::from(size >= 7.0)
        + u8::from(size > 10.0);
    if code > 0 && w < 0.0 { code + 8 } else { code }
}

/// `weights / scale` to nearest, ties to even, within the codes there are.
fn codes(weights: &[f32; GROUP], scale: f32, lowest: f32, highest: f32) -> [f32; GROUP] {
    /// Adding it leaves the integer part in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    weights.map(|w| {
        let q = w / scale + ROUND - ROUND;
        let q = if q < lowest { lowest } else { q };
        if q > highest { highest } else { q }
    })
}

/// In units of `unit`², so that no square overflows or vanishes; eight sums, added in order.
fn squared_error(weights: &[f32; GROUP], codes: &[f32; GROUP], scale: f32, unit: f32) -> f32 {
    let mut sums = [0.0f32; 8];
    for (weights, codes) in weights.as_chunks::<8>().0.iter().zip(codes.as_chunks::<8>().0) {
        for i in 0..8 {
            let error = (weights[i] - scale * codes[i]) / unit;
            sums[i] += error * error;
        }
    }
    sums.iter().sum()
}

/// The weight of largest magnitude, the first of equals.
fn largest(weights: &[f32; GROUP]) -> f32 {
    weights.iter().fold(0.0f32, |largest, &w| if w.abs() > largest.abs() { w } else { largest })
}

/// A borrowed quantized matrix `[N, L]`.
#[derive(Debug, Clone, Copy)]
pub struct QuantizedView<'a> {
    bytes: Bytes<'a>,
    format: QuantFormat,
    shape: Shape,
}

impl<'a> QuantizedView<'a> {
    /// A view of `bytes` as a matrix of the given dimensions, whose rows are the last one.
    ///
    /// # Panics
    /// If the byte count does not match.
    pub fn new(bytes: Bytes<'a>, format: QuantFormat, dims: &[usize]) -> Self {
        assert_eq!(bytes.len(), format.bytes(dims), "bytes match the shape {dims:?} of {format}");
        Self { bytes, format, shape: Shape::new(dims) }
    }

    /// How it is stored.
    pub fn format(&self) -> QuantFormat {
        self.format
    }

    /// Shape, padding left out.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The bytes.
    pub fn bytes(&self) -> Bytes<'a> {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMATS: [QuantFormat; 3] = [QuantFormat::Int8, QuantFormat::Int4, QuantFormat::Mxfp4];

    /// Roughly normal, from a linear congruence.
    fn weights(count: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut unit = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32
        };
        (0..count).map(|_| (0..12).map(|_| unit()).sum::<f32>() - 6.0).collect()
    }

    fn there_and_back(format: QuantFormat, weights: &[f32]) -> Vec<f32> {
        let mut codes = vec![0xA5; format.row_bytes(weights.len())];
        format.quantize(weights, &mut codes).unwrap();
        let mut back = vec![f32::NAN; weights.len()];
        format.dequantize(&codes, &mut back);
        back
    }

    #[test]
    fn errors_are_within_the_bounds() {
        for (format, bound, rms_bound) in [
            (QuantFormat::Int8, 1.0 / 252.0, 0.0056),
            (QuantFormat::Int4, 0.2265, 0.083),
            (QuantFormat::Mxfp4, 0.25, 0.12),
        ] {
            for scale in [1.0, 1e-3, 1e-25, 1e30] {
                let weights: Vec<f32> = weights(32 * 1000, 1).iter().map(|w| w * scale).collect();
                let back = there_and_back(format, &weights);
                let mut squares = 0.0;
                for (group, back) in weights.chunks(GROUP).zip(back.chunks(GROUP)) {
                    let largest = group.iter().fold(0.0f32, |m, w| m.max(w.abs()));
                    for (w, b) in group.iter().zip(back) {
                        let error = (w - b).abs();
                        assert!(error <= bound * largest, "{format}: {w} became {b}, largest {largest}");
                        squares += f64::from(error / scale).powi(2);
                    }
                }
                let rms = (squares / weights.len() as f64).sqrt();
                assert!(rms < rms_bound && rms > rms_bound / 2.0, "{format}: {rms}");
            }
        }
    }

    /// The worst group for int4: everything else pulls the scale to where both ends are cut off.
    #[test]
    fn extremes_of_a_group() {
        for pull in [1.0 / 9.0, 1.0 / 8.5, 1.0 / 8.0, 1.0 / 7.5, 1.0 / 7.0] {
            let mut group = vec![pull; GROUP];
            (group[3], group[17]) = (1.0, -1.0);
            for (w, b) in group.iter().zip(there_and_back(QuantFormat::Int4, &group)) {
                assert!((w - b).abs() <= 0.2265, "{w} became {b}");
            }
        }
    }

    #[test]
    fn codes_that_are_exact_come_back() {
        for (format, lowest, highest) in [(QuantFormat::Int8, -127, 127), (QuantFormat::Int4, -8, 7)] {
            for scale in [0.5, -0.5, 1.5] {
                let q = (0..GROUP as i32)
                    .map(|e| if e == 0 { lowest } else { lowest + e * 7 % (highest - lowest) });
                let row: Vec<f32> = q.map(|q| scale * q as f32).collect();
                assert_eq!(there_and_back(format, &row), row, "{format}");
            }
        }
    }

    /// The magnitudes that E2M1 has.
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

    /// Whatever the scale that they were published with: of each, groups of all numbers up to each, with either sign, and of one
    /// such number among zeros.
    #[test]
    fn weights_that_are_mxfp4_come_back() {
        for exponent in [-99, -60, -24, -7, -1, 0, 3, 40, 100, 125] {
            let scale = 2f32.powi(exponent);
            for (last, sign) in (1..8).flat_map(|last| [(last, 1.0), (last, -1.0)]) {
                let numbers =
                    |e: usize| MAGNITUDES[e % (last + 1)] * if e.is_multiple_of(3) { -sign } else { sign };
                let all: Vec<f32> = (0..GROUP).map(|e| scale * numbers(e)).collect();
                let one: Vec<f32> =
                    (0..GROUP).map(|e| if e == 21 { sign * scale * MAGNITUDES[last] } else { 0.0 }).collect();
                for group in [all, one] {
                    assert_eq!(
                        there_and_back(QuantFormat::Mxfp4, &group),
                        group,
                        "2^{exponent}, up to {last}"
                    );
                }
            }
        }
    }

    /// Codes and scale of a group that begins with 6, which fixes the scale to a half.
    #[test]
    fn mxfp4_is_converted_as_the_specification_says() {
        let (sixteenth, below) = (1.0 / 16.0, |x: f32| f32::from_bits(x.to_bits() - 1));
        let cases = [
            // (weight, number that it becomes)
            (0.0, 0.0),
            (-0.0, 0.0),
            (0.25, 0.0),
            (-0.25, 0.0),
            (0.25 + sixteenth, 0.5),
            (below(0.75), 0.5),
            (0.75, 1.0),
            (1.25, 1.0),
            (-1.25 - sixteenth, -1.5),
            (1.75, 2.0),
            (below(1.75), 1.5),
            (2.5, 2.0),
            (2.5 + sixteenth, 3.0),
            (-3.5, -4.0),
            (below(3.5), 3.0),
            (5.0, 4.0),
            (5.0 + sixteenth, 6.0),
            (below(8.0), 6.0),
            (-7.5, -6.0),
        ];
        let mut group = [0.0; GROUP];
        group[0] = 6.0;
        for (weight, (from, _)) in group[1..].iter_mut().zip(cases) {
            *weight = from;
        }
        let back = there_and_back(QuantFormat::Mxfp4, &group);
        for (found, (from, to)) in back[1..].iter().zip(cases) {
            assert_eq!(found.to_bits(), f32::to_bits(to), "{from} became {found}");
        }

        let mut bytes = vec![0xA5; QuantFormat::Mxfp4.row_bytes(GROUP)];
        group[..16].copy_from_slice(&[
            6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.5, 0.0, -6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, -0.0,
        ]);
        group[16..].fill(-3.0);
        QuantFormat::Mxfp4.quantize(&group, &mut bytes).unwrap();
        assert_eq!(bytes[..SCALE_BYTES], [0x00, 0x3F, 0, 0, 0, 0, 0, 0]);
        let codes: Vec<u8> = (0..16).map(|word| bytes[SCALE_BYTES + 4 * word]).collect();
        assert_eq!(codes, [7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 0]);
        assert!((0..16).all(|word| bytes[SCALE_BYTES + 4 * word + 2] == 13), "their other halves");
    }

    /// The largest number of a group is at any place between two powers of two, on either side of which are the largest floats and
    /// the smallest that are not taken as zeros.
    #[test]
    fn mxfp4_scales_at_the_ends_of_the_range() {
        for (largest, back) in [
            (f32::MAX, 12.0 * 2f32.powi(124)),
            (2f32.powi(127), 2f32.powi(127)),
            (2f32.powi(-100), 2f32.powi(-100)),
            (f32::from_bits(2f32.powi(-100).to_bits() - 1), 0.0),
        ] {
            let mut group = [0.0; GROUP];
            (group[1], group[2]) = (-largest, f32::from_bits(1));
            let found = there_and_back(QuantFormat::Mxfp4, &group);
            assert_eq!((found[0], found[1], found[2]), (0.0, -back, 0.0), "{largest:e}");
        }
    }

    #[test]
    fn zeros_and_next_to_nothing_are_zeros() {
        for format in FORMATS {
            for value in [0.0, 1e-31, -1e-40] {
                assert!(there_and_back(format, &[value; 50]).iter().all(|w| *w == 0.0), "{format}: {value}");
            }
        }
    }

    /// Every weight has a place of its own, in any order.
    #[test]
    fn a_weight_is_where_the_diagram_says() {
        let mut seen = [false; BLOCK];
        for e in 0..BLOCK {
            let (byte, shift) = nibble(e);
            let place = byte * 2 + shift / 4;
            assert!(!std::mem::replace(&mut seen[place], true), "weight {e}");
        }
        assert_eq!((nibble(0), nibble(17), nibble(32), nibble(112 + 15)), ((0, 0), (6, 0), (0, 4), (63, 4)));
    }

    #[test]
    fn parts_of_a_row_give_the_bytes_of_the_whole() {
        let weights = weights(300, 7);
        for format in FORMATS {
            let mut whole = vec![0; format.row_bytes(300)];
            format.quantize(&weights, &mut whole).unwrap();
            let mut parts = vec![0; format.row_bytes(300)];
            let (first, second) = parts.split_at_mut(format.block_bytes());
            format.quantize(&weights[..BLOCK], first).unwrap();
            format.quantize(&weights[BLOCK..], second).unwrap();
            assert_eq!(whole, parts);
        }
    }

    #[test]
    fn infinite_weights_are_refused() {
        for (format, bad) in
            FORMATS.into_iter().flat_map(|f| [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].map(|bad| (f, bad)))
        {
            let mut row = vec![1.0; 200];
            row[150] = bad;
            let error = format.quantize(&row, &mut vec![0; format.row_bytes(200)]);
            assert_eq!(error.unwrap_err().index, 150, "{format}");
        }
    }
}
