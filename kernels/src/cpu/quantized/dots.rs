//! Products of few rows of activations with blocks of codes, in integers.

use super::blocks::{Codes, Int4, Int8, Mxfp4};
use crate::cpu::Isa;
use crate::cpu::isa::Level;
use crate::cpu::lanes;
use crate::cpu::shorts::Shorts;
use crate::cpu::thin::AHEAD;
use crate::quantized::{BLOCK, GROUP, GROUPS, SCALE_BYTES};

/// Most rows of a.
pub const ROWS: usize = 16;
/// Rows of weights that take turns.
pub const COLS: usize = 16;
/// Most lanes of a sum.
pub const LANES: usize = 16;
/// Rows of a that meet a row of weights in registers.
const TOGETHER: usize = 4;
/// Blocks of the inner size, times rows of a that meet, that stay in the first-level cache: 16 KiB.
const PIECE: usize = 64;

/// Sums of [`COLS`] rows of weights, lane by lane: of row j with row m of a. Lanes that the processor has not are zero.
pub type Sums = [[[f32; LANES]; ROWS]; COLS];

/// Codes as 16-bit integers.
pub trait Products: Codes {
    /// What the integers of each group are to be multiplied by, for the codes.
    const FACTORS: [f32; GROUPS];
    /// What is read of a block once.
    type Read<V: Shorts>: Copy;

    /// Begins with a block.
    ///
    /// # Safety
    /// It is readable; the processor has the instruction set of `V`.
    unsafe fn read<V: Shorts>(block: *const u8) -> Self::Read<V>;

    /// The codes of a group divided by its [factor](Self::FACTORS), in the order of [`arrange`](Self::arrange).
    ///
    /// # Safety
    /// As for [`read`](Self::read), of the same block.
    unsafe fn group<V: Shorts>(read: Self::Read<V>, group: usize) -> V::Shorts;

    /// Puts elements of a into the order of the codes of a group.
    fn arrange(group: &mut [i16; GROUP]);
}

impl Products for Int8 {
    const FACTORS: [f32; GROUPS] = [1.0; GROUPS];
    type Read<V: Shorts> = *const u8;

    #[inline(always)]
    unsafe fn read<V: Shorts>(block: *const u8) -> *const u8 {
        // SAFETY: within the block.
        unsafe { block.add(SCALE_BYTES) }
    }

    #[inline(always)]
    unsafe fn group<V: Shorts>(codes: *const u8, group: usize) -> V::Shorts {
        // SAFETY: within the block.
        unsafe { V::extend_i8(codes.add(GROUP * group)) }
    }

    fn arrange(_group: &mut [i16; GROUP]) {}
}

impl Products for Int4 {
    // The last nibble of sixteen bits is the sign's as well, and is shifted down.
    const FACTORS: [f32; GROUPS] = [1.0, 1.0 / 16.0, 1.0 / 256.0, 1.0];
    type Read<V: Shorts> = V::Shorts;

    #[inline(always)]
    unsafe fn read<V: Shorts>(block: *const u8) -> V::Shorts {
        // SAFETY: within the block.
        unsafe { V::load_i16(block.add(SCALE_BYTES).cast()) }
    }

    #[inline(always)]
    unsafe fn group<V: Shorts>(words: V::Shorts, group: usize) -> V::Shorts {
        // SAFETY: the processor has the instructions.
        unsafe { V::nibble(words, group) }
    }

    /// A word has weights i and i + 16 of a group side by side.
    fn arrange(group: &mut [i16; GROUP]) {
        let straight = *group;
        for (i, pair) in group.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            *pair = [straight[i], straight[i + GROUP / 2]];
        }
    }
}

impl Products for Mxfp4 {
    // Lower bytes are put into the upper ones, upper ones shifted down with their sign.
    const FACTORS: [f32; GROUPS] = [1.0 / 256.0, 1.0 / 256.0, 1.0, 1.0];
    /// Of groups 0 and 2 in the lower and upper bytes, and of groups 1 and 3.
    type Read<V: Shorts> = [V::Shorts; 2];

    #[inline(always)]
    unsafe fn read<V: Shorts>(block: *const u8) -> Self::Read<V> {
        // SAFETY: within the block.
        unsafe { V::look_up(V::load_i16(block.add(SCALE_BYTES).cast())) }
    }

    #[inline(always)]
    unsafe fn group<V: Shorts>(codes: Self::Read<V>, group: usize) -> V::Shorts {
        // SAFETY: the processor has the instructions.
        unsafe { V::signed_byte(codes[group % 2], group / 2) }
    }

    fn arrange(group: &mut [i16; GROUP]) {
        Int4::arrange(group);
    }
}

/// Rows of a as 16-bit integers with a factor for each block: [`TOGETHER`] rows after the other, of each block side by side, so
/// that what is in the first-level cache at once spreads over its sets.
#[derive(Debug)]
pub struct Activations<'a> {
    m: usize,
    elements: &'a mut [[i16; BLOCK]],
    factors: &'a mut [f32],
}

impl<'a> Activations<'a> {
    /// Floats of working memory that `m` rows of `blocks` take.
    pub fn floats(m: usize, blocks: usize) -> usize {
        m * blocks * (BLOCK / 2 + 1)
    }

    /// `m` rows of blocks in working memory, with any contents.
    pub fn new(m: usize, blocks: usize, memory: &'a mut [f32]) -> Self {
        let (elements, factors) = memory[..Self::floats(m, blocks)].split_at_mut(m * blocks * (BLOCK / 2));
        let elements = bytemuck::cast_slice_mut::<f32, i16>(elements).as_chunks_mut().0;
        Self { m, elements, factors }
    }

    /// Sets a block of a row, and leaves in `values` what it lacks of them.
    pub fn set<C: Products>(&mut self, isa: Isa, row: usize, block: usize, values: &mut [f32; BLOCK]) {
        let (first, blocks) = (row / TOGETHER * TOGETHER, self.factors.len() / self.m);
        let at = first * blocks + block * TOGETHER.min(self.m - first) + row - first;
        let elements = &mut self.elements[at];
        self.factors[at] = narrow(isa, values, elements);
        elements.as_chunks_mut::<GROUP>().0.iter_mut().for_each(C::arrange);
    }
}

multiversion! {
    /// Integers and a power of two, times which they are the values but for at most 2⁻¹⁵ of the largest magnitude, which is left
    /// in `values`. A block with a value that is not finite gets a factor that is not a number.
    fn narrow(values: &mut [f32; BLOCK], integers: &mut [i16; BLOCK]) -> f32 {
        let largest = values.iter().fold(0, |largest: u32, x| largest.max(x.to_bits() & 0x7FFF_FFFF));
        let exponent = largest >> 23;
        if exponent == 0xFF {
            integers.fill(0);
            return f32::NAN;
        }
        // The largest becomes 2¹⁴ or more, below 2¹⁵. Both powers are normal numbers.
        let up = (127 + 127 + 14 - exponent).min(253);
        let (up, down) = (f32::from_bits(up << 23), f32::from_bits((254 - up) << 23));
        for (integer, x) in integers.iter_mut().zip(values) {
            // Adding 1.5·2²³ leaves the nearest integer in the low bits.
            *integer = ((*x * up).min(32_767.0) + 12_582_912.0).to_bits() as i16;
            *x -= f32::from(*integer) * down;
        }
        down
    }
}

/// `Σ_l a[m, l]·b[j, l]` of up to [`COLS`] rows of blocks, lanes apart. Other sums are left as they are.
pub fn dots<C: Products>(isa: Isa, a: &Activations<'_>, b: &[u8], sums: &mut Sums) {
    let (m, blocks) = (a.m, a.factors.len() / a.m);
    assert!(m > 0 && m <= ROWS && a.elements.len() == m * blocks, "{m} rows of blocks");
    let rows = b.len() / (blocks * C::BYTES);
    assert!(rows <= COLS && b.len() == rows * blocks * C::BYTES, "rows of {blocks} blocks");
    let size = Size { m, rows, blocks, piece: if m == 1 { blocks } else { PIECE / m.min(TOGETHER) } };
    for sums in &mut sums[..rows] {
        sums[..m].fill([0.0; LANES]);
    }
    let (a, b) = (At { elements: a.elements.as_ptr(), factors: a.factors.as_ptr() }, b.as_ptr());
    match isa.level() {
        // SAFETY: rows of a and b have as many blocks (asserted); no instructions are needed.
        Level::Generic => unsafe { dots_of::<lanes::Generic<8>, C>(a, b, size, sums) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above; an `Isa` exists only when the processor has its instructions.
        Level::Avx2 => unsafe { x86::dots_avx2::<C>(a, b, size, sums) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx512 => unsafe { x86::dots_avx512::<C>(a, b, size, sums) },
    }
}

/// Rows of a and of weights, blocks in each, and how many of them at a time.
#[derive(Clone, Copy)]
struct Size {
    m: usize,
    rows: usize,
    blocks: usize,
    piece: usize,
}

/// Where blocks of a and their factors begin.
#[derive(Clone, Copy)]
struct At {
    elements: *const [i16; BLOCK],
    factors: *const f32,
}

/// # Safety
/// `a` and `b` are of that size; the processor has the instruction set of `V`.
#[inline(always)]
unsafe fn dots_of<V: Shorts, C: Products>(a: At, b: *const u8, size: Size, sums: &mut Sums) {
    const { assert!(V::WIDTH <= LANES) };
    let mut first = 0;
    while first < size.blocks {
        let count = size.piece.min(size.blocks - first);
        let mut r = 0;
        while r < size.m {
            for (j, sums) in sums.iter_mut().enumerate().take(size.rows) {
                if r == 0 && size.m > 1 {
                    // The next turn's rows, in the order of memory, while this one's take turns.
                    let next = size.rows * size.blocks + first * size.rows + j * count;
                    let at = b.wrapping_add(next * C::BYTES);
                    let mut byte = 0;
                    while byte < count * C::BYTES {
                        V::prefetch_far(at.wrapping_add(byte));
                        byte += 64;
                    }
                }
                // SAFETY: this row's blocks from the first of the piece; row `r` of a; sums of as many rows.
                unsafe {
                    let codes = b.add((j * size.blocks + first) * C::BYTES);
                    let together = TOGETHER.min(size.m - r);
                    let at = r * size.blocks + first * together;
                    let a = At { elements: a.elements.add(at), factors: a.factors.add(at) };
                    let sums = sums.as_mut_ptr().add(r);
                    match together {
                        1 => piece::<V, C, 1>(a, codes, count, sums),
                        2 => piece::<V, C, 2>(a, codes, count, sums),
                        3 => piece::<V, C, 3>(a, codes, count, sums),
                        _ => piece::<V, C, TOGETHER>(a, codes, count, sums),
                    }
                }
            }
            r += TOGETHER;
        }
        first += size.piece;
    }
}

/// Adds to `R` sums what `count` blocks of a row of weights bring.
///
/// # Safety
/// They are readable, as are `R` rows of as many blocks of a; there are `R` sums; the processor has the instruction set of `V`.
#[inline(always)]
unsafe fn piece<V: Shorts, C: Products, const R: usize>(
    mut a: At,
    mut block: *const u8,
    count: usize,
    sums: *mut [f32; LANES],
) {
    // No closures here: they would not be compiled for the instruction set.
    // SAFETY: within the blocks and the sums, by the caller's promise.
    unsafe {
        let mut registers = [V::zero(); R];
        for (r, register) in registers.iter_mut().enumerate() {
            *register = V::load(sums.add(r).cast());
        }
        for _ in 0..count {
            if R == 1 {
                V::prefetch(block.wrapping_add(AHEAD));
                V::prefetch(block.wrapping_add(AHEAD + 64));
            }
            let read = C::read::<V>(block);
            let mut of_block = [V::zero(); R];
            for group in 0..GROUPS {
                let codes = C::group::<V>(read, group);
                let scale = V::splat_bf16(block, group).mul(V::splat(C::FACTORS[group]));
                for (r, sum) in of_block.iter_mut().enumerate() {
                    let elements = a.elements.add(r).cast::<i16>().add(GROUP * group);
                    *sum = V::float(V::products(codes, V::load_i16(elements))).fma(scale, *sum);
                }
            }
            for (r, register) in registers.iter_mut().enumerate() {
                *register = of_block[r].fma(V::splat(*a.factors.add(r)), *register);
            }
            block = block.add(C::BYTES);
            a = At { elements: a.elements.wrapping_add(R), factors: a.factors.wrapping_add(R) };
        }
        for (r, register) in registers.into_iter().enumerate() {
            register.store(sums.add(r).cast());
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{At, Products, Size, Sums, dots_of};
    use crate::cpu::lanes::{Avx2Half, Avx512};

    macro_rules! compiled_for {
        ($features:literal, $lanes:ty, $dots:ident) => {
            /// # Safety
            /// See [`dots_of`].
            #[target_feature(enable = $features)]
            pub unsafe fn $dots<C: Products>(a: At, b: *const u8, size: Size, sums: &mut Sums) {
                // SAFETY: the caller's promise.
                unsafe { dots_of::<$lanes, C>(a, b, size, sums) }
            }
        };
    }

    compiled_for!("avx2,fma", Avx2Half, dots_avx2);
    compiled_for!("avx512f,avx512bw,avx512vl,avx2,fma", Avx512, dots_avx512);
}
