//! The blocked product that matmul and attention share.
//!
//! Operands are packed into panels of `mr` rows or `nr` columns, k-major, widened to f32 on the way, so that the
//! innermost product ([`micro`]) reads both sequentially: Goto and van de Geijn, "Anatomy of High-Performance Matrix
//! Multiplication" (2008), with the names of BLIS.
//!
//! **Accumulation order of an element:** k is cut into blocks; within a block terms are added one after the other in
//! a register, k ascending, starting from zero; the block's sum is then added to the element. The order does not
//! depend on where a panel or tile begins, so tiles may be cut to suit the number of threads.

mod micro;
mod pack;

pub use micro::Micro;
pub use pack::{Panels, packed_len};

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

/// `target[rows, cols] (+)= a·b` over one block of `depth`; `a` and `b` packed by [`Panels::pack`].
///
/// # Safety
/// The target's elements are valid and nobody else touches them.
///
/// # Panics
/// If a packed operand is too short.
pub unsafe fn product(
    micro: Micro,
    (rows, cols, depth): (usize, usize, usize),
    a: &[f32],
    b: &[f32],
    target: Target,
) {
    let (mr, nr) = (micro.mr, micro.nr);
    assert!(a.len() >= rows.next_multiple_of(mr) * depth, "a holds {rows} rows of depth {depth}");
    assert!(b.len() >= cols.next_multiple_of(nr) * depth, "b holds {cols} columns of depth {depth}");
    let mut edge = [0.0f32; TILE_MAX];
    for col in (0..cols).step_by(nr) {
        let b_panel = b[col * depth..].as_ptr();
        for row in (0..rows).step_by(mr) {
            let a_panel = a[row * depth..].as_ptr();
            // SAFETY: the first element of a micro tile that overlaps the target is in it.
            let corner = unsafe { target.pointer.add(row * target.stride + col) };
            if row + mr <= rows && col + nr <= cols {
                // SAFETY: the panels are long enough (asserted), the whole micro tile lies in the target.
                unsafe { micro.run(depth, a_panel, b_panel, corner, target.stride, target.add) };
            } else {
                // SAFETY: the panels are padded to whole micro tiles (asserted), `edge` holds one.
                unsafe { micro.run(depth, a_panel, b_panel, edge.as_mut_ptr(), nr, false) };
                let part = (mr.min(rows - row), nr.min(cols - col));
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
