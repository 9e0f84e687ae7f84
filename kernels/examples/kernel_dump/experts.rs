//! Mixture of experts: what tokens choose, rows to experts and back.

use crate::case::Case;
use crate::products::pairs;
use crate::{MIXES, Rig};
use terrace_kernels::{DType, ExpertGroups, Gating, GroupScore, Residual, Scores, Tensor};

/// Tokens, experts, choices of a token, and elements of a row.
const SHAPES: [[usize; 4]; 4] = [[512, 128, 8, 768], [300, 8, 2, 1030], [77, 64, 64, 33], [1, 3, 1, 5]];
const SHAPES_TINY: [[usize; 4]; 2] = [[9, 40, 4, 64], [5, 3, 1, 37]];

pub fn run(rig: &Rig) {
    for (shape, mix) in pairs(&rig.sizes(&SHAPES, &SHAPES_TINY), &MIXES) {
        let sigmoid = Gating { scores: Scores::Sigmoid, scale: 2.5, ..Gating::softmax(true) };
        let grouped = |by, gating: Gating<'static>| {
            let [_, experts, choices, _] = shape;
            // Each group has two experts, where there are as many.
            let count = (1..=8).rev().find(|count| experts % count == 0 && experts / count > 1).unwrap_or(1);
            let kept = (choices * count).div_ceil(experts).midpoint(count);
            Gating { groups: Some(ExpertGroups { count, kept, by }), ..gating }
        };
        for (gating, is_biased) in [
            (Gating::softmax(false), false),
            (Gating::softmax(true), false),
            (sigmoid, false),
            (sigmoid, true),
            (grouped(GroupScore::Largest, Gating::softmax(false)), false),
            (grouped(GroupScore::TwoLargest, sigmoid), true),
        ] {
            route(rig, shape, mix, gating, is_biased);
        }
        let [tokens, _, choices, width] = shape;
        let what = format!("{tokens}x{width} to {choices} each {} to {}", mix.0, mix.1);
        spread(rig, shape, mix, &what);
        collect(rig, shape, mix, &what);
        weigh(rig, shape, mix, &what);
    }
}

/// A choice and its gradient, with something added to scores or not.
fn route(
    rig: &Rig,
    [tokens, count, choices, _]: [usize; 4],
    (dtype, of_out): (DType, DType),
    gating: Gating<'static>,
    is_biased: bool,
) {
    let experts = &rig.kernels().experts;
    let what = format!(
        "{choices} of {count} by {tokens} {dtype} to {of_out}, {:?}{}{}{}",
        gating.scores,
        if gating.normalize { ", normalized" } else { "" },
        if is_biased { ", biased" } else { "" },
        gating
            .groups
            .map_or(String::new(), |of| format!(", {} of {} groups, {:?}", of.kept, of.count, of.by))
    );
    for backward in [false, true] {
        let op = if backward { "route_backward" } else { "route" };
        let mut case =
            rig.case(op, what.clone()).with("normalize", gating.normalize).with("choices", choices);
        case = case.with("scores", format!("{:?}", gating.scores)).with("scale", f64::from(gating.scale));
        if let Some(ExpertGroups { count, kept, by }) = gating.groups {
            case = case.with("groups", count).with("kept", kept).with("by", format!("{by:?}"));
        }
        let logits = case.operand("logits", dtype, &[tokens, count], 2.0);
        let bias = is_biased.then(|| case.operand("bias", DType::F32, &[count], 0.5));
        let gating = Gating { bias: bias.as_ref().map(Tensor::view), ..gating };
        let of_choices = |dtype| case.result(dtype, &[tokens, choices]);
        let [mut weights, mut chosen, mut rows] = [DType::F32, DType::I32, DType::I32].map(of_choices);
        let mut starts = case.result(DType::I32, &[count + 1]);
        let (to_weights, to_chosen, to_rows) = (weights.view_mut(), chosen.view_mut(), rows.view_mut());
        experts
            .route(logits.view(), gating, to_weights, to_chosen, to_rows, starts.view_mut())
            .expect("route runs");
        if !backward {
            case.finish(&[("weights", &weights), ("chosen", &chosen), ("rows", &rows), ("starts", &starts)]);
            continue;
        }
        let dweights = case.operand("dweights", DType::F32, &[tokens, choices], 1.0);
        let mut dlogits = case.result(of_out, &[tokens, count]);
        let (weights, chosen, to_logits) = (weights.view(), chosen.view(), dlogits.view_mut());
        experts
            .route_backward(logits.view(), gating, weights, chosen, dweights.view(), to_logits)
            .expect("route_backward runs");
        case.finish(&[("dlogits", &dlogits)]);
    }
}

/// Routed rows in any order.
fn rows(case: &mut Case<'_>, tokens: usize, choices: usize) -> Tensor {
    let keys = case.random_integers(1 << 30, tokens * choices);
    let mut rows: Vec<i32> = (0..keys.len() as i32).collect();
    rows.sort_by_key(|row| keys[*row as usize]);
    case.integers("rows", &[tokens, choices], &rows)
}

fn spread(rig: &Rig, [tokens, _, choices, width]: [usize; 4], (dtype, of_out): (DType, DType), what: &str) {
    let mut case = rig.case("spread", what.to_owned());
    let (x, rows) = (case.operand("x", dtype, &[tokens, width], 1.0), rows(&mut case, tokens, choices));
    let mut out = case.result(of_out, &[tokens * choices, width]);
    rig.kernels().experts.spread(x.view(), rows.view(), out.view_mut()).expect("spread runs");
    case.finish(&[("out", &out)]);
}

/// Without a residual, with one that the result replaces, and with another.
fn collect(rig: &Rig, [tokens, _, choices, width]: [usize; 4], (dtype, of_out): (DType, DType), what: &str) {
    for residual in ["", ", in place", ", residual"] {
        let mut case = rig.case("collect", format!("{what}{residual}"));
        let x = case.operand("x", dtype, &[tokens * choices, width], 1.0);
        let (rows, dims) = (rows(&mut case, tokens, choices), [tokens, width]);
        let other = (residual == ", residual").then(|| case.operand("residual", dtype, &dims, 1.0));
        let in_place = residual == ", in place";
        let mut out =
            if in_place { case.operand("residual", of_out, &dims, 1.0) } else { case.result(of_out, &dims) };
        let added = match &other {
            Some(other) => Residual::Of(other.view()),
            None if in_place => Residual::InPlace,
            None => Residual::None,
        };
        rig.kernels().experts.collect(x.view(), rows.view(), added, out.view_mut()).expect("collect runs");
        case.finish(&[("out", &out)]);
    }
}

fn weigh(rig: &Rig, [tokens, _, choices, width]: [usize; 4], (dtype, of_out): (DType, DType), what: &str) {
    let (experts, dims) = (&rig.kernels().experts, [tokens * choices, width]);
    let mut case = rig.case("weigh", what.to_owned());
    let (x, rows_tx) = (case.operand("x", dtype, &dims, 1.0), rows(&mut case, tokens, choices));
    let weights = case.operand("weights", DType::F32, &[tokens, choices], 1.0);
    let mut out = case.result(of_out, &dims);
    experts.weigh(x.view(), rows_tx.view(), weights.view(), out.view_mut()).expect("weigh runs");
    case.finish(&[("out", &out)]);

    let mut case = rig.case("weigh_backward", what.to_owned());
    let (x, rows_tx) = (case.operand("x", dtype, &dims, 1.0), rows(&mut case, tokens, choices));
    let weights = case.operand("weights", DType::F32, &[tokens, choices], 1.0);
    let (mut d, mut dweights) =
        (case.operand("d", of_out, &dims, 1.0), case.result(DType::F32, &[tokens, choices]));
    let (into, to_weights) = (d.view_mut(), dweights.view_mut());
    experts
        .weigh_backward(into, x.view(), rows_tx.view(), weights.view(), to_weights)
        .expect("weigh_backward runs");
    case.finish(&[("d", &d), ("dweights", &dweights)]);
}
