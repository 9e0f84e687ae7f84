//! Tolerance: cosines and sines are rounded once to f32 and two products are added, of values up to 6·√2: 4e-6.

use crate::support::{Host, assert_close, backends};
use proptest::prelude::*;
use terrace_kernels::{DType, KernelSet, RopeDirection, RopeLayout, RopePairs, reference};

fn inv_freq(half: usize) -> Host {
    Host::of(DType::F32, &[half], (0..half).map(|i| 10_000f64.powf(-(i as f64) / half as f64)))
}

/// Tokens, heads, elements of a head and pairs.
type Sizes = (usize, usize, usize, usize);

/// The last five rotate a part of each head, or nothing of it.
const SIZES: [Sizes; 9] = [
    (1, 1, 2, 1),
    (3, 2, 6, 3),
    (65, 3, 64, 32),
    (2, 5, 130, 65),
    (3, 2, 128, 48),
    (65, 3, 15, 7),
    (7, 3, 192, 32),
    (2, 2, 8, 0),
    (40, 1, 71, 33),
];

/// In halves and neighbours, from the beginning, somewhere and at the end of heads of so many elements.
fn layouts(head_size: usize, half: usize) -> Vec<RopeLayout> {
    let rest = head_size - 2 * half;
    let firsts = [0, rest / 2, rest];
    let layouts = [RopePairs::Halves, RopePairs::Neighbours]
        .map(|pairs| firsts.map(|first| RopeLayout { first, pairs }));
    layouts.concat()
}

#[test]
fn rotates_like_the_reference() {
    for sizes in SIZES {
        for (layout, dtype) in
            layouts(sizes.2, sizes.3).into_iter().flat_map(|layout| FLOATS.map(|dtype| (layout, dtype)))
        {
            check(sizes, layout, dtype);
        }
    }
}

const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

fn check((tokens, heads, head_size, half): Sizes, layout: RopeLayout, dtype: DType) {
    for direction in [RopeDirection::Forward, RopeDirection::Backward] {
        let x = Host::random(dtype, &[tokens, heads, head_size], 1.0, 1);
        // Positions up to 100 000 need an exact range reduction.
        let positions = Host::of(DType::I32, &[tokens], (0..tokens).map(|t| (t * 99_991 % 100_003) as f64));
        let inv_freq = inv_freq(half);
        let rotated = |set: &KernelSet, x: &Host| {
            let mut out = x.clone();
            set.rope
                .rotate(out.view_mut(), positions.view(), inv_freq.view(), layout, 1.1, direction)
                .unwrap();
            out
        };
        let expected = rotated(&reference::kernel_set(), &x.cast(DType::F32));
        for (name, set) in backends() {
            let out = rotated(&set, &x);
            let what = format!(
                "{name}: [{tokens}, {heads}, {head_size}], {half} pairs {layout:?} {dtype} {direction:?}"
            );
            assert_close(&what, &expected, &out, 4e-6);
            // What is not rotated is not touched.
            for (at, (before, after)) in x.values().into_iter().zip(out.values()).enumerate() {
                let is_rotated = (layout.first..layout.first + 2 * half).contains(&(at % head_size));
                assert!(is_rotated || before == after, "{what}: element {at}");
            }
        }
    }
}

/// A layout is a place of the same elements: rotated together in front, in halves, they have the same bits.
#[test]
fn every_layout_has_the_same_bits() {
    for (tokens, heads, head_size, half) in SIZES {
        let x = Host::random(DType::BF16, &[tokens, heads, head_size], 1.0, 3);
        let positions = Host::of(DType::I32, &[tokens], (0..tokens).map(|t| (t * 17) as f64));
        let inv_freq = inv_freq(half);
        for (name, set) in backends() {
            let rotated = |x: &Host, layout| {
                let (mut out, direction) = (x.clone(), RopeDirection::Forward);
                set.rope
                    .rotate(out.view_mut(), positions.view(), inv_freq.view(), layout, 1.1, direction)
                    .unwrap();
                out
            };
            for layout in layouts(head_size, half) {
                // Where the layout has what halves have in front.
                let place = |i: usize| {
                    layout.first
                        + match layout.pairs {
                            RopePairs::Halves => i,
                            RopePairs::Neighbours => 2 * (i % half) + i / half,
                        }
                };
                let dims = [tokens, heads, 2 * half];
                let in_front = |x: &Host| {
                    let values = x.values();
                    let of_head = |head: &[f64]| (0..2 * half).map(|i| head[place(i)]).collect::<Vec<_>>();
                    Host::of(DType::BF16, &dims, values.chunks(head_size).flat_map(of_head))
                };
                let expected = rotated(&in_front(&x), RopeLayout::HALVES);
                let found = in_front(&rotated(&x, layout));
                assert!(expected.bytes() == found.bytes(), "{name}: {head_size} {half} {layout:?}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_shape(
        tokens in 1usize..70, heads in 1usize..9, half in 1usize..100, rest in 0usize..70, layout in 0usize..6, dtype in 0..FLOATS.len(),
    ) {
        let head_size = 2 * half + rest.saturating_sub(35);
        check((tokens, heads, head_size, half), layouts(head_size, half)[layout], FLOATS[dtype]);
    }
}

/// With a quarter turn, `(a, b)` of a pair becomes `(−b, a)`.
#[test]
fn layout() {
    let positions = Host::of(DType::I32, &[1], [1.0]);
    let quarter = Host::of(DType::F32, &[2], [std::f64::consts::FRAC_PI_2; 2]);
    let rope = reference::kernel_set().rope;
    let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    for (layout, expected) in [
        (RopeLayout::HALVES, [-3.0, -4.0, 1.0, 2.0, 5.0, 6.0]),
        (RopeLayout { first: 2, pairs: RopePairs::Halves }, [1.0, 2.0, -5.0, -6.0, 3.0, 4.0]),
        (RopeLayout { first: 0, pairs: RopePairs::Neighbours }, [-2.0, 1.0, -4.0, 3.0, 5.0, 6.0]),
        (RopeLayout { first: 1, pairs: RopePairs::Neighbours }, [1.0, -3.0, 2.0, -5.0, 4.0, 6.0]),
    ] {
        let mut x = Host::of(DType::F32, &[1, 1, 6], values);
        let mut rotate = |direction| {
            rope.rotate(x.view_mut(), positions.view(), quarter.view(), layout, 1.0, direction).unwrap();
            x.clone()
        };
        let turned = rotate(RopeDirection::Forward);
        assert_close("quarter turn", &Host::of(DType::F32, &[6], expected), &turned, 1e-6);
        let back = rotate(RopeDirection::Backward);
        assert_close("and back", &Host::of(DType::F32, &[6], values), &back, 1e-6);
    }
}
