//! Choices, numbers of routed rows and their starts are the reference's, whatever the logits. Tolerance: weights 1e-6; gradients of
//! logits 1e-6·X of the largest gradient of a weight; spreading none; sums of X rows of order 1 and a residual 1e-6·X; weighed rows
//! 1e-6; gradients of weights, sums of F products of order 1, 1e-5·√F.

use crate::support::{Host, MIXES, assert_close, backends};
use proptest::prelude::*;
use std::collections::HashSet;
use std::panic::AssertUnwindSafe;
use terrace_kernels::{
    DType, ExpertGroups, Experts, Gating, GroupScore, KernelSet, Residual, Scores, cpu, reference,
};

/// Tokens, experts and choices: one of each, all experts, one expert, many, more than a warp and a block of a card have threads, and
/// more than a buffer of the CPU holds.
const SIZES: [(usize, usize, usize); 9] = [
    (1, 1, 1),
    (5, 3, 3),
    (33, 7, 1),
    (60, 128, 8),
    (9, 8, 8),
    (4, 1030, 5),
    (300, 64, 2),
    (2, 50, 40),
    (700, 5, 3),
];

const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// What `route` writes.
pub struct Routed {
    pub weights: Host,
    pub chosen: Host,
    pub rows: Host,
    pub starts: Host,
}

/// What results hold before they are written.
const UNWRITTEN: f64 = -7.0;

/// Every kind of scores, with and without what is added to them, divided by their sum or not, and multiplied by another number.
pub fn gatings(bias: &Host) -> [Gating<'_>; 6] {
    let gating = |scores, is_biased: bool, normalize, scale| Gating {
        scores,
        bias: is_biased.then(|| bias.view()),
        normalize,
        scale,
        groups: None,
    };
    [
        Gating::softmax(false),
        Gating::softmax(true),
        gating(Scores::Softmax, true, true, 0.5),
        gating(Scores::Sigmoid, false, false, 1.0),
        gating(Scores::Sigmoid, true, false, 2.5),
        gating(Scores::Sigmoid, true, true, 1.5),
    ]
}

/// Groups of so many experts, of which some are kept that have as many as a token chooses.
fn groups(experts: usize, choices: usize) -> Vec<ExpertGroups> {
    let mut all = Vec::new();
    for count in [1, 2, 4, 8, 10, 103, experts] {
        let size = experts / count.min(experts);
        if count > ExpertGroups::COUNT_MAX || count * size != experts {
            continue;
        }
        let least = choices.div_ceil(size);
        for kept in [least, least.midpoint(count), count] {
            for by in [GroupScore::Largest, GroupScore::TwoLargest] {
                if size > 1 || by == GroupScore::Largest {
                    all.push(ExpertGroups { count, kept, by });
                }
            }
        }
    }
    all
}

/// What is added to the scores of so many experts.
pub fn biases(experts: usize) -> Host {
    Host::random(DType::F32, &[experts], 0.5, 9)
}

pub fn route(experts: &dyn Experts, logits: &Host, choices: usize, gating: Gating<'_>) -> Routed {
    let [tokens, count] = *logits.dims() else { panic!("logits are a matrix") };
    let of_choices = |dtype| Host::of(dtype, &[tokens, choices], vec![UNWRITTEN; tokens * choices]);
    let [mut weights, mut chosen, mut rows] = [DType::F32, DType::I32, DType::I32].map(of_choices);
    let mut starts = Host::of(DType::I32, &[count + 1], vec![UNWRITTEN; count + 1]);
    let (to_weights, to_chosen, to_rows) = (weights.view_mut(), chosen.view_mut(), rows.view_mut());
    experts.route(logits.view(), gating, to_weights, to_chosen, to_rows, starts.view_mut()).unwrap();
    Routed { weights, chosen, rows, starts }
}

/// Where a choice is not the expected one, if anywhere. Weights that are no numbers are to be none.
pub fn disagreement(expected: &Routed, found: &Routed) -> Option<String> {
    let integers = [
        ("chosen", &expected.chosen, &found.chosen),
        ("rows", &expected.rows, &found.rows),
        ("starts", &expected.starts, &found.starts),
    ];
    let differs = integers.into_iter().find(|(_, expected, found)| expected.bytes() != found.bytes());
    if let Some((name, expected, found)) = differs {
        return Some(format!("{name}: {:?} instead of {:?}", found.values(), expected.values()));
    }
    let pairs = expected.weights.values().into_iter().zip(found.weights.values());
    let close = |(a, b): &(f64, f64)| (a - b).abs() <= 1e-6 || (a.is_nan() && b.is_nan());
    let different = pairs.enumerate().find(|(_, pair)| !close(pair));
    different.map(|(i, (expected, found))| format!("weight {i}: {found} instead of {expected}"))
}

/// Backends agree with the reference on logits; what it says.
fn check_route(logits: &Host, choices: usize, gating: Gating<'_>) -> Routed {
    let expected = route(&*reference::kernel_set().experts, logits, choices, gating);
    for (name, set) in backends() {
        let found = route(&*set.experts, logits, choices, gating);
        let what = format!("{name}: {choices} of {:?} {}, {}", logits.dims(), logits.dtype(), words(gating));
        if let Some(found) = disagreement(&expected, &found) {
            panic!("{what}: {found}");
        }
        let numbers = set.experts.starts(found.starts.view(), expected.rows.len()).unwrap();
        let numbers: Vec<f64> = numbers.iter().map(|&number| number as f64).collect();
        assert_eq!(expected.starts.values(), numbers, "{what}: numbers of the host");
    }
    expected
}

fn words(Gating { scores, bias, normalize, scale, groups }: Gating<'_>) -> String {
    let bias = if bias.is_some() { " and a bias" } else { "" };
    let normalized = if normalize { ", normalized" } else { "" };
    let grouped = groups.map_or(String::new(), |groups| format!(", {groups:?}"));
    format!("{scores:?}{bias}{normalized}, times {scale}{grouped}")
}

#[test]
fn choices_and_their_rows() {
    for (tokens, experts, choices) in SIZES {
        for dtype in FLOATS {
            for gating in gatings(&biases(experts)) {
                let logits = Host::random(dtype, &[tokens, experts], 2.0, 1);
                let routed = check_route(&logits, choices, gating);
                each_row_is_of_its_expert(&routed, choices);
                if gating.normalize {
                    for weights in routed.weights.values().chunks(choices) {
                        assert!((weights.iter().sum::<f64>() - f64::from(gating.scale)).abs() < 1e-6);
                    }
                }
            }
        }
    }
}

/// A token's experts are in no more groups than are kept; with all of them it chooses as without groups.
#[test]
fn choices_from_some_groups() {
    for (tokens, experts, choices) in SIZES {
        let bias = biases(experts);
        for (turn, dtype) in FLOATS.into_iter().enumerate() {
            let logits = Host::random(dtype, &[tokens, experts], 2.0, 1);
            for (i, groups) in groups(experts, choices).into_iter().enumerate() {
                let gating = gatings(&bias)[(i + turn) % 6];
                let routed = check_route(&logits, choices, Gating { groups: Some(groups), ..gating });
                each_row_is_of_its_expert(&routed, choices);
                for chosen in routed.chosen.values().chunks(choices) {
                    let of_group = |expert: &f64| *expert as usize / (experts / groups.count);
                    let from: HashSet<usize> = chosen.iter().map(of_group).collect();
                    assert!(from.len() <= groups.kept, "{from:?} with {groups:?}");
                }
                if groups.kept == groups.count {
                    let free = route(&*reference::kernel_set().experts, &logits, choices, gating);
                    assert_eq!(disagreement(&free, &routed), None, "{groups:?}");
                }
            }
        }
    }
}

/// Which groups are kept, by hand.
#[test]
fn groups_by_their_scores() {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let largest = |kept| ExpertGroups { count: 3, kept, by: GroupScore::Largest };
    let two = |kept| ExpertGroups { count: 3, kept, by: GroupScore::TwoLargest };
    let sigmoid = Gating { scores: Scores::Sigmoid, ..Gating::softmax(true) };
    let rows: [([f64; 6], ExpertGroups, usize, &[f64]); 10] = [
        // One large score, or two that are not small.
        ([2.0, -3.0, 1.0, 1.0, -1.0, -1.0], largest(1), 2, &[0.0, 1.0]),
        ([2.0, -3.0, 1.0, 1.0, -1.0, -1.0], two(1), 2, &[2.0, 3.0]),
        ([2.0, -3.0, 1.0, 1.0, -1.0, -1.0], two(2), 3, &[0.0, 2.0, 3.0]),
        // The choice is of the largest among those that are left.
        ([0.0, 3.0, 2.0, 2.5, 4.0, -9.0], largest(2), 4, &[4.0, 1.0, 0.0, 5.0]),
        // Of equal groups the lower ones.
        ([1.0, 0.0, 0.0, 1.0, 1.0, 0.0], largest(1), 1, &[0.0]),
        ([0.0, 1.0, 1.0, 0.0, 1.0, 0.0], two(2), 2, &[1.0, 2.0]),
        // NaNs are less than everything, alone or in a sum.
        ([nan, nan, -inf, -inf, -1.0, nan], largest(2), 4, &[4.0, 2.0, 3.0, 5.0]),
        ([nan, 9.0, -2.0, -3.0, nan, 8.0], two(1), 2, &[2.0, 3.0]),
        ([nan, 9.0, -2.0, -3.0, nan, 8.0], largest(1), 2, &[1.0, 0.0]),
        ([nan; 6], two(2), 4, &[0.0, 1.0, 2.0, 3.0]),
    ];
    for dtype in FLOATS {
        for (logits, groups, choices, expected) in rows {
            let logits = Host::of(dtype, &[1, 6], logits);
            let routed = check_route(&logits, choices, Gating { groups: Some(groups), ..sigmoid });
            assert_eq!(routed.chosen.values(), expected, "{:?} {groups:?}", logits.values());
        }
    }
    // What is added to scores counts for groups, too.
    let logits = Host::zeros(DType::F32, &[1, 6]);
    let bias = Host::of(DType::F32, &[6], [0.0, 0.3, 0.25, 0.25, 0.2, 0.2]);
    for (groups, expected) in [(largest(1), [1.0, 0.0]), (two(1), [2.0, 3.0])] {
        let gating = Gating { bias: Some(bias.view()), groups: Some(groups), ..sigmoid };
        assert_eq!(check_route(&logits, 2, gating).chosen.values(), expected);
    }
    // Two probabilities that are large together, of logits that are not.
    let logits = Host::of(DType::F32, &[1, 6], [-1.0, -9.0, -1.5, -1.5, -5.0, -5.0]);
    let gating = Gating { groups: Some(two(1)), ..Gating::softmax(false) };
    assert_eq!(check_route(&logits, 1, gating).chosen.values(), [2.0]);
}

/// The documentation's words, of the reference: those of one expert follow each other in the order of their tokens.
fn each_row_is_of_its_expert(routed: &Routed, choices: usize) {
    let mut tokens = vec![None; routed.rows.len()];
    let starts = routed.starts.values();
    for (choice, (row, expert)) in routed.rows.values().into_iter().zip(routed.chosen.values()).enumerate() {
        assert!((starts[expert as usize]..starts[expert as usize + 1]).contains(&row));
        assert_eq!(tokens[row as usize].replace(choice / choices), None);
    }
    for bounds in starts.windows(2) {
        assert!(tokens[bounds[0] as usize..bounds[1] as usize].is_sorted());
    }
}

#[test]
fn equal_logits_go_to_lower_experts() {
    for experts in [6, 70, 1500] {
        let logits = Host::of(DType::BF16, &[2, experts], vec![0.5; 2 * experts]);
        let chosen = check_route(&logits, 4, Gating::softmax(true)).chosen.values();
        assert_eq!(chosen, [0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0]);
    }
    // A zero is as large as the other.
    let logits = Host::of(DType::F32, &[2, 3], [-0.0, 0.0, 1.0, 0.0, -0.0, 1.0]);
    assert_eq!(check_route(&logits, 2, Gating::softmax(false)).chosen.values(), [2.0, 0.0, 2.0, 0.0]);
}

/// A token with such logits gets weights that are none, so that the loss says so, but a place like any other.
#[test]
fn what_is_no_number_comes_last() {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let rows = [
        ([nan, 1.0, nan, 2.0, -inf], [3.0, 1.0, 4.0, 0.0, 2.0]),
        ([nan; 5], [0.0, 1.0, 2.0, 3.0, 4.0]),
        ([-inf; 5], [0.0, 1.0, 2.0, 3.0, 4.0]),
        ([0.0, inf, nan, inf, -inf], [1.0, 3.0, 0.0, 4.0, 2.0]),
    ];
    for dtype in FLOATS {
        for (logits, expected) in rows {
            for choices in 1..=5 {
                let logits = Host::of(dtype, &[1, 5], logits);
                let routed = check_route(&logits, choices, Gating::softmax(choices % 2 == 0));
                assert_eq!(routed.chosen.values(), expected[..choices]);
                assert!(routed.weights.values().iter().all(|weight| weight.is_nan()), "{dtype}");
            }
        }
        // What is infinitely unlikely is a number.
        let logits = Host::of(dtype, &[1, 3], [-inf, 0.0, -inf]);
        assert_eq!(check_route(&logits, 2, Gating::softmax(true)).weights.values(), [1.0, 0.0]);
    }
}

/// What is added decides who is chosen, and weighs nothing.
#[test]
fn a_bias_chooses_and_does_not_weigh() {
    let logits = Host::of(DType::F32, &[1, 4], [0.0, 1.0, 2.0, 3.0]);
    let bias = Host::of(DType::F32, &[4], [1.0, 0.0, -1.0, -1.0]);
    let gating = Gating { scores: Scores::Sigmoid, bias: Some(bias.view()), ..Gating::softmax(true) };
    let gating = Gating { scale: 2.0, ..gating };
    let routed = check_route(&logits, 2, gating);
    assert_eq!(routed.chosen.values(), [0.0, 1.0]);
    let sigmoid = 1.0 / (1.0 + (-1.0f64).exp());
    let expected = [0.5, sigmoid].map(|score| 2.0 * score / (0.5 + sigmoid));
    for (expected, found) in expected.iter().zip(routed.weights.values()) {
        assert!((expected - found).abs() < 1e-6, "{found} instead of {expected}");
    }
    // Each score is of its own logit: one that is no number harms no other.
    let logits = Host::of(DType::F32, &[1, 4], [0.0, f64::NAN, 2.0, 3.0]);
    let routed = check_route(&logits, 3, Gating { normalize: false, ..gating });
    assert_eq!(routed.chosen.values(), [0.0, 3.0, 2.0]);
    assert!(routed.weights.values().iter().all(|weight| weight.is_finite()));
}

#[test]
fn experts_that_nobody_chose() {
    let logit = |expert: usize| if [2, 5].contains(&expert) { 9.0 } else { -(expert as f64) };
    let logits = Host::of(DType::F32, &[3, 8], (0..24).map(|i| logit(i % 8)));
    let routed = check_route(&logits, 2, Gating::softmax(true));
    assert_eq!(routed.starts.values(), [0.0, 0.0, 0.0, 3.0, 3.0, 3.0, 6.0, 6.0, 6.0]);
    assert_eq!(routed.rows.values(), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
}

/// A batch may have no tokens.
#[test]
fn no_tokens() {
    let routed = check_route(&Host::zeros(DType::F32, &[0, 4]), 2, Gating::softmax(true));
    assert_eq!(routed.starts.values(), [0.0; 5]);
}

#[test]
fn numbers_that_are_no_starts() {
    let starts = [[0.0, 2.0, 5.0], [1.0, 2.0, 4.0], [0.0, 5.0, 4.0], [0.0, -1.0, 4.0]];
    for (name, set) in backends().into_iter().chain([("reference".to_owned(), reference::kernel_set())]) {
        for starts in starts {
            let found = set.experts.starts(Host::of(DType::I32, &[3], starts).view(), 4);
            let error = found.expect_err(&name).to_string();
            assert!(error.contains("4 routed rows"), "{name}: {error}");
        }
    }
}

#[test]
fn gradients_of_logits() {
    for (tokens, experts, choices) in SIZES {
        for mix in MIXES {
            for gating in gatings(&biases(experts)) {
                check_route_backward((tokens, experts, choices), mix, gating);
            }
        }
    }
}

fn check_route_backward(
    (tokens, experts, choices): (usize, usize, usize),
    (dtype, out_dtype): (DType, DType),
    gating: Gating<'_>,
) {
    let logits = Host::random(dtype, &[tokens, experts], 2.0, 1);
    let Routed { weights, chosen, .. } = route(&*reference::kernel_set().experts, &logits, choices, gating);
    let dweights = Host::random(DType::F32, &[tokens, choices], 1.0, 2);
    let run = |set: &KernelSet, dtype| {
        let mut dlogits = Host::random(dtype, &[tokens, experts], 1.0, 3);
        let (weights, chosen, dweights) = (weights.view(), chosen.view(), dweights.view());
        set.experts
            .route_backward(logits.view(), gating, weights, chosen, dweights, dlogits.view_mut())
            .unwrap();
        dlogits
    };
    let expected = run(&reference::kernel_set(), DType::F32);
    let largest =
        dweights.values().into_iter().map(f64::abs).fold(0.0, f64::max) * f64::from(gating.scale.max(1.0));
    for (name, set) in backends() {
        let what =
            format!("{name}: {choices} of [{tokens}, {experts}] {dtype} {out_dtype}, {}", words(gating));
        assert_close(&what, &expected, &run(&set, out_dtype), 1e-6 * choices as f64 * largest);
    }
}

#[test]
fn rows_to_experts_and_back() {
    for ((tokens, experts, choices), width) in SIZES.into_iter().zip([1, 5, 64, 300, 1024, 1030, 3, 2056, 8])
    {
        MIXES.into_iter().for_each(|mix| check_rows((tokens, experts, choices), width, mix));
    }
}

fn check_rows((tokens, experts, choices): (usize, usize, usize), width: usize, mix: (DType, DType)) {
    let logits = Host::random(DType::F32, &[tokens, experts], 2.0, 1);
    let routed = route(&*reference::kernel_set().experts, &logits, choices, Gating::softmax(true));
    let what =
        |name: &str| format!("{name}: {choices} of {experts}, [{tokens}, {width}] {} {}", mix.0, mix.1);
    check_spread_and_collect(&routed, width, mix, what);
    check_weigh(&routed, width, mix, what);
}

fn check_spread_and_collect(
    routed: &Routed,
    width: usize,
    (dtype, out_dtype): (DType, DType),
    what: impl Fn(&str) -> String,
) {
    let [tokens, choices] = routed.rows.dims() else { panic!("rows are a matrix") };
    let x = Host::random(dtype, &[*tokens, width], 1.0, 2);
    let back = Host::random(dtype, &[tokens * choices, width], 1.0, 3);
    let (other, old) =
        (Host::random(dtype, &[*tokens, width], 1.0, 4), Host::random(out_dtype, &[*tokens, width], 1.0, 5));
    let run = |set: &KernelSet, dtype| {
        let mut spread = Host::random(dtype, &[tokens * choices, width], 1.0, 6);
        set.experts.spread(x.view(), routed.rows.view(), spread.view_mut()).unwrap();
        let residuals = [Residual::None, Residual::InPlace, Residual::Of(other.view())];
        let collected = residuals.map(|residual| {
            let mut out = old.cast(dtype);
            set.experts.collect(back.view(), routed.rows.view(), residual, out.view_mut()).unwrap();
            out
        });
        (spread, collected)
    };
    let (expected, expected_sums) = run(&reference::kernel_set(), DType::F32);
    for (name, set) in backends() {
        let (spread, sums) = run(&set, out_dtype);
        assert_close(&what(&name), &expected, &spread, 0.0);
        for (expected, found) in expected_sums.iter().zip(&sums) {
            assert_close(&what(&name), expected, found, 1e-6 * *choices as f64);
        }
    }
}

fn check_weigh(
    Routed { weights, rows, .. }: &Routed,
    width: usize,
    (dtype, out_dtype): (DType, DType),
    what: impl Fn(&str) -> String,
) {
    let dims = [rows.len(), width];
    let (x, d) = (Host::random(dtype, &dims, 1.0, 2), Host::random(out_dtype, &dims, 1.0, 3));
    let run = |set: &KernelSet, dtype| {
        let (mut out, mut d, mut dweights) = (Host::zeros(dtype, &dims), d.cast(dtype), weights.clone());
        set.experts.weigh(x.view(), rows.view(), weights.view(), out.view_mut()).unwrap();
        let (into, of_weights) = (d.view_mut(), dweights.view_mut());
        set.experts.weigh_backward(into, x.view(), rows.view(), weights.view(), of_weights).unwrap();
        (out, d, dweights)
    };
    let (expected, expected_d, expected_dweights) = run(&reference::kernel_set(), DType::F32);
    for (name, set) in backends() {
        let (out, d, dweights) = run(&set, out_dtype);
        assert_close(&what(&name), &expected, &out, 1e-6);
        assert_close(&format!("d, {}", what(&name)), &expected_d, &d, 1e-6);
        let tolerance = 1e-5 * (width as f64).sqrt();
        assert_close(&format!("dweights, {}", what(&name)), &expected_dweights, &dweights, tolerance);
    }
}

/// Two threads would write one row. The last are more rows than the CPU looks at together.
#[test]
fn rows_that_are_not_named_once() {
    let spread = |tokens: usize, last: f64| {
        let (x, mut out) = (Host::zeros(DType::F32, &[tokens, 1]), Host::zeros(DType::F32, &[tokens, 1]));
        let rows = (0..tokens).map(|t| if t == tokens - 1 { last } else { t as f64 });
        let rows = Host::of(DType::I32, &[tokens, 1], rows);
        let run = || cpu::kernel_set(2).experts.spread(x.view(), rows.view(), out.view_mut());
        std::panic::catch_unwind(AssertUnwindSafe(run)).is_ok()
    };
    for tokens in [4, 9 << 20] {
        let last = (tokens - 1) as f64;
        assert!(spread(tokens, last));
        for wrong in [0.0, last - 1.0, last + 1.0, -1.0] {
            assert!(!spread(tokens, wrong), "{wrong} of {tokens}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_shape(
        tokens in 1usize..60, experts in 1usize..200, choices in 1usize..20, width in 1usize..1500,
        mix in 0..MIXES.len(), gating in 0usize..6, seed in 1u64..1000, grouped in 0usize..100,
    ) {
        let choices = choices.min(experts);
        // Few different values: many are equal.
        let logits = Host::random(DType::F32, &[tokens, experts], 2.0, seed);
        let coarse = Host::of(DType::F32, &[tokens, experts], logits.values().into_iter().map(f64::round));
        let (bias, zeros) = (biases(experts), Host::zeros(DType::F32, &[experts]));
        check_route(&logits, choices, gatings(&bias)[gating]);
        check_route(&coarse, choices, gatings(&zeros)[gating]);
        let of_groups = groups(experts, choices);
        let groups = Some(of_groups[grouped % of_groups.len()]);
        check_route(&logits, choices, Gating { groups, ..gatings(&bias)[gating] });
        // Different sums of sigmoids of both signs may be equal, but for roundings.
        let positive = Host::of(DType::F32, &[tokens, experts], coarse.values().into_iter().map(f64::abs));
        check_route(&positive, choices, Gating { groups, ..gatings(&zeros)[gating] });
        check_route_backward((tokens, experts, choices), MIXES[mix], gatings(&bias)[gating]);
        check_rows((tokens, experts, choices), width, MIXES[mix]);
    }
}
