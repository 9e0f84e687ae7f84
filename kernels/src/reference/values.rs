//! Reading and writing views as f64.

use crate::{DType, View, ViewMut};
use half::{bf16, f16};

/// The elements widened to f64, which is exact for every dtype.
pub fn read(view: View<'_>) -> Vec<f64> {
    let bytes = view.bytes().host();
    match view.dtype() {
        DType::F32 => bytemuck::cast_slice::<_, f32>(bytes).iter().map(|&x| f64::from(x)).collect(),
        DType::BF16 => bytemuck::cast_slice::<_, bf16>(bytes).iter().map(|x| x.to_f64()).collect(),
        DType::F16 => bytemuck::cast_slice::<_, f16>(bytes).iter().map(|x| x.to_f64()).collect(),
        DType::F64 => bytemuck::cast_slice::<_, f64>(bytes).to_vec(),
        DType::I32 => bytemuck::cast_slice::<_, i32>(bytes).iter().map(|&x| f64::from(x)).collect(),
    }
}

/// The elements of an i32 view.
pub fn ints(view: View<'_>) -> &[i32] {
    bytemuck::cast_slice(view.bytes().host())
}

/// The elements of an i32 view, to write.
pub fn ints_mut(view: ViewMut<'_>) -> &mut [i32] {
    bytemuck::cast_slice_mut(view.into_bytes().into_host())
}

/// The elements of an f32 view.
pub fn floats(view: View<'_>) -> &[f32] {
    bytemuck::cast_slice(view.bytes().host())
}

/// Rounds to nearest even, once, to the dtype of the view.
pub fn write(view: ViewMut<'_>, values: &[f64]) {
    let dtype = view.dtype();
    assert_eq!(view.shape().elements(), values.len(), "as many values as elements");
    let bytes = view.into_bytes().into_host();
    match dtype {
        DType::F32 => fill(bytemuck::cast_slice_mut::<_, f32>(bytes), values, |x| x as f32),
        DType::BF16 => {
            fill(bytemuck::cast_slice_mut::<_, bf16>(bytes), values, |x| bf16::from_f32(to_odd(x)));
        }
        DType::F16 => fill(bytemuck::cast_slice_mut::<_, f16>(bytes), values, |x| f16::from_f32(to_odd(x))),
        DType::F64 => fill(bytemuck::cast_slice_mut::<_, f64>(bytes), values, |x| x),
        DType::I32 => unreachable!("integers are no rounded sums"),
    }
}

fn fill<T>(out: &mut [T], values: &[f64], round: impl Fn(f64) -> T) {
    for (out, &value) in out.iter_mut().zip(values) {
        *out = round(value);
    }
}

/// f32 rounded to odd: when inexact, the neighbour whose last bit is one. A second rounding to a narrower type then
/// gives what one rounding from f64 would have (Boldo and Melquiond, "When double rounding is odd").
fn to_odd(x: f64) -> f32 {
    let near = x as f32;
    if !near.is_finite() || f64::from(near) == x || near.to_bits() & 1 == 1 {
        return near;
    }
    let away = f64::from(near).abs() < x.abs();
    let bits = near.to_bits() & 0x7FFF_FFFF;
    f32::from_bits(if away { bits + 1 } else { bits - 1 }).copysign(x as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrowing_rounds_once() {
        // Just above the middle of two bf16 values: rounding to f32 first would lose the excess and round to even.
        let x = 1.0 + 1.0 / 256.0 + 1e-12;
        assert_eq!(bf16::from_f32(x as f32).to_f64(), 1.0);
        assert_eq!(bf16::from_f32(to_odd(x)).to_f64(), 1.0 + 1.0 / 128.0);
        assert_eq!(bf16::from_f32(to_odd(-x)).to_f64(), -1.0 - 1.0 / 128.0);
    }
}
