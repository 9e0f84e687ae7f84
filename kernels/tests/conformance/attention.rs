//! Tolerance: probabilities sum to one and values are of order 1 (≤ 5), every f32 step is within a few 1e-7 relative, and
//! up to 300 terms are added: 1e-5. Gradients of keys add over all rows that see them: 1e-4. The backward pass is given
//! out and lse of the backend's own forward pass, whose out may be rounded to bf16; its delta then differs by 2⁻⁸ relative,
//! which the tolerance for such results includes: once for
//! every head that shares the keys.

use crate::support::{Host, MIXES, assert_close, backends, backends_and_pairs};
use proptest::prelude::*;
use terrace_kernels::{AttentionSpec, DType, KernelSet, KeyValues, reference};

#[derive(Debug, Clone, Copy)]
struct Case {
    batch: usize,
    queries: usize,
    capacity: usize,
    heads: usize,
    kv_heads: usize,
    head_size: usize,
    window: Option<usize>,
    cap: Option<f32>,
    chunk: Option<usize>,
}

impl Case {
    fn in_chunks(self, chunk: usize) -> Self {
        Self { window: None, chunk: Some(chunk), ..self }
    }

    fn spec(&self) -> AttentionSpec {
        AttentionSpec {
            scale: 1.0 / (self.head_size as f32).sqrt(),
            window: self.window,
            cap: self.cap,
            chunk: self.chunk,
        }
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
        self.forward_over(set, q, KeyValues::rows(k.view(), v.view()), starts, dtype)
    }

    fn forward_over(
        &self,
        set: &KernelSet,
        q: &Host,
        keys: KeyValues<'_>,
        starts: &Host,
        dtype: DType,
    ) -> [Host; 2] {
        let mut out = Host::zeros(dtype, &self.q_dims());
        let mut lse = Host::zeros(DType::F32, &[self.batch, self.heads, self.queries]);
        let (into, into_lse) = (out.view_mut(), lse.view_mut());
        set.attention.forward(q.view(), keys, starts.view(), into, into_lse, self.spec()).unwrap();
        [out, lse]
    }

    fn check_forward(&self, starts: &[usize], mix: (DType, DType)) {
        let qkv = self.qkv(mix.0);
        let starts = Host::of(DType::I32, &[self.batch], starts.iter().map(|start| *start as f64));
        let [expected, expected_lse] = self.forward(&reference::kernel_set(), &qkv, &starts, DType::F32);
        for (name, set) in backends_and_pairs() {
            let [out, lse] = self.forward(&set, &qkv, &starts, mix.1);
            let by_pairs = mix == (DType::BF16, DType::BF16) && multiplies_pairs(&name);
            let tolerance = if by_pairs { rounded_weights(&qkv[2]) } else { 1e-5 };
            assert_close(&format!("{name}: out, {self:?} {mix:?}"), &expected, &out, tolerance);
            assert_close(&format!("{name}: lse, {self:?} {mix:?}"), &expected_lse, &lse, 1e-5);
        }
    }

    /// out, dq, dk and dv of a sequence from its beginning.
    fn gradients(&self, set: &KernelSet, [q, k, v, dout]: [&Host; 4], dtype: DType) -> [Host; 4] {
        let (keys, starts) = (KeyValues::rows(k.view(), v.view()), Host::zeros(DType::I32, &[self.batch]));
        let [out, lse] = self.forward_over(set, q, keys, &starts, dtype);
        let mut dq = Host::zeros(dtype, &self.q_dims());
        let (mut dk, mut dv) = (Host::zeros(dtype, &self.k_dims()), Host::zeros(dtype, &self.k_dims()));
        let (of_q, of_k, of_v) = (q.view(), k.view(), v.view());
        let (to_q, to_k, to_v) = (dq.view_mut(), dk.view_mut(), dv.view_mut());
        set.attention
            .backward(of_q, of_k, of_v, out.view(), lse.view(), dout.view(), to_q, to_k, to_v, self.spec())
            .unwrap();
        [out, dq, dk, dv]
    }

    fn check_backward(&self, mix: (DType, DType)) {
        self.check_backward_on(backends_and_pairs(), mix);
    }

    fn check_backward_on(&self, sets: Vec<(String, KernelSet)>, mix: (DType, DType)) {
        let qkv = self.qkv(mix.0);
        let dout = Host::random(mix.0, &self.q_dims(), 1.0, 4);
        let [q, k, v] = &qkv;
        let run = |set: &KernelSet, dtype| {
            let [_, dq, dk, dv] = self.gradients(set, [q, k, v, &dout], dtype);
            [dq, dk, dv]
        };
        let expected = run(&reference::kernel_set(), DType::F32);
        let group = (self.heads / self.kv_heads) as f64;
        let tolerance = if mix.1 == DType::F32 { 1e-4 } else { 5e-2 * group.sqrt() };
        for (name, set) in sets {
            for (what, (expected, found)) in
                ["dq", "dk", "dv"].iter().zip(expected.iter().zip(&run(&set, mix.1)))
            {
                assert_close(&format!("{name}: {what}, {self:?} {mix:?}"), expected, found, tolerance);
            }
        }
    }
}

/// What rounding the weights of a sum of values to bf16 costs at most.
fn rounded_weights(v: &Host) -> f64 {
    v.values().into_iter().fold(0.0, |largest: f64, v| largest.max(v.abs())) * 2f64.powi(-8)
}

/// Whether products of bf16 are taken by pairs.
fn multiplies_pairs(backend: &str) -> bool {
    backend.contains("+pairs") || backend.contains("avx512bf16")
}

fn training(queries: usize, heads: usize, kv_heads: usize, head_size: usize, window: Option<usize>) -> Case {
    Case { batch: 2, queries, capacity: queries, heads, kv_heads, head_size, window, cap: None, chunk: None }
}

/// Scores of minus infinity, as products that overflow give them, are keys without weight, wherever they stand among the others.
#[test]
fn keys_of_no_weight_before_others_leave_numbers() {
    for queries in [1, 70] {
        let case = Case {
            batch: 1,
            queries,
            capacity: 300,
            heads: 2,
            kv_heads: 1,
            head_size: 32,
            window: None,
            cap: None,
            chunk: None,
        };
        // In fp16 nothing is large enough.
        for mix in MIXES.into_iter().filter(|mix| mix.0 != DType::F16) {
            let [_, k, v] = case.qkv(mix.0);
            let q = Host::of(mix.0, &case.q_dims(), std::iter::repeat_n(1e30, queries * 2 * 32));
            let low =
                k.values().into_iter().enumerate().map(|(i, x)| if i < 200 * 32 { -1e30 } else { x * 1e-30 });
            let k = Host::of(mix.0, &case.k_dims(), low);
            let starts = Host::of(DType::I32, &[1], [300.0 - queries as f64]);
            let qkv = [q, k, v];
            let [expected, _] = case.forward(&reference::kernel_set(), &qkv, &starts, DType::F32);
            for (name, set) in backends_and_pairs() {
                let [out, _] = case.forward(&set, &qkv, &starts, mix.1);
                assert!(out.values().iter().all(|x| x.is_finite()), "{name}: {queries} queries, {mix:?}");
                assert_close(&format!("{name}: {queries} queries, {mix:?}"), &expected, &out, 2e-2);
            }
        }
    }
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

/// Caps that bend most of the scores, which are of order 2, or few of them; with windows and groups, and from a start, where a card
/// shares keys out.
#[test]
fn capped_scores() {
    for (queries, heads, kv_heads, head_size, window) in [
        (1, 1, 1, 2, None),
        (33, 6, 2, 16, None),
        (100, 7, 1, 24, Some(17)),
        (131, 2, 2, 64, Some(96)),
        (40, 4, 2, 128, None),
        (70, 2, 1, 256, Some(33)),
    ] {
        for (mix, cap) in MIXES.into_iter().zip([0.7, 2.0, 1.0, 50.0]) {
            let case = Case { cap: Some(cap), ..training(queries, heads, kv_heads, head_size, window) };
            case.check_forward(&[0, 0], mix);
            case.check_backward(mix);
            for queries in [1, 3] {
                let case = Case { queries, capacity: 520, ..case };
                case.check_forward(&[7, 516], mix);
            }
        }
    }
}

/// No score leaves the cap, however large it was, and its gradient is zero there.
#[test]
fn scores_beyond_a_cap() {
    let (queries, cap) = (40, 3.0);
    let case = Case { batch: 1, cap: Some(cap), ..training(queries, 2, 1, 16, None) };
    let [q, k, v] = case.qkv(DType::F32);
    let [q, k] = [q, k].map(|of| {
        let large = of.values().into_iter().map(|x| 1e3 * (x.abs() + 1.0));
        Host::of(DType::F32, of.view().shape().dims(), large.collect::<Vec<_>>())
    });
    let starts = Host::zeros(DType::I32, &[1]);
    let dout = Host::random(DType::F32, &case.q_dims(), 1.0, 4);
    for (name, set) in backends_and_pairs() {
        let [_, lse] = case.forward_over(&set, &q, KeyValues::rows(k.view(), v.view()), &starts, DType::F32);
        // All scores are the cap.
        for (i, lse) in lse.values().into_iter().enumerate() {
            let expected = f64::from(cap) + ((i % queries + 1) as f64).ln();
            assert!((lse - expected).abs() < 1e-5, "{name}: lse {lse} of row {i} instead of {expected}");
        }
        let [_, dq, dk, dv] = case.gradients(&set, [&q, &k, &v, &dout], DType::F32);
        assert!(
            dq.values().iter().chain(&dk.values()).all(|x| *x == 0.0),
            "{name}: gradients beyond the cap"
        );
        assert!(dv.values().iter().all(|x| x.is_finite() && *x != 0.0), "{name}: gradients of values");
    }
}

/// From less than a block of keys to more than all keys; some whose last query is the first of a block of rows.
#[test]
fn chunks() {
    for chunk in [1, 2, 17, 64, 65, 96, 97, 100, 229, 500] {
        let case = training(230, 2, 1, 12, None).in_chunks(chunk);
        case.check_forward(&[0, 0], MIXES[0]);
        case.check_backward(MIXES[0]);
    }
    for mix in MIXES {
        for (case, chunk) in [(training(150, 6, 2, 64, None), 70), (training(101, 1, 1, 33, None), 8)] {
            case.in_chunks(chunk).check_forward(&[0, 0], mix);
            case.in_chunks(chunk).check_backward(mix);
        }
    }
}

/// Queries that see the same whether they are told by chunks, by a window, or by neither.
#[test]
fn chunks_that_hide_nothing_change_no_bit() {
    let plain = training(130, 4, 2, 24, None);
    for mix in MIXES {
        let ([q, k, v], dout) = (plain.qkv(mix.0), Host::random(mix.0, &plain.q_dims(), 1.0, 4));
        for (name, set) in backends_and_pairs() {
            let run = |case: Case| case.gradients(&set, [&q, &k, &v, &dout], mix.1).map(|all| all.values());
            let expected = run(plain);
            assert!(expected == run(plain.in_chunks(130)), "{name}: {mix:?}");
            assert!(expected == run(Case { window: Some(130), ..plain }), "{name}: {mix:?}, window");
            assert!(expected != run(plain.in_chunks(129)), "{name}: {mix:?}, one less");
        }
    }
}

#[test]
#[should_panic(expected = "a window or chunks, not both")]
fn chunks_with_a_window() {
    let case = Case { chunk: Some(3), ..training(5, 1, 1, 8, Some(2)) };
    let [(_, set), ..] = &backends()[..] else { panic!("a backend") };
    case.forward(set, &case.qkv(DType::F32), &Host::zeros(DType::I32, &[2]), DType::F32);
}

/// Decoding and prefill in pieces: queries that begin at different positions of longer keys.
#[test]
fn starts() {
    for (queries, starts) in [(1, [0, 299]), (3, [7, 200]), (40, [96, 1]), (1, [95, 96])] {
        let plain = Case { batch: 2, queries, capacity: 300, ..training(queries, 6, 2, 20, None) };
        for case in [plain, Case { window: Some(50), ..plain }, plain.in_chunks(48), plain.in_chunks(97)] {
            for mix in MIXES {
                case.check_forward(&starts, mix);
            }
        }
    }
}

/// What lies beyond a query's position does not matter, not even NaNs that are not there yet.
#[test]
fn the_future_is_not_read() {
    let case = Case {
        batch: 1,
        queries: 2,
        capacity: 64,
        heads: 2,
        kv_heads: 1,
        head_size: 16,
        window: None,
        cap: None,
        chunk: None,
    };
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
        for (name, set) in backends_and_pairs() {
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
            let plain = Case { batch: 2, capacity, ..training(queries, heads, kv_heads, head_size, None) };
            let windows = [None, Some(7), Some(300)].map(|window| Case { window, ..plain });
            for case in windows.into_iter().chain([3, 64, 301].map(|chunk| plain.in_chunks(chunk))) {
                let starts = starts.map(|start| start.min(capacity - queries));
                let mix = if queries == 1 { (DType::BF16, DType::BF16) } else { (DType::F32, DType::F16) };
                case.check_forward(&starts, mix);
            }
        }
    }
}

/// Keys and values in pages of `positions`, in an order of their own and with pages of NaNs between them. What no query sees has
/// no page.
struct InPages {
    k: Host,
    v: Host,
    table: Host,
}

impl InPages {
    fn new(case: &Case, [_, k, v]: &[Host; 3], starts: &[usize], positions: usize) -> Self {
        let per_sequence = case.capacity / positions;
        let count = 2 * case.batch * per_sequence;
        let row = case.kv_heads * case.head_size;
        let dims = [count, positions, case.kv_heads, case.head_size];
        let dtype = k.view().dtype();
        let nans = || Host::of(dtype, &dims, std::iter::repeat_n(f64::NAN, count * positions * row));
        let (mut in_k, mut in_v, mut table) = (nans(), nans(), Vec::new());
        let (k, v) = (k.values(), v.values());
        for (at, (b, page)) in
            (0..case.batch).flat_map(|b| (0..per_sequence).map(move |page| (b, page))).enumerate()
        {
            if page * positions >= starts[b] + case.queries {
                table.push(-1.0);
                continue;
            }
            // Odd pages, from the last one down.
            let place = count - 1 - 2 * at;
            table.push(place as f64);
            let (from, to) = ((b * case.capacity + page * positions) * row, place * positions * row);
            for (from, to) in (from..).zip(to..).take(positions * row) {
                in_k.set(to, k[from]);
                in_v.set(to, v[from]);
            }
        }
        let table = Host::of(DType::I32, &[case.batch, per_sequence], table);
        Self { k: in_k, v: in_v, table }
    }

    fn keys(&self) -> KeyValues<'_> {
        KeyValues { k: self.k.view(), v: self.v.view(), pages: Some(self.table.view()) }
    }
}

#[test]
fn pages_change_no_bit() {
    for (queries, heads, kv_heads, head_size, mix) in [
        (1, 6, 2, 16, MIXES[0]),
        (1, 3, 1, 7, MIXES[1]),
        (5, 4, 2, 64, (DType::BF16, DType::BF16)),
        (70, 2, 2, 24, (DType::F32, DType::BF16)),
        (130, 2, 1, 64, (DType::F16, DType::F16)),
    ] {
        for positions in [64, 128] {
            let plain = Case { capacity: 384, ..training(queries, heads, kv_heads, head_size, None) };
            for (starts, case) in [
                ([0, 383], plain),
                ([200, 63], Case { cap: Some(1.0), ..plain }),
                ([64, 300], Case { window: Some(90), ..plain }),
                ([60, 300], plain.in_chunks(100)),
            ] {
                let starts = starts.map(|start| start.min(case.capacity - queries));
                let qkv = case.qkv(mix.0);
                let paged = InPages::new(&case, &qkv, &starts, positions);
                let positions_b = Host::of(DType::I32, &[2], starts.map(|start| start as f64));
                let all =
                    backends_and_pairs().into_iter().chain([("reference".into(), reference::kernel_set())]);
                for (name, set) in all {
                    let expected = case.forward(&set, &qkv, &positions_b, mix.1);
                    let found = case.forward_over(&set, &qkv[0], paged.keys(), &positions_b, mix.1);
                    let what = format!("{name}: {case:?} at {starts:?} in pages of {positions}");
                    assert!(expected[0].values() == found[0].values(), "{what}: out");
                    assert!(expected[1].values() == found[1].values(), "{what}: lse");
                }
            }
        }
    }
}

/// A row's result does not depend on which rows are computed with it, nor on where those begin to see; blocks of rows are large
/// enough here to be packed.
#[test]
fn chunks_change_no_bit() {
    if crate::cuda::backends().is_some() {
        return;
    }
    let plain = Case { batch: 1, ..training(260, 2, 1, 32, None) };
    let windowed = |window| Case { window: Some(window), ..plain };
    for (case, mix) in [
        (plain, MIXES[2]),
        (windowed(33), MIXES[2]),
        (windowed(120), MIXES[2]),
        (windowed(33), MIXES[0]),
        (plain.in_chunks(50), MIXES[2]),
        (plain.in_chunks(110), MIXES[0]),
    ] {
        let qkv = case.qkv(mix.0);
        let row = 2 * case.head_size;
        for (name, set) in backends_and_pairs() {
            let [all, _] = case.forward(&set, &qkv, &Host::zeros(DType::I32, &[1]), mix.1);
            for (start, queries) in [(0, 17), (17, 96), (113, 60), (173, 87)] {
                let q = qkv[0].values()[start * row..][..queries * row].to_vec();
                let chunk = Case { queries, ..case };
                let q = Host::of(mix.0, &chunk.q_dims(), q);
                let starts = Host::of(DType::I32, &[1], [start as f64]);
                let [out, _] = chunk.forward(&set, &[q, qkv[1].clone(), qkv[2].clone()], &starts, mix.1);
                let expected = &all.values()[start * row..][..queries * row];
                assert!(expected == out.values(), "{name}: {queries} from {start}, {case:?} {mix:?}");
            }
        }
    }
}

/// Where there is no page keys and values are zeros, and page 0, which may be another sequence's, is as good as any other.
#[test]
fn pages_that_are_not_there() {
    for (pages, start, queries, window) in [
        (vec![1, -1], 62, 3, None),
        (vec![1, -1], 40, 60, None),
        (vec![2, -1, 1], 100, 90, None),
        (vec![-1, -1, 3, 4], 200, 1, Some(60)),
        (vec![-1, -1, 3, 4], 200, 30, Some(60)),
        (vec![-1, -1, -1, -1, -1, -1, -1, 3, 4, 5], 520, 2, Some(60)),
        (vec![1, 2, 5, -1, 3, 4, 6, 7, 8, 9], 600, 1, None),
    ] {
        for (head_size, group) in [(16, 2), (64, 8)] {
            let count = pages.len() + 1;
            let table = Host::of(DType::I32, &[1, pages.len()], pages.iter().map(|page| f64::from(*page)));
            let capacity = pages.len() * 64;
            let case = Case {
                batch: 1,
                queries,
                capacity,
                heads: group,
                kv_heads: 1,
                head_size,
                window,
                cap: None,
                chunk: None,
            };
            let starts = Host::of(DType::I32, &[1], [f64::from(start)]);
            for (mix, wrong) in MIXES.into_iter().zip([f64::NAN, f64::INFINITY, f64::NAN, f64::INFINITY]) {
                let q = Host::random(mix.0, &case.q_dims(), 1.5, 1);
                let [k, v] = [2, 3].map(|seed| {
                    let mut all = Host::random(mix.0, &[count, 64, 1, head_size], 1.0, seed);
                    (0..64 * head_size).for_each(|i| all.set(i, wrong));
                    all
                });
                let keys = KeyValues { k: k.view(), v: v.view(), pages: Some(table.view()) };
                let [expected, expected_lse] =
                    case.forward_over(&reference::kernel_set(), &q, keys, &starts, DType::F32);
                assert!(expected.values().iter().all(|x| x.is_finite()), "the reference reads no page 0");
                for (name, set) in backends_and_pairs() {
                    let what = format!("{name}: {case:?} from {start} in {pages:?}, {mix:?}");
                    let [out, lse] = case.forward_over(&set, &q, keys, &starts, mix.1);
                    let by_pairs = mix == (DType::BF16, DType::BF16) && multiplies_pairs(&name);
                    // Of values up to 5.
                    let tolerance = if by_pairs { 5.0 * 2f64.powi(-8) } else { 1e-5 };
                    assert_close(&what, &expected, &out, tolerance);
                    assert_close(&what, &expected_lse, &lse, 1e-5);
                }
            }
        }
    }
}

/// What a query does not see is no part of its result, whatever it is; what it sees is. (On a card zeros hide: see the trait.)
#[test]
fn what_is_hidden_may_be_anything() {
    if crate::cuda::backends().is_some() {
        return;
    }
    for (queries, group, at, window, chunk) in [
        (2, 1, 1, None, None),
        (5, 2, 4, None, None),
        (30, 1, 29, None, None),
        (130, 1, 100, None, None),
        (60, 3, 40, Some(7), None),
        (230, 1, 2, Some(20), None),
        (230, 1, 120, Some(20), None),
        (230, 1, 120, None, Some(50)),
        (60, 3, 40, None, Some(9)),
    ] {
        let case = Case { batch: 1, chunk, ..training(queries, group, 1, 18, window) };
        for (mix, wrong) in MIXES.into_iter().zip([f64::INFINITY, f64::NAN, f64::NAN, f64::NEG_INFINITY]) {
            for operand in 0..4 {
                let mut of_forward = case.qkv(mix.0);
                let mut dout = Host::random(mix.0, &case.q_dims(), 1.0, 4);
                let [q, k, v] = of_forward.each_mut();
                let changed = [q, k, v, &mut dout].into_iter().nth(operand).unwrap();
                let width = changed.len() / queries;
                changed.set(at * width + width / 2, wrong);
                let run = |set: &KernelSet, dtype| {
                    let [q, k, v] = &of_forward;
                    case.gradients(set, [q, k, v, &dout], dtype)
                };
                let expected = run(&reference::kernel_set(), DType::F32);
                for (name, set) in backends_and_pairs() {
                    let tolerance = if mix.1 == DType::F32 { 1e-4 } else { 5e-2 };
                    for (what, (expected, found)) in ["out", "dq", "dk", "dv"]
                        .iter()
                        .zip(expected.iter().zip(&run(&set, mix.1)))
                        .filter(|(_, (expected, _))| expected.values().iter().any(|x| x.is_finite()))
                    {
                        let what = format!("{name}: {what} with operand {operand} at {at}, {case:?} {mix:?}");
                        same_where_finite(&what, expected, found, tolerance);
                    }
                }
            }
        }
    }
}

/// Close where `expected` is finite, and not finite elsewhere.
fn same_where_finite(what: &str, expected: &Host, found: &Host, tolerance: f64) {
    let (mut expected, mut found) = (expected.clone(), found.clone());
    let pairs = expected.values().into_iter().zip(found.values());
    for (i, (value, found_value)) in pairs.enumerate().filter(|(_, (value, _))| !value.is_finite()) {
        assert!(!found_value.is_finite(), "{what}: element {i} hides {value}");
        expected.set(i, 0.0);
        found.set(i, 0.0);
    }
    assert_close(what, &expected, &found, tolerance);
}

#[test]
fn rows_are_appended_to_pages() {
    for (length, kv_heads, head_size, from, to) in [
        (1, 2, 16, DType::BF16, DType::BF16),
        (1, 1, 7, DType::F32, DType::F16),
        (9, 3, 5, DType::F32, DType::BF16),
        (150, 2, 200, DType::F16, DType::F32),
    ] {
        let new = |seed| Host::random(from, &[3, length, kv_heads, head_size], 1.0, seed);
        let (k, v) = (new(1), new(2));
        // The first sequence crosses pages, the second has only some of the pages it would need, the third ends with its table.
        let pages = Host::of(DType::I32, &[3, 3], [4.0, 1.0, 6.0, 0.0, -1.0, -1.0, 2.0, 3.0, 5.0]);
        let starts = Host::of(DType::I32, &[3], [60.0, 63.0, 190.0]);
        let run = |set: &KernelSet| {
            let old = |seed| Host::random(to, &[7, 64, kv_heads, head_size], 1.0, seed);
            let (mut to_k, mut to_v) = (old(3), old(4));
            let (into_k, into_v) = (to_k.view_mut(), to_v.view_mut());
            let values = Some((v.view(), into_v));
            set.attention.append(k.view(), values, starts.view(), pages.view(), into_k).unwrap();
            let mut alone = old(3);
            set.attention.append(k.view(), None, starts.view(), pages.view(), alone.view_mut()).unwrap();
            assert!(alone.values() == to_k.values(), "keys alone");
            [to_k, to_v]
        };
        let expected = run(&reference::kernel_set());
        let before = Host::random(to, &[7, 64, kv_heads, head_size], 1.0, 3);
        assert!(expected[0].values() != before.values());
        for (name, set) in backends_and_pairs() {
            for (expected, found) in expected.iter().zip(&run(&set)) {
                assert!(expected.values() == found.values(), "{name}: {length} of {from} in {to}");
            }
        }
    }
}

#[test]
#[should_panic(expected = "page 7 is one of 7")]
fn pages_are_checked() {
    let zeros = |dims: &[usize]| Host::zeros(DType::F32, dims);
    let (k, mut to_k, mut to_v) = (zeros(&[1, 1, 1, 4]), zeros(&[7, 64, 1, 4]), zeros(&[7, 64, 1, 4]));
    let (starts, pages) = (Host::zeros(DType::I32, &[1]), Host::of(DType::I32, &[1, 1], [7.0]));
    let attention = terrace_kernels::cpu::kernel_set(1).attention;
    let (to_k, to_v) = (to_k.view_mut(), to_v.view_mut());
    let _ = attention.append(k.view(), Some((k.view(), to_v)), starts.view(), pages.view(), to_k);
}

#[test]
fn large_heads() {
    let case = Case {
        batch: 1,
        queries: 100,
        capacity: 100,
        heads: 2,
        kv_heads: 1,
        head_size: 576,
        window: None,
        cap: None,
        chunk: None,
    };
    case.check_forward(&[0], MIXES[0]);
    case.check_backward(MIXES[0]);
}

/// On one thread heads of 64 go backward in one pass; of heads of 128, dq does not fit a thread's scratch, so that they take two.
/// (Without emulated pairs, which are too slow for this.)
#[test]
fn long_sequences() {
    if crate::cuda::backends().is_some() {
        return;
    }
    for (head_size, mix) in [(64, MIXES[0]), (128, MIXES[0]), (64, MIXES[2]), (128, MIXES[2])] {
        let case = Case { batch: 1, ..training(1200, 4, 1, head_size, Some(130)) };
        case.check_backward_on(backends(), mix);
    }
}

/// A window of so many positions, or chunks; 0 is neither.
fn sight(positions: usize, in_chunks: bool) -> (Option<usize>, Option<usize>) {
    let some = (positions > 0).then_some(positions);
    if in_chunks { (None, some) } else { (some, None) }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_shape(
        queries in 1usize..120,
        kv_heads in 1usize..3,
        group in 1usize..5,
        head_size in 1usize..40,
        window in 0usize..150,
        in_chunks: bool,
        cap in prop::option::of(0.3f32..20.0),
        mix in 0..MIXES.len(),
    ) {
        let (window, chunk) = sight(window, in_chunks);
        let case = Case { cap, chunk, ..training(queries, kv_heads * group, kv_heads, head_size, window) };
        case.check_forward(&[0, 0], MIXES[mix]);
        case.check_backward(MIXES[mix]);
    }

    #[test]
    fn any_start(
        queries in 1usize..70,
        starts in prop::array::uniform2(0usize..230),
        group in 1usize..5,
        head_size in 1usize..40,
        window in 0usize..150,
        in_chunks: bool,
        cap in prop::option::of(0.3f32..20.0),
        mix in 0..MIXES.len(),
    ) {
        let (window, chunk) = sight(window, in_chunks);
        let case = Case { batch: 2, queries, capacity: 300, heads: group, kv_heads: 1, head_size, window, cap, chunk };
        case.check_forward(&starts, MIXES[mix]);
    }
}
