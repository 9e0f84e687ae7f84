//! Matrix products.
//!
//! The result is cut into tiles; a task packs the operands of its tile block by block of the inner size and accumulates in
//! f32, in place when the result is f32 and nothing is added to it, and in scratch otherwise. Two ways of packing share this:
//! [`Widened`] to f32, for any operands, and [`Paired`], for two bf16 operands on a processor that multiplies them as they are
//! (`gemm/pairs.rs`).
//!
//! **No panel is shared between threads.** A tile of R × C packs `1/R + 1/C` elements per multiplication. Operands come from far
//! memory and lie in many pages, so that an element takes up to a cycle: tiles of 192 × 480 spent 11 to 23 % of the time of
//! large products with packing, tiles of 384 × 960 spend 8 to 10 % (AVX2, measured with perf). Panels of b shared by all row tiles would save at most half of that again, for a barrier per block and
//! a second kind of scratch, and only where tiles remain large: many threads have no use for few large tiles.
//!
//! **A right side may stay packed** from one product to the next ([`Packed`]): then the first packs all of it, and tiles begin with a panel.
//! On Zen 4 that makes bf16 products of 128, 256, 512 and 1024 rows 1.10 to 1.20, 1.03 to 1.10, 1.01 to 1.06 and 1.03 to 1.06 times as
//! fast, and packing it apart takes 0.22 to 0.35, 0.13 to 0.19, 0.06 to 0.11 and 0.03 to 0.05 of one.
//!
//! **Several products at once** ([`Matmul::together`]) are one list of tiles. At the end of a product a thread waits for what the other was
//! doing when something else took its core: the disk's thread, an update, the host of a virtual machine. A product of 512 rows is two tiles on two
//! threads, so that each such moment stops both.
//!
//! Tolerance against f64: `|error| ≤ L·ε·Σ|a·b|` with ε = 2⁻²⁴ in the worst case, about `√L·ε` of that in practice; plus
//! half a unit of the result's dtype. Pairs round as often, and take denormal operands for zeros.

use super::epilogue::Output;
use super::floats::{Floats, FloatsMut};
use super::gemm::{self, Micro, Pair, Panels, Target, packed_len};
use super::quantized::Rows;
use super::threads::{Carver, SCRATCH_BYTES, Threads};
use super::{Cpu, Isa, thin};
use crate::check::{self, ProductDims};
use crate::packing::Order;
use crate::{
    DType, Epilogue, Matmul, MatmulSpec, Packed, Product, Residual, Result, View, ViewMut, one_by_one,
};
use std::cmp::Reverse;
use std::sync::{Mutex, PoisonError};

/// Widths of the widest panels of a and b.
const PANEL_ROWS_MAX: usize = 8;
const PANEL_COLS_MAX: usize = 48;
/// Smallest tile worth handing out.
const TILE_ROWS_MIN: usize = 48;
const TILE_COLS_MIN: usize = 96;
/// Panels of b that are packed by one thread after one another, where they stay packed.
const PANELS_TOGETHER: usize = 4;
/// How many more parts than the fewest a dimension is cut into at most.
const MORE_PARTS: usize = 12;

/// The largest tile, how much of the inner size is packed at a time, and what that costs.
#[derive(Clone, Copy)]
struct Blocks {
    rows: usize,
    cols: usize,
    depth: usize,
    /// Words of a panel along the depth.
    words: usize,
    /// Multiplications that take as long as packing an element.
    packing: usize,
}

impl Blocks {
    /// Whether all that a tile needs fits the scratch.
    const fn fit(self, rows: usize, cols: usize) -> bool {
        let packed =
            packed_len(rows, PANEL_ROWS_MAX, self.words) + packed_len(cols, PANEL_COLS_MAX, self.words);
        4 * (packed + PANEL_COLS_MAX * self.depth + rows * cols + 64) <= SCRATCH_BYTES
    }
}

/// With AVX2 a micro panel of b is 16 KiB and stays in the first-level cache; the packed a (512 KiB at most) stays in the
/// second-level cache, or comes from the next in sequence.
const WIDENED: Blocks = Blocks { rows: 512, cols: 960, depth: 256, words: 256, packing: 12 };

/// A micro panel of b is 48 KiB and comes from the second-level cache, where the packed a (512 KiB at most) is too: 8 to 16 bytes
/// a cycle. In return the result is read and written half as often.
const PAIRED: Blocks = Blocks { rows: 512, cols: 960, depth: 512, words: Pair::count(512), packing: 25 };

const _: () = assert!(
    WIDENED.fit(TILE_ROWS_MIN, TILE_COLS_MIN) && PAIRED.fit(TILE_ROWS_MIN, TILE_COLS_MIN),
    "a small tile fits the scratch"
);

impl Matmul for Cpu {
    fn matmul(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>, spec: MatmulSpec) -> Result {
        let dims = check::matmul(a, b, &out, spec);
        let (a, kept, b) = (Floats::new(a), b.packed, Floats::new(b));
        if thin::applies(dims, spec) {
            let residual = if spec.accumulate { Residual::InPlace } else { Residual::None };
            let output = Output::new(out, dims.n, Epilogue { bias: None, residual });
            thin::matmul(&self.threads, a, b, output, dims);
        } else {
            self.product(a, Right::Floats(b, kept), Output::new(out, dims.n, Epilogue::NONE), dims, spec);
        }
        Ok(())
    }

    fn matmul_nt(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>, epilogue: Epilogue<'_>) -> Result {
        let dims = check::matmul_nt(a, b, &out, &epilogue);
        let (a, kept, b) = (Floats::new(a), b.packed, Floats::new(b));
        let output = Output::new(out, dims.n, epilogue);
        if thin::applies(dims, MatmulSpec::NT) {
            thin::matmul(&self.threads, a, b, output, dims);
        } else {
            self.product(a, Right::Floats(b, kept), output, dims, MatmulSpec::NT);
        }
        Ok(())
    }

    fn together(&self, products: &mut [Product<'_>]) -> Result {
        products.iter().for_each(check::product);
        let is_thin = |Product { terms, out, spec, .. }: &Product<'_>| {
            terms.iter().any(|&(a, b)| thin::applies(check::matmul(a, b, out, *spec), *spec))
        };
        // Products of few rows, as experts have in generation, are no reason to wait for the others one by one.
        products.sort_by_key(|product| !is_thin(product));
        let (few, products) = products.split_at_mut(products.partition_point(is_thin));
        one_by_one(self, few)?;
        let all = |pairs: bool| {
            let mut terms = products.iter().flat_map(|product| product.terms);
            terms.all(|(a, b)| (a.dtype() == DType::BF16 && b.dtype() == DType::BF16) == pairs)
        };
        let pairs = self.threads.pair_micro();
        match pairs {
            _ if products.is_empty() => Ok(()),
            Some(micro) if all(true) => {
                self.sums(products, |a, b, place, dims, spec| Paired { micro, a, b, place, dims, spec });
                Ok(())
            }
            Some(_) if !all(false) => one_by_one(self, products),
            _ => {
                let micro = self.threads.micro();
                self.sums(products, |a, b, place, dims, spec| {
                    let b = Right::Floats(b, place);
                    Widened { micro, a, b, dims, spec }
                });
                Ok(())
            }
        }
    }

    fn packed_bytes(&self, [rows, cols]: [usize; 2], dtype: DType) -> usize {
        let both = |each: &dyn Fn(ProductDims) -> usize| {
            let dims = |n, l| ProductDims { m: 1, n, l };
            // Each begins at a cache line.
            [dims(rows, cols), dims(cols, rows)].into_iter().map(|dims| each(dims).next_multiple_of(64)).sum()
        };
        match self.threads.pair_micro() {
            Some(micro) if dtype == DType::BF16 => both(&|dims| kept_bytes::<Paired<'_>>(micro, dims)),
            _ => both(&|dims| kept_bytes::<Widened<'_>>(self.threads.micro(), dims)),
        }
    }
}

/// The right side of a product.
#[derive(Clone, Copy)]
pub enum Right<'a> {
    /// With a place where it may stay packed.
    Floats(Floats<'a>, Option<&'a Packed<'a>>),
    /// Its rows are columns of the product.
    Quantized(Rows<'a>),
}

/// Where along a dimension, and how much of it.
type Span = (usize, usize);

/// A rectangle of the result.
#[derive(Clone, Copy)]
struct Tile {
    row: usize,
    col: usize,
    rows: usize,
    cols: usize,
}

/// The operands of a product, and how they are packed.
trait Operands: Copy + Sync {
    /// What a packed panel consists of.
    type Word: bytemuck::Pod + Send + Sync;

    const BLOCKS: Blocks;
    const WIDENED: bool;

    fn micro(self) -> Micro<Self::Word>;

    fn dims(self) -> ProductDims;

    fn spec(self) -> MatmulSpec;

    /// Words along a block of `depth`.
    fn words(depth: usize) -> usize;

    /// Floats of scratch that [`pack_b`](Self::pack_b) takes.
    fn wide_len(self) -> usize {
        0
    }

    fn pack_a(self, isa: Isa, rows: Span, block: Span, packed: &mut [Self::Word]);

    fn pack_b(self, isa: Isa, cols: Span, block: Span, wide: &mut [f32], packed: &mut [Self::Word]);

    /// Where b may stay packed.
    fn place(&self) -> Option<&Packed<'_>>;
}

/// Any operands, as f32.
#[derive(Clone, Copy)]
struct Widened<'a> {
    micro: Micro,
    a: Floats<'a>,
    b: Right<'a>,
    dims: ProductDims,
    spec: MatmulSpec,
}

impl Operands for Widened<'_> {
    type Word = f32;

    const BLOCKS: Blocks = WIDENED;
    const WIDENED: bool = true;

    fn micro(self) -> Micro {
        self.micro
    }

    fn dims(self) -> ProductDims {
        self.dims
    }

    fn spec(self) -> MatmulSpec {
        self.spec
    }

    fn words(depth: usize) -> usize {
        depth
    }

    fn wide_len(self) -> usize {
        if matches!(self.b, Right::Quantized(_)) { self.micro.nr * WIDENED.depth } else { 0 }
    }

    fn pack_a(self, isa: Isa, rows: Span, block: Span, packed: &mut [f32]) {
        left(self.a, rows, block, self.dims, self.spec).pack(isa, self.micro.mr, packed);
    }

    fn pack_b(self, isa: Isa, cols: Span, block: Span, wide: &mut [f32], packed: &mut [f32]) {
        match self.b {
            Right::Floats(b, _) => {
                right(b, cols, block, self.dims, self.spec).pack(isa, self.micro.nr, packed);
            }
            Right::Quantized(b) => b.pack(isa, self.micro.nr, cols, block, wide, packed),
        }
    }

    fn place(&self) -> Option<&Packed<'_>> {
        match self.b {
            Right::Floats(_, place) => place,
            Right::Quantized(_) => None,
        }
    }
}

/// Two operands of bf16, as pairs.
#[derive(Clone, Copy)]
struct Paired<'a> {
    micro: Micro<Pair>,
    a: Floats<'a>,
    b: Floats<'a>,
    place: Option<&'a Packed<'a>>,
    dims: ProductDims,
    spec: MatmulSpec,
}

impl Operands for Paired<'_> {
    type Word = Pair;

    const BLOCKS: Blocks = PAIRED;
    const WIDENED: bool = false;

    fn micro(self) -> Micro<Pair> {
        self.micro
    }

    fn dims(self) -> ProductDims {
        self.dims
    }

    fn spec(self) -> MatmulSpec {
        self.spec
    }

    fn words(depth: usize) -> usize {
        Pair::count(depth)
    }

    fn pack_a(self, isa: Isa, rows: Span, block: Span, packed: &mut [Pair]) {
        left(self.a, rows, block, self.dims, self.spec).pack_pairs(isa, self.micro.mr, packed);
    }

    fn pack_b(self, isa: Isa, cols: Span, block: Span, _wide: &mut [f32], packed: &mut [Pair]) {
        right(self.b, cols, block, self.dims, self.spec).pack_pairs(isa, self.micro.nr, packed);
    }

    fn place(&self) -> Option<&Packed<'_>> {
        self.place
    }
}

impl Cpu {
    /// `output (+)= op(a)·op(b)`, tile by tile. What accumulates has no epilogue.
    pub(super) fn product(
        &self,
        a: Floats<'_>,
        b: Right<'_>,
        output: Output<'_>,
        dims: ProductDims,
        spec: MatmulSpec,
    ) {
        let pairs = self.threads.pair_micro();
        if let (Some(micro), Floats::BF16(_), Right::Floats(b @ Floats::BF16(_), place)) = (pairs, a, b) {
            tiles(&self.threads, &[Sum { terms: &[Paired { micro, a, b, place, dims, spec }], output }]);
        } else {
            let micro = self.threads.micro();
            tiles(&self.threads, &[Sum { terms: &[Widened { micro, a, b, dims, spec }], output }]);
        }
    }

    /// Products with the operands that `operands` makes of each term.
    fn sums<'a, O: Operands>(
        &self,
        products: &'a mut [Product<'_>],
        operands: impl Fn(Floats<'a>, Floats<'a>, Option<&'a Packed<'a>>, ProductDims, MatmulSpec) -> O,
    ) {
        let mut all = Vec::new();
        for product in &mut *products {
            let term = |&(a, b): &(View<'a>, View<'a>)| {
                let dims = check::matmul(a, b, &product.out, product.spec);
                operands(Floats::new(a), Floats::new(b), b.packed, dims, product.spec)
            };
            all.push(product.terms.iter().map(term).collect::<Vec<_>>());
        }
        let sums = products.iter_mut().zip(&all).map(|(product, terms)| {
            let n = terms[0].dims().n;
            Sum { terms, output: Output::new(product.out.reborrow(), n, product.epilogue) }
        });
        tiles(&self.threads, &sums.collect::<Vec<_>>());
    }
}

/// What is summed into one result.
struct Sum<'a, O> {
    /// Of one size but for the inner one; one at least.
    terms: &'a [O],
    output: Output<'a>,
}

/// A sum on its way, cut into tiles.
struct Job<'a, O: Operands> {
    /// Each with its right side, where that stays packed.
    terms: Vec<(O, Option<&'a [O::Word]>)>,
    output: Output<'a>,
    /// Rows and columns of a tile.
    tile: (usize, usize),
    /// Tiles beside each other.
    across: usize,
    tiles: usize,
}

impl<'a, O: Operands> Job<'a, O> {
    fn new(threads: &Threads, sum: &'a Sum<'a, O>) -> Self {
        let first = sum.terms[0];
        let (dims, micro) = (first.dims(), first.micro());
        assert!(!(first.spec().accumulate && sum.output.adds()), "sums that grow in place get nothing else");
        let kept =
            |operands: &'a O| (*operands, operands.place().and_then(|place| kept(threads, *operands, place)));
        let terms: Vec<_> = sum.terms.iter().map(kept).collect();
        // Tiles of what is packed begin with a panel.
        let unit = if terms.iter().any(|(_, kept)| kept.is_some()) { micro.nr } else { micro.lanes };
        let tile = tile_size(dims, threads.count(), O::BLOCKS, micro, unit);
        let across = dims.n.div_ceil(tile.1);
        Self { terms, output: sum.output, tile, across, tiles: dims.m.div_ceil(tile.0) * across }
    }

    fn dims(&self) -> ProductDims {
        self.terms[0].0.dims()
    }

    /// Multiplications of a tile.
    fn work(&self) -> usize {
        self.tile.0 * self.tile.1 * self.terms.iter().map(|(operands, _)| operands.dims().l).sum::<usize>()
    }

    fn tile(&self, index: usize) -> Tile {
        let ((rows, cols), dims) = (self.tile, self.dims());
        let (row, col) = (index / self.across * rows, index % self.across * cols);
        Tile { row, col, rows: rows.min(dims.m - row), cols: cols.min(dims.n - col) }
    }
}

/// The tiles of all, those that take longest first.
fn tiles<O: Operands>(threads: &Threads, sums: &[Sum<'_, O>]) {
    let is_empty = |sum: &&Sum<'_, O>| sum.terms[0].dims().m == 0 || sum.terms[0].dims().n == 0;
    let mut jobs: Vec<_> =
        sums.iter().filter(|sum| !is_empty(sum)).map(|sum| Job::new(threads, sum)).collect();
    jobs.sort_by_key(|job| Reverse(job.work()));
    threads.run(jobs.iter().map(|job| job.tiles).sum(), |task, scratch| {
        let mut index = task;
        for job in &jobs {
            match index.checked_sub(job.tiles) {
                Some(later) => index = later,
                None => return compute(threads.isa(), job, job.tile(index), scratch),
            }
        }
    });
}

/// Bytes of b, packed as a whole: the panels of a depth block after those of the block before.
fn kept_bytes<O: Operands>(micro: Micro<O::Word>, dims: ProductDims) -> usize {
    dims.n.next_multiple_of(micro.nr) * O::words(dims.l) * size_of::<O::Word>()
}

/// All of b, packed now or by a product before; `None` if there is no room for it.
fn kept<'p, O: Operands>(threads: &Threads, operands: O, place: &'p Packed<'_>) -> Option<&'p [O::Word]> {
    let (dims, spec) = (operands.dims(), operands.spec());
    let (nr, isa) = (operands.micro().nr, threads.isa());
    let order = Order { transposed: spec.trans_b, widened: O::WIDENED };
    let packed = place.get_or_pack(order, kept_bytes::<O>(operands.micro(), dims), |memory| {
        let mut left: &mut [O::Word] = bytemuck::cast_slice_mut(memory);
        let mut parts = Vec::new();
        for start in (0..dims.l).step_by(O::BLOCKS.depth) {
            let block = (start, O::BLOCKS.depth.min(dims.l - start));
            let words = O::words(block.1);
            for first in (0..dims.n).step_by(nr * PANELS_TOGETHER) {
                let cols = (nr * PANELS_TOGETHER).min(dims.n - first);
                let part = left.split_off_mut(..cols.next_multiple_of(nr) * words);
                parts.push(((first, cols), block, Mutex::new(part.expect("the panels fill the memory"))));
            }
        }
        threads.run(parts.len(), |task, _| {
            let (cols, block, part) = &parts[task];
            let mut part = part.lock().unwrap_or_else(PoisonError::into_inner);
            operands.pack_b(isa, *cols, *block, &mut [], &mut part);
        });
    })?;
    Some(bytemuck::cast_slice(packed))
}

fn compute<O: Operands>(isa: Isa, job: &Job<'_, O>, tile: Tile, scratch: &mut [f32]) {
    let (output, ProductDims { n, .. }) = (job.output, job.dims());
    let (micro, words) = (job.terms[0].0.micro(), O::words(O::BLOCKS.depth));
    let mut carver = Carver::new(scratch);
    let a_packed: &mut [O::Word] =
        bytemuck::cast_slice_mut(carver.take(packed_len(tile.rows, micro.mr, words)));
    let b_packed: &mut [O::Word] =
        bytemuck::cast_slice_mut(carver.take(packed_len(tile.cols, micro.nr, words)));
    let wide = carver.take(job.terms[0].0.wide_len());
    let (pointer, stride, sums) = match output.to {
        FloatsMut::F32(out) if !output.adds() => (out.pointer(tile.row * n + tile.col), n, None),
        _ => {
            let sums = carver.take(tile.rows * tile.cols);
            (sums.as_mut_ptr(), tile.cols, Some(sums))
        }
    };
    for (index, (operands, kept)) in job.terms.iter().enumerate() {
        let inner = operands.dims().l;
        // An empty inner size still writes zeros.
        for start in (0..inner.max(1)).step_by(O::BLOCKS.depth) {
            let block = (start, O::BLOCKS.depth.min(inner - start));
            operands.pack_a(isa, (tile.row, tile.rows), block, a_packed);
            let size = (tile.rows, tile.cols, O::words(block.1));
            let b_packed = match kept {
                Some(kept) => {
                    let before = O::words(start) * n.next_multiple_of(micro.nr) + tile.col * size.2;
                    &kept[before..][..tile.cols.next_multiple_of(micro.nr) * size.2]
                }
                None => {
                    operands.pack_b(isa, (tile.col, tile.cols), block, wide, b_packed);
                    &*b_packed
                }
            };
            let target =
                Target { pointer, stride, add: operands.spec().accumulate || index > 0 || start > 0 };
            // SAFETY: the tile lies in the result or in this thread's scratch, and tiles do not overlap.
            unsafe { gemm::product(micro, size, a_packed, b_packed, target) };
        }
    }
    if let Some(sums) = sums {
        for (i, row) in sums.chunks_exact_mut(tile.cols).enumerate() {
            // SAFETY: elements of this tile.
            unsafe { output.write(isa, (tile.row + i, tile.col), row) };
        }
    }
}

/// Rows of the result and a block of the inner size, of the left operand.
fn left(a: Floats<'_>, rows: Span, block: Span, dims: ProductDims, spec: MatmulSpec) -> Panels<'_> {
    operand(a, rows, block, dims.m, dims.l, !spec.trans_a)
}

/// Columns of the result and a block of the inner size, of the right operand.
fn right(b: Floats<'_>, cols: Span, block: Span, dims: ProductDims, spec: MatmulSpec) -> Panels<'_> {
    operand(b, cols, block, dims.n, dims.l, spec.trans_b)
}

/// Rows `first.0..+first.1` of the outer dimension and `block.0..+block.1` of the inner one; `inner_contiguous` tells
/// which of the two is stored last.
fn operand(
    data: Floats<'_>,
    (first, outer): Span,
    (start, depth): Span,
    outer_size: usize,
    inner_size: usize,
    inner_contiguous: bool,
) -> Panels<'_> {
    let (outer_stride, depth_stride) = if inner_contiguous { (inner_size, 1) } else { (1, outer_size) };
    let at = if depth == 0 { 0 } else { first * outer_stride + start * depth_stride };
    Panels { data: data.slice(at, data.len() - at), outer, depth, outer_stride, depth_stride }
}

/// Tiles of nearly equal size, of whole vectors or `unit`s of columns, that take the least time: that of the thread with most of them, each with its
/// packing, and a sixteenth of a tile for what disturbs a thread (a quarter made f32 products of 512 rows 5 % slower, for no gain beside
/// other work). The bits of the result do not depend on the choice (see
/// [`gemm`]), which is why the number of threads may take part in it.
fn tile_size<W: Copy + 'static>(
    dims: ProductDims,
    threads: usize,
    blocks: Blocks,
    micro: Micro<W>,
    unit: usize,
) -> (usize, usize) {
    let cost = |rows: usize, cols: usize| {
        let tiles = dims.m.div_ceil(rows) * dims.n.div_ceil(cols);
        let work = rows * micro.paid(cols) + blocks.packing * (rows + cols);
        (16 * tiles.div_ceil(threads) + 1) * work
    };
    let sizes = |size: usize, most: usize, least: usize, unit: usize| {
        let fewest = size.div_ceil(most);
        (fewest..=fewest + MORE_PARTS)
            .map(move |parts| size.div_ceil(parts).next_multiple_of(unit))
            .take_while(move |part| *part >= least || size.next_multiple_of(unit) == *part)
    };
    let rows = || sizes(dims.m, blocks.rows, TILE_ROWS_MIN, micro.mr);
    let tiles =
        rows().flat_map(|rows| sizes(dims.n, blocks.cols, TILE_COLS_MIN, unit).map(move |cols| (rows, cols)));
    tiles
        .filter(|(rows, cols)| blocks.fit(*rows, *cols))
        .min_by_key(|(rows, cols)| cost(*rows, *cols))
        .unwrap_or((TILE_ROWS_MIN, TILE_COLS_MIN))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tiles fit the scratch, whatever the sizes, and no thread has much more than its share of a large product.
    #[test]
    fn tiles_are_shared_out_evenly() {
        let any = [Micro::generic::<4, 8>(), Micro::generic::<6, 16>(), Micro::generic::<8, 48>()];
        let tiles = any.into_iter().chain(Isa::available().into_iter().map(Micro::of));
        let widened = tiles.map(|micro| (WIDENED, micro));
        for (blocks, micro) in widened.chain([(PAIRED, Micro::generic::<8, 48>())]) {
            for threads in [1, 2, 3, 8, 16] {
                for m in [1, 9, 100, 512, 1024, 4096] {
                    for n in [1, 97, 768, 1024, 2688, 8192] {
                        let dims = ProductDims { m, n, l: 1024 };
                        let (rows, cols) = tile_size(dims, threads, blocks, micro, micro.lanes);
                        assert!(blocks.fit(rows, cols), "{rows}x{cols} of {m}x{n}");
                        if threads <= 8 && m >= 512 && n >= 768 {
                            let tiles = m.div_ceil(rows) * n.div_ceil(cols);
                            let most = tiles.div_ceil(threads) * rows * cols * threads;
                            let case = format!("{rows}x{cols} of {m}x{n}, {threads} threads");
                            assert!(most as f64 <= 1.25 * (m * n) as f64, "{case}");
                        }
                    }
                }
            }
        }
    }
}
