//! Causal attention, backward.
//!
//! With `p = exp(scale·(q·kᵀ) − lse)`, `dp = dout·vᵀ`, `delta = Σ dout·out` of a row and `ds = p·(dp − delta)`:
//! `dq = scale·(ds·k)`, `dk = scale·(dsᵀ·q)`, `dv = pᵀ·dout`. With a cap `s = cap·t`, `t = tanh(scale·(q·kᵀ)/cap)`, takes the place of the
//! scaled score in p, and ds is multiplied by `1 − t²`.
//!
//! *In one pass* a task takes all of a `(b, g)` pair: block of keys by block of keys it sums dk and dv over the rows (heads of a
//! group included), and adds to dq, which waits in f32 until all keys have been seen. Five products. Rows are packed once, if there is
//! room for all of them.
//!
//! *In two passes* one task per block of rows sums dq over the keys, then one task per block of keys sums dk and dv. Scores are
//! computed in both, seven products. This is for few pairs to many threads, and for sequences whose dq does not fit the scratch of
//! a thread.
//!
//! Both add the same products in the same order, keys and rows ascending, in f32: bits depend on neither. Where all operands and
//! results are bf16 and the processor multiplies pairs of it, products take them as they are, and p and ds are rounded to bf16.
//!
//! As in the forward pass, rows and keys that do not see each other are zeros of p and ds. A task whose results are not finite
//! computes them again and multiplies rows and keys one by one in blocks where not all see each other.
//!
//! Tolerance against f64: 1e-5 of the sum of absolute terms, before the rounding; by pairs 2⁻⁸ of it.

use super::attention::{Geometry, KEYS, ROWS, RowBlock, by_pairs, key_blocks, plain_rows, visible};
use super::floats::{Floats, FloatsMut, floats};
use super::gemm::{self, Micro, Pair, Panels, Target, Word, packed_len};
use super::threads::{Carver, SCRATCH_BYTES};
use super::{Cpu, Isa, vector};
use crate::{View, ViewMut};
use std::ops::Range;

/// Products of a pair of blocks, in one pass and in two.
const PRODUCTS: [usize; 2] = [5, 7];

/// What all passes read.
#[derive(Clone, Copy)]
pub struct Operands<'a> {
    cpu: &'a Cpu,
    geometry: Geometry<'a>,
    q: Floats<'a>,
    k: Floats<'a>,
    v: Floats<'a>,
    out: Floats<'a>,
    lse: &'a [f32],
    dout: Floats<'a>,
    /// Keep what rows and keys do not see from their sums, even if it is not finite.
    apart: bool,
}

/// A block of rows, ready to be multiplied with keys.
struct RowPack<'s, W> {
    /// First row, once there is one.
    holds: Option<usize>,
    q_packed: &'s mut [W],
    dout_packed: &'s mut [W],
    /// q and dout as right operands, their elements as columns, for sums of keys.
    depth: Option<[&'s mut [W]; 2]>,
    lse: &'s mut [f32],
    delta: &'s mut [f32],
}

/// Room for rows on their way.
struct RowRoom<'s, W: Word> {
    /// `[rows, K]`.
    plain: &'s mut [W::Element],
    /// Two rows.
    wide: [&'s mut [f32]; 2],
}

/// A block of keys and values, ready to be multiplied with rows.
struct KeyPack<'s, W> {
    k_packed: &'s mut [W],
    v_packed: &'s mut [W],
}

/// Sums of a block of keys, `[KEYS, K]` each.
struct KeySums<'s> {
    of_k: &'s mut [f32],
    of_v: &'s mut [f32],
}

/// A block of scores and its gradient.
struct ScorePack<'s, W: Word> {
    /// ds, `[rows, KEYS]`.
    ds: &'s mut [f32],
    /// p, `[rows, KEYS]`.
    p: &'s mut [f32],
    /// Room for one of them, rounded.
    rounded: &'s mut [W::Element],
    packed: &'s mut [W],
}

impl KeySums<'_> {
    fn clear(&mut self) {
        self.of_k.fill(0.0);
        self.of_v.fill(0.0);
    }
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
            apart: false,
        }
    }

    /// Writes dq, dk and dv.
    pub fn gradients(&self, dq: ViewMut<'_>, dk: ViewMut<'_>, dv: ViewMut<'_>) {
        let (dq, dk, dv) = (FloatsMut::new(dq), FloatsMut::new(dk), FloatsMut::new(dv));
        let operands = [self.q, self.k, self.v, self.dout];
        if [dq, dk, dv].iter().all(|result| by_pairs(self.cpu, &operands, result)) {
            self.gradients_of::<Pair>(dq, dk, dv);
        } else {
            self.gradients_of::<f32>(dq, dk, dv);
        }
    }

    fn gradients_of<W: Word>(&self, dq: FloatsMut<'_>, dk: FloatsMut<'_>, dv: FloatsMut<'_>) {
        if self.fits_one_pass() {
            let dims = self.geometry.dims;
            self.cpu.threads.run(dims.batch * dims.kv_heads, |task, scratch| {
                let pair = (task / dims.kv_heads, task % dims.kv_heads);
                self.with_care(scratch, |call, carver| call.pair::<W>(dq, dk, dv, pair, carver));
            });
        } else {
            self.query_gradient::<W>(dq);
            self.key_value_gradient::<W>(dk, dv);
        }
    }

    /// Runs a task, and again if its results, which it gives, are not finite.
    fn with_care(&self, scratch: &mut [f32], task: impl Fn(&Self, Carver<'_>) -> bool) {
        if !task(self, Carver::new(scratch)) {
            task(&Self { apart: true, ..*self }, Carver::new(scratch));
        }
    }

    /// Whether one pass keeps threads as busy as two would, and its buffers, if they are of f32, fit the scratch.
    fn fits_one_pass(&self) -> bool {
        let (pairs, threads) = (self.geometry.pairs(), self.cpu.threads.count());
        pairs.div_ceil(threads) * threads * PRODUCTS[0] <= pairs * PRODUCTS[1]
            && self.one_pass_bytes::<f32>(1) <= SCRATCH_BYTES
    }

    /// Blocks of rows that are held while one pass goes from keys to keys: all, or one at a time.
    fn rows_held<W: Word>(&self) -> usize {
        let all = self.geometry.row_count().div_ceil(ROWS);
        if self.one_pass_bytes::<W>(all) <= SCRATCH_BYTES { all } else { 1 }
    }

    /// Scratch of one pass that holds so many blocks of rows.
    fn one_pass_bytes<W: Word>(&self, blocks: usize) -> usize {
        let (_, micro, head_size) = self.machine::<W>();
        let (of_head, of_rows) = (W::words(head_size), W::words(ROWS.max(KEYS)));
        // Each begins at a cache line.
        let rows = packed_len(ROWS, micro.mr, of_head) + 16;
        let keys = packed_len(KEYS, micro.nr, of_head) + 16;
        let depth = packed_len(head_size, micro.nr, of_rows) + 16;
        let plain = ROWS.max(KEYS) * head_size + 16;
        let scores = packed_len(ROWS, micro.mr, KEYS) + 16;
        let floats = blocks * (2 * (rows + depth) + 2 * (ROWS + 16))
            + 2 * keys
            + depth
            + 3 * plain
            + 2 * (head_size + 16)
            + 4 * scores
            + self.geometry.row_count() * head_size
            + 16;
        4 * floats
    }

    fn query_gradient<W: Word>(&self, dq: FloatsMut<'_>) {
        let geometry = self.geometry;
        self.cpu.threads.run(geometry.row_tasks(), |task, scratch| {
            let rows = geometry.row_block(task);
            self.with_care(scratch, |call, carver| call.query_block::<W>(dq, rows, carver));
        });
    }

    fn key_value_gradient<W: Word>(&self, dk: FloatsMut<'_>, dv: FloatsMut<'_>) {
        let dims = self.geometry.dims;
        let pairs = dims.batch * dims.kv_heads;
        // The first keys, which most rows see, come first.
        self.cpu.threads.run(pairs * dims.capacity.div_ceil(KEYS), |task, scratch| {
            let first = task / pairs * KEYS;
            let keys = first..dims.capacity.min(first + KEYS);
            let pair = (task % pairs / dims.kv_heads, task % dims.kv_heads);
            self.with_care(scratch, |call, carver| call.key_block::<W>(dk, dv, pair, &keys, carver));
        });
    }

    /// All of a pair, in one pass; whether all of it is finite.
    fn pair<W: Word>(
        &self,
        dq: FloatsMut<'_>,
        dk: FloatsMut<'_>,
        dv: FloatsMut<'_>,
        (b, g): (usize, usize),
        mut carver: Carver<'_>,
    ) -> bool {
        let (isa, micro, head_size) = self.machine::<W>();
        let mut finite = true;
        let mut held: Vec<_> =
            (0..self.rows_held::<W>()).map(|_| self.row_pack::<W>(true, &mut carver)).collect();
        let mut room = self.row_room::<W>(&mut carver);
        let mut scores = score_pack::<W>(micro, &mut carver);
        let mut keys_pack = self.key_pack::<W>(&mut carver);
        let mut key_sums = self.key_sums(&mut carver);
        let k_depth = carver.take_of(packed_len(head_size, micro.nr, W::words(KEYS)));
        let sums = carver.take(self.geometry.row_count() * head_size);
        sums.fill(0.0);
        for keys in key_blocks(0..self.geometry.dims.capacity) {
            self.load_keys((b, g), &keys, &mut keys_pack);
            key_sums.clear();
            W::pack(self.as_columns(self.k, (b, g), &keys).turned(), isa, micro.nr, k_depth);
            for rows in self.rows_seeing(b, g, &keys) {
                let at = rows.first / ROWS % held.len();
                let pack = &mut held[at];
                self.load_rows(rows, pack, &mut room);
                self.score_gradient(rows, &keys, pack, &keys_pack, &mut scores);
                self.add_to_keys(rows, &keys, pack, &mut room, &mut scores, &mut key_sums);
                let sums = &mut sums[rows.first * head_size..][..rows.rows * head_size];
                self.add_to_rows(rows, &keys, k_depth, &mut room, &mut scores, sums);
            }
            finite &= self.write_keys(dk, dv, (b, g), &keys, &mut key_sums);
        }
        let rows = self.geometry.row_count();
        finite & self.write_rows(dq, RowBlock { b, g, first: 0, rows }, sums)
    }

    fn query_block<W: Word>(&self, dq: FloatsMut<'_>, rows: RowBlock, mut carver: Carver<'_>) -> bool {
        let (isa, micro, head_size) = self.machine::<W>();
        let mut pack = self.row_pack::<W>(false, &mut carver);
        let mut room = self.row_room::<W>(&mut carver);
        let mut scores = score_pack::<W>(micro, &mut carver);
        let mut keys_pack = self.key_pack::<W>(&mut carver);
        let k_depth = carver.take_of(packed_len(head_size, micro.nr, W::words(KEYS)));
        let sums = carver.take(rows.rows * head_size);
        sums.fill(0.0);
        self.load_rows(rows, &mut pack, &mut room);
        for keys in key_blocks(self.geometry.keys_of(0, rows)) {
            self.load_keys((rows.b, rows.g), &keys, &mut keys_pack);
            W::pack(self.as_columns(self.k, (rows.b, rows.g), &keys).turned(), isa, micro.nr, k_depth);
            self.score_gradient(rows, &keys, &pack, &keys_pack, &mut scores);
            self.add_to_rows(rows, &keys, k_depth, &mut room, &mut scores, sums);
        }
        self.write_rows(dq, rows, sums)
    }

    fn key_block<W: Word>(
        &self,
        dk: FloatsMut<'_>,
        dv: FloatsMut<'_>,
        (b, g): (usize, usize),
        keys: &Range<usize>,
        mut carver: Carver<'_>,
    ) -> bool {
        let mut pack = self.row_pack::<W>(true, &mut carver);
        let mut room = self.row_room::<W>(&mut carver);
        let mut scores = score_pack::<W>(W::micro(&self.cpu.threads), &mut carver);
        let mut keys_pack = self.key_pack::<W>(&mut carver);
        let mut sums = self.key_sums(&mut carver);
        self.load_keys((b, g), keys, &mut keys_pack);
        sums.clear();
        for rows in self.rows_seeing(b, g, keys) {
            self.load_rows(rows, &mut pack, &mut room);
            self.score_gradient(rows, keys, &pack, &keys_pack, &mut scores);
            self.add_to_keys(rows, keys, &pack, &mut room, &mut scores, &mut sums);
        }
        self.write_keys(dk, dv, (b, g), keys, &mut sums)
    }

    /// Adds `ds·k` to the sums of the rows.
    fn add_to_rows<W: Word>(
        &self,
        rows: RowBlock,
        keys: &Range<usize>,
        k_depth: &[W],
        room: &mut RowRoom<'_, W>,
        scores: &mut ScorePack<'_, W>,
        sums: &mut [f32],
    ) {
        let (isa, micro, head_size) = self.machine::<W>();
        if self.apart && !self.geometry.all_see(0, rows, keys) {
            for (i, sums) in sums.chunks_exact_mut(head_size).enumerate() {
                for at in visible(&self.geometry.keys(0, rows.first + i), keys) {
                    let k_at = self.geometry.key_at(rows.b, rows.g, keys.start + at);
                    let k = self.k.read(isa, k_at, head_size, room.wide[0]);
                    vector::add_weighted_rows(isa, sums, &[scores.ds[i * KEYS + at]], k);
                }
            }
            return;
        }
        let ds = W::round(isa, &scores.ds[..rows.rows * KEYS], scores.rounded);
        W::pack(plain_rows::<W>(ds, rows.rows, keys.len(), KEYS), isa, micro.mr, scores.packed);
        assert!(sums.len() >= rows.rows * head_size, "a sum for every element of the rows");
        let target = Target { pointer: sums.as_mut_ptr(), stride: head_size, add: true };
        let size = (rows.rows, head_size, W::words(keys.len()));
        // SAFETY: `sums` holds that many rows (asserted).
        unsafe { gemm::product(micro, size, scores.packed, k_depth, target) };
    }

    /// Adds `pᵀ·dout` and `dsᵀ·q` to the sums of the keys.
    fn add_to_keys<W: Word>(
        &self,
        rows: RowBlock,
        keys: &Range<usize>,
        pack: &RowPack<'_, W>,
        room: &mut RowRoom<'_, W>,
        scores: &mut ScorePack<'_, W>,
        key_sums: &mut KeySums<'_>,
    ) {
        let (isa, micro, head_size) = self.machine::<W>();
        let KeySums { of_k, of_v } = key_sums;
        if self.apart && !self.geometry.all_see(0, rows, keys) {
            for i in 0..rows.rows {
                let [of_q, of_dout] = &mut room.wide;
                let at = self.geometry.q_at(rows.b, rows.g, rows.first + i);
                let q = self.q.read(isa, at, head_size, of_q);
                let dout = self.dout.read(isa, at, head_size, of_dout);
                for at in visible(&self.geometry.keys(0, rows.first + i), keys) {
                    let (score, sums) = (i * KEYS + at, at * head_size..(at + 1) * head_size);
                    vector::add_weighted_rows(isa, &mut of_k[sums.clone()], &[scores.ds[score]], q);
                    vector::add_weighted_rows(isa, &mut of_v[sums], &[scores.p[score]], dout);
                }
            }
            return;
        }
        let [q_depth, dout_depth] = pack.depth.as_ref().expect("rows that keys get something of");
        for (of_score, of_row, sums) in [(&*scores.p, dout_depth, of_v), (&*scores.ds, q_depth, of_k)] {
            let of_score = W::round(isa, &of_score[..rows.rows * KEYS], scores.rounded);
            let of_score = columns_as_rows::<W>(of_score, keys.len(), rows.rows, KEYS);
            W::pack(of_score, isa, micro.mr, scores.packed);
            let target = Target { pointer: sums.as_mut_ptr(), stride: head_size, add: true };
            let size = (keys.len(), head_size, W::words(rows.rows));
            // SAFETY: `sums` holds KEYS rows of this thread's scratch, and a block has no more.
            unsafe { gemm::product(micro, size, scores.packed, of_row, target) };
        }
    }

    /// Writes the sums of rows to dq; whether they are finite.
    fn write_rows(&self, dq: FloatsMut<'_>, rows: RowBlock, sums: &mut [f32]) -> bool {
        let (isa, _, head_size) = self.machine::<f32>();
        vector::scale(isa, sums, self.geometry.spec.scale);
        for (i, row) in sums.chunks_exact(head_size).enumerate() {
            // SAFETY: these rows of dq belong to this task.
            unsafe { dq.write(isa, self.geometry.q_at(rows.b, rows.g, rows.first + i), row) };
        }
        vector::is_finite(isa, sums)
    }

    /// Writes the sums of keys to dk and dv; whether they are finite.
    fn write_keys(
        &self,
        dk: FloatsMut<'_>,
        dv: FloatsMut<'_>,
        (b, g): (usize, usize),
        keys: &Range<usize>,
        sums: &mut KeySums<'_>,
    ) -> bool {
        let (isa, _, head_size) = self.machine::<f32>();
        let all = keys.len() * head_size;
        vector::scale(isa, &mut sums.of_k[..all], self.geometry.spec.scale);
        for (i, key) in keys.clone().enumerate() {
            let at = self.geometry.key_at(b, g, key);
            // SAFETY: these keys' rows of dk and dv belong to this task.
            unsafe { dk.write(isa, at, &sums.of_k[i * head_size..][..head_size]) };
            // SAFETY: as above.
            unsafe { dv.write(isa, at, &sums.of_v[i * head_size..][..head_size]) };
        }
        vector::is_finite(isa, &sums.of_k[..all]) && vector::is_finite(isa, &sums.of_v[..all])
    }

    /// The blocks of rows, beginning at multiples of [`ROWS`], that see any of the keys.
    fn rows_seeing(&self, b: usize, g: usize, keys: &Range<usize>) -> impl Iterator<Item = RowBlock> + use<> {
        let (queries, group) = (self.geometry.dims.queries, self.geometry.dims.group());
        let last = self.geometry.spec.queries_end(keys.end - 1).map_or(queries, |end| queries.min(end));
        let (start, end, count) = (keys.start * group, last * group, self.geometry.row_count());
        (start / ROWS * ROWS..end).step_by(ROWS).map(move |first| RowBlock {
            b,
            g,
            first,
            rows: ROWS.min(count - first),
        })
    }

    /// Packs rows of q and dout, and computes delta, unless `pack` holds them.
    fn load_rows<W: Word>(&self, rows: RowBlock, pack: &mut RowPack<'_, W>, room: &mut RowRoom<'_, W>) {
        if pack.holds == Some(rows.first) {
            return;
        }
        let (isa, micro, head_size) = self.machine::<W>();
        let geometry = self.geometry;
        let [q_depth, dout_depth] = match &mut pack.depth {
            Some([q, dout]) => [Some(&mut **q), Some(&mut **dout)],
            None => [None, None],
        };
        // Of q, then of dout, which stays for delta. Rows are far apart, and lie together in few sets of a cache until they are gathered.
        let operands =
            [(self.q, &mut pack.q_packed, q_depth), (self.dout, &mut pack.dout_packed, dout_depth)];
        for (data, packed, depth) in operands {
            geometry.gather_rows::<W>(isa, data, rows, room.plain);
            let panels = plain_rows::<W>(room.plain, rows.rows, head_size, head_size);
            W::pack(panels, isa, micro.mr, packed);
            if let Some(depth) = depth {
                W::pack(panels.turned(), isa, micro.nr, depth);
            }
        }
        let ([of_out, of_dout], dout) = (&mut room.wide, W::floats(room.plain));
        for i in 0..rows.rows {
            let row = rows.first + i;
            let out = self.out.read(isa, geometry.q_at(rows.b, rows.g, row), head_size, of_out);
            pack.delta[i] = vector::dot(isa, out, dout.read(isa, i * head_size, head_size, of_dout));
            pack.lse[i] = self.lse[geometry.lse_at(rows.b, rows.g, row)];
        }
        pack.holds = Some(rows.first);
    }

    /// Packs keys and values.
    fn load_keys<W: Word>(&self, (b, g): (usize, usize), keys: &Range<usize>, pack: &mut KeyPack<'_, W>) {
        let (isa, micro, _) = self.machine::<W>();
        W::pack(self.as_columns(self.k, (b, g), keys), isa, micro.nr, pack.k_packed);
        W::pack(self.as_columns(self.v, (b, g), keys), isa, micro.nr, pack.v_packed);
    }

    fn as_columns(&self, data: Floats<'a>, (b, g): (usize, usize), keys: &Range<usize>) -> Panels<'a> {
        self.geometry.keys_as_columns(data, self.geometry.key_at(b, g, keys.start), keys.len())
    }

    /// p and ds of a block of rows and keys; zeros where a row does not see a key.
    fn score_gradient<W: Word>(
        &self,
        rows: RowBlock,
        keys: &Range<usize>,
        pack: &RowPack<'_, W>,
        keys_pack: &KeyPack<'_, W>,
        scores: &mut ScorePack<'_, W>,
    ) {
        let (isa, micro, head_size) = self.machine::<W>();
        let size = (rows.rows, keys.len(), W::words(head_size));
        let target = |pointer| Target { pointer, stride: KEYS, add: false };
        // SAFETY: both blocks hold ROWS rows of KEYS floats of this thread's scratch.
        unsafe {
            gemm::product(micro, size, pack.q_packed, keys_pack.k_packed, target(scores.ds.as_mut_ptr()));
            gemm::product(micro, size, pack.dout_packed, keys_pack.v_packed, target(scores.p.as_mut_ptr()));
        }
        for i in 0..rows.rows {
            let seen = visible(&self.geometry.keys(0, rows.first + i), keys);
            let (ds, p) = (&mut scores.ds[i * KEYS..][..keys.len()], &mut scores.p[i * KEYS..][..keys.len()]);
            for row in [&mut *ds, &mut *p] {
                row[..seen.start].fill(0.0);
                row[seen.end..].fill(0.0);
            }
            let (ds, p) = (&mut ds[seen.clone()], &mut p[seen]);
            let (scale, lse, delta) = (self.geometry.spec.scale, pack.lse[i], pack.delta[i]);
            match self.geometry.spec.cap {
                None => vector::score_gradient(isa, ds, p, scale, lse, delta),
                Some(cap) => vector::capped_score_gradient(isa, ds, p, scale, cap, lse, delta),
            }
        }
    }

    /// Room for a block of rows; `of_keys` if keys get their sums from it.
    fn row_pack<'s, W: Word>(&self, of_keys: bool, carver: &mut Carver<'s>) -> RowPack<'s, W> {
        let (_, micro, head_size) = self.machine::<W>();
        let packed = packed_len(ROWS, micro.mr, W::words(head_size));
        let depth = packed_len(head_size, micro.nr, W::words(ROWS));
        RowPack {
            holds: None,
            q_packed: carver.take_of(packed),
            dout_packed: carver.take_of(packed),
            depth: of_keys.then(|| [carver.take_of(depth), carver.take_of(depth)]),
            lse: carver.take(ROWS),
            delta: carver.take(ROWS),
        }
    }

    fn row_room<'s, W: Word>(&self, carver: &mut Carver<'s>) -> RowRoom<'s, W> {
        let head_size = self.geometry.dims.head_size;
        RowRoom {
            plain: carver.take_of(ROWS * head_size),
            wide: [carver.take(head_size), carver.take(head_size)],
        }
    }

    fn key_pack<'s, W: Word>(&self, carver: &mut Carver<'s>) -> KeyPack<'s, W> {
        let (_, micro, head_size) = self.machine::<W>();
        let packed = packed_len(KEYS, micro.nr, W::words(head_size));
        KeyPack { k_packed: carver.take_of(packed), v_packed: carver.take_of(packed) }
    }

    fn key_sums<'s>(&self, carver: &mut Carver<'s>) -> KeySums<'s> {
        let head_size = self.geometry.dims.head_size;
        KeySums { of_k: carver.take(KEYS * head_size), of_v: carver.take(KEYS * head_size) }
    }

    fn machine<W: Word>(&self) -> (Isa, Micro<W>, usize) {
        let threads = &self.cpu.threads;
        (threads.isa(), W::micro(threads), self.geometry.dims.head_size)
    }
}

fn score_pack<'s, W: Word>(micro: Micro<W>, carver: &mut Carver<'s>) -> ScorePack<'s, W> {
    ScorePack {
        ds: carver.take(ROWS * KEYS),
        p: carver.take(ROWS * KEYS),
        rounded: carver.take_of(ROWS * KEYS),
        packed: carver.take_of(packed_len(ROWS, micro.mr, W::words(KEYS))),
    }
}

/// The columns of a plain matrix as the outer dimension, its rows as the inner one.
fn columns_as_rows<W: Word>(data: &[W::Element], columns: usize, rows: usize, stride: usize) -> Panels<'_> {
    Panels { data: W::floats(data), outer: columns, depth: rows, outer_stride: 1, depth_stride: stride }
}
