//! Weights as MXFP4: blocks of 32 numbers of four bits with a scale of eight (OCP Microscaling Formats (MX) Specification 1.0,
//! <https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf>).
//!
//! A number has a sign, two bits of exponent and one of mantissa; a scale is a power of two. Of two numbers in a byte the lower half is the first.
//! Each is a bf16 without rounding, but for scales near its smallest.

/// Numbers of a block.
pub(crate) const BLOCK: usize = 32;

/// Bytes that they take.
pub(crate) const BLOCK_BYTES: usize = BLOCK / 2;

/// What the lower three bits stand for.
const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The exponent of a scale of 1.
const BIAS: i32 = 127;

/// The scale that is none.
const NAN: u8 = 0xFF;

/// What files call blocks and scales of a tensor.
pub(crate) fn names(tensor: &str) -> [String; 2] {
    ["blocks", "scales"].map(|part| format!("{tensor}_{part}"))
}

/// Blocks of so many numbers, if they are whole.
pub(crate) fn groups(numbers: usize) -> Option<usize> {
    numbers.is_multiple_of(BLOCK).then_some(numbers / BLOCK)
}

/// Blocks of [`BLOCK_BYTES`] and a scale for each.
///
/// # Panics
/// If there are not as many numbers as they hold.
pub(crate) fn decode(blocks: &[u8], scales: &[u8], out: &mut [f32]) {
    let (blocks, out) = (blocks.as_chunks::<BLOCK_BYTES>().0, out.as_chunks_mut::<BLOCK>().0);
    assert!(blocks.len() == scales.len() && out.len() == scales.len(), "each block has a scale");
    for ((block, scale), out) in blocks.iter().zip(scales).zip(out) {
        let scale = if *scale == NAN { f32::NAN } else { 2f32.powi(i32::from(*scale) - BIAS) };
        for (pair, out) in block.iter().zip(out.as_chunks_mut::<2>().0) {
            *out = [pair & 0xF, pair >> 4].map(|code| number(code) * scale);
        }
    }
}

fn number(code: u8) -> f32 {
    let magnitude = MAGNITUDES[usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_at_every_scale() {
        let block: [u8; BLOCK_BYTES] =
            std::array::from_fn(|i| (2 * i as u8 % 16) | ((2 * i as u8 + 1) % 16) << 4);
        for scale in 0..=NAN {
            let mut out = [0.0; BLOCK];
            decode(&block, &[scale], &mut out);
            for (code, found) in out.iter().enumerate() {
                let (sign, exponent, mantissa) = (code >> 3 & 1, code >> 1 & 3, code & 1);
                // As the format defines them, without a table: below 1 there is no leading one.
                let magnitude = match exponent {
                    0 => mantissa as f64 / 2.0,
                    _ => (1.0 + mantissa as f64 / 2.0) * 2f64.powi(exponent as i32 - 1),
                };
                let expected =
                    magnitude * 2f64.powi(i32::from(scale) - 127) * if sign == 1 { -1.0 } else { 1.0 };
                match scale {
                    NAN => assert!(found.is_nan()),
                    // What f32 rounds to zero or infinity is none of this format's business.
                    _ => assert_eq!(*found, expected as f32, "{code} at {scale}"),
                }
            }
        }
    }
}
