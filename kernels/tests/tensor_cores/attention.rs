//! Bounds: probabilities p and gradients of scores g are rounded to the operands' dtype before they are multiplied, by at
//! most u = 2⁻⁸ (bf16) or 2⁻¹¹ (f16) of their size, so that
//!
//! - out differs by at most `u·Σ p·|v|`;
//! - dv by `u·Σ p·|dout|`;
//! - dq by `scale·Σ e·|k|` and dk by `scale·Σ e·|q|`, where `e = u·|g| + p·d` and d is what the rounding of the given out
//!   makes of the row's delta, `u·Σ |dout·out|`;
//!
//! a cap multiplies g by at most 1; and in f16 a term may also lose 2⁻²⁵ where it is subnormal. To that f32 adds some 1e-7 of the largest term at every step:
//! 2e-5 of it all told, for scores of order 10 and sums over up to 2000 terms.

use crate::shim::{Argument, Launch, Library, ORDERS};
use crate::tensor::{Random, Tensor, unit};
use std::ops::Range;
use terrace_kernels::{AttentionSpec, DType, KeyValues, reference};

#[derive(Debug, Clone)]
struct Case {
    /// The position of each sequence's first query.
    starts: Vec<usize>,
    queries: usize,
    capacity: usize,
    heads: usize,
    kv_heads: usize,
    head_size: usize,
    window: Option<usize>,
    cap: Option<f32>,
    chunk: Option<usize>,
    operands: DType,
    results: DType,
}

/// What a launch of each kernel needs: rows of its tile, and bytes of shared memory (`attention_mma.cu`).
struct Kernel {
    name: &'static str,
    rows: usize,
    shared_bytes: usize,
}

const fn kernel(name: &'static str, rows: usize, shared_bytes: usize) -> Kernel {
    Kernel { name, rows, shared_bytes }
}

/// Forward, dq and dkv.
const KERNELS_64: [Kernel; 3] = [
    kernel("attention_forward_mma_64", 128, 49152),
    kernel("attention_dq_mma_64", 128, 49152),
    kernel("attention_dkv_mma_64", 64, 66304),
];
const KERNELS_128: [Kernel; 3] = [
    kernel("attention_forward_mma_128", 128, 65536),
    kernel("attention_dq_mma_128", 64, 65536),
    kernel("attention_dkv_mma_128", 64, 82304),
];

const KERNELS_128_CAPPED: [Kernel; 3] = [
    kernel("attention_forward_mma_128_capped", 128, 65536),
    kernel("attention_dq_mma_128_capped", 64, 65536),
    kernel("attention_dkv_mma_128_capped", 64, 82304),
];

const F32_ERROR: f64 = 2e-5;
/// Positions of a page.
const PAGE: usize = 64;

impl Case {
    fn batch(&self) -> usize {
        self.starts.len()
    }

    fn group(&self) -> usize {
        self.heads / self.kv_heads
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
        [self.batch(), self.queries, self.heads, self.head_size]
    }

    fn k_dims(&self) -> [usize; 4] {
        [self.batch(), self.capacity, self.kv_heads, self.head_size]
    }

    fn lse_dims(&self) -> [usize; 3] {
        [self.batch(), self.heads, self.queries]
    }

    fn kernels(&self) -> &'static [Kernel; 3] {
        match self.head_size {
            64 => &KERNELS_64,
            _ if self.cap.is_some() => &KERNELS_128_CAPPED,
            _ => &KERNELS_128,
        }
    }

    fn launch(&self, kernel: &Kernel, rows: usize) -> Launch {
        let grid = [rows.div_ceil(kernel.rows) as u32, self.kv_heads as u32, self.batch() as u32];
        Launch { grid, threads: 128, shared_bytes: kernel.shared_bytes }
    }

    fn starts(&self) -> Tensor {
        Tensor::of(DType::I32, &[self.batch()], self.starts.iter().map(|start| *start as f64))
    }

    /// Keys and values that no query may see yet are NaN.
    fn operands(&self, random: &mut Random) -> [Tensor; 3] {
        let q = Tensor::random(self.operands, &self.q_dims(), 1.5, random);
        let mut k = Tensor::random(self.operands, &self.k_dims(), 1.5, random);
        let mut v = Tensor::random(self.operands, &self.k_dims(), 1.0, random);
        let row = self.kv_heads * self.head_size;
        for (b, start) in self.starts.iter().enumerate() {
            for i in (b * self.capacity + start + self.queries) * row..(b + 1) * self.capacity * row {
                k.set(i, f64::NAN);
                v.set(i, f64::NAN);
            }
        }
        [q, k, v]
    }

    fn sizes(&self, with_capacity: bool) -> Vec<Argument> {
        let int = |value: usize| Argument::Int(value as i32);
        // Chunks with a minus.
        let window = self.window.map_or(i32::MAX, |window| window as i32);
        let window = self.chunk.map_or(window, |chunk| -(chunk as i32));
        let mut sizes = vec![int(self.queries)];
        sizes.extend(with_capacity.then(|| int(self.capacity)));
        sizes.extend([int(self.heads), int(self.kv_heads), int(self.head_size), Argument::Int(window)]);
        sizes.extend([self.spec().scale, self.cap.unwrap_or(0.0)].map(Argument::Float));
        sizes
    }

    fn expected_forward(&self, [q, k, v]: &[Tensor; 3]) -> [Tensor; 2] {
        let mut out = Tensor::new(DType::F32, &self.q_dims());
        let mut lse = Tensor::new(DType::F32, &self.lse_dims());
        let (starts, spec) = (self.starts(), self.spec());
        let attention = reference::kernel_set().attention;
        attention
            .forward(
                q.view(),
                KeyValues::rows(k.view(), v.view()),
                starts.view(),
                out.view_mut(),
                lse.view_mut(),
                spec,
            )
            .unwrap();
        [out, lse]
    }

    fn check_forward(&self, library: &Library, seed: u64) {
        let qkv = self.operands(&mut Random::new(seed));
        let [expected, expected_lse] = self.expected_forward(&qkv);
        let bound = self.forward_bound(&qkv);
        let kernel = &self.kernels()[0];
        let launch = self.launch(kernel, self.queries * self.group());
        let starts = self.starts();
        let [q, k, v] = &qkv;
        let (in_pages, table) = self.in_pages([k, v]);
        let runs = [([k, v], Argument::Long(0), 0), ([&in_pages[0], &in_pages[1]], table.read(), PAGE)];
        let mut first: Option<[Tensor; 2]> = None;
        for (order, ([k, v], pages, positions)) in ORDERS.into_iter().flat_map(|o| runs.map(|run| (o, run))) {
            if positions > 0 && !self.capacity.is_multiple_of(positions) {
                continue;
            }
            let mut out = Tensor::new(self.results, &self.q_dims());
            let mut lse = Tensor::new(DType::F32, &self.lse_dims());
            let mut arguments: Vec<Argument> = [q, k, v].iter().flat_map(|x| [x.read(), x.code()]).collect();
            arguments.extend([pages, Argument::Int(PAGE.trailing_zeros() as i32), starts.read()]);
            arguments.extend([out.write(), out.code(), lse.write()]);
            arguments.extend(self.sizes(true));
            library.run(kernel.name, launch, order, &arguments);
            let what = format!("{self:?} in pages of {positions}, order {order:?}");
            out.assert_guarded(&what);
            lse.assert_guarded(&what);
            if let Some([first_out, first_lse]) = &first {
                assert!(
                    first_out.bytes() == out.bytes() && first_lse.bytes() == lse.bytes(),
                    "{what}: other bits"
                );
                continue;
            }
            out.assert_close(&format!("out, {what}"), &expected.values(), |i| bound[i] + F32_ERROR);
            lse.assert_close(&format!("lse, {what}"), &expected_lse.values(), |_| F32_ERROR);
            first = Some([out, lse]);
        }
    }

    /// Keys and values in pages, the last ones first and a page of NaNs before each, and the sequences' tables.
    fn in_pages(&self, [k, v]: [&Tensor; 2]) -> ([Tensor; 2], Tensor) {
        let pages = self.batch() * (self.capacity / PAGE);
        let page = PAGE * self.kv_heads * self.head_size;
        let place = |at: usize| 2 * (pages - at) - 1;
        let scatter = |of: &Tensor| {
            let values = of.values();
            let mut all = Tensor::new(self.operands, &[2 * pages * page]);
            for at in 0..pages {
                for i in 0..page {
                    all.set(place(at) * page + i, values[at * page + i]);
                }
            }
            all
        };
        let table = Tensor::of(DType::I32, &[pages], (0..pages).map(|at| place(at) as f64));
        ([scatter(k), scatter(v)], table)
    }

    fn check_backward(&self, library: &Library, seed: u64) {
        let mut random = Random::new(seed);
        let qkv = self.operands(&mut random);
        let dout = Tensor::random(self.operands, &self.q_dims(), 1.0, &mut random);
        let [out_f32, lse] = self.expected_forward(&qkv);
        let out = out_f32.cast(self.operands);
        let mut expected = self.gradients(DType::F32);
        {
            let ([q, k, v], [dq, dk, dv]) = (&qkv, &mut expected);
            let (dq, dk, dv) = (dq.view_mut(), dk.view_mut(), dv.view_mut());
            let attention = reference::kernel_set().attention;
            let (out, lse, dout) = (out_f32.view(), lse.view(), dout.view());
            attention
                .backward(q.view(), k.view(), v.view(), out, lse, dout, dq, dk, dv, self.spec())
                .unwrap();
        }
        let bounds = self.backward_bounds(&qkv, &out_f32, &dout);
        let [_, dq_kernel, dkv_kernel] = self.kernels();
        let mut first: Option<[Tensor; 3]> = None;
        for order in ORDERS {
            let mut found = self.gradients(self.results);
            let mut operands: Vec<Argument> = qkv.iter().flat_map(|x| [x.read(), x.code()]).collect();
            operands.extend([out.read(), out.code(), lse.read(), dout.read(), dout.code()]);
            let [dq, dk, dv] = &mut found;
            let of_q = [operands.clone(), vec![dq.write(), dq.code()], self.sizes(false)].concat();
            library.run(dq_kernel.name, self.launch(dq_kernel, self.queries * self.group()), order, &of_q);
            let results = vec![dk.write(), dk.code(), dv.write(), dv.code()];
            let of_kv = [operands, results, self.sizes(false)].concat();
            library.run(dkv_kernel.name, self.launch(dkv_kernel, self.capacity), order, &of_kv);
            for (i, name) in ["dq", "dk", "dv"].into_iter().enumerate() {
                let what = format!("{name}, {self:?} in order {order:?}");
                found[i].assert_guarded(&what);
                match &first {
                    Some(first) => assert!(first[i].bytes() == found[i].bytes(), "{what}: other bits"),
                    None => found[i].assert_close(&what, &expected[i].values(), |at| bounds[i][at]),
                }
            }
            first.get_or_insert(found);
        }
    }

    fn gradients(&self, dtype: DType) -> [Tensor; 3] {
        [&self.q_dims(), &self.k_dims(), &self.k_dims()].map(|dims| Tensor::new(dtype, dims))
    }

    /// Where rounding of numbers between products may change what they are multiplied by, at most.
    fn loss(&self, x: f64) -> f64 {
        unit(self.operands) * x.abs() + if self.operands == DType::F16 { 2f64.powi(-25) } else { 0.0 }
    }

    /// Calls `with(query's first element, visible keys)` for every row.
    fn each_row(&self, mut with: impl FnMut(usize, &dyn Fn(usize) -> usize, Range<usize>)) {
        for b in 0..self.batch() {
            for i in 0..self.queries {
                for h in 0..self.heads {
                    let end = self.starts[b] + i + 1;
                    let first = self.spec().first_key(end - 1);
                    let query = ((b * self.queries + i) * self.heads + h) * self.head_size;
                    let key = |j: usize| {
                        ((b * self.capacity + j) * self.kv_heads + h / self.group()) * self.head_size
                    };
                    with(query, &key, first..end);
                }
            }
        }
    }

    fn probabilities(
        &self,
        q: &[f64],
        k: &[f64],
        key: &dyn Fn(usize) -> usize,
        keys: Range<usize>,
    ) -> Vec<f64> {
        let scale = f64::from(self.spec().scale);
        let capped = |x: f64| self.cap.map(f64::from).map_or(x, |cap| cap * (x / cap).tanh());
        let scores: Vec<f64> = keys.map(|j| capped(scale * dot(q, &k[key(j)..]))).collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().map(|score| (score - most).exp()).sum();
        scores.iter().map(|score| (score - most).exp() / total).collect()
    }

    fn forward_bound(&self, [q, k, v]: &[Tensor; 3]) -> Vec<f64> {
        let (q, k, v) = (q.values(), k.values(), v.values());
        let mut bound = vec![0.0; q.len()];
        self.each_row(|query, key, keys| {
            let row = query..query + self.head_size;
            let p = self.probabilities(&q[row.clone()], &k, key, keys.clone());
            for (p, j) in p.iter().zip(keys) {
                add_sizes(&mut bound[row.clone()], self.loss(*p), &v[key(j)..]);
            }
        });
        bound
    }

    /// Of dq, dk and dv; f32 errors are those of the largest terms.
    fn backward_bounds(&self, [q, k, v]: &[Tensor; 3], out: &Tensor, dout: &Tensor) -> [Vec<f64>; 3] {
        let (q, k, v) = (q.values(), k.values(), v.values());
        let (out, dout) = (out.values(), dout.values());
        let scale = f64::from(self.spec().scale);
        let mut of = [vec![F32_ERROR; q.len()], vec![F32_ERROR; k.len()], vec![F32_ERROR; v.len()]];
        self.each_row(|query, key, keys| {
            let row = query..query + self.head_size;
            let (q_row, out_row, dout_row) = (&q[row.clone()], &out[row.clone()], &dout[row.clone()]);
            let p = self.probabilities(q_row, &k, key, keys.clone());
            let delta = dot(dout_row, out_row);
            let delta_loss: f64 = dout_row.iter().zip(out_row).map(|(d, o)| d.abs() * self.loss(*o)).sum();
            for (p, j) in p.iter().zip(keys) {
                let at = key(j);
                let g = p * (dot(dout_row, &v[at..]) - delta);
                let e = scale * (self.loss(g) + p * delta_loss + F32_ERROR * p * (1.0 + delta.abs() + 5.0));
                add_sizes(&mut of[0][row.clone()], e, &k[at..]);
                add_sizes(&mut of[1][at..at + self.head_size], e, q_row);
                add_sizes(&mut of[2][at..at + self.head_size], self.loss(*p) + F32_ERROR * p, dout_row);
            }
        });
        of
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `acc += factor·|x|` over as many elements as `acc` has.
fn add_sizes(acc: &mut [f64], factor: f64, x: &[f64]) {
    for (acc, x) in acc.iter_mut().zip(x) {
        *acc += factor * x.abs();
    }
}

const KINDS: [(usize, DType); 4] =
    [(64, DType::BF16), (128, DType::BF16), (64, DType::F16), (128, DType::F16)];

fn training(queries: usize, heads: (usize, usize), kind: (usize, DType), window: Option<usize>) -> Case {
    Case {
        starts: vec![0; 2],
        queries,
        capacity: queries,
        heads: heads.0,
        kv_heads: heads.1,
        head_size: kind.0,
        window,
        cap: None,
        chunk: None,
        operands: kind.1,
        results: DType::F32,
    }
}

/// Around the sizes of tiles, with groups of 1, 4 and 8; of 9, so that a tile of rows begins one query before a warp's last key.
#[test]
fn training_shapes() {
    let Some(library) = Library::open() else { return };
    for kind in KINDS {
        for (queries, heads) in [
            (1, (1, 1)),
            (31, (2, 2)),
            (33, (4, 1)),
            (65, (1, 1)),
            (129, (2, 2)),
            (39, (8, 1)),
            (193, (1, 1)),
            (23, (9, 1)),
        ] {
            let mut case = training(queries, heads, kind, None);
            case.check_forward(&library, 1);
            case.results = case.operands;
            case.check_backward(&library, 2);
        }
    }
}

#[test]
fn sliding_windows() {
    let Some(library) = Library::open() else { return };
    for (i, window) in [1, 2, 31, 32, 33, 64, 100, 150, 500].into_iter().enumerate() {
        let heads = [(1, 1), (4, 1), (2, 2)][i % 3];
        let case = training(150, heads, KINDS[i % 4], Some(window));
        case.check_forward(&library, 3);
        case.check_backward(&library, 4);
    }
    // A tile's last query is one beyond what lets it see all keys of a tile.
    for kind in [KINDS[1], KINDS[2]] {
        let case = training(150, (1, 1), kind, Some(95));
        case.check_forward(&library, 3);
        case.check_backward(&library, 4);
    }
}

/// Scores of order 5 beside caps of a tenth of that and more: with windows, groups, and keys in pages from a start.
#[test]
fn capped_scores() {
    let Some(library) = Library::open() else { return };
    for (i, (queries, heads, window)) in [
        (1, (1, 1), None),
        (33, (4, 1), None),
        (129, (2, 2), Some(40)),
        (39, (8, 1), Some(7)),
        (65, (9, 3), None),
    ]
    .into_iter()
    .enumerate()
    {
        for kind in [KINDS[1], KINDS[3]] {
            let mut case = training(queries, heads, kind, window);
            case.cap = Some([0.5, 2.0, 5.0][i % 3]);
            case.check_backward(&library, 7);
            case.results = case.operands;
            case.capacity = 4 * PAGE;
            case.starts = vec![0, case.capacity - queries];
            case.check_forward(&library, 8);
        }
    }
}

#[test]
fn chunks() {
    let Some(library) = Library::open() else { return };
    for (i, chunk) in [1, 2, 31, 32, 33, 64, 96, 100, 149, 500, 65, 65, 65, 65].into_iter().enumerate() {
        let heads = [(1, 1), (4, 1), (2, 2)][i % 3];
        let case = Case { chunk: Some(chunk), ..training(150, heads, KINDS[i % 4], None) };
        case.check_forward(&library, 3);
        case.check_backward(&library, 4);
    }
}

/// Decoding and prefill in pieces over caches whose ends are not there yet.
#[test]
fn starts_within_longer_caches() {
    let Some(library) = Library::open() else { return };
    for (i, (queries, starts, heads)) in [
        (1, [0, 299], (8, 1)),
        (1, [95, 96], (8, 2)),
        (1, [63, 64], (1, 1)),
        (3, [7, 200], (4, 1)),
        (40, [96, 1], (4, 4)),
        (77, [0, 130], (8, 2)),
    ]
    .into_iter()
    .enumerate()
    {
        for (window, chunk) in [(None, None), (Some(50), None), (None, Some(60))] {
            let mut case = training(queries, heads, KINDS[i % 4], window);
            case.chunk = chunk;
            case.starts = starts.to_vec();
            case.capacity = 300;
            case.check_forward(&library, 5);
            case.head_size = 192 - case.head_size;
            case.results = case.operands;
            // In pages too.
            case.capacity = 5 * PAGE;
            case.check_forward(&library, 6);
        }
    }
}

#[test]
fn any_shape() {
    let Some(library) = Library::open() else { return };
    for seed in 0..24 {
        let mut random = Random::new(500 + seed);
        let kv_heads = random.between(1, 2);
        let group = [1, 2, 3, 4, 7, 8][random.between(0, 5)];
        let window = [None, Some(random.between(1, 200))][random.between(0, 1)];
        let queries = random.between(1, 260 / group);
        let mut case = training(queries, (kv_heads * group, kv_heads), KINDS[random.between(0, 3)], window);
        if seed % 3 == 0 {
            case.chunk = case.window.take();
        }
        case.results = [DType::F32, DType::BF16, DType::F16][random.between(0, 2)];
        case.check_backward(&library, seed);
        case.capacity += random.between(0, 150);
        if seed % 2 == 0 {
            case.capacity = case.capacity.next_multiple_of(PAGE);
        }
        case.starts = (0..2).map(|_| random.between(0, case.capacity - queries)).collect();
        case.check_forward(&library, seed);
    }
}
