//! Tolerance: sums are f32. With operands of deviation 1 the terms of a sum are of order 1 and their errors add like a
//! random walk, so that `L·2⁻²²` covers the largest of some thousand elements.

use crate::shim::{Argument, Launch, Library, ORDERS};
use crate::tensor::{Random, Tensor};
use terrace_kernels::{DType, MatmulSpec, reference};

/// Of `matmul_mma.cu`.
const SIDE: usize = 128;
const SHARED_BYTES: usize = 3 * 2 * 128 * 32 * 2;

#[derive(Debug, Clone, Copy)]
struct Case {
    m: usize,
    n: usize,
    l: usize,
    spec: MatmulSpec,
    operands: DType,
    out: DType,
    bias: bool,
    residual: bool,
}

impl Case {
    fn kernel(&self) -> &'static str {
        match (self.spec.trans_a, self.spec.trans_b) {
            (false, true) => "matmul_mma_nt",
            (false, false) => "matmul_mma_nn",
            (true, false) => "matmul_mma_tn",
            (true, true) => unreachable!("left to the plain kernel"),
        }
    }

    fn check(&self, library: &Library, seed: u64) {
        let mut random = Random::new(seed);
        let &Self { m, n, l, spec, .. } = self;
        let a_dims = if spec.trans_a { [l, m] } else { [m, l] };
        let b_dims = if spec.trans_b { [n, l] } else { [l, n] };
        let a = Tensor::random(self.operands, &a_dims, 1.0, &mut random);
        let b = Tensor::random(self.operands, &b_dims, 1.0, &mut random);
        let old = Tensor::random(DType::F32, &[m, n], 1.0, &mut random);
        let bias = self.bias.then(|| Tensor::random(self.out, &[n], 1.0, &mut random));
        let residual = self.residual.then(|| old.cast(self.out));
        let mut expected = old.clone();
        reference::kernel_set().matmul.matmul(a.view(), b.view(), expected.view_mut(), spec).unwrap();
        let mut expected = expected.values();
        for (i, sum) in expected.iter_mut().enumerate() {
            *sum += bias.as_ref().map_or(0.0, |bias| bias.values()[i % n]);
            *sum += residual.as_ref().map_or(0.0, |residual| residual.values()[i]);
        }
        let tiles = (m.div_ceil(SIDE) * n.div_ceil(SIDE)) as u32;
        let launch = Launch { grid: [tiles, 1, 1], threads: 256, shared_bytes: SHARED_BYTES };
        let mut first: Option<Tensor> = None;
        for order in ORDERS {
            let mut out = if spec.accumulate { old.cast(self.out) } else { Tensor::new(self.out, &[m, n]) };
            let flag = |is: bool| Argument::Int(i32::from(is));
            let size = |value: usize| Argument::Long(value as i64);
            let optional = |tensor: Option<&Tensor>| {
                tensor
                    .map_or([Argument::Address(0), Argument::Int(0)], |tensor| [tensor.read(), tensor.code()])
            };
            let [bias, bias_dtype] = optional(bias.as_ref());
            let [residual, residual_dtype] =
                optional(if spec.accumulate { Some(&out) } else { residual.as_ref() });
            let arguments = [
                a.read(),
                a.code(),
                flag(spec.trans_a),
                b.read(),
                b.code(),
                flag(spec.trans_b),
                out.write(),
                out.code(),
                bias,
                bias_dtype,
                residual,
                residual_dtype,
                size(m),
                size(n),
                size(l),
            ];
            library.run(self.kernel(), launch, order, &arguments);
            let what = format!("{self:?} in order {order:?}");
            out.assert_guarded(&what);
            match &first {
                Some(first) => assert!(first.bytes() == out.bytes(), "{what}: other bits"),
                None => {
                    out.assert_close(&what, &expected, |_| l as f64 * 2f64.powi(-22) + 1e-5);
                    first = Some(out);
                }
            }
        }
    }
}

const SPECS: [MatmulSpec; 5] = [
    MatmulSpec::NT,
    MatmulSpec::NN,
    MatmulSpec { accumulate: false, ..MatmulSpec::TN_ACCUMULATE },
    MatmulSpec::TN_ACCUMULATE,
    MatmulSpec { accumulate: true, ..MatmulSpec::NT },
];

/// The sizes with what must be a multiple of eight raised to one: rows of a and of b.
fn raised((m, n, l): (usize, usize, usize), spec: MatmulSpec, operands: DType, out: DType) -> Case {
    let inner_free = spec.trans_a && !spec.trans_b;
    let raise = |size: usize, free: bool| if free { size } else { size.next_multiple_of(8) };
    let out = if spec.accumulate { DType::F32 } else { out };
    Case {
        m: raise(m, !spec.trans_a),
        n: raise(n, spec.trans_b),
        l: raise(l, inner_free),
        spec,
        operands,
        out,
        bias: false,
        residual: false,
    }
}

/// Rows of odd lengths, tiles cut off, every dtype.
#[test]
fn epilogues() {
    let Some(library) = Library::open() else { return };
    let sizes = [(17, 9, 8), (131, 130, 40), (3, 257, 64)];
    for (i, out) in [DType::BF16, DType::F16, DType::F32].into_iter().enumerate() {
        for (j, size) in sizes.into_iter().enumerate() {
            let case = raised(size, MatmulSpec::NT, [DType::BF16, DType::F16][(i + j) % 2], out);
            for (bias, residual) in [(true, false), (false, true), (true, true)] {
                Case { bias, residual, ..case }.check(&library, j as u64);
            }
        }
    }
}

#[test]
fn every_layout_dtype_and_edge() {
    let Some(library) = Library::open() else { return };
    let sizes = [(1, 1, 1), (3, 5, 7), (17, 9, 31), (127, 129, 33), (131, 63, 65), (65, 257, 97)];
    for spec in SPECS {
        for (i, size) in sizes.into_iter().enumerate() {
            let operands = [DType::BF16, DType::F16][i % 2];
            let out = [DType::F32, operands, DType::BF16][i % 3];
            raised(size, spec, operands, out).check(&library, i as u64);
        }
    }
}

/// From no slab to more than there are stages, and every remainder of one.
#[test]
fn every_number_of_slabs() {
    let Some(library) = Library::open() else { return };
    for l in [0, 1, 8, 15, 16, 24, 31, 32, 33, 40, 64, 72, 95, 96, 97, 104, 128, 160, 200] {
        for spec in [MatmulSpec::NT, MatmulSpec::NN, MatmulSpec::TN_ACCUMULATE] {
            raised((21, 24, l), spec, DType::BF16, DType::F32).check(&library, l as u64);
        }
    }
}

/// More rows of tiles than a group has, so that the last group is smaller.
#[test]
fn groups_of_tiles() {
    let Some(library) = Library::open() else { return };
    raised((9 * SIDE + 5, SIDE + 8, 8), MatmulSpec::NT, DType::BF16, DType::BF16).check(&library, 1);
    raised((10 * SIDE, 2 * SIDE + 8, 3), MatmulSpec::TN_ACCUMULATE, DType::F16, DType::F32)
        .check(&library, 2);
}

#[test]
fn any_shape() {
    let Some(library) = Library::open() else { return };
    for seed in 0..40 {
        let mut random = Random::new(1000 + seed);
        let size = (random.between(1, 300), random.between(1, 300), random.between(1, 150));
        let spec = SPECS[random.between(0, 4)];
        let operands = [DType::BF16, DType::F16][random.between(0, 1)];
        let out = [DType::F32, operands][random.between(0, 1)];
        raised(size, spec, operands, out).check(&library, seed);
    }
}
