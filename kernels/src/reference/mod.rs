//! The yardstick: every operation as plain loops over f64.
//!
//! Operands are widened to f64, sums are taken in f64 in the order of the formula, and each result is rounded to
//! nearest even exactly once. It is slow and allocates freely; tests compare the other backends with it and prove it
//! by finite differences. One thread.

mod attention;
mod columns;
mod delta;
mod experts;
mod pointwise;
mod rows;
mod sinks;
mod values;

use crate::check::{self, ProductDims};
use crate::{
    Epilogue, KernelSet, Matmul, MatmulSpec, QuantizedMatmul, QuantizedView, Residual, Result, View, ViewMut,
};
use std::sync::Arc;

#[cfg(test)]
pub(crate) use pointwise::function as gate;

/// The reference backend.
pub fn kernel_set() -> KernelSet {
    let reference = Arc::new(Reference);
    KernelSet {
        matmul: reference.clone(),
        quantized_matmul: reference.clone(),
        rms_norm: reference.clone(),
        rope: reference.clone(),
        columns: reference.clone(),
        attention: reference.clone(),
        sinks: reference.clone(),
        activation: reference.clone(),
        embedding: reference.clone(),
        cross_entropy: reference.clone(),
        elementwise: reference.clone(),
        reduce: reference.clone(),
        experts: reference.clone(),
        delta_rule: reference,
    }
}

#[derive(Debug)]
struct Reference;

impl Matmul for Reference {
    /// `out[m,n] = Σ_l a[m,l]·b[l,n]`, l ascending, plus the old value last.
    fn matmul(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>, spec: MatmulSpec) -> Result {
        let dims = check::matmul(a, b, &out, spec);
        let residual = if spec.accumulate { Residual::InPlace } else { Residual::None };
        finish(sums(a, b, dims, spec), dims, out, Epilogue { bias: None, residual });
        Ok(())
    }

    /// The same, then the bias, then the residual.
    fn matmul_nt(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>, epilogue: Epilogue<'_>) -> Result {
        let dims = check::matmul_nt(a, b, &out, &epilogue);
        finish(sums(a, b, dims, MatmulSpec::NT), dims, out, epilogue);
        Ok(())
    }
}

impl QuantizedMatmul for Reference {
    /// `out[m,n] = Σ_l a[m,l]·b[n,l]`, l ascending, then the bias, then the residual.
    fn matmul_nt(
        &self,
        a: View<'_>,
        b: QuantizedView<'_>,
        out: ViewMut<'_>,
        epilogue: Epilogue<'_>,
    ) -> Result {
        let dims = check::quantized_matmul(a, b, &out, &epilogue);
        let row_bytes = b.format().row_bytes(dims.l);
        let mut row_l = vec![0.0f32; dims.l];
        let a_ml = values::read(a);
        let mut result = vec![0.0; dims.m * dims.n];
        for n in 0..dims.n {
            b.format().dequantize(&b.bytes().host()[n * row_bytes..][..row_bytes], &mut row_l);
            for m in 0..dims.m {
                let terms = a_ml[m * dims.l..][..dims.l].iter().zip(&row_l);
                result[m * dims.n + n] = terms.map(|(a, b)| a * f64::from(*b)).sum();
            }
        }
        finish(result, dims, out, epilogue);
        Ok(())
    }
}

/// `Σ_l op(a)[m,l]·op(b)[l,n]`, l ascending.
fn sums(a: View<'_>, b: View<'_>, dims: ProductDims, spec: MatmulSpec) -> Vec<f64> {
    let (a_ml, b_ln) = (values::read(a), values::read(b));
    let a_strides = if spec.trans_a { (1, dims.m) } else { (dims.l, 1) };
    let b_strides = if spec.trans_b { (1, dims.l) } else { (dims.n, 1) };
    let mut sums_mn = Vec::with_capacity(dims.m * dims.n);
    for m in 0..dims.m {
        for n in 0..dims.n {
            let term =
                |l: usize| a_ml[m * a_strides.0 + l * a_strides.1] * b_ln[l * b_strides.0 + n * b_strides.1];
            sums_mn.push((0..dims.l).map(term).sum());
        }
    }
    sums_mn
}

/// Adds what is to be added and rounds.
fn finish(mut sums_mn: Vec<f64>, dims: ProductDims, out: ViewMut<'_>, epilogue: Epilogue<'_>) {
    if let Some(bias) = epilogue.bias {
        let bias_n = values::read(bias);
        for row in sums_mn.chunks_mut(dims.n.max(1)) {
            row.iter_mut().zip(&bias_n).for_each(|(sum, bias)| *sum += bias);
        }
    }
    if let Some(residual) = epilogue.residual.view(&out) {
        sums_mn.iter_mut().zip(values::read(residual)).for_each(|(sum, residual)| *sum += residual);
    }
    values::write(out, &sums_mn);
}
