//! Causal attention without an S×S matrix (Dao, arXiv 2307.08691), forward.
//!
//! The query heads that share a key/value head are taken together: *row* `i·(H/G) + h` of a `(b, g)` pair is query i of
//! the h-th such head, so that keys and values are packed once for all of them and never repeated in memory. A task takes
//! [`ROWS`] rows, or where that leaves no thread idle those of a pair one block after the other, which packs its keys once
//! (1.04 to 1.12 times as fast on Zen 4), and walks over the keys they see in blocks of [`KEYS`] that begin at multiples of it:
//!
//! ```text
//! s = scale·(q·kᵀ);  m' = max(m, max s);  p = exp(s − m');  l = l·exp(m − m') + Σp;  acc = acc·exp(m − m') + p·v
//! out = acc / l;  lse = m + ln l
//! ```
//!
//! A cap makes `cap·tanh(s/cap)` of s, a pass over a row's block of scores.
//!
//! In f32, but where all operands and the result are bf16 and the processor multiplies pairs of it: there the products take them as
//! they are, and p is rounded to bf16, as torch does and Dao's kernels do. Hidden entries of a block are zeros in p, and a block that a row does not see at all leaves its state as it
//! is, so that a row's result depends neither on its neighbours nor on the number of threads.
//!
//! Keys that no row of a block sees are not read, and where there is no page keys and values are zeros. A zero of p does not hide
//! a value that is not finite (0·∞ is NaN), so where results are not finite they are computed again, adding to each row of a block
//! that some see less of than others only what it sees ([`Rows::add_seen`]).
//!
//! Tolerance against f64: 1e-5 of the largest |v| for heads up to 128 and inputs of order one, before the rounding; by pairs
//! 2⁻⁸ of it.

use super::floats::{Floats, FloatsMut, floats_mut, ints};
use super::gemm::{self, Pair, Panels, Target, Word, packed_len};
use super::threads::{Carver, SCRATCH_BYTES, SharedMut};
use super::{Cpu, Isa, thin, vector};
use crate::check::{self, AttentionDims, Paging};
use crate::{Attention, AttentionSpec, KeyValues, Result, View, ViewMut};
use std::ops::Range;

/// Rows per task and keys per block: whole micro tiles of every instruction set.
pub const ROWS: usize = 96;
pub const KEYS: usize = 96;
/// Largest head size.
pub const HEAD_MAX: usize = 576;
/// Up to this many rows, dot products with unpacked keys are faster than packing them.
const ROWS_THIN: usize = 8;
/// Columns that a task appends.
const COLUMNS: usize = 128;
/// Keys between the one in use and the one asked for, in decoding.
const AHEAD: usize = 8;

/// The largest of a call's buffers: a block of rows or keys, packed either way.
const BUFFER: usize = packed_len(HEAD_MAX, 48, ROWS) + 16;
/// A block of scores, plain or packed.
const SCORES: usize = packed_len(ROWS, 8, KEYS) + 16;

const _: () = assert!(
    4 * (9 * BUFFER + 5 * SCORES + 4 * (ROWS + HEAD_MAX)) <= SCRATCH_BYTES,
    "the buffers of the backward pass fit the scratch"
);

impl Attention for Cpu {
    fn forward(
        &self,
        q: View<'_>,
        keys: KeyValues<'_>,
        starts: View<'_>,
        out: ViewMut<'_>,
        lse: ViewMut<'_>,
        spec: AttentionSpec,
    ) -> Result {
        let dims = check::attention_forward(q, keys, starts, &out, &lse);
        let starts_b = ints(starts);
        check::starts(&dims, starts_b);
        let table = keys.pages.map(ints);
        let geometry = Geometry::new(dims, table, spec);
        let call = Forward {
            cpu: self,
            geometry,
            q: Floats::new(q),
            k: Floats::new(keys.k),
            v: Floats::new(keys.v),
            out: FloatsMut::new(out),
            lse: SharedMut::new(floats_mut(lse)),
        };
        if by_pairs(self, &[call.q, call.k, call.v], &call.out) {
            call.run::<Pair>(starts_b);
        } else {
            call.run::<f32>(starts_b);
        }
        Ok(())
    }

    /// A task takes columns, so that no two write one element whatever the pages.
    fn append(
        &self,
        k: View<'_>,
        values: Option<(View<'_>, ViewMut<'_>)>,
        starts: View<'_>,
        pages: View<'_>,
        to_k: ViewMut<'_>,
    ) -> Result {
        let dims = check::append(k, &values, starts, pages, &to_k);
        let (starts_b, table) = (ints(starts), ints(pages));
        check::pages(&dims.paging, table);
        let isa = self.threads.isa();
        let of_values = values.map(|(v, to_v)| (Floats::new(v), FloatsMut::new(to_v)));
        let copies = [Some((Floats::new(k), FloatsMut::new(to_k))), of_values];
        self.threads.run_ranges(dims.width, COLUMNS, |columns, _| {
            let mut buffer = [0.0; COLUMNS];
            for token in 0..dims.batch * dims.length {
                let (b, i) = (token / dims.length, token % dims.length);
                let Some(row) = page_row(&dims.paging, table, b, starts_b[b] as usize + i) else { continue };
                for (from, to) in copies.iter().flatten() {
                    let at = token * dims.width + columns.start;
                    let values = from.read(isa, at, columns.len(), &mut buffer);
                    // SAFETY: these columns of all rows belong to this task.
                    unsafe { to.write(isa, row * dims.width + columns.start, values) };
                }
            }
        });
        Ok(())
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
        let dims = check::attention_backward(q, k, v, out, lse, dout, &dq, &dk, &dv);
        let geometry = Geometry::new(dims, None, spec);
        let operands = super::attention_backward::Operands::new(self, geometry, (q, k, v), (out, lse, dout));
        operands.gradients(dq, dk, dv);
        Ok(())
    }
}

/// Where the rows of a call lie and what they see.
#[derive(Clone, Copy)]
pub struct Geometry<'a> {
    pub dims: AttentionDims,
    pub spec: AttentionSpec,
    paging: Option<(Paging, &'a [i32])>,
}

/// The row, among those of all pages, of a sequence's position, if there is a page for it.
fn page_row(paging: &Paging, table: &[i32], b: usize, position: usize) -> Option<usize> {
    let page = position >> paging.positions.trailing_zeros();
    if page >= paging.per_sequence {
        return None;
    }
    let page = usize::try_from(table[b * paging.per_sequence + page]).ok()?;
    Some(page * paging.positions + (position & (paging.positions - 1)))
}

/// Rows `first..first + rows` of key/value head `g` of sequence `b`.
#[derive(Clone, Copy)]
pub struct RowBlock {
    pub b: usize,
    pub g: usize,
    pub first: usize,
    pub rows: usize,
}

impl<'t> Geometry<'t> {
    /// # Panics
    /// If heads are larger than working memory is planned for, the scale or the cap is not positive, or a page is none of those there are.
    pub fn new(dims: AttentionDims, table: Option<&'t [i32]>, spec: AttentionSpec) -> Self {
        assert!(dims.head_size <= HEAD_MAX, "attention: heads of {} exceed {HEAD_MAX}", dims.head_size);
        check::attention_spec(spec);
        let paging = dims.paging.zip(table);
        if let Some((paging, table)) = &paging {
            check::pages(paging, table);
        }
        Self { dims, spec, paging }
    }

    pub fn row_count(&self) -> usize {
        self.dims.queries * self.dims.group()
    }

    /// Pairs of a sequence and a key/value head.
    pub fn pairs(&self) -> usize {
        self.dims.batch * self.dims.kv_heads
    }

    pub fn row_tasks(&self) -> usize {
        self.pairs() * self.row_count().div_ceil(ROWS)
    }

    /// The rows of a task; the last rows of a sequence, which see most, come first.
    pub fn row_block(&self, task: usize) -> RowBlock {
        let pairs = self.pairs();
        let block = self.row_count().div_ceil(ROWS) - 1 - task / pairs;
        let (b, g) = (task % pairs / self.dims.kv_heads, task % self.dims.kv_heads);
        let first = block * ROWS;
        RowBlock { b, g, first, rows: ROWS.min(self.row_count() - first) }
    }

    /// Query position within the call.
    pub fn query(&self, row: usize) -> usize {
        row / self.dims.group()
    }

    fn head(&self, g: usize, row: usize) -> usize {
        g * self.dims.group() + row % self.dims.group()
    }

    /// First element of a row in q and out.
    pub fn q_at(&self, b: usize, g: usize, row: usize) -> usize {
        let dims = &self.dims;
        ((b * dims.queries + self.query(row)) * dims.heads + self.head(g, row)) * dims.head_size
    }

    pub fn lse_at(&self, b: usize, g: usize, row: usize) -> usize {
        (b * self.dims.heads + self.head(g, row)) * self.dims.queries + self.query(row)
    }

    /// First element of a key in k and v of one run.
    pub fn key_at(&self, b: usize, g: usize, key: usize) -> usize {
        ((b * self.dims.capacity + key) * self.dims.kv_heads + g) * self.dims.head_size
    }

    /// First element of a key in k and v, if it is not in a page that there is not.
    fn place(&self, b: usize, g: usize, key: usize) -> Option<usize> {
        let Some((paging, table)) = &self.paging else { return Some(self.key_at(b, g, key)) };
        Some((page_row(paging, table, b, key)? * self.dims.kv_heads + g) * self.dims.head_size)
    }

    /// Whether the rows of these keys follow each other.
    fn in_one_run(&self, keys: &Range<usize>) -> bool {
        self.paging.is_none_or(|(paging, _)| {
            keys.is_empty() || keys.start / paging.positions == (keys.end - 1) / paging.positions
        })
    }

    /// Elements between consecutive keys of a head.
    pub fn key_stride(&self) -> usize {
        self.dims.kv_heads * self.dims.head_size
    }

    /// Keys that a row sees when the first query sits at position `start`.
    pub fn keys(&self, start: usize, row: usize) -> Range<usize> {
        let position = start + self.query(row);
        self.spec.first_key(position)..position + 1
    }

    /// Keys that any of the rows sees.
    pub fn keys_of(&self, start: usize, rows: RowBlock) -> Range<usize> {
        self.keys(start, rows.first).start..self.keys(start, rows.first + rows.rows - 1).end
    }

    /// Whether every one of the rows sees all keys of a block.
    pub fn all_see(&self, start: usize, rows: RowBlock, block: &Range<usize>) -> bool {
        let (first, last) = (self.keys(start, rows.first), self.keys(start, rows.first + rows.rows - 1));
        last.start <= block.start && block.end <= first.end
    }

    /// `keys` that follow each other from element `at` on as columns, the head's elements as the inner dimension.
    pub fn keys_as_columns<'a>(&self, data: Floats<'a>, at: usize, keys: usize) -> Panels<'a> {
        Panels {
            data: data.slice(at, data.len() - at),
            outer: keys,
            depth: self.dims.head_size,
            outer_stride: self.key_stride(),
            depth_stride: 1,
        }
    }

    /// Rows of q or an operand of its shape as they are to be packed: where they are, or gathered if several heads share a row's keys.
    pub fn rows_of<'d, W: Word>(
        &self,
        isa: Isa,
        data: Floats<'d>,
        rows: RowBlock,
        gathered: &'d mut [W::Element],
    ) -> Panels<'d> {
        let head_size = self.dims.head_size;
        if self.dims.group() == 1 {
            let at = self.q_at(rows.b, rows.g, rows.first);
            return Panels {
                data: data.slice(at, data.len() - at),
                outer: rows.rows,
                depth: head_size,
                outer_stride: self.dims.heads * head_size,
                depth_stride: 1,
            };
        }
        self.gather_rows::<W>(isa, data, rows, gathered);
        plain_rows::<W>(gathered, rows.rows, head_size, head_size)
    }

    /// Copies rows of q or an operand of its shape to consecutive rows.
    pub fn gather_rows<W: Word>(&self, isa: Isa, data: Floats<'_>, rows: RowBlock, to: &mut [W::Element]) {
        let head_size = self.dims.head_size;
        for (i, to) in to.chunks_exact_mut(head_size).take(rows.rows).enumerate() {
            W::gather(isa, data.slice(self.q_at(rows.b, rows.g, rows.first + i), head_size), to);
        }
    }
}

/// The blocks of keys, between multiples of [`KEYS`], that cover `keys`. The first begins with the pair of the first key: which
/// keys are multiplied together, and so the bits, do not depend on where rows begin to see.
pub fn key_blocks(keys: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let (start, end) = (keys.start / 2 * 2, keys.end);
    (start / KEYS * KEYS..end).step_by(KEYS).map(move |first| first.max(start)..end.min(first + KEYS))
}

/// The part of `keys` within `block`, relative to its start.
pub fn visible(keys: &Range<usize>, block: &Range<usize>) -> Range<usize> {
    let start = keys.start.clamp(block.start, block.end) - block.start;
    let end = keys.end.clamp(block.start, block.end) - block.start;
    start..end.max(start)
}

/// A matrix of consecutive rows, `rows × depth`, as the left operand of a product.
pub fn plain_rows<W: Word>(data: &[W::Element], rows: usize, depth: usize, stride: usize) -> Panels<'_> {
    Panels { data: W::floats(data), outer: rows, depth, outer_stride: stride, depth_stride: 1 }
}

/// Whether products of these operands are taken by pairs.
pub fn by_pairs(cpu: &Cpu, operands: &[Floats<'_>], result: &FloatsMut<'_>) -> bool {
    cpu.threads.pair_micro().is_some()
        && operands.iter().all(|operand| matches!(operand, Floats::BF16(_)))
        && matches!(result, FloatsMut::BF16(_))
}

struct Forward<'a> {
    cpu: &'a Cpu,
    geometry: Geometry<'a>,
    q: Floats<'a>,
    k: Floats<'a>,
    v: Floats<'a>,
    out: FloatsMut<'a>,
    lse: SharedMut<'a, f32>,
}

/// Running softmax of a block of rows.
struct Rows<'s> {
    /// Largest score so far, per row.
    max: [f32; ROWS],
    /// `Σ exp(score − max)`, per row.
    sum: [f32; ROWS],
    /// Sum of values weighted alike, `[rows, K]`.
    acc: &'s mut [f32],
    /// Scores, then probabilities of the current block, `[rows, KEYS]`.
    scores: &'s mut [f32],
}

/// Packed blocks of keys or values. With a place for every block of a pair, each is packed once for all rows.
struct Blocks<'s, W> {
    words: &'s mut [W],
    /// Words of a place.
    each: usize,
    /// The first key and the end of what each place holds.
    held: &'s mut [u32],
}

impl<'s, W: Word> Blocks<'s, W> {
    /// Places that hold nothing.
    fn new(places: usize, each: usize, carver: &mut Carver<'s>) -> Self {
        let each = each.next_multiple_of(16);
        let held = carver.take_of(2 * places);
        held.fill(0);
        Self { words: carver.take_of(places * each), each, held }
    }

    /// A block, packed now unless it is held.
    fn get(&mut self, block: &Range<usize>, pack: impl FnOnce(&mut [W])) -> &[W] {
        let place = block.start / KEYS % (self.held.len() / 2);
        let words = &mut self.words[place * self.each..][..self.each];
        let held = &mut self.held[2 * place..][..2];
        let wanted = [block.start as u32, block.end as u32];
        if *held != wanted {
            pack(words);
            held.copy_from_slice(&wanted);
        }
        words
    }
}

/// Packed keys and values.
struct KeyBlocks<'s, W> {
    k: Blocks<'s, W>,
    v: Blocks<'s, W>,
}

impl<'a> Forward<'a> {
    fn run<W: Word>(&self, starts_b: &[i32]) {
        let (geometry, threads) = (self.geometry, &self.cpu.threads);
        let task = |first: usize, step: usize, places: usize, scratch: &mut [f32]| {
            let mut carver = Carver::new(scratch);
            let mut blocks = self.key_blocks::<W>(places, &mut carver);
            let scratch = carver.rest();
            for task in (first..geometry.row_tasks()).step_by(step) {
                let rows = geometry.row_block(task);
                let start = starts_b[rows.b] as usize;
                if !self.try_rows(rows, start, &mut blocks, Carver::new(scratch), false) {
                    self.try_rows(rows, start, &mut blocks, Carver::new(scratch), true);
                }
            }
        };
        let (pairs, tasks) = (geometry.pairs(), geometry.row_tasks());
        if self.takes_pairs::<W>() {
            // Those of all rows of a pair are so many tasks apart.
            let places = geometry.dims.capacity.div_ceil(KEYS);
            threads.run(pairs, |pair, scratch| task(pair, pairs, places, scratch));
        } else {
            threads.run(tasks, |first, scratch| task(first, tasks, 1, scratch));
        }
    }

    /// Whether a task takes all rows of a pair: threads stay as busy as with a task for every block of them (a sixteenth counts for what is
    /// not packed again), and there is room for all keys.
    fn takes_pairs<W: Word>(&self) -> bool {
        let (geometry, micro) = (self.geometry, W::micro(&self.cpu.threads));
        let (pairs, threads, head_size) =
            (geometry.pairs(), self.cpu.threads.count(), geometry.dims.head_size);
        let (of_head, of_keys) = (W::words(head_size), W::words(KEYS));
        let places = geometry.dims.capacity.div_ceil(KEYS);
        let block = packed_len(KEYS, micro.nr, of_head) + packed_len(head_size, micro.nr, of_keys) + 2 * 16;
        let rows = ROWS * head_size
            + ROWS * KEYS
            + packed_len(ROWS, micro.mr, of_head)
            + packed_len(ROWS, micro.mr, of_keys)
            + ROWS.max(KEYS) * head_size.max(KEYS)
            + KEYS * head_size;
        let floats = places * (block + 4) + rows + 10 * 16;
        geometry.row_count() > ROWS
            && pairs.div_ceil(threads) * threads * 16 <= pairs * 17
            && 4 * floats <= SCRATCH_BYTES
    }

    fn key_blocks<'s, W: Word>(&self, places: usize, carver: &mut Carver<'s>) -> KeyBlocks<'s, W> {
        let (micro, head_size) = (W::micro(&self.cpu.threads), self.geometry.dims.head_size);
        let k = packed_len(KEYS, micro.nr, W::words(head_size));
        let v = packed_len(head_size, micro.nr, W::words(KEYS));
        KeyBlocks { k: Blocks::new(places, k, carver), v: Blocks::new(places, v, carver) }
    }

    /// Writes the results of rows, unless values that they do not see may have made them not finite. With `apart` it keeps such
    /// values from them.
    fn try_rows<W: Word>(
        &self,
        rows: RowBlock,
        start: usize,
        blocks: &mut KeyBlocks<'_, W>,
        mut carver: Carver<'_>,
        apart: bool,
    ) -> bool {
        let (isa, geometry, head_size) =
            (self.cpu.threads.isa(), self.geometry, self.geometry.dims.head_size);
        let mut state = Rows {
            max: [f32::NEG_INFINITY; ROWS],
            sum: [0.0; ROWS],
            acc: carver.take(rows.rows * head_size),
            scores: carver.take(rows.rows * KEYS),
        };
        state.acc.fill(0.0);
        if rows.rows <= ROWS_THIN {
            self.walk_thin(rows, start, &mut state, carver);
        } else {
            self.walk(rows, start, &mut state, blocks, carver, apart);
        }
        if !apart && rows.rows > ROWS_THIN && !vector::is_finite(isa, state.acc) {
            return false;
        }
        for i in 0..rows.rows {
            let row = &mut state.acc[i * head_size..][..head_size];
            vector::scale(isa, row, 1.0 / state.sum[i]);
            // SAFETY: these rows of out and lse belong to this task.
            unsafe { self.out.write(isa, geometry.q_at(rows.b, rows.g, rows.first + i), row) };
            let at = geometry.lse_at(rows.b, rows.g, rows.first + i);
            // SAFETY: as above.
            unsafe { self.lse.set(at, state.max[i] + state.sum[i].ln()) };
        }
        true
    }

    /// The row of a key (or value), if there is one.
    fn row_of(&self, data: Floats<'a>, rows: RowBlock, key: usize) -> Option<Floats<'a>> {
        let at = self.geometry.place(rows.b, rows.g, key)?;
        Some(data.slice(at, self.geometry.dims.head_size))
    }

    /// Asks for the row of a key that comes soon.
    fn prefetch(&self, data: Floats<'a>, rows: RowBlock, key: usize) {
        if let Some(row) = self.row_of(data, rows, key) {
            row.prefetch();
        }
    }

    /// Values as f32, consecutive; asks for those that follow, up to the last one.
    fn widen_values(&self, rows: RowBlock, block: &Range<usize>, last: usize, wide: &mut [f32]) {
        for (key, wide) in block.clone().zip(wide.chunks_exact_mut(self.geometry.dims.head_size)) {
            self.prefetch(self.v, rows, (key + AHEAD).min(last));
            match self.row_of(self.v, rows, key) {
                Some(row) => row.widen(self.cpu.threads.isa(), wide),
                None => wide.fill(0.0),
            }
        }
    }

    /// Keys (or values) as columns, the head's elements as the inner dimension: where they are, or gathered if they lie apart
    /// or are not there.
    fn block<'b, W: Word>(
        &self,
        data: Floats<'a>,
        rows: RowBlock,
        keys: &Range<usize>,
        gathered: &'b mut [W::Element],
    ) -> Panels<'b>
    where
        'a: 'b,
    {
        let geometry = &self.geometry;
        if let Some(at) = geometry.place(rows.b, rows.g, keys.start).filter(|_| geometry.in_one_run(keys)) {
            return geometry.keys_as_columns(data, at, keys.len());
        }
        let (isa, head_size) = (self.cpu.threads.isa(), geometry.dims.head_size);
        for (key, to) in keys.clone().zip(gathered.chunks_exact_mut(head_size)) {
            match self.row_of(data, rows, key) {
                Some(row) => W::gather(isa, row, to),
                None => to.fill(bytemuck::Zeroable::zeroed()),
            }
        }
        plain_rows::<W>(gathered, keys.len(), head_size, head_size)
    }

    /// Many rows: products of packed operands. With `apart`, values that only some rows see are added to those alone.
    fn walk<W: Word>(
        &self,
        rows: RowBlock,
        start: usize,
        state: &mut Rows<'_>,
        blocks: &mut KeyBlocks<'_, W>,
        mut carver: Carver<'_>,
        apart: bool,
    ) {
        let (isa, micro, geometry) = (self.cpu.threads.isa(), W::micro(&self.cpu.threads), self.geometry);
        let head_size = geometry.dims.head_size;
        let (of_head, of_keys) = (W::words(head_size), W::words(KEYS));
        let q_packed = carver.take_of(packed_len(rows.rows, micro.mr, of_head));
        let p_packed = carver.take_of(packed_len(rows.rows, micro.mr, of_keys));
        let plain = carver.take_of(ROWS.max(KEYS) * head_size.max(KEYS));
        let wide = carver.take(KEYS * head_size);
        W::pack(geometry.rows_of::<W>(isa, self.q, rows, plain), isa, micro.mr, q_packed);
        for block in key_blocks(geometry.keys_of(start, rows)) {
            let keys = block.len();
            let k_packed = blocks.k.get(&block, |packed| {
                W::pack(self.block::<W>(self.k, rows, &block, plain), isa, micro.nr, packed);
            });
            let scores = Target { pointer: state.scores.as_mut_ptr(), stride: KEYS, add: false };
            // SAFETY: the scores hold `rows` rows of KEYS floats of this thread's scratch.
            unsafe { gemm::product(micro, (rows.rows, keys, of_head), q_packed, k_packed, scores) };
            state.softmax(isa, geometry, start, rows, &block);
            if apart && !geometry.all_see(start, rows, &block) {
                self.widen_values(rows, &block, block.end - 1, wide);
                state.add_seen(isa, geometry, start, rows, &block, wide);
                continue;
            }
            let p = W::round(isa, &state.scores[..rows.rows * KEYS], plain);
            W::pack(plain_rows::<W>(p, rows.rows, keys, KEYS), isa, micro.mr, p_packed);
            let v_packed = blocks.v.get(&block, |packed| {
                W::pack(self.block::<W>(self.v, rows, &block, plain).turned(), isa, micro.nr, packed);
            });
            let acc = Target { pointer: state.acc.as_mut_ptr(), stride: head_size, add: true };
            let size = (rows.rows, head_size, W::words(keys));
            // SAFETY: the accumulator holds `rows` rows of `head_size` floats of this thread's scratch.
            unsafe { gemm::product(micro, size, p_packed, v_packed, acc) };
        }
    }

    /// Few rows, as in decoding: keys are used as they lie, values widened once for all rows.
    fn walk_thin(&self, rows: RowBlock, start: usize, state: &mut Rows<'_>, mut carver: Carver<'_>) {
        let (isa, geometry) = (self.cpu.threads.isa(), self.geometry);
        let head_size = geometry.dims.head_size;
        let q_wide = carver.take(rows.rows * head_size);
        geometry.gather_rows::<f32>(isa, self.q, rows, q_wide);
        let wide = carver.take(KEYS * head_size);
        let keys = geometry.keys_of(start, rows);
        for block in key_blocks(keys.clone()) {
            for (j, key) in block.clone().enumerate() {
                self.prefetch(self.k, rows, (key + AHEAD).min(keys.end - 1));
                let mut scores = [0.0; ROWS_THIN];
                if let Some(row) = self.row_of(self.k, rows, key) {
                    thin::dots_with(isa, q_wide, row, wide, &mut scores[..rows.rows]);
                }
                for (i, score) in scores[..rows.rows].iter().enumerate() {
                    state.scores[i * KEYS + j] = *score;
                }
            }
            state.softmax(isa, geometry, start, rows, &block);
            self.widen_values(rows, &block, keys.end - 1, wide);
            state.add_seen(isa, geometry, start, rows, &block, wide);
        }
    }
}

impl Rows<'_> {
    /// Adds to each row the values that it sees, by the probabilities of the block; `wide` are its values.
    fn add_seen(
        &mut self,
        isa: Isa,
        geometry: Geometry<'_>,
        start: usize,
        rows: RowBlock,
        block: &Range<usize>,
        wide: &[f32],
    ) {
        let head_size = geometry.dims.head_size;
        let (acc, scores) = (self.acc.chunks_exact_mut(head_size), self.scores.chunks_exact(KEYS));
        for (i, (acc, p)) in acc.zip(scores).enumerate() {
            let seen = visible(&geometry.keys(start, rows.first + i), block);
            vector::add_weighted_rows(isa, acc, &p[seen.clone()], &wide[seen.start * head_size..]);
        }
    }

    /// Turns a block's scores into probabilities relative to the new maximum and rescales what came before.
    fn softmax(
        &mut self,
        isa: Isa,
        geometry: Geometry<'_>,
        start: usize,
        rows: RowBlock,
        block: &Range<usize>,
    ) {
        let head_size = geometry.dims.head_size;
        for i in 0..rows.rows {
            let scores = &mut self.scores[i * KEYS..][..block.len()];
            let seen = visible(&geometry.keys(start, rows.first + i), block);
            scores[..seen.start].fill(0.0);
            scores[seen.end..].fill(0.0);
            if seen.is_empty() {
                continue;
            }
            let (scores, mut scale) = (&mut scores[seen], geometry.spec.scale);
            if let Some(cap) = geometry.spec.cap {
                vector::cap_scaled(isa, scores, scale, cap);
                scale = 1.0;
            }
            let max = self.max[i].max(vector::max(isa, scores) * scale);
            if max == f32::NEG_INFINITY && scores.iter().all(|score| *score == max) {
                // Nothing so far has any weight, and a difference to this maximum would not be a number.
                scores.fill(0.0);
                continue;
            }
            let shrink = (self.max[i] - max).exp();
            self.sum[i] = self.sum[i] * shrink + vector::exp_sum(isa, scores, scale, max);
            self.max[i] = max;
            if shrink != 1.0 {
                vector::scale(isa, &mut self.acc[i * head_size..][..head_size], shrink);
            }
        }
    }
}
