//! Causal attention, backward.
//!
//! With `p = exp(scale·q·kᵀ − lse)`, `dp = dout·vᵀ`, `delta = Σ dout·out` of a row and `ds = p·(dp − delta)`:
//! `dq = scale·ds·k`, `dk = dsᵀ·(scale·q)`, `dv = pᵀ·dout`.
//!
//! Two passes: one task per block of rows sums dq over the keys, then one task per block of keys sums dk and dv over the
//! rows (heads of a group included), both in ascending order in f32. Scores are computed in both, seven products instead
//! of five; in exchange there is neither a shared accumulator nor memory that grows with S. (Rejected: one pass per
//! `(b, g)` with f32 dk and dv for a whole sequence. It cannot use more threads than B·G.)
//!
//! Tolerance against f64: 1e-5 of the sum of absolute terms, before the rounding.

use super::attention::{Geometry, KEYS, ROWS, RowBlock, key_blocks, plain_rows, visible};
use super::floats::{Floats, FloatsMut, floats};
use super::gemm::{self, Micro, Panels, Target, packed_len};
use super::threads::Carver;
use super::{Cpu, Isa, vector};
use crate::{View, ViewMut};
use std::ops::Range;

/// What both passes read.
pub struct Operands<'a> {
    cpu: &'a Cpu,
    geometry: Geometry<'a>,
    q: Floats<'a>,
    k: Floats<'a>,
    v: Floats<'a>,
    out: Floats<'a>,
    lse: &'a [f32],
    dout: Floats<'a>,
}

/// A block of rows, ready to be multiplied with keys.
struct RowPack<'s> {
    /// `scale·q`, `[rows, K]`.
    q: &'s mut [f32],
    /// `[rows, K]`.
    dout: &'s mut [f32],
    q_packed: &'s mut [f32],
    dout_packed: &'s mut [f32],
    /// One row of out.
    out: &'s mut [f32],
    lse: [f32; ROWS],
    delta: [f32; ROWS],
}

/// A block of scores and its gradient.
struct ScorePack<'s> {
    /// ds, `[rows, KEYS]`.
    ds: &'s mut [f32],
    /// p, `[rows, KEYS]`.
    p: &'s mut [f32],
    packed: &'s mut [f32],
}

impl<'a> Operands<'a> {
    pub fn new(
        cpu: &'a Cpu,
        geometry: Geometry<'a>,
        (q, k, v): (View<'a>, View<'a>, View<'a>),
        (out, lse, dout): (View<'a>, View<'a>, View<'a>),
    ) -> Self {
        Self {
            cpu,
            geometry,
            q: Floats::new(q),
            k: Floats::new(k),
            v: Floats::new(v),
            out: Floats::new(out),
            lse: floats(lse),
            dout: Floats::new(dout),
        }
    }

    /// Writes dq.
    pub fn query_gradient(&self, dq: ViewMut<'_>) {
        let (dq, geometry) = (FloatsMut::new(dq), self.geometry);
        self.cpu.threads.run(geometry.row_tasks(), |task, scratch| {
            self.query_block(dq, geometry.row_block(task), Carver::new(scratch));
        });
    }

    /// Writes dk and dv.
    pub fn key_value_gradient(&self, dk: ViewMut<'_>, dv: ViewMut<'_>) {
        let (dk, dv, dims) = (FloatsMut::new(dk), FloatsMut::new(dv), self.geometry.dims);
        let pairs = dims.batch * dims.kv_heads;
        // The first keys, which most rows see, come first.
        self.cpu.threads.run(pairs * dims.capacity.div_ceil(KEYS), |task, scratch| {
            let first = task / pairs * KEYS;
            let keys = first..dims.capacity.min(first + KEYS);
            let pair = (task % pairs / dims.kv_heads, task % dims.kv_heads);
            self.key_block(dk, dv, pair, &keys, Carver::new(scratch));
        });
    }

    fn query_block(&self, dq: FloatsMut<'_>, rows: RowBlock, mut carver: Carver<'_>) {
        let (isa, micro, head_size) = self.machine();
        let mut pack = self.row_pack(&mut carver);
        let mut scores = score_pack(micro, &mut carver);
        let k_packed = carver.take(packed_len(KEYS, micro.nr, head_size));
        let v_packed = carver.take(packed_len(KEYS, micro.nr, head_size));
        let k_depth = carver.take(packed_len(head_size, micro.nr, KEYS));
        let sums = carver.take(rows.rows * head_size);
        sums.fill(0.0);
        self.load_rows(rows, &mut pack);
        for block in key_blocks(self.geometry.keys_of(0, rows)) {
            self.geometry.keys_as_columns(self.k, rows.b, rows.g, &block).pack(isa, micro.nr, k_packed);
            self.geometry.keys_as_columns(self.v, rows.b, rows.g, &block).pack(isa, micro.nr, v_packed);
            self.score_gradient(rows, &block, &pack, k_packed, v_packed, &mut scores);
            plain_rows(scores.ds, rows.rows, block.len(), KEYS).pack(isa, micro.mr, scores.packed);
            self.geometry
                .keys_as_columns(self.k, rows.b, rows.g, &block)
                .turned()
                .pack(isa, micro.nr, k_depth);
            let target = Target { pointer: sums.as_mut_ptr(), stride: head_size, add: true };
            let size = (rows.rows, head_size, block.len());
            // SAFETY: `sums` holds that many rows of this thread's scratch.
            unsafe { gemm::product(micro, size, scores.packed, k_depth, target) };
        }
        vector::scale(isa, sums, self.geometry.spec.scale);
        for (i, row) in sums.chunks_exact(head_size).enumerate() {
            // SAFETY: these rows of dq belong to this task.
            unsafe { dq.write(isa, self.geometry.q_at(rows.b, rows.g, rows.first + i), row) };
        }
    }

    fn key_block(
        &self,
        dk: FloatsMut<'_>,
        dv: FloatsMut<'_>,
        (b, g): (usize, usize),
        keys: &Range<usize>,
        mut carver: Carver<'_>,
    ) {
        let (isa, micro, head_size) = self.machine();
        let mut pack = self.row_pack(&mut carver);
        let mut scores = score_pack(micro, &mut carver);
        let k_packed = carver.take(packed_len(KEYS, micro.nr, head_size));
        let v_packed = carver.take(packed_len(KEYS, micro.nr, head_size));
        let rows_depth = carver.take(packed_len(head_size, micro.nr, ROWS));
        let of_k = carver.take(keys.len() * head_size);
        let of_v = carver.take(keys.len() * head_size);
        of_k.fill(0.0);
        of_v.fill(0.0);
        self.geometry.keys_as_columns(self.k, b, g, keys).pack(isa, micro.nr, k_packed);
        self.geometry.keys_as_columns(self.v, b, g, keys).pack(isa, micro.nr, v_packed);
        for rows in self.rows_seeing(b, g, keys) {
            self.load_rows(rows, &mut pack);
            self.score_gradient(rows, keys, &pack, k_packed, v_packed, &mut scores);
            for (of_score, of_row, sums) in
                [(&*scores.p, &*pack.dout, &mut *of_v), (&*scores.ds, &*pack.q, &mut *of_k)]
            {
                columns_as_rows(of_score, keys.len(), rows.rows, KEYS).pack(isa, micro.mr, scores.packed);
                columns_as_rows(of_row, head_size, rows.rows, head_size).pack(isa, micro.nr, rows_depth);
                let target = Target { pointer: sums.as_mut_ptr(), stride: head_size, add: true };
                let size = (keys.len(), head_size, rows.rows);
                // SAFETY: `sums` holds that many rows of this thread's scratch.
                unsafe { gemm::product(micro, size, scores.packed, rows_depth, target) };
            }
        }
        for (i, key) in keys.clone().enumerate() {
            let at = self.geometry.key_at(b, g, key);
            // SAFETY: these keys' rows of dk and dv belong to this task.
            unsafe { dk.write(isa, at, &of_k[i * head_size..][..head_size]) };
            // SAFETY: as above.
            unsafe { dv.write(isa, at, &of_v[i * head_size..][..head_size]) };
        }
    }

    /// The blocks of rows, beginning at multiples of [`ROWS`], that see any of the keys.
    fn rows_seeing(&self, b: usize, g: usize, keys: &Range<usize>) -> impl Iterator<Item = RowBlock> + use<> {
        let (queries, group) = (self.geometry.dims.queries, self.geometry.dims.group());
        let last = self
            .geometry
            .spec
            .window
            .map_or(queries, |window| queries.min((keys.end - 1).saturating_add(window)));
        let (start, end, count) = (keys.start * group, last * group, self.geometry.row_count());
        (start / ROWS * ROWS..end).step_by(ROWS).map(move |first| RowBlock {
            b,
            g,
            first,
            rows: ROWS.min(count - first),
        })
    }

    /// Widens and packs rows of q and dout, and computes delta.
    fn load_rows(&self, rows: RowBlock, pack: &mut RowPack<'_>) {
        let (isa, micro, head_size) = self.machine();
        let geometry = self.geometry;
        geometry.widen_rows(isa, self.q, rows, geometry.spec.scale, pack.q);
        geometry.widen_rows(isa, self.dout, rows, 1.0, pack.dout);
        plain_rows(pack.q, rows.rows, head_size, head_size).pack(isa, micro.mr, pack.q_packed);
        plain_rows(pack.dout, rows.rows, head_size, head_size).pack(isa, micro.mr, pack.dout_packed);
        for i in 0..rows.rows {
            let row = rows.first + i;
            let out = self.out.read(isa, geometry.q_at(rows.b, rows.g, row), head_size, pack.out);
            pack.delta[i] = vector::dot(isa, out, &pack.dout[i * head_size..][..head_size]);
            pack.lse[i] = self.lse[geometry.lse_at(rows.b, rows.g, row)];
        }
    }

    /// p and ds of a block of rows and keys; zeros where a row does not see a key.
    fn score_gradient(
        &self,
        rows: RowBlock,
        keys: &Range<usize>,
        pack: &RowPack<'_>,
        k_packed: &[f32],
        v_packed: &[f32],
        scores: &mut ScorePack<'_>,
    ) {
        let (isa, micro, head_size) = self.machine();
        let size = (rows.rows, keys.len(), head_size);
        let target = |pointer| Target { pointer, stride: KEYS, add: false };
        // SAFETY: both blocks hold ROWS rows of KEYS floats of this thread's scratch.
        unsafe {
            gemm::product(micro, size, pack.q_packed, k_packed, target(scores.ds.as_mut_ptr()));
            gemm::product(micro, size, pack.dout_packed, v_packed, target(scores.p.as_mut_ptr()));
        }
        for i in 0..rows.rows {
            let seen = visible(&self.geometry.keys(0, rows.first + i), keys);
            let (ds, p) = (&mut scores.ds[i * KEYS..][..keys.len()], &mut scores.p[i * KEYS..][..keys.len()]);
            for row in [&mut *ds, &mut *p] {
                row[..seen.start].fill(0.0);
                row[seen.end..].fill(0.0);
            }
            vector::score_gradient(isa, &mut ds[seen.clone()], &mut p[seen], pack.lse[i], pack.delta[i]);
        }
    }

    fn row_pack<'s>(&self, carver: &mut Carver<'s>) -> RowPack<'s> {
        let (_, micro, head_size) = self.machine();
        RowPack {
            q: carver.take(ROWS * head_size),
            dout: carver.take(ROWS * head_size),
            q_packed: carver.take(packed_len(ROWS, micro.mr, head_size)),
            dout_packed: carver.take(packed_len(ROWS, micro.mr, head_size)),
            out: carver.take(head_size),
            lse: [0.0; ROWS],
            delta: [0.0; ROWS],
        }
    }

    fn machine(&self) -> (Isa, Micro, usize) {
        (self.cpu.threads.isa(), self.cpu.threads.micro(), self.geometry.dims.head_size)
    }
}

fn score_pack<'s>(micro: Micro, carver: &mut Carver<'s>) -> ScorePack<'s> {
    ScorePack {
        ds: carver.take(ROWS * KEYS),
        p: carver.take(ROWS * KEYS),
        packed: carver.take(packed_len(ROWS, micro.mr, KEYS)),
    }
}

/// The columns of a plain matrix as the outer dimension, its rows as the inner one.
fn columns_as_rows(data: &[f32], columns: usize, rows: usize, stride: usize) -> Panels<'_> {
    Panels { data: Floats::F32(data), outer: columns, depth: rows, outer_stride: 1, depth_stride: stride }
}
