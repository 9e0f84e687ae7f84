//! Weights as FP8 with a scale for each block of rows and columns, as DeepSeek V3 (arXiv 2412.19437, section 3.3) and others are published.
//!
//! A number (E4M3 of Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433) has a sign, four bits of exponent and three of
//! mantissa, no infinities, and one magnitude that is none. Its weight is the f32 product of that and the scale of its block; blocks at the
//! edges are smaller.

use crate::entries::Entries;
use crate::{ModelError, Result};
use std::sync::LazyLock;

/// What `quantization_config` calls it.
pub(crate) const METHOD: &str = "fp8";

/// How the format of numbers is spelled.
const FORMATS: [&str; 2] = ["e4m3", "float8_e4m3fn"];

/// What files call the scales of a weight.
pub(crate) fn scales_of(tensor: &str) -> String {
    format!("{tensor}_scale_inv")
}

/// What files may have beside a weight: its scales, and that of what is multiplied with it, of which nothing is made here.
pub(crate) fn beside(tensor: &str) -> [String; 2] {
    let layer = tensor.strip_suffix("weight").unwrap_or(tensor);
    [scales_of(tensor), format!("{layer}activation_scale")]
}

/// Rows and columns of a block; `None` where a weight has one scale.
pub(crate) fn block(quantization: &Entries<'_>) -> Result<Option<[usize; 2]>> {
    let format = quantization.string("fmt")?.unwrap_or("e4m3");
    if !FORMATS.contains(&format) {
        return Err(ModelError::Unsupported {
            what: "fmt of quantization_config".into(),
            found: format!("\"{format}\""),
            supported: FORMATS.map(|known| format!("\"{known}\"")).join(", "),
        });
    }
    let Some(sizes) = quantization.numbers("weight_block_size")? else { return Ok(None) };
    let size = |number: &f64| (*number >= 1.0 && number.fract() == 0.0).then_some(*number as usize);
    match sizes.iter().map(size).collect::<Option<Vec<_>>>().as_deref() {
        Some(&[rows, columns]) => Ok(Some([rows, columns])),
        _ => {
            let detail = format!("is {sizes:?}; it must be numbers of rows and columns");
            Err(quantization.error("weight_block_size", detail))
        }
    }
}

/// What each code stands for.
static NUMBERS: LazyLock<[f32; 256]> = LazyLock::new(|| std::array::from_fn(|code| number(code as u8)));

fn number(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 0xF), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (0xF, 7) => f32::NAN,
        (0, _) => mantissa / 8.0 * 2f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Numbers of one row from column `first` on, of which `scales` has one for every `columns`.
pub(crate) fn decode(codes: &[u8], first: usize, scales: &[f32], columns: usize, out: &mut [f32]) {
    for (column, (code, out)) in codes.iter().zip(out).enumerate() {
        *out = NUMBERS[usize::from(*code)] * scales[(first + column) / columns];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_the_format() {
        let cases = [
            (0x00, 0.0),
            (0x01, 2f32.powi(-9)),
            (0x07, 7.0 * 2f32.powi(-9)),
            (0x08, 2f32.powi(-6)),
            (0x38, 1.0),
            (0x3C, 1.5),
            (0xB8, -1.0),
            (0x7E, 448.0),
            (0xFE, -448.0),
        ];
        for (code, expected) in cases {
            assert_eq!(NUMBERS[code], expected, "{code:#x}");
        }
        assert!(NUMBERS[0x7F].is_nan() && NUMBERS[0xFF].is_nan() && NUMBERS[0x80].is_sign_negative());
        assert_eq!(NUMBERS.iter().filter(|number| number.is_finite()).count(), 254);
    }

    #[test]
    fn scales_of_columns() {
        let mut out = [0.0; 4];
        decode(&[0x38; 4], 1, &[2.0, 3.0, 5.0], 2, &mut out);
        assert_eq!(out, [2.0, 3.0, 3.0, 5.0]);
    }
}
