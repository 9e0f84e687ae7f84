//! The gated delta rule.

use super::{RowDims, exact, float, matrix, same};
use crate::{Carried, DType, DeltaSpec, View, ViewMut, delta_scratch};

/// Sizes of a convolution.
#[derive(Debug, Clone, Copy)]
pub struct ConvolutionDims {
    /// Sequences (B).
    pub sequences: usize,
    /// Positions of a sequence (S).
    pub length: usize,
    /// C.
    pub channels: usize,
    /// W.
    pub taps: usize,
}

impl ConvolutionDims {
    /// T.
    pub fn tokens(&self) -> usize {
        self.sequences * self.length
    }
}

/// Sizes of a scan.
#[derive(Debug, Clone, Copy)]
pub struct ScanDims {
    /// Sequences (B).
    pub sequences: usize,
    /// Positions of a sequence (S).
    pub length: usize,
    pub heads: DeltaSpec,
}

impl ScanDims {
    /// T.
    pub fn tokens(&self) -> usize {
        self.sequences * self.length
    }

    /// Pairs of a sequence and a value head.
    pub fn pairs(&self) -> usize {
        self.sequences * self.heads.value_heads
    }

    /// The sequence, the value head and its key head of a pair.
    pub fn pair(&self, pair: usize) -> (usize, usize, usize) {
        let h = pair % self.heads.value_heads;
        (pair / self.heads.value_heads, h, h / self.heads.group())
    }

    /// Where qkv has the query of key head `g` of a row.
    pub fn q(&self, row: usize, g: usize) -> usize {
        row * self.heads.channels() + g * self.heads.key_size
    }

    /// Where qkv has the key of key head `g` of a row.
    pub fn k(&self, row: usize, g: usize) -> usize {
        self.q(row, self.heads.key_heads + g)
    }

    /// Where qkv has the value of value head `h` of a row.
    pub fn v(&self, row: usize, h: usize) -> usize {
        self.q(row, 2 * self.heads.key_heads) + h * self.heads.value_size
    }

    /// Where out has value head `h` of a row.
    pub fn out(&self, row: usize, h: usize) -> usize {
        (row * self.heads.value_heads + h) * self.heads.value_size
    }

    /// Where decay and beta have value head `h` of a row.
    pub fn gate(&self, row: usize, h: usize) -> usize {
        row * self.heads.value_heads + h
    }

    /// Where states have that of value head `h` in a slot.
    pub fn state(&self, slot: usize, h: usize) -> usize {
        (slot * self.heads.value_heads + h) * self.heads.key_size * self.heads.value_size
    }
}

pub fn convolve(
    x: View<'_>,
    weight: View<'_>,
    carried: Option<&Carried<'_>>,
    out: &ViewMut<'_>,
) -> ConvolutionDims {
    let dims = convolution("convolve", x, weight);
    same("convolve", "out", x.shape().elements(), out.shape().elements());
    float("convolve", "out", out.dtype());
    if let Some(carried) = carried {
        let state = [dims.taps - 1, dims.channels];
        self::carried("convolve", carried, dims.sequences, x.dtype(), &state);
    }
    dims
}

pub fn convolve_backward(
    x: View<'_>,
    weight: View<'_>,
    dout: View<'_>,
    dx: &ViewMut<'_>,
    dweight: &ViewMut<'_>,
) -> ConvolutionDims {
    const OP: &str = "convolve backward";
    let dims = convolution(OP, x, weight);
    for (name, shape, dtype) in [("dout", dout.shape(), dout.dtype()), ("dx", dx.shape(), dx.dtype())] {
        same(OP, name, x.shape().elements(), shape.elements());
        float(OP, name, dtype);
    }
    matrix(OP, "dweight", [dims.channels, dims.taps], dweight.shape());
    exact(OP, "dweight", dweight.dtype(), DType::F32);
    dims
}

fn convolution(op: &str, x: View<'_>, weight: View<'_>) -> ConvolutionDims {
    let (shape, taps) = (x.shape(), weight.shape().last());
    let &[sequences, length, channels] = shape.dims() else {
        panic!("{op}: x is [B, S, C], not {shape:?}");
    };
    float(op, "x", x.dtype());
    float(op, "weight", weight.dtype());
    let most = DeltaSpec::TAPS_MAX;
    assert!((1..=most).contains(&taps), "{op}: a convolution has 1 to {most} taps, not {taps}");
    matrix(op, "weight", [channels, taps], weight.shape());
    ConvolutionDims { sequences, length, channels, taps }
}

pub fn gates(
    a: View<'_>,
    b: View<'_>,
    a_log: View<'_>,
    dt_bias: View<'_>,
    decay: &ViewMut<'_>,
    beta: &ViewMut<'_>,
) -> RowDims {
    gate_operands("gates", [a, b], [a_log, dt_bias], [("decay", decay.view()), ("beta", beta.view())])
}

#[expect(clippy::too_many_arguments, reason = "the operands of the operation")]
pub fn gates_backward(
    a: View<'_>,
    b: View<'_>,
    a_log: View<'_>,
    dt_bias: View<'_>,
    ddecay: View<'_>,
    dbeta: View<'_>,
    da: &ViewMut<'_>,
    db: &ViewMut<'_>,
    da_log: &ViewMut<'_>,
    ddt_bias: &ViewMut<'_>,
) -> RowDims {
    const OP: &str = "gates backward";
    let dims = gate_operands(OP, [a, b], [a_log, dt_bias], [("ddecay", ddecay), ("dbeta", dbeta)]);
    for (name, view) in [("da", da), ("db", db)] {
        matrix(OP, name, [dims.rows, dims.width], view.shape());
        float(OP, name, view.dtype());
    }
    for (name, view) in [("da_log", da_log), ("ddt_bias", ddt_bias)] {
        same(OP, name, dims.width, view.shape().elements());
        exact(OP, name, view.dtype(), DType::F32);
    }
    dims
}

fn gate_operands(
    op: &str,
    [a, b]: [View<'_>; 2],
    [a_log, dt_bias]: [View<'_>; 2],
    gates: [(&str, View<'_>); 2],
) -> RowDims {
    let dims = super::rows(op, a);
    matrix(op, "b", [dims.rows, dims.width], b.shape());
    float(op, "b", b.dtype());
    for (name, view) in [("a_log", a_log), ("dt_bias", dt_bias)] {
        same(op, name, dims.width, view.shape().elements());
        float(op, name, view.dtype());
    }
    for (name, view) in gates {
        matrix(op, name, [dims.rows, dims.width], view.shape());
        exact(op, name, view.dtype(), DType::F32);
    }
    dims
}

pub fn scan(
    qkv: View<'_>,
    decay: View<'_>,
    beta: View<'_>,
    spec: DeltaSpec,
    carried: Option<&Carried<'_>>,
    out: &ViewMut<'_>,
) -> ScanDims {
    let dims = scan_operands("scan", qkv, [("decay", decay), ("beta", beta)], spec, ("out", out.view()));
    if let Some(carried) = carried {
        let state = [spec.value_heads, spec.key_size, spec.value_size];
        self::carried("scan", carried, dims.sequences, DType::F32, &state);
    }
    dims
}

#[expect(clippy::too_many_arguments, reason = "the operands of the operation")]
pub fn scan_backward(
    qkv: View<'_>,
    decay: View<'_>,
    beta: View<'_>,
    spec: DeltaSpec,
    dout: View<'_>,
    dqkv: &ViewMut<'_>,
    ddecay: &ViewMut<'_>,
    dbeta: &ViewMut<'_>,
    scratch: &ViewMut<'_>,
) -> ScanDims {
    const OP: &str = "scan backward";
    let dims = scan_operands(OP, qkv, [("decay", decay), ("beta", beta)], spec, ("dout", dout));
    same(OP, "dqkv", qkv.shape().elements(), dqkv.shape().elements());
    float(OP, "dqkv", dqkv.dtype());
    for (name, view) in [("ddecay", ddecay), ("dbeta", dbeta)] {
        matrix(OP, name, [dims.tokens(), spec.value_heads], view.shape());
        exact(OP, name, view.dtype(), DType::F32);
    }
    same(OP, "scratch", delta_scratch(dims.sequences, dims.length, spec), scratch.shape().elements());
    exact(OP, "scratch", scratch.dtype(), DType::F32);
    dims
}

fn scan_operands(
    op: &str,
    qkv: View<'_>,
    gates: [(&str, View<'_>); 2],
    spec: DeltaSpec,
    (name, result): (&str, View<'_>),
) -> ScanDims {
    let DeltaSpec { key_heads, value_heads, key_size, value_size } = spec;
    assert!(
        key_heads > 0 && value_heads > 0 && value_heads.is_multiple_of(key_heads),
        "{op}: {value_heads} value heads are a multiple of {key_heads} key heads"
    );
    let most = DeltaSpec::KEY_SIZE_MAX;
    assert!((1..=most).contains(&key_size), "{op}: a key has 1 to {most} elements, not {key_size}");
    assert!(value_size > 0, "{op}: a value has elements");
    let shape = qkv.shape();
    let &[sequences, length, channels] = shape.dims() else {
        panic!("{op}: qkv is [B, S, C], not {shape:?}");
    };
    assert_eq!(channels, spec.channels(), "{op}: qkv {shape:?} has the channels of {spec:?}");
    float(op, "qkv", qkv.dtype());
    let dims = ScanDims { sequences, length, heads: spec };
    for (name, view) in gates {
        matrix(op, name, [dims.tokens(), value_heads], view.shape());
        exact(op, name, view.dtype(), DType::F32);
    }
    same(op, name, dims.tokens() * value_heads * value_size, result.shape().elements());
    float(op, name, result.dtype());
    dims
}

fn carried(op: &str, carried: &Carried<'_>, sequences: usize, dtype: DType, of_slot: &[usize]) {
    let shape = carried.state.shape();
    assert!(
        shape.dims().split_first().is_some_and(|(_, slot)| slot == of_slot),
        "{op}: a state is [N] of {of_slot:?}, not {shape:?}"
    );
    exact(op, "state", carried.state.dtype(), dtype);
    for (name, view) in [("slots", carried.slots), ("starts", carried.starts), ("last", carried.last)] {
        same(op, name, sequences, view.shape().elements());
        exact(op, name, view.dtype(), DType::I32);
    }
}

/// What is carried of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CarriedSequence {
    pub slot: usize,
    /// Whether the state counts as zeros.
    pub is_new: bool,
    /// Positions that are no padding.
    pub valid: usize,
}

/// What is carried of each of `sequences`, from the bytes a real backend sees: no slot twice, and rows of their own.
pub fn carried_sequences(
    [slots, starts, last]: [&[i32]; 3],
    slot_count: usize,
    length: usize,
) -> Vec<CarriedSequence> {
    let mut taken = slots.to_vec();
    taken.sort_unstable();
    assert!(taken.windows(2).all(|pair| pair[0] < pair[1]), "carried: the slots {slots:?} are all different");
    let sequence = |(b, ((slot, start), last)): (usize, ((&i32, &i32), &i32))| {
        let in_range = usize::try_from(*slot).ok().filter(|slot| *slot < slot_count);
        let slot = in_range.unwrap_or_else(|| panic!("carried: slot {slot} is one of {slot_count}"));
        let rows = b * length..(b + 1) * length;
        let row = usize::try_from(*last).ok().filter(|row| rows.contains(row));
        let row = row.unwrap_or_else(|| panic!("carried: row {last} is one of sequence {b}, {rows:?}"));
        CarriedSequence { slot, is_new: *start == 0, valid: row + 1 - rows.start }
    };
    slots.iter().zip(starts).zip(last).enumerate().map(sequence).collect()
}
