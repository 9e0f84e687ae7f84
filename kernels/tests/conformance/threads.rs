//! The number of threads never changes a bit: results are compared by their bytes. Nor does, on a card, the order in which
//! threads run (a new one at every launch if TERRACE_SHIM_ORDER is set), nor where operands lie.

use crate::support::{Host, Random, isas_and_pairs};
use std::hash::{DefaultHasher, Hasher};
use terrace_kernels::cpu::{self, CpuConfig, Isa};
use terrace_kernels::{
    AttentionSpec, DType, Epilogue, GateFunction, KernelSet, KeyValues, MatmulSpec, Residual, RopeDirection,
};

fn same_for_every_thread_count(what: &str, run: impl Fn(&KernelSet) -> Vec<Host>) {
    same_on(Isa::available(), what, &run);
    // cuBLASLt, the last variant, may add in an order of its own.
    let mut cuda = crate::cuda::backends().unwrap_or_default();
    cuda.truncate(2);
    let hashes: Vec<_> =
        [&cuda, &cuda].into_iter().flatten().map(|(name, set)| (name, hash(&run(set)))).collect();
    assert!(hashes.windows(2).all(|pair| pair[0].1 == pair[1].1), "{what}: {hashes:?}");
}

fn same_on(isas: Vec<Isa>, what: &str, run: impl Fn(&KernelSet) -> Vec<Host>) {
    for isa in isas {
        let with =
            |threads| hash(&run(&cpu::with_config(CpuConfig { isa: Some(isa), ..CpuConfig::new(threads) })));
        let one = with(1);
        for threads in [2, 3, 8] {
            assert_eq!(one, with(threads), "{what}: {} threads, {}", threads, isa.name());
        }
    }
}

fn hash(tensors: &[Host]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for tensor in tensors {
        hasher.write(tensor.bytes());
    }
    hasher.finish()
}

#[test]
fn matmul() {
    for (m, n, l) in [(200, 500, 600), (1000, 64, 300), (3, 1000, 700)] {
        for spec in [MatmulSpec::NT, MatmulSpec::NN, MatmulSpec::TN_ACCUMULATE] {
            for dtype in [DType::F32, DType::BF16] {
                let a = Host::random(dtype, &if spec.trans_a { [l, m] } else { [m, l] }, 1.0, 1);
                let b = Host::random(dtype, &if spec.trans_b { [n, l] } else { [l, n] }, 1.0, 2);
                let what = format!("matmul {m} {n} {l} {spec:?} {dtype}");
                same_on(isas_and_pairs(), &what, |set| {
                    let mut out = Host::zeros(if spec.accumulate { DType::F32 } else { dtype }, &[m, n]);
                    set.matmul.matmul(a.view(), b.view(), out.view_mut(), spec).unwrap();
                    vec![out]
                });
            }
        }
    }
}

#[test]
fn products_with_epilogues() {
    for (m, n, l) in [(200, 500, 600), (3, 1000, 700)] {
        for dtype in [DType::F32, DType::BF16] {
            let (a, b) = (Host::random(dtype, &[m, l], 1.0, 1), Host::random(dtype, &[n, l], 1.0, 2));
            let (bias, old) = (Host::random(dtype, &[n], 1.0, 3), Host::random(dtype, &[m, n], 1.0, 4));
            let run = |set: &KernelSet| {
                let residuals = [Residual::InPlace, Residual::Of(old.view())];
                let results = residuals.map(|residual| {
                    let (mut out, bias) = (old.clone(), Some(bias.view()));
                    let epilogue = Epilogue { bias, residual };
                    set.matmul.matmul_nt(a.view(), b.view(), out.view_mut(), epilogue).unwrap();
                    out
                });
                results.to_vec()
            };
            same_on(isas_and_pairs(), &format!("epilogues {m} {n} {l} {dtype}"), run);
        }
    }
}

/// Four pairs of sequences and heads: on the CPU one or two threads go backward in one pass, three or eight in two.
#[test]
fn attention() {
    attention_of(DType::BF16, Some(150));
    attention_of(DType::F32, None);
}

fn attention_of(dtype: DType, window: Option<usize>) {
    let (q_dims, k_dims) = ([2, 210, 6, 32], [2, 210, 2, 32]);
    let [q, dout] = [1, 4].map(|seed| Host::random(dtype, &q_dims, 1.0, seed));
    let [k, v] = [2, 3].map(|seed| Host::random(dtype, &k_dims, 1.0, seed));
    let starts = Host::zeros(DType::I32, &[2]);
    let spec = AttentionSpec { scale: 0.2, window };
    same_for_every_thread_count("attention", |set| {
        let mut out = Host::zeros(dtype, &q_dims);
        let mut lse = Host::zeros(DType::F32, &[2, 6, 210]);
        let (mut dq, mut dk, mut dv) =
            (out.clone(), Host::zeros(dtype, &k_dims), Host::zeros(dtype, &k_dims));
        let attention = &set.attention;
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
        attention
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
                spec,
            )
            .unwrap();
        vec![out, lse, dq, dk, dv]
    });
}

#[test]
fn rows_and_elements() {
    let (rows, width) = (700, 300);
    let [x, y] = [1, 2].map(|seed| Host::random(DType::BF16, &[rows, width], 1.0, seed));
    let weight = Host::random(DType::BF16, &[width], 1.0, 3);
    let mut random = Random::new(4);
    let ids = Host::of(DType::I32, &[rows], (0..rows).map(|_| random.below(width) as f64));
    let inv_freq = Host::random(DType::F32, &[width / 4], 0.5, 5);
    same_for_every_thread_count("rows and elements", |set| {
        let zeros = |dtype| Host::zeros(dtype, &[rows, width]);
        let (mut out, mut dx, mut gathered, mut rotated) =
            (zeros(DType::BF16), zeros(DType::F32), zeros(DType::BF16), x.clone());
        let (mut dgate, mut dup) = (zeros(DType::BF16), zeros(DType::BF16));
        let mut rstd = Host::zeros(DType::F32, &[rows]);
        let (mut dweight, mut sums) = (Host::zeros(DType::F32, &[width]), Host::zeros(DType::F32, &[width]));
        let (mut dtable, mut loss) =
            (Host::zeros(DType::F32, &[width, width]), Host::zeros(DType::F64, &[1]));
        set.rms_norm.forward(x.view(), weight.view(), 1e-5, out.view_mut(), rstd.view_mut()).unwrap();
        set.rms_norm
            .backward(y.view(), x.view(), weight.view(), rstd.view(), dx.view_mut(), true, dweight.view_mut())
            .unwrap();
        set.embedding.gather(ids.view(), x.view(), gathered.view_mut()).unwrap();
        set.embedding.scatter_add(ids.view(), y.view(), dtable.view_mut()).unwrap();
        let heads = rotated.view_mut().reshape(&[rows, 2, width / 2]);
        set.rope.rotate(heads, ids.view(), inv_freq.view(), 1.0, RopeDirection::Forward).unwrap();
        set.activation
            .gated_backward(
                GateFunction::Silu,
                x.view(),
                y.view(),
                x.view(),
                dgate.view_mut(),
                dup.view_mut(),
            )
            .unwrap();
        set.reduce.sum_rows(x.view(), sums.view_mut()).unwrap();
        let mut logits = y.clone();
        set.cross_entropy.loss_and_gradient(logits.view_mut(), ids.view(), 0.1, loss.view_mut()).unwrap();
        vec![out, rstd, dx, dweight, gathered, dtable, rotated, dgate, dup, sums, logits, loss]
    });
}
