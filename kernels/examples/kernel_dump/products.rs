//! Products, those with an epilogue, and those with quantized weights.

use crate::{MIXES, Rig};
use terrace_kernels::{DType, Epilogue, MatmulSpec, QuantFormat, QuantizedView, Residual, Tensor};

/// M, N, L: whole tiles of every kernel, none, a row, few rows, many.
const SHAPES: [[usize; 3]; 5] =
    [[256, 512, 384], [129, 257, 65], [1, 300, 131], [7, 64, 2048], [512, 768, 1024]];
const SHAPES_TINY: [[usize; 3]; 2] = [[20, 33, 17], [32, 64, 64]];

pub fn run(rig: &Rig) {
    plain(rig);
    epilogues(rig);
    quantized(rig);
}

fn plain(rig: &Rig) {
    let adds = |spec| MatmulSpec { accumulate: true, ..spec };
    let layouts = [
        ("NT", MatmulSpec::NT),
        ("NN", MatmulSpec::NN),
        ("TN", MatmulSpec { accumulate: false, ..MatmulSpec::TN_ACCUMULATE }),
        ("NT+", adds(MatmulSpec::NT)),
        ("NN+", adds(MatmulSpec::NN)),
        ("TN+", MatmulSpec::TN_ACCUMULATE),
    ];
    for ([m, n, l], (dtype, of_out)) in pairs(&rig.sizes(&SHAPES, &SHAPES_TINY), &MIXES) {
        for (layout, spec) in layouts.iter().filter(|(_, spec)| !spec.accumulate || of_out == DType::F32) {
            for (variant, set) in &rig.sets {
                let name = format!("{layout} {m}x{n}x{l} {dtype} to {of_out}");
                let mut case = rig
                    .case_of("matmul", variant, name)
                    .with("trans_a", spec.trans_a)
                    .with("trans_b", spec.trans_b);
                let a = case.operand("a", dtype, &if spec.trans_a { [l, m] } else { [m, l] }, 1.0);
                let b = case.operand("b", dtype, &if spec.trans_b { [n, l] } else { [l, n] }, 1.0);
                let mut out = if spec.accumulate {
                    case.operand("residual", of_out, &[m, n], 3.0)
                } else {
                    case.result(of_out, &[m, n])
                };
                set.matmul.matmul(a.view(), b.view(), out.view_mut(), *spec).expect("the product runs");
                case.finish(&[("out", &out)]);
            }
        }
    }
}

/// What is added to a product: a bias, and the result's memory or another tensor.
#[derive(Clone, Copy)]
struct Added {
    name: &'static str,
    bias: bool,
    residual: Option<Place>,
}

#[derive(Clone, Copy, PartialEq)]
enum Place {
    Here,
    Elsewhere,
}

const ADDED: [Added; 4] = [
    Added { name: "bias", bias: true, residual: None },
    Added { name: "residual in place", bias: false, residual: Some(Place::Here) },
    Added { name: "bias, residual", bias: true, residual: Some(Place::Elsewhere) },
    Added { name: "bias, residual in place", bias: true, residual: Some(Place::Here) },
];

impl Added {
    /// The operands of the epilogue and the memory of the result.
    fn operands(
        self,
        case: &mut crate::Case<'_>,
        (dtype, of_out): (DType, DType),
        [m, n]: [usize; 2],
    ) -> (Option<Tensor>, Option<Tensor>, Tensor) {
        let bias = self.bias.then(|| case.operand("bias", dtype, &[n], 2.0));
        let residual = self.residual.map(|_| case.operand("residual", of_out, &[m, n], 3.0));
        match (self.residual, residual) {
            (Some(Place::Here), Some(out)) => (bias, None, out),
            (_, residual) => (bias, residual, case.result(of_out, &[m, n])),
        }
    }

    fn epilogue<'a>(self, bias: Option<&'a Tensor>, residual: Option<&'a Tensor>) -> Epilogue<'a> {
        let residual = match (self.residual, residual) {
            (Some(Place::Here), _) => Residual::InPlace,
            (_, Some(residual)) => Residual::Of(residual.view()),
            _ => Residual::None,
        };
        Epilogue { bias: bias.map(Tensor::view), residual }
    }
}

fn epilogues(rig: &Rig) {
    let shapes = rig.sizes(&SHAPES[..4], &SHAPES_TINY);
    for ([m, n, l], mix) in pairs(&shapes, &MIXES) {
        for added in ADDED {
            for (variant, set) in &rig.sets {
                let name = format!("NT {m}x{n}x{l} {} to {}, {}", mix.0, mix.1, added.name);
                let mut case =
                    rig.case_of("matmul", variant, name).with("trans_a", false).with("trans_b", true);
                let (a, b) = (case.operand("a", mix.0, &[m, l], 1.0), case.operand("b", mix.0, &[n, l], 1.0));
                let (bias, residual, mut out) = added.operands(&mut case, mix, [m, n]);
                let epilogue = added.epilogue(bias.as_ref(), residual.as_ref());
                set.matmul.matmul_nt(a.view(), b.view(), out.view_mut(), epilogue).expect("the product runs");
                case.finish(&[("out", &out)]);
            }
        }
    }
}

const NOTHING: Added = Added { name: "nothing added", bias: false, residual: None };

fn quantized(rig: &Rig) {
    let shapes = rig.sizes(
        &[[1, 256, 512], [5, 67, 300], [16, 384, 1024], [33, 129, 640], [200, 256, 384]],
        &[[1, 32, 128], [5, 19, 140]],
    );
    for ([m, n, l], mix) in pairs(&shapes, &MIXES) {
        let formats = [QuantFormat::Int8, QuantFormat::Int4, QuantFormat::Mxfp4];
        for (format, added) in pairs(&formats, &[NOTHING, ADDED[2]]) {
            let name = format!("{format} {m}x{n}x{l} {} to {}, {}", mix.0, mix.1, added.name);
            let mut case = rig.case("quantized", name);
            let (a, codes) = (case.operand("a", mix.0, &[m, l], 1.0), case.quantized("b", format, [n, l]));
            let (bias, residual, mut out) = added.operands(&mut case, mix, [m, n]);
            let b = QuantizedView::new(codes.bytes(), format, &[n, l]);
            let epilogue = added.epilogue(bias.as_ref(), residual.as_ref());
            let products = &rig.kernels().quantized_matmul;
            products.matmul_nt(a.view(), b, out.view_mut(), epilogue).expect("the product runs");
            case.finish(&[("out", &out)]);
        }
    }
}

/// Every pair of elements of two lists.
pub fn pairs<A: Copy, B: Copy>(a: &[A], b: &[B]) -> Vec<(A, B)> {
    a.iter().flat_map(|a| b.iter().map(|b| (*a, *b))).collect()
}
