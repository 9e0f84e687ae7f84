//! Attention: which kernels for which head size and operands.

use super::launch::Arguments;
use super::{Cuda, THREADS, too_large};
use crate::check::{self, AttentionDims};
use crate::{Attention, AttentionSpec, Result, View, ViewMut};

/// A kernel, and what it needs to be launched.
#[derive(Debug, Clone, Copy)]
struct Pass {
    kernel: &'static str,
    /// Of a block's tile of the result (keys, where those are the result's rows).
    rows: usize,
    /// Of the result that a block keeps; larger heads are computed in pieces.
    columns: usize,
    threads: u32,
    shared_bytes: u32,
}

/// One kernel each for out, dq, and dk with dv.
struct Passes {
    forward: Pass,
    dq: Pass,
    dkv: Pass,
}

/// `SHARED_FLOATS` of `attention.cu`; its dkv pass keeps two numbers of every row as well.
const SHARED_BYTES: u32 = 4 * (2 * 32 * 68 + 64 * 68);
const SHARED_BYTES_DKV: u32 = SHARED_BYTES + 4 * 2 * 64;

const fn plain(kernel: &'static str, columns: usize, shared_bytes: u32) -> Pass {
    Pass { kernel, rows: 64, columns, threads: THREADS, shared_bytes }
}

const PLAIN_64: Passes = Passes {
    forward: plain("attention_forward_64", 64, SHARED_BYTES),
    dq: plain("attention_dq_64", 64, SHARED_BYTES),
    dkv: plain("attention_dkv_64", 64, SHARED_BYTES_DKV),
};
const PLAIN_128: Passes = Passes {
    forward: plain("attention_forward_128", 128, SHARED_BYTES),
    dq: plain("attention_dq_128", 128, SHARED_BYTES),
    dkv: plain("attention_dkv_128", 128, SHARED_BYTES_DKV),
};
const PLAIN_256: Passes = Passes { forward: plain("attention_forward_256", 256, SHARED_BYTES), ..PLAIN_128 };

/// By the table of `attention_mma.cu`.
const fn mma(kernel: &'static str, columns: usize, rows: usize, shared_bytes: u32) -> Pass {
    Pass { kernel, rows, columns, threads: 128, shared_bytes }
}

const MMA_64: Passes = Passes {
    forward: mma("attention_forward_mma_64", 64, 128, 49152),
    dq: mma("attention_dq_mma_64", 64, 128, 49152),
    dkv: mma("attention_dkv_mma_64", 64, 64, 66304),
};
const MMA_128: Passes = Passes {
    forward: mma("attention_forward_mma_128", 128, 128, 65536),
    dq: mma("attention_dq_mma_128", 128, 64, 65536),
    dkv: mma("attention_dkv_mma_128", 128, 64, 82304),
};

/// Kernels that use more shared memory than is given without asking, and how many bytes.
pub(super) fn large_shared_bytes() -> impl Iterator<Item = (&'static str, u32)> {
    let all = [MMA_64, MMA_128].into_iter().flat_map(|passes| [passes.forward, passes.dq, passes.dkv]);
    all.map(|pass| (pass.kernel, pass.shared_bytes))
}

fn passes(head_size: usize, tensor_cores: bool) -> Passes {
    match head_size {
        64 if tensor_cores => MMA_64,
        128 if tensor_cores => MMA_128,
        0..=64 => PLAIN_64,
        65..=128 => PLAIN_128,
        _ => PLAIN_256,
    }
}

impl Attention for Cuda {
    /// `starts` are in device memory and not looked at here: the caller keeps them within the keys.
    fn forward(
        &self,
        q: View<'_>,
        k: View<'_>,
        v: View<'_>,
        starts: View<'_>,
        out: ViewMut<'_>,
        lse: ViewMut<'_>,
        spec: AttentionSpec,
    ) -> Result {
        const OP: &str = "attention";
        let dims = check::attention_forward(q, k, v, starts, &out, &lse);
        if dims.batch * dims.queries * dims.heads == 0 {
            return Ok(());
        }
        let tensor_cores = self.fits_tensor_cores(&[q, k, v], &[out.view()]);
        let pass = passes(dims.head_size, tensor_cores).forward;
        let mut arguments = self.arguments().read(q).read(k).read(v).only(starts).write(&out);
        arguments = arguments.only(lse.view()).size(dims.queries).size(dims.capacity).size(dims.heads);
        arguments = arguments.size(dims.kv_heads).size(dims.head_size).int(window(spec)).float(spec.scale);
        self.launch_pass(OP, pass, &dims, dims.queries * dims.group(), &mut arguments)
    }

    fn backward(
        &self,
        q: View<'_>,
        k: View<'_>,
        v: View<'_>,
        out: View<'_>,
        lse: View<'_>,
        dout: View<'_>,
        dq: ViewMut<'_>,
        dk: ViewMut<'_>,
        dv: ViewMut<'_>,
        spec: AttentionSpec,
    ) -> Result {
        const OP: &str = "attention backward";
        let dims = check::attention_backward(q, k, v, out, lse, dout, &dq, &dk, &dv);
        if dims.batch * dims.queries * dims.heads == 0 {
            return Ok(());
        }
        let tensor_cores = self.fits_tensor_cores(&[q, k, v, out, dout], &[dq.view(), dk.view(), dv.view()]);
        let passes = passes(dims.head_size, tensor_cores);
        let operands = self.arguments().read(q).read(k).read(v).read(out).only(lse).read(dout);
        let with_shape = |arguments: Arguments| {
            let arguments = arguments.size(dims.queries).size(dims.heads).size(dims.kv_heads);
            arguments.size(dims.head_size).int(window(spec)).float(spec.scale)
        };
        let mut of_q = with_shape(operands.clone().write(&dq));
        self.launch_pass(OP, passes.dq, &dims, dims.queries * dims.group(), &mut of_q)?;
        let mut of_kv = with_shape(operands.write(&dk).write(&dv));
        self.launch_pass(OP, passes.dkv, &dims, dims.capacity, &mut of_kv)
    }
}

impl Cuda {
    /// Launches blocks for tiles of `rows`, sequences and key heads, and pieces of a head's columns.
    fn launch_pass(
        &self,
        op: &'static str,
        pass: Pass,
        dims: &AttentionDims,
        rows: usize,
        arguments: &mut Arguments,
    ) -> Result {
        let (tiles, heads) = (rows.div_ceil(pass.rows), dims.batch * dims.kv_heads);
        let pieces = dims.head_size.div_ceil(pass.columns).max(1);
        if heads > 65_535 {
            return Err(too_large(op, "sequences times key heads", heads));
        }
        let number = |value: usize, what| u32::try_from(value).map_err(|_| too_large(op, what, value));
        let grid = [number(tiles, "tiles of rows")?, number(heads, "heads")?, number(pieces, "columns")?];
        self.launch(op, pass.kernel, grid, pass.threads, pass.shared_bytes, arguments)
    }
}

/// Positions a query sees.
fn window(spec: AttentionSpec) -> i32 {
    spec.window.map_or(i32::MAX, |window| i32::try_from(window).unwrap_or(i32::MAX))
}
