//! Attention: which kernel for which head size.

use super::{Cuda, THREADS, too_large};
use crate::check::{self, AttentionDims};
use crate::{Attention, AttentionSpec, Result, View, ViewMut};

/// Rows and keys of a tile.
const TILE: usize = 64;
/// `SHARED_FLOATS` of `attention.cu`.
const SHARED_BYTES: u32 = 4 * (2 * 32 * 68 + 64 * 68);
/// The dkv pass keeps two numbers of every row as well.
const SHARED_BYTES_DKV: u32 = SHARED_BYTES + 4 * 2 * TILE as u32;

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
        let (kernel, columns) = match dims.head_size {
            0..=64 => ("attention_forward_64", 64),
            65..=128 => ("attention_forward_128", 128),
            _ => ("attention_forward_256", 256),
        };
        let mut arguments = self.arguments().read(q).read(k).read(v).only(starts).write(&out);
        arguments = arguments.only(lse.view()).size(dims.queries).size(dims.capacity).size(dims.heads);
        arguments = arguments.size(dims.kv_heads).size(dims.head_size).int(window(spec)).float(spec.scale);
        let grid = grid(OP, &dims, dims.queries * dims.group(), columns)?;
        self.launch(OP, kernel, grid, THREADS, SHARED_BYTES, &mut arguments)
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
        let (dq_kernel, dkv_kernel, columns) = match dims.head_size {
            0..=64 => ("attention_dq_64", "attention_dkv_64", 64),
            _ => ("attention_dq_128", "attention_dkv_128", 128),
        };
        let operands = self.arguments().read(q).read(k).read(v).read(out).only(lse).read(dout);
        let with_shape = |arguments: super::launch::Arguments| {
            let arguments = arguments.size(dims.queries).size(dims.heads).size(dims.kv_heads);
            arguments.size(dims.head_size).int(window(spec)).float(spec.scale)
        };
        let rows = grid(OP, &dims, dims.queries * dims.group(), columns)?;
        let mut of_q = with_shape(operands.clone().write(&dq));
        self.launch(OP, dq_kernel, rows, THREADS, SHARED_BYTES, &mut of_q)?;
        let keys = grid(OP, &dims, dims.capacity, columns)?;
        let mut of_kv = with_shape(operands.write(&dk).write(&dv));
        self.launch(OP, dkv_kernel, keys, THREADS, SHARED_BYTES_DKV, &mut of_kv)
    }
}

/// Tiles, sequences and key heads, pieces of a head's columns.
fn grid(op: &'static str, dims: &AttentionDims, rows: usize, columns: usize) -> Result<[u32; 3]> {
    let (tiles, heads) = (rows.div_ceil(TILE), dims.batch * dims.kv_heads);
    let pieces = dims.head_size.div_ceil(columns).max(1);
    if heads > 65_535 {
        return Err(too_large(op, "sequences times key heads", heads));
    }
    let number = |value: usize, what| u32::try_from(value).map_err(|_| too_large(op, what, value));
    Ok([number(tiles, "tiles of rows")?, number(heads, "heads")?, number(pieces, "columns")?])
}

/// Positions a query sees.
fn window(spec: AttentionSpec) -> i32 {
    spec.window.map_or(i32::MAX, |window| i32::try_from(window).unwrap_or(i32::MAX))
}
