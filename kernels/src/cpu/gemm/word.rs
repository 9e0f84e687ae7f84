//! What packed panels consist of, and the matrices that are packed into them.

use super::{Micro, Pair, Panels};
use crate::cpu::Isa;
use crate::cpu::floats::Floats;
use crate::cpu::threads::Threads;
use crate::cpu::vector;
use half::bf16;

/// A word of a panel: an f32, or a [`Pair`] of bf16.
pub trait Word: bytemuck::Pod {
    /// An element of a matrix to be packed.
    type Element: bytemuck::Pod;

    /// The innermost product.
    ///
    /// # Panics
    /// If the instruction set has none of these words.
    fn micro(threads: &Threads) -> Micro<Self>;

    /// Words along a block of `depth`.
    fn words(depth: usize) -> usize;

    /// Packs a block into panels of `width`.
    ///
    /// # Panics
    /// If its elements are not of this kind, or a size is wrong.
    fn pack(panels: Panels<'_>, isa: Isa, width: usize, packed: &mut [Self]);

    /// Elements as an operand.
    fn floats(elements: &[Self::Element]) -> Floats<'_>;

    /// An operand's elements.
    ///
    /// # Panics
    /// If pairs are asked for and it is not of bf16.
    fn gather(isa: Isa, from: Floats<'_>, to: &mut [Self::Element]);

    /// The elements nearest to `values`, in `room` unless they are the values themselves.
    fn round<'v>(isa: Isa, values: &'v [f32], room: &'v mut [Self::Element]) -> &'v [Self::Element];
}

impl Word for f32 {
    type Element = f32;

    fn micro(threads: &Threads) -> Micro {
        threads.micro()
    }

    fn words(depth: usize) -> usize {
        depth
    }

    fn pack(panels: Panels<'_>, isa: Isa, width: usize, packed: &mut [f32]) {
        panels.pack(isa, width, packed);
    }

    fn floats(elements: &[f32]) -> Floats<'_> {
        Floats::F32(elements)
    }

    fn gather(isa: Isa, from: Floats<'_>, to: &mut [f32]) {
        from.widen(isa, to);
    }

    fn round<'v>(_: Isa, values: &'v [f32], _: &'v mut [f32]) -> &'v [f32] {
        values
    }
}

impl Word for Pair {
    type Element = bf16;

    fn micro(threads: &Threads) -> Micro<Pair> {
        threads.pair_micro().expect("pairs are asked for where there is a product of them")
    }

    fn words(depth: usize) -> usize {
        Self::count(depth)
    }

    fn pack(panels: Panels<'_>, isa: Isa, width: usize, packed: &mut [Pair]) {
        panels.pack_pairs(isa, width, packed);
    }

    fn floats(elements: &[bf16]) -> Floats<'_> {
        Floats::BF16(elements)
    }

    fn gather(_: Isa, from: Floats<'_>, to: &mut [bf16]) {
        let Floats::BF16(from) = from else { unreachable!("pairs are of bf16") };
        to.copy_from_slice(from);
    }

    fn round<'v>(isa: Isa, values: &'v [f32], room: &'v mut [bf16]) -> &'v [bf16] {
        let room = &mut room[..values.len()];
        vector::narrow_bf16(isa, values, room);
        room
    }
}
