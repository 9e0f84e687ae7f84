//! Attention: which kernels for which head size and operands.

use super::launch::Arguments;
use super::{Cuda, THREADS, aligned, too_large};
use crate::check::{self, AttentionDims, Paging};
use crate::{Attention, AttentionSpec, KeyValues, Result, View, ViewMut};
use std::sync::PoisonError;

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
    tensor_cores: bool,
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
    Pass { kernel, rows: 64, columns, threads: THREADS, shared_bytes, tensor_cores: false }
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
const PLAIN_CAPPED: Passes = Passes {
    forward: plain("attention_forward_256_capped", 256, SHARED_BYTES),
    dq: plain("attention_dq_128_capped", 128, SHARED_BYTES),
    dkv: plain("attention_dkv_128_capped", 128, SHARED_BYTES_DKV),
};

/// By the table of `attention_mma.cu`.
const fn mma(kernel: &'static str, columns: usize, rows: usize, shared_bytes: u32) -> Pass {
    Pass { kernel, rows, columns, threads: 128, shared_bytes, tensor_cores: true }
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

const MMA_128_CAPPED: Passes = Passes {
    forward: Pass { kernel: "attention_forward_mma_128_capped", ..MMA_128.forward },
    dq: Pass { kernel: "attention_dq_mma_128_capped", ..MMA_128.dq },
    dkv: Pass { kernel: "attention_dkv_mma_128_capped", ..MMA_128.dkv },
};

/// Kernels that use more shared memory than is given without asking, and how many bytes.
pub(super) fn large_shared_bytes() -> impl Iterator<Item = (&'static str, u32)> {
    let all = [MMA_64, MMA_128, MMA_128_CAPPED].into_iter();
    let all = all.flat_map(|passes| [passes.forward, passes.dq, passes.dkv]);
    all.map(|pass| (pass.kernel, pass.shared_bytes))
}

fn passes(head_size: usize, tensor_cores: bool, spec: AttentionSpec) -> Passes {
    match head_size {
        128 if tensor_cores && spec.cap.is_some() => MMA_128_CAPPED,
        _ if spec.cap.is_some() => PLAIN_CAPPED,
        64 if tensor_cores => MMA_64,
        128 if tensor_cores => MMA_128,
        0..=64 => PLAIN_64,
        65..=128 => PLAIN_128,
        _ => PLAIN_256,
    }
}

/// Memory for partial results where the keys of few queries are shared out among blocks.
pub(super) const PARTIAL_BYTES: usize = 8 << 20;

/// How the keys are shared out, by the kernels of `attention_decode.cu`.
#[derive(Debug, Clone, Copy)]
struct Split {
    kernel: &'static str,
    /// Rows of a block.
    rows: usize,
    /// Keys of a block.
    piece: usize,
    pieces: usize,
}

impl Split {
    /// Fewer keys are not worth a block, and more pieces not worth merging.
    const KEYS_MIN: usize = 256;
    const PIECES_MAX: usize = 64;
    /// The tile of the kernel.
    const TILE: usize = 64;
    /// Queries that share keys; more fill tiles of the other kernels well enough.
    const ROWS_MAX: usize = 16;

    /// How to share the keys out, if that is worth while.
    fn of(dims: &AttentionDims, spec: AttentionSpec) -> Option<Self> {
        let (head, rows) = (dims.head_size, dims.queries * dims.group());
        if !head.is_multiple_of(8) || head == 0 || head > 256 || rows > Self::ROWS_MAX {
            return None;
        }
        let partial = dims.batch * dims.queries * dims.heads * (head + 2) * size_of::<f32>();
        let pieces =
            dims.capacity.div_ceil(Self::KEYS_MIN).min(Self::PIECES_MAX).min(PARTIAL_BYTES / partial);
        if pieces < 2 {
            return None;
        }
        let piece = dims.capacity.div_ceil(pieces).next_multiple_of(Self::TILE);
        let (kernel, rows) = match (rows <= 4, spec.cap) {
            (true, None) => ("attention_decode_4", 4),
            (true, Some(_)) => ("attention_decode_4_capped", 4),
            (false, None) => ("attention_decode_8", 8),
            (false, Some(_)) => ("attention_decode_8_capped", 8),
        };
        Some(Self { kernel, rows, piece, pieces: dims.capacity.div_ceil(piece) })
    }
}

impl Attention for Cuda {
    /// `starts` are in device memory and not looked at here: the caller keeps them within the keys.
    fn forward(
        &self,
        q: View<'_>,
        keys: KeyValues<'_>,
        starts: View<'_>,
        out: ViewMut<'_>,
        lse: ViewMut<'_>,
        spec: AttentionSpec,
    ) -> Result {
        const OP: &str = "attention";
        let dims = check::attention_forward(q, keys, starts, &out, &lse);
        if dims.batch * dims.queries * dims.heads == 0 {
            return Ok(());
        }
        let KeyValues { k, v, pages } = keys;
        let operands = self.arguments().read(q).read(k).read(v);
        // Without pages the kernels are told so by a null pointer.
        let operands = pages.map_or(operands.clone().long(0), |pages| operands.only(pages));
        let operands = operands.size(dims.paging.map_or(0, |paging| page_shift(&paging))).only(starts);
        let with_shape = |arguments: Arguments| {
            let arguments = arguments.size(dims.queries).size(dims.capacity).size(dims.heads);
            with_spec(arguments.size(dims.kv_heads).size(dims.head_size), spec)
        };
        if let Some(split) = Split::of(&dims, spec).filter(|_| aligned(&[k, v])) {
            let _held = self.partials.lock().unwrap_or_else(PoisonError::into_inner);
            let mut keys = with_shape(operands.bytes(self.partials())).size(split.piece);
            self.launch_split(OP, split, &dims, &mut keys)?;
            let mut merge = self.arguments().bytes(self.partials()).size(split.pieces).write(&out);
            merge = merge.only(lse.view()).size(dims.queries).size(dims.heads).size(dims.head_size);
            let grid = [number(OP, "rows", dims.batch * dims.queries * dims.heads)?, 1, 1];
            return self.launch(OP, "attention_decode_merge", grid, SPLIT_THREADS, 0, &mut merge);
        }
        let tensor_cores = self.fits_tensor_cores(&[q, k, v], &[out.view()]);
        let pass = passes(dims.head_size, tensor_cores, spec).forward;
        let mut arguments = with_shape(operands.write(&out).only(lse.view()));
        self.launch_pass(OP, pass, &dims, dims.queries * dims.group(), &mut arguments)
    }

    fn append(
        &self,
        k: View<'_>,
        values: Option<(View<'_>, ViewMut<'_>)>,
        starts: View<'_>,
        pages: View<'_>,
        to_k: ViewMut<'_>,
    ) -> Result {
        const OP: &str = "append";
        let dims = check::append(k, &values, starts, pages, &to_k);
        if dims.batch * dims.length * dims.width == 0 {
            return Ok(());
        }
        let (v, to_v) = values.map_or((None, None), |(v, to_v)| (Some(v), Some(to_v)));
        let kinds = 1 + u32::from(v.is_some());
        let arguments = self.arguments().read(k).optional(v).only(pages);
        let arguments = arguments.size(page_shift(&dims.paging)).only(starts);
        let arguments = arguments.write(&to_k).optional(to_v.as_ref().map(ViewMut::view));
        let mut arguments = arguments.size(dims.length).size(dims.width).size(dims.paging.per_sequence);
        let grid = [number(OP, "positions", dims.batch * dims.length)?, kinds, 1];
        self.launch(OP, "attention_append", grid, SPLIT_THREADS, 0, &mut arguments)
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
        let passes = passes(dims.head_size, tensor_cores, spec);
        let operands = self.arguments().read(q).read(k).read(v).read(out).only(lse).read(dout);
        let with_shape = |arguments: Arguments| {
            let arguments = arguments.size(dims.queries).size(dims.heads).size(dims.kv_heads);
            with_spec(arguments.size(dims.head_size), spec)
        };
        let mut of_q = with_shape(operands.clone().write(&dq));
        self.launch_pass(OP, passes.dq, &dims, dims.queries * dims.group(), &mut of_q)?;
        let mut of_kv = with_shape(operands.write(&dk).write(&dv));
        self.launch_pass(OP, passes.dkv, &dims, dims.capacity, &mut of_kv)
    }
}

impl Cuda {
    /// Launches blocks for tiles of `rows`, sequences and key heads, and in the plain kernels pieces of a head's columns.
    fn launch_pass(
        &self,
        op: &'static str,
        pass: Pass,
        dims: &AttentionDims,
        rows: usize,
        arguments: &mut Arguments,
    ) -> Result {
        let tiles = number(op, "tiles of rows", rows.div_ceil(pass.rows))?;
        let grid = if pass.tensor_cores {
            [tiles, grid_size(op, "key heads", dims.kv_heads)?, grid_size(op, "sequences", dims.batch)?]
        } else {
            [tiles, heads(op, dims)?, number(op, "columns", dims.head_size.div_ceil(pass.columns).max(1))?]
        };
        self.launch(op, pass.kernel, grid, pass.threads, pass.shared_bytes, arguments)
    }

    /// Launches blocks for pieces of the keys, sequences and key heads, and pieces of the rows that share keys.
    fn launch_split(
        &self,
        op: &'static str,
        split: Split,
        dims: &AttentionDims,
        arguments: &mut Arguments,
    ) -> Result {
        let rows = (dims.queries * dims.group()).div_ceil(split.rows);
        let grid = [number(op, "pieces of keys", split.pieces)?, heads(op, dims)?, number(op, "rows", rows)?];
        self.launch(op, split.kernel, grid, SPLIT_THREADS, 0, arguments)
    }
}

/// Threads of the kernels of `attention_decode.cu`.
const SPLIT_THREADS: u32 = 128;

/// The logarithm of a page's positions.
fn page_shift(paging: &Paging) -> usize {
    paging.positions.trailing_zeros() as usize
}

/// Sequences times key heads, as a grid's second dimension.
fn heads(op: &'static str, dims: &AttentionDims) -> Result<u32> {
    grid_size(op, "sequences times key heads", dims.batch * dims.kv_heads)
}

/// A size of a grid's second or third dimension.
fn grid_size(op: &'static str, what: &'static str, value: usize) -> Result<u32> {
    if value > 65_535 {
        return Err(too_large(op, what, value));
    }
    number(op, what, value)
}

fn number(op: &'static str, what: &'static str, value: usize) -> Result<u32> {
    u32::try_from(value).map_err(|_| too_large(op, what, value))
}

/// What a query sees, the scale, and the cap, which kernels without one do not read.
fn with_spec(arguments: Arguments, spec: AttentionSpec) -> Arguments {
    check::attention_spec(spec);
    arguments.int(sight(spec)).float(spec.scale).float(spec.cap.unwrap_or(0.0))
}

/// What a query sees, as `first_key` of `common.cuh` reads it: the window, or the size of chunks with a minus.
fn sight(spec: AttentionSpec) -> i32 {
    let int = |positions: usize| i32::try_from(positions).unwrap_or(i32::MAX);
    match (spec.chunk, spec.window) {
        (Some(chunk), _) => -int(chunk),
        (None, window) => window.map_or(i32::MAX, int),
    }
}
