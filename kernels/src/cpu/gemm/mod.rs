//! The blocked product that matmul and attention share.
//!
//! Operands are packed into panels of `mr` rows or `nr` columns, k-major, widened to f32 on the way, so that the
//! innermost product ([`micro`]) reads both sequentially: Goto and van de Geijn, "Anatomy of High-Performance Matrix
//! Multiplication" (2008), with the names of BLIS.
//!
//! **Accumulation order of an element:** k is cut into blocks; within a block terms are added one after the other in
//! a register, k ascending, starting from zero; the block's sum is then added to the element. The order does not
//! depend on where a panel or tile begins, so tiles may be cut to suit the number of threads.
//!
//! Rejected: the `gemm` crate. It takes neither bf16 nor a caller's scratch, so operands would be copied twice (widened by
//! us, packed by it into memory it allocates per call), and it is no faster on f32 (`benches/matmul.rs` has both).

mod micro;
mod pack;
mod pairs;
mod word;

pub use micro::Micro;
pub use pack::{Panels, packed_len, prefetch};
pub use pairs::{Pair, add_products};
pub use word::Word;

/// Most elements of one micro tile, over all instruction sets.
const TILE_MAX: usize = 8 * 48;

/// Where a product goes: element `(i, j)` at `pointer + i·stride + j`.
#[derive(Clone, Copy)]
pub struct Target {
    pub pointer: *mut f32,
    pub stride: usize,
    /// Add to the old contents instead of overwriting them.
    pub add: bool,
}

/// `target[rows, cols] (+)= a·b` over one block, `words` long; `a` and `b` packed by [`Panels::pack`], or
/// [`Panels::pack_pairs`] for a micro tile of pairs.
///
/// # Safety
/// The target's elements are valid and nobody else touches them.
///
/// # Panics
/// If a packed operand is too short.
pub unsafe fn product<W: Copy>(
    micro: Micro<W>,
    (rows, cols, words): (usize, usize, usize),
    a: &[W],
    b: &[W],
    target: Target,
) {
    let (mr, nr) = (micro.mr, micro.nr);
    assert!(a.len() >= rows.next_multiple_of(mr) * words, "a holds {rows} rows of {words} words");
    assert!(b.len() >= cols.next_multiple_of(nr) * words, "b holds {cols} columns of {words} words");
    let mut edge = [0.0f32; TILE_MAX];
    for col in (0..cols).step_by(nr) {
        let b_panel = b[col * words..].as_ptr();
        let left = nr.min(cols - col);
        let width = micro.width(left);
        for row in (0..rows).step_by(mr) {
            let a_panel = a[row * words..].as_ptr();
            // SAFETY: the first element of a micro tile that overlaps the target is in it.
            let corner = unsafe { target.pointer.add(row * target.stride + col) };
            if row + mr <= rows && width == left {
                // SAFETY: the panels are long enough (asserted), all of the rows and columns lie in the target.
                unsafe { micro.run(width, words, a_panel, b_panel, (corner, target.stride), target.add) };
            } else {
                // SAFETY: the panels are padded to whole micro tiles (asserted), `edge` holds one.
                unsafe { micro.run(width, words, a_panel, b_panel, (edge.as_mut_ptr(), nr), false) };
                let part = (mr.min(rows - row), left);
                // SAFETY: only elements within the target are written.
                unsafe { copy_part(&edge, nr, part, Target { pointer: corner, ..target }) };
            }
        }
    }
}

/// Moves the part of a micro tile that lies in the target.
///
/// # Safety
/// `part` elements from the target's pointer are valid and nobody else touches them.
unsafe fn copy_part(tile: &[f32], nr: usize, part: (usize, usize), target: Target) {
    for i in 0..part.0 {
        // SAFETY: row `i < part.0` of the target, `part.1` elements wide.
        let row = unsafe { std::slice::from_raw_parts_mut(target.pointer.add(i * target.stride), part.1) };
        for (out, value) in row.iter_mut().zip(&tile[i * nr..]) {
            *out = if target.add { *out + value } else { *value };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;
    use crate::cpu::floats::Floats;
    use half::bf16;

    /// Micro tiles of every instruction set's size, whether or not this machine has the instructions.
    #[test]
    fn any_micro_tile_gives_the_product() {
        let tiles = [Micro::generic::<4, 8>(), Micro::generic::<6, 16>(), Micro::generic::<8, 48>()];
        for isa in Isa::available() {
            for micro in tiles.into_iter().chain([Micro::of(isa)]) {
                for (rows, cols, depth) in
                    [(1, 1, 1), (12, 24, 3), (16, 80, 4), (7, 49, 9), (13, 100, 24), (16, 96, 17)]
                {
                    for contiguous in [false, true] {
                        check(isa, micro, (rows, cols, depth), contiguous);
                    }
                }
            }
        }
    }

    /// Small integers, so that every order of adding gives the same sum.
    fn check(isa: Isa, micro: Micro, (rows, cols, depth): (usize, usize, usize), contiguous: bool) {
        let value = |i: usize, k: usize| (i * 7 + k * 5) % 11;
        let store = |outer: usize| -> Vec<bf16> {
            let at = |i| if contiguous { (i / depth, i % depth) } else { (i % outer, i / outer) };
            (0..outer * depth).map(at).map(|(i, k)| bf16::from_f32(value(i, k) as f32)).collect()
        };
        let pack = |outer: usize, width: usize| {
            let (outer_stride, depth_stride) = if contiguous { (depth, 1) } else { (1, outer) };
            let mut packed = vec![f32::NAN; packed_len(outer, width, depth)];
            let data = store(outer);
            Panels { data: Floats::BF16(&data), outer, depth, outer_stride, depth_stride }.pack(
                isa,
                width,
                &mut packed,
            );
            packed
        };
        let (a, b) = (pack(rows, micro.mr), pack(cols, micro.nr));
        let mut out = vec![1.0f32; rows * cols];
        let target = Target { pointer: out.as_mut_ptr(), stride: cols, add: true };
        // SAFETY: `out` holds rows of `cols` floats.
        unsafe { product(micro, (rows, cols, depth), &a, &b, target) };
        for (at, found) in out.iter().enumerate() {
            let sum: usize = (0..depth).map(|k| value(at / cols, k) * value(at % cols, k)).sum();
            assert_eq!(*found, 1.0 + sum as f32, "{} {}x{} at {at}", isa.name(), micro.mr, micro.nr);
        }
    }
}
