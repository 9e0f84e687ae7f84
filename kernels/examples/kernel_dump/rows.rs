//! What works row by row and element by element.

use crate::products::pairs;
use crate::{MIXES, Rig};
use terrace_kernels::{DType, GateFunction, RopeDirection, RopeLayout, RopePairs};

/// Rows and their width: whole vectors and blocks, and neither.
const SHAPES: [[usize; 2]; 4] = [[256, 1024], [33, 771], [5, 4096], [1, 3]];
const SHAPES_TINY: [[usize; 2]; 2] = [[6, 64], [3, 37]];

pub fn run(rig: &Rig) {
    for ([rows, width], mix) in pairs(&rig.sizes(&SHAPES, &SHAPES_TINY), &MIXES) {
        let what = format!("{rows}x{width} {} to {}", mix.0, mix.1);
        norm(rig, [rows, width], mix, &what);
        gated(rig, [rows, width], mix, &what);
        embedding(rig, [rows, width], mix, &what);
        elementwise(rig, [rows, width], mix, &what);
        if mix.0 == mix.1 {
            in_place(rig, [rows, width], mix.0);
        }
    }
    let shapes = [[100, 8, 128, 64], [100, 8, 128, 48], [37, 3, 80, 40]];
    let tiny = [[5, 2, 16, 8], [5, 2, 16, 6], [3, 1, 10, 5]];
    for (dims, dtype) in pairs(&rig.sizes(&shapes, &tiny), &FLOATS) {
        rope(rig, dims, RopeLayout::HALVES, dtype);
    }
    let shapes = [[100, 16, 192, 32], [37, 3, 81, 20]];
    for (dims, dtype) in pairs(&rig.sizes(&shapes, &[[5, 2, 16, 4], [3, 1, 11, 3]]), &FLOATS) {
        let [_, _, size, turning] = dims;
        for pairs in [RopePairs::Halves, RopePairs::Neighbours] {
            rope(rig, dims, RopeLayout { first: size - 2 * turning, pairs }, dtype);
        }
    }
    let moves = [[300, 16, 576, 192, 64], [100, 1, 256, 2100, 200], [37, 3, 15, 9, 5]];
    for (sizes, dtype) in pairs(&rig.sizes(&moves, &[[5, 4, 40, 24, 16], [3, 2, 15, 9, 5]]), &FLOATS) {
        columns(rig, sizes, dtype);
    }
    for ([rows, words], dtype) in
        pairs(&rig.sizes(&[[64, 32_000], [37, 1003]], &[[6, 512], [5, 77]]), &FLOATS[..2])
    {
        cross_entropy(rig, [rows, words], dtype);
    }
}

const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

fn norm(rig: &Rig, dims: [usize; 2], (dtype, of_out): (DType, DType), what: &str) {
    let (eps, [rows, width]) = (1e-5, dims);
    let norm = &rig.kernels().rms_norm;
    let mut case = rig.case("rms_norm", what.to_owned()).with("eps", f64::from(eps));
    let (x, weight) = (case.operand("x", dtype, &dims, 2.0), case.operand("weight", dtype, &[width], 1.0));
    let (mut out, mut rstd) = (case.result(of_out, &dims), case.result(DType::F32, &[rows]));
    norm.forward(x.view(), weight.view(), eps, out.view_mut(), rstd.view_mut()).expect("rms_norm runs");
    case.finish(&[("out", &out), ("rstd", &rstd)]);

    for accumulate in [false, true] {
        let name = format!("{what}{}", if accumulate { ", dx added" } else { "" });
        let mut case = rig.case("rms_norm_backward", name).with("eps", f64::from(eps));
        let (x, weight) =
            (case.operand("x", dtype, &dims, 2.0), case.operand("weight", dtype, &[width], 1.0));
        let dout = case.operand("dout", dtype, &dims, 1.0);
        let mut dx =
            if accumulate { case.operand("dx", of_out, &dims, 1.0) } else { case.result(of_out, &dims) };
        let mut dweight = case.operand("dweight", DType::F32, &[width], 1.0);
        let (mut out, mut rstd) = (case.result(of_out, &dims), case.result(DType::F32, &[rows]));
        norm.forward(x.view(), weight.view(), eps, out.view_mut(), rstd.view_mut()).expect("rms_norm runs");
        let (of_x, of_weight) = (dx.view_mut(), dweight.view_mut());
        norm.backward(dout.view(), x.view(), weight.view(), rstd.view(), of_x, accumulate, of_weight)
            .expect("rms_norm runs");
        case.finish(&[("dx", &dx), ("dweight", &dweight)]);
    }
}

fn gated(rig: &Rig, dims: [usize; 2], (dtype, of_out): (DType, DType), what: &str) {
    let activation = &rig.kernels().activation;
    for (f, name) in
        GateFunction::ALL.into_iter().zip(["silu", "gelu", "gelu_tanh", "clamped_swish", "sigmoid"])
    {
        let what = format!("{what} {name}");
        // Limits lie at 7.
        let of_up = if f == GateFunction::ClampedSwish { 4.0 } else { 2.0 };
        let mut case = rig.case("gated", what.clone()).with("function", name);
        let (gate, up) = (case.operand("gate", dtype, &dims, 3.0), case.operand("up", dtype, &dims, of_up));
        let mut out = case.result(of_out, &dims);
        activation.gated(f, gate.view(), up.view(), out.view_mut()).expect("gated runs");
        case.finish(&[("out", &out)]);

        let mut case = rig.case("gated_backward", what).with("function", name);
        let (gate, up) = (case.operand("gate", dtype, &dims, 3.0), case.operand("up", dtype, &dims, of_up));
        let dout = case.operand("dout", dtype, &dims, 1.0);
        let (mut dgate, mut dup) = (case.result(of_out, &dims), case.result(of_out, &dims));
        let (gate, up, dout) = (gate.view(), up.view(), dout.view());
        activation.gated_backward(f, gate, up, dout, dgate.view_mut(), dup.view_mut()).expect("gated runs");
        case.finish(&[("dgate", &dgate), ("dup", &dup)]);
    }
}

/// The rows are tokens, many of them the same.
fn embedding(rig: &Rig, [tokens, width]: [usize; 2], (dtype, of_out): (DType, DType), what: &str) {
    let (embedding, words) = (&rig.kernels().embedding, tokens / 2 + 3);
    let mut case = rig.case("gather", what.to_owned());
    let ids = case.random_integers(words, tokens);
    let (ids, table) =
        (case.integers("ids", &[tokens], &ids), case.operand("table", dtype, &[words, width], 1.0));
    let mut out = case.result(of_out, &[tokens, width]);
    embedding.gather(ids.view(), table.view(), out.view_mut()).expect("gather runs");
    case.finish(&[("out", &out)]);

    let mut case = rig.case("scatter_add", what.to_owned());
    let ids = case.random_integers(words, tokens);
    let (ids, dout) =
        (case.integers("ids", &[tokens], &ids), case.operand("dout", dtype, &[tokens, width], 1.0));
    let mut dtable = case.operand("dtable", DType::F32, &[words, width], 1.0);
    embedding.scatter_add(ids.view(), dout.view(), dtable.view_mut()).expect("scatter_add runs");
    case.finish(&[("dtable", &dtable)]);
}

fn elementwise(rig: &Rig, dims: [usize; 2], (dtype, of_out): (DType, DType), what: &str) {
    let elementwise = &rig.kernels().elementwise;
    let mut case = rig.case("add", what.to_owned());
    let (a, b) = (case.operand("a", dtype, &dims, 2.0), case.operand("b", dtype, &dims, 1.0));
    let mut out = case.result(of_out, &dims);
    elementwise.add(a.view(), b.view(), out.view_mut()).expect("add runs");
    case.finish(&[("out", &out)]);

    let mut case = rig.case("add", format!("{what}, in place"));
    let (mut acc, x) = (case.operand("a", of_out, &dims, 2.0), case.operand("b", dtype, &dims, 1.0));
    elementwise.add_assign(acc.view_mut(), x.view()).expect("add_assign runs");
    case.finish(&[("out", &acc)]);

    for to in FLOATS {
        let mut case = rig.case("cast", format!("{}x{} {dtype} to {to}", dims[0], dims[1]));
        let x = case.operand("x", dtype, &dims, 1.0);
        let mut out = case.result(to, &dims);
        elementwise.cast(x.view(), out.view_mut()).expect("cast runs");
        case.finish(&[("out", &out)]);
    }
}

/// Biases and their gradients, and zeros.
fn in_place(rig: &Rig, dims: [usize; 2], dtype: DType) {
    let (set, what) = (rig.kernels(), format!("{}x{} {dtype}", dims[0], dims[1]));
    let mut case = rig.case("add", format!("{what}, to rows"));
    let (mut x, bias) = (case.operand("a", dtype, &dims, 2.0), case.operand("b", dtype, &[dims[1]], 1.0));
    set.elementwise.add_bias(x.view_mut(), bias.view()).expect("add_bias runs");
    case.finish(&[("out", &x)]);

    let mut case = rig.case("sum_rows", what.clone());
    let (x, mut out) =
        (case.operand("x", dtype, &dims, 1.0), case.operand("out", DType::F32, &[dims[1]], 1.0));
    set.reduce.sum_rows(x.view(), out.view_mut()).expect("sum_rows runs");
    case.finish(&[("out", &out)]);

    let case = rig.case("zero", what);
    let mut out = case.result(dtype, &dims);
    set.elementwise.zero(out.view_mut()).expect("zero runs");
    case.finish(&[("out", &out)]);
}

/// Columns from the end of rows of `from` elements to the end of those of `to`, of which `group` are one's, and back.
fn columns(rig: &Rig, [rows, group, from, to, width]: [usize; 5], dtype: DType) {
    let columns = &rig.kernels().columns;
    let what = format!("{width} of {rows}x{from} to {}x{to} {dtype}", rows * group);
    let begin = |op, what: &str| rig.case(op, what.to_owned()).with("group", group).with("width", width);
    let (few, many) = ([rows, from], [rows * group, to]);

    let mut case = begin("columns_copy", &what).with("from", from - width).with("to", to - width);
    let (x, mut out) = (case.operand("x", dtype, &few, 1.0), case.operand("out", dtype, &many, 1.0));
    columns.copy(x.view(), from - width, out.view_mut(), to - width, width).expect("columns run");
    case.finish(&[("out", &out)]);

    let mut case = begin("columns_fold", &what).with("from", to - width).with("to", from - width);
    let (x, mut out) = (case.operand("x", dtype, &many, 1.0), case.operand("out", dtype, &few, 1.0));
    columns.fold(x.view(), to - width, out.view_mut(), from - width, width).expect("columns run");
    case.finish(&[("out", &out)]);

    let mut case = begin("columns_clear", &what).with("to", to - width);
    let mut out = case.operand("out", dtype, &many, 1.0);
    columns.clear(out.view_mut(), to - width, width).expect("columns run");
    case.finish(&[("out", &out)]);
}

fn rope(rig: &Rig, [tokens, heads, size, turning]: [usize; 4], layout: RopeLayout, dtype: DType) {
    for (direction, word, scale) in
        [(RopeDirection::Forward, "forward", 1.0f32), (RopeDirection::Backward, "backward", 1.25)]
    {
        let RopeLayout { first, pairs } = layout;
        let name = format!("{tokens}x{heads}x{size} {turning} pairs from {first}, {pairs:?} {dtype} {word}");
        let mut case = rig.case("rope", name).with("direction", word).with("scale", f64::from(scale));
        case = case.with("first", first).with("pairs", format!("{pairs:?}"));
        let mut x = case.operand("x", dtype, &[tokens, heads, size], 1.0);
        let positions: Vec<i32> = (0..tokens as i32).map(|t| t * 41).collect();
        let positions = case.integers("positions", &[tokens], &positions);
        let frequency = |i: usize| 10_000f32.powf(-(i as f32) / turning as f32);
        let frequencies: Vec<f32> = (0..turning).map(frequency).collect();
        let inv_freq = case.operand_of("inv_freq", DType::F32, &[turning], &frequencies);
        let rope = &rig.kernels().rope;
        rope.rotate(x.view_mut(), positions.view(), inv_freq.view(), layout, scale, direction)
            .expect("rope runs");
        case.finish(&[("x", &x)]);
    }
}

fn cross_entropy(rig: &Rig, [rows, words]: [usize; 2], dtype: DType) {
    let cross_entropy = &rig.kernels().cross_entropy;
    for gradient in [false, true] {
        let name = format!("{rows}x{words} {dtype}{}", if gradient { " and gradient" } else { "" });
        let mut case = rig.case("cross_entropy", name).with("scale", 0.125);
        let mut labels = case.random_integers(words, rows);
        labels.iter_mut().step_by(4).for_each(|label| *label = -1);
        let labels = case.integers("labels", &[rows], &labels);
        let mut logits = case.operand("logits", dtype, &[rows, words], 4.0);
        let mut loss = case.operand_of("loss", DType::F64, &[1], &[2.5]);
        if gradient {
            let (logits, loss) = (logits.view_mut(), loss.view_mut());
            cross_entropy
                .loss_and_gradient(logits, labels.view(), 0.125, None, loss)
                .expect("cross_entropy runs");
        } else {
            cross_entropy.loss(logits.view(), labels.view(), loss.view_mut()).expect("cross_entropy runs");
        }
        // Without a gradient the logits are what they were.
        case.finish(&[("loss", &loss), ("logits", &logits)]);
    }
}
