//! Tolerance: cosines and sines are rounded once to f32 and two products are added, of values up to 6·√2: 4e-6.

use crate::support::{Host, assert_close, backends};
use proptest::prelude::*;
use terrace_kernels::{DType, RopeDirection, RopeLayout, reference};

fn inv_freq(half: usize) -> Host {
    Host::of(DType::F32, &[half], (0..half).map(|i| 10_000f64.powf(-(i as f64) / half as f64)))
}

#[test]
fn rotates_like_the_reference() {
    // The last three rotate a part of each head, or nothing of it.
    for sizes in [
        (1, 1, 2, 1),
        (3, 2, 6, 3),
        (65, 3, 64, 32),
        (2, 5, 130, 65),
        (3, 2, 128, 48),
        (65, 3, 15, 7),
        (2, 2, 8, 0),
    ] {
        for dtype in FLOATS {
            check(sizes, dtype);
        }
    }
}

const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

fn check((tokens, heads, head_size, half): (usize, usize, usize, usize), dtype: DType) {
    for direction in [RopeDirection::Forward, RopeDirection::Backward] {
        let x = Host::random(dtype, &[tokens, heads, head_size], 1.0, 1);
        // Positions up to 100 000 need an exact range reduction.
        let positions = Host::of(DType::I32, &[tokens], (0..tokens).map(|t| (t * 99_991 % 100_003) as f64));
        let inv_freq = inv_freq(half);
        let mut expected = x.cast(DType::F32);
        let rope = reference::kernel_set().rope;
        rope.rotate(
            expected.view_mut(),
            positions.view(),
            inv_freq.view(),
            RopeLayout::HALVES,
            1.1,
            direction,
        )
        .unwrap();
        for (name, set) in backends() {
            let mut out = x.clone();
            set.rope
                .rotate(out.view_mut(), positions.view(), inv_freq.view(), RopeLayout::HALVES, 1.1, direction)
                .unwrap();
            let what =
                format!("{name}: [{tokens}, {heads}, {head_size}], {half} pairs {dtype} {direction:?}");
            assert_close(&what, &expected, &out, 4e-6);
            // What is not rotated is not touched.
            for (at, (before, after)) in x.values().into_iter().zip(out.values()).enumerate() {
                assert!(at % head_size < 2 * half || before == after, "{what}: element {at}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_shape(tokens in 1usize..70, heads in 1usize..9, half in 1usize..100, rest in 0usize..70, dtype in 0..FLOATS.len()) {
        let rest = rest.saturating_sub(35);
        check((tokens, heads, 2 * half + rest, half), FLOATS[dtype]);
    }
}

/// The half-split layout: with a quarter turn, `(low, high)` becomes `(−high, low)`.
#[test]
fn layout() {
    let mut x = Host::of(DType::F32, &[1, 1, 4], [1.0, 2.0, 3.0, 4.0]);
    let positions = Host::of(DType::I32, &[1], [1.0]);
    let quarter = Host::of(DType::F32, &[2], [std::f64::consts::FRAC_PI_2; 2]);
    let rope = reference::kernel_set().rope;
    rope.rotate(
        x.view_mut(),
        positions.view(),
        quarter.view(),
        RopeLayout::HALVES,
        1.0,
        RopeDirection::Forward,
    )
    .unwrap();
    assert_close("quarter turn", &Host::of(DType::F32, &[4], [-3.0, -4.0, 1.0, 2.0]), &x, 1e-6);
    rope.rotate(
        x.view_mut(),
        positions.view(),
        quarter.view(),
        RopeLayout::HALVES,
        1.0,
        RopeDirection::Backward,
    )
    .unwrap();
    assert_close("and back", &Host::of(DType::F32, &[4], [1.0, 2.0, 3.0, 4.0]), &x, 1e-6);
}
