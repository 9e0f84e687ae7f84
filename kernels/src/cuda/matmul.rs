//! Products: by cuBLASLt where it can, else by the kernels of `matmul_mma.cu`, `matmul.cu`, `quantized_mma.cu` and `quantized.cu`.

use super::{Cuda, THREADS, VECTOR, failed, operand, too_large};
use crate::check::{self, ProductDims};
use crate::{Epilogue, Matmul, MatmulSpec, QuantizedMatmul, QuantizedView, Residual, Result, View, ViewMut};

/// Rows and columns of a tile.
const TILE: usize = 64;
/// `SIDE` of `matmul_mma.cu`: rows and columns of a tile for tensor cores.
const TILE_MMA: usize = 128;
/// `STAGES` slabs of both operands, 32 deep, of 16 bits an element.
const SHARED_BYTES_MMA: u32 = 3 * 2 * 2 * 32 * 128;
/// Bytes of two slabs of a tile's operands, by their depth.
const fn slab_bytes(depth: u32) -> u32 {
    4 * 2 * depth * 68
}
/// Rows that `quantized_thin` takes, and columns of a that it keeps of each.
const THIN_ROWS: usize = 8;
const THIN_COLUMNS: usize = 1024;

/// `out = op(a)·op(b) (+ bias) (+ residual)`.
#[derive(Clone, Copy)]
pub(super) struct Product<'a> {
    pub(super) a: View<'a>,
    pub(super) b: View<'a>,
    /// What is written.
    pub(super) out: View<'a>,
    /// Which of the two are transposed; a product that accumulates has `out` as its residual.
    pub(super) spec: MatmulSpec,
    pub(super) dims: ProductDims,
    pub(super) bias: Option<View<'a>>,
    /// May be `out`.
    pub(super) residual: Option<View<'a>>,
}

impl Matmul for Cuda {
    fn matmul(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>, spec: MatmulSpec) -> Result {
        let dims = check::matmul(a, b, &out, spec);
        if dims.l == 0 && spec.accumulate {
            return Ok(());
        }
        let residual = spec.accumulate.then(|| out.view());
        self.product(&Product { a, b, out: out.view(), spec, dims, bias: None, residual })
    }

    fn matmul_nt(&self, a: View<'_>, b: View<'_>, mut out: ViewMut<'_>, epilogue: Epilogue<'_>) -> Result {
        let dims = check::matmul_nt(a, b, &out, &epilogue);
        let epilogue = Epilogue { residual: self.in_place(epilogue.residual, &mut out)?, ..epilogue };
        let (bias, residual) = (epilogue.bias, epilogue.residual.view(&out));
        self.product(&Product { a, b, out: out.view(), spec: MatmulSpec::NT, dims, bias, residual })
    }
}

impl Cuda {
    /// Where cuBLASLt may add it, the residual in the result's place: it rounds otherwise in place than from elsewhere, and where a
    /// residual lies must not change bits. A copy reads and writes 2·M·N elements, where the product reads and writes M·N and computes.
    fn in_place<'a>(&self, residual: Residual<'a>, out: &mut ViewMut<'_>) -> Result<Residual<'a>> {
        match residual {
            Residual::Of(residual) if self.products.is_some() && residual.dtype() == out.dtype() => {
                // SAFETY: the caller keeps both valid, and ordered by the stream, as operands of the operation.
                let copied = unsafe { self.card.copy(residual.bytes(), out.reborrow().into_bytes()) };
                copied.map(|()| Residual::InPlace).map_err(|error| failed("matmul", &error))
            }
            other => Ok(other),
        }
    }

    fn product(&self, product: &Product<'_>) -> Result {
        const OP: &str = "matmul";
        let &Product { a, b, out, spec, dims, bias, residual } = product;
        if dims.m * dims.n == 0 {
            return Ok(());
        }
        if let Some(products) = self.products.as_ref().filter(|_| dims.l > 0)
            && products.run(product, self.scratch.bytes())?
        {
            return Ok(());
        }
        let operands = self.arguments().read(a).flag(spec.trans_a).read(b).flag(spec.trans_b).read(out);
        let mut arguments = operands.optional(bias).optional(residual).long(dims.m).long(dims.n).long(dims.l);
        if let Some(kernel) = self.tensor_core_product(product) {
            let tiles = tiles(OP, dims, TILE_MMA)?;
            return self.launch(OP, kernel, tiles, THREADS, SHARED_BYTES_MMA, &mut arguments);
        }
        self.launch(OP, "matmul_plain", tiles(OP, dims, TILE)?, THREADS, slab_bytes(16), &mut arguments)
    }

    /// The kernel for tensor cores that takes this product, if any does.
    fn tensor_core_product(&self, product: &Product<'_>) -> Option<&'static str> {
        let &Product { a, b, out, spec, bias, residual, .. } = product;
        let kernel = match (spec.trans_a, spec.trans_b) {
            (false, true) => "matmul_mma_nt",
            (false, false) => "matmul_mma_nn",
            (true, false) => "matmul_mma_tn",
            (true, true) => return None,
        };
        let whole_chunks = [a, b].iter().all(|view| view.shape().last().is_multiple_of(VECTOR));
        let added_like_out = bias.into_iter().chain(residual).all(|added| added.dtype() == out.dtype());
        (whole_chunks && added_like_out && self.fits_tensor_cores(&[a, b], &[out])).then_some(kernel)
    }
}

impl QuantizedMatmul for Cuda {
    fn matmul_nt(
        &self,
        a: View<'_>,
        b: QuantizedView<'_>,
        out: ViewMut<'_>,
        epilogue: Epilogue<'_>,
    ) -> Result {
        const OP: &str = "quantized matmul";
        let dims = check::quantized_matmul(a, b, &out, &epilogue);
        if dims.m * dims.n == 0 {
            return Ok(());
        }
        let operands =
            self.arguments().read(a).bytes(b.bytes()).int(operand::format_code(b.format())).write(&out);
        let operands = operands.optional(epilogue.bias).optional(epilogue.residual.view(&out));
        if let Some((kernel, tile)) = self.quantized_on_tensor_cores(a, b, dims) {
            let down =
                u32::try_from(dims.m.div_ceil(tile.rows)).map_err(|_| too_large(OP, "rows", dims.m))?;
            let across = u32::try_from(dims.n.div_ceil(tile.columns)).expect("it fits a grid");
            let mut arguments = operands.long(dims.m).long(dims.n).long(dims.l);
            return self.launch(OP, kernel, [down, across, 1], THREADS, tile.shared_bytes, &mut arguments);
        }
        if dims.m > THIN_ROWS {
            let mut arguments = operands.long(dims.m).long(dims.n).long(dims.l);
            return self.launch(
                OP,
                "quantized_tile",
                tiles(OP, dims, TILE)?,
                THREADS,
                slab_bytes(32),
                &mut arguments,
            );
        }
        let mut arguments = operands.size(dims.m).long(dims.n).long(dims.l);
        // A warp for every column.
        let columns = dims.n.div_ceil(THREADS as usize / 32);
        let blocks = u32::try_from(columns).map_err(|_| too_large(OP, "columns", dims.n))?;
        let shared = 4 * dims.m.next_power_of_two() * THIN_COLUMNS;
        let shared = u32::try_from(shared).expect("eight rows at most");
        self.launch(OP, "quantized_thin", [blocks, 1, 1], THREADS, shared, &mut arguments)
    }
}

impl Cuda {
    /// The kernel of `quantized_mma.cu` that takes this product, if any does, and what a block of it has.
    fn quantized_on_tensor_cores(
        &self,
        a: View<'_>,
        b: QuantizedView<'_>,
        dims: ProductDims,
    ) -> Option<(&'static str, Tile)> {
        let whole_words = b.bytes().address().as_ptr().addr().is_multiple_of(8);
        // Places within a row, and in codes of the eight rows of a warp, are numbers of 32 bits.
        let whole_rows = (1..1 << 24).contains(&dims.l) && dims.l.is_multiple_of(VECTOR);
        if !whole_words || !whole_rows || !self.fits_tensor_cores(&[a], &[]) {
            return None;
        }
        let found = match dims.m {
            1..=8 => ("quantized_mma_8", Tile { rows: 16, columns: 16, shared_bytes: 1536 }),
            9..=16 => ("quantized_mma_16", Tile { rows: 16, columns: 16, shared_bytes: 3072 }),
            17..=64 => ("quantized_mma_32", Tile { rows: 32, columns: 16, shared_bytes: 6144 }),
            _ => ("quantized_mma_many", Tile { rows: 32, columns: 64, shared_bytes: 0 }),
        };
        // A grid has no more blocks in its second direction.
        (dims.n.div_ceil(found.1.columns) <= usize::from(u16::MAX)).then_some(found)
    }
}

/// What a block has of a product, and the memory that its threads share.
struct Tile {
    rows: usize,
    columns: usize,
    shared_bytes: u32,
}

fn tiles(op: &'static str, dims: ProductDims, side: usize) -> Result<[u32; 3]> {
    let tiles = dims.m.div_ceil(side) * dims.n.div_ceil(side);
    match i32::try_from(tiles) {
        Ok(count) => Ok([count.unsigned_abs(), 1, 1]),
        Err(_) => Err(too_large(op, "tiles", tiles)),
    }
}
