//! Tolerance: probabilities sum to one and values are of order 1 (≤ 5), every f32 step is within a few 1e-7 relative, and
//! up to 300 terms are added: 1e-5. Gradients of keys add over all rows that see them: 1e-4. The backward pass is given
//! out and lse of the backend's own forward pass, whose out may be rounded to bf16; its delta then differs by 2⁻⁸ relative,
//! which the tolerance for such results includes.

use crate::support::{Host, MIXES, assert_close, backends};
use proptest::prelude::*;
use terrace_kernels::{AttentionSpec, DType, KernelSet, reference};

#[derive(Debug, Clone, Copy)]
struct Case {
    batch: usize,
    queries: usize,
    capacity: usize,
    heads: usize,
    kv_heads: usize,
    head_size: usize,
    window: Option<usize>,
}

impl Case {
    fn spec(&self) -> AttentionSpec {
        AttentionSpec { scale: 1.0 / (self.head_size as f32).sqrt(), window: self.window }
    }

    fn q_dims(&self) -> [usize; 4] {
        [self.batch, self.queries, self.heads, self.head_size]
    }

    fn k_dims(&self) -> [usize; 4] {
        [self.batch, self.capacity, self.kv_heads, self.head_size]
    }

    fn qkv(&self, dtype: DType) -> [Host; 3] {
        [
            Host::random(dtype, &self.q_dims(), 1.5, 1),
            Host::random(dtype, &self.k_dims(), 1.5, 2),
            Host::random(dtype, &self.k_dims(), 1.0, 3),
        ]
    }

    fn forward(&self, set: &KernelSet, [q, k, v]: &[Host; 3], starts: &Host, dtype: DType) -> [Host; 2] {
        let mut out = Host::zeros(dtype, &self.q_dims());
        let mut lse = Host::zeros(DType::F32, &[self.batch, self.heads, self.queries]);
        set.attention
            .forward(q.view(), k.view(), v.view(), starts.view(), out.view_mut(), lse.view_mut(), self.spec())
            .unwrap();
        [out, lse]
    }

    fn check_forward(&self, starts: &[usize], mix: (DType, DType)) {
        let qkv = self.qkv(mix.0);
        let starts = Host::of(DType::I32, &[self.batch], starts.iter().map(|start| *start as f64));
        let [expected, expected_lse] = self.forward(&reference::kernel_set(), &qkv, &starts, DType::F32);
        for (name, set) in backends() {
            let [out, lse] = self.forward(&set, &qkv, &starts, mix.1);
            assert_close(&format!("{name}: out, {self:?} {mix:?}"), &expected, &out, 1e-5);
            assert_close(&format!("{name}: lse, {self:?} {mix:?}"), &expected_lse, &lse, 1e-5);
        }
    }

    fn check_backward(&self, mix: (DType, DType)) {
        let qkv = self.qkv(mix.0);
        let dout = Host::random(mix.0, &self.q_dims(), 1.0, 4);
        let starts = Host::zeros(DType::I32, &[self.batch]);
        let run = |set: &KernelSet, dtype| {
            let [out, lse] = self.forward(set, &qkv, &starts, dtype);
            let [q, k, v] = &qkv;
            let mut dq = Host::zeros(dtype, &self.q_dims());
            let (mut dk, mut dv) = (Host::zeros(dtype, &self.k_dims()), Host::zeros(dtype, &self.k_dims()));
            set.attention
                .backward(
                    q.view(),
                    k.view(),
                    v.view(),
                    out.view(),
                    lse.view(),
                    dout.view(),
                    dq.view_mut(),
                    dk.view_mut(),
                    dv.view_mut(),
                    self.spec(),
                )
                .unwrap();
            [dq, dk, dv]
        };
        let expected = run(&reference::kernel_set(), DType::F32);
        let tolerance = if mix.1 == DType::F32 { 1e-4 } else { 3e-2 };
        for (name, set) in backends() {
            for (what, (expected, found)) in
                ["dq", "dk", "dv"].iter().zip(expected.iter().zip(&run(&set, mix.1)))
            {
                assert_close(&format!("{name}: {what}, {self:?} {mix:?}"), expected, found, tolerance);
            }
        }
    }
}

fn training(queries: usize, heads: usize, kv_heads: usize, head_size: usize, window: Option<usize>) -> Case {
    Case { batch: 2, queries, capacity: queries, heads, kv_heads, head_size, window }
}

#[test]
fn training_shapes() {
    for mix in MIXES {
        for case in [
            training(1, 1, 1, 2, None),
            training(5, 2, 1, 8, None),
            training(33, 6, 2, 16, None),
            training(100, 7, 1, 24, None),
            training(131, 2, 2, 64, None),
        ] {
            case.check_forward(&[0, 0], mix);
            case.check_backward(mix);
        }
    }
}

#[test]
fn sliding_windows() {
    for window in [1, 2, 17, 96, 120, 500] {
        let case = training(230, 2, 1, 12, Some(window));
        case.check_forward(&[0, 0], MIXES[0]);
        case.check_backward(MIXES[0]);
    }
}

/// Decoding and chunked prefill: queries that begin at different positions of longer keys.
#[test]
fn starts() {
    for (queries, starts) in [(1, [0, 299]), (3, [7, 200]), (40, [96, 1]), (1, [95, 96])] {
        for window in [None, Some(50)] {
            for mix in MIXES {
                let case =
                    Case { batch: 2, queries, capacity: 300, heads: 6, kv_heads: 2, head_size: 20, window };
                case.check_forward(&starts, mix);
            }
        }
    }
}

/// What lies beyond a query's position does not matter, not even NaNs that are not there yet.
#[test]
fn the_future_is_not_read() {
    let case =
        Case { batch: 1, queries: 2, capacity: 64, heads: 2, kv_heads: 1, head_size: 16, window: None };
    let many = Case { queries: 30, ..case };
    let shared_out = Case { capacity: 640, ..case };
    for case in [case, many, shared_out] {
        let [q, mut k, mut v] = case.qkv(DType::F32);
        let first_hidden = (5 + case.queries) * case.head_size;
        for i in first_hidden..k.len() {
            k.set(i, f64::NAN);
            v.set(i, f64::NAN);
        }
        let starts = Host::of(DType::I32, &[1], [5.0]);
        for (name, set) in backends() {
            let [out, lse] = case.forward(&set, &[q.clone(), k.clone(), v.clone()], &starts, DType::F32);
            assert!(out.values().iter().chain(&lse.values()).all(|x| x.is_finite()), "{name}: {case:?}");
        }
    }
}

/// As in decoding: a card shares the keys out among blocks.
#[test]
fn few_queries_on_many_keys() {
    for (queries, heads, kv_heads, head_size) in [
        (1, 6, 2, 16),
        (1, 8, 1, 64),
        (2, 7, 1, 80),
        (1, 16, 1, 128),
        (3, 4, 4, 8),
        (1, 4, 2, 256),
        (4, 6, 2, 40),
    ] {
        for (capacity, starts) in [(300, [0, 299]), (520, [255, 256]), (1500, [1400, 3])] {
            for window in [None, Some(7), Some(300)] {
                let case = Case { batch: 2, queries, capacity, heads, kv_heads, head_size, window };
                let starts = starts.map(|start| start.min(capacity - queries));
                let mix = if queries == 1 { (DType::BF16, DType::BF16) } else { (DType::F32, DType::F16) };
                case.check_forward(&starts, mix);
            }
        }
    }
}

#[test]
fn large_heads() {
    let case =
        Case { batch: 1, queries: 100, capacity: 100, heads: 2, kv_heads: 1, head_size: 512, window: None };
    case.check_forward(&[0], MIXES[0]);
    case.check_backward(MIXES[0]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_shape(
        queries in 1usize..120, kv_heads in 1usize..3, group in 1usize..5, half in 1usize..20, window in 0usize..150,
    ) {
        let window = (window > 0).then_some(window);
        let case = training(queries, kv_heads * group, kv_heads, 2 * half, window);
        case.check_forward(&[0, 0], MIXES[0]);
        case.check_backward(MIXES[0]);
    }
}
