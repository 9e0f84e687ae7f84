//! Blocks of codes to weights, and weights times activations, over [`Lanes`].

use crate::QuantFormat;
use crate::cpu::Isa;
use crate::cpu::isa::Level;
use crate::cpu::lanes::{self, Lanes};
use crate::cpu::vector::{LANES, sum_lanes};
use crate::quantized::{BLOCK, GROUP, GROUPS, SCALE_BYTES};

const _: () = assert!(GROUP == 2 * LANES && GROUPS == 4, "a group is two runs of lanes");

/// How a block's weights are unpacked, run by run of sixteen.
pub trait Codes {
    /// Bytes of a block.
    const BYTES: usize;
    /// What is read of a block once.
    type Opened<V: Lanes>: Copy;

    /// Begins with a block.
    ///
    /// # Safety
    /// It is readable; the processor has the instruction set of `V`.
    unsafe fn open<V: Lanes>(block: *const u8) -> Self::Opened<V>;

    /// Weights `32·group + 16·half ..` of it, exactly.
    ///
    /// # Safety
    /// As for [`open`](Self::open), of the same block.
    unsafe fn run<V: Lanes>(opened: Self::Opened<V>, group: usize, half: usize) -> V;
}

/// [`QuantFormat::Int8`].
pub struct Int8;

impl Codes for Int8 {
    const BYTES: usize = QuantFormat::Int8.block_bytes();
    type Opened<V: Lanes> = *const u8;

    #[inline(always)]
    unsafe fn open<V: Lanes>(block: *const u8) -> *const u8 {
        block
    }

    #[inline(always)]
    unsafe fn run<V: Lanes>(block: *const u8, group: usize, half: usize) -> V {
        // SAFETY: within the block.
        unsafe {
            let codes = V::load_i8(block.add(SCALE_BYTES + GROUP * group + LANES * half));
            codes.mul(V::splat_bf16(block, group))
        }
    }
}

/// [`QuantFormat::Int4`].
pub struct Int4;

impl Codes for Int4 {
    const BYTES: usize = QuantFormat::Int4.block_bytes();
    type Opened<V: Lanes> = (*const u8, [V::Words; 2]);

    #[inline(always)]
    unsafe fn open<V: Lanes>(block: *const u8) -> Self::Opened<V> {
        // SAFETY: within the block.
        unsafe {
            let words = V::load_words(block.add(SCALE_BYTES));
            (block, [words, V::upper(words)])
        }
    }

    #[inline(always)]
    unsafe fn run<V: Lanes>((block, words): Self::Opened<V>, group: usize, half: usize) -> V {
        /// `16⁻ᵍ`, since the mask leaves the codes of group g multiplied by `16ᵍ`.
        const SHIFTS: [f32; GROUPS] = [1.0, 1.0 / 16.0, 1.0 / 256.0, 1.0 / 4096.0];
        // SAFETY: within the block.
        unsafe {
            let scale = V::splat_bf16(block, group);
            let (factor, offset) = (scale.mul(V::splat(SHIFTS[group])), scale.mul(V::splat(-8.0)));
            V::masked(words[half], 0xF << (4 * group)).fma(factor, offset)
        }
    }
}

/// Rows of blocks.
#[derive(Clone, Copy)]
pub struct Strided<'a> {
    pub blocks: &'a [u8],
    pub row_bytes: usize,
}

/// `sums[r][m] = Σ_l a[m, l]·b[r, l]` for the first `R` rows of b and `M` of a, which are filled up with zeros to `width`.
pub fn dots<C: Codes, const R: usize, const M: usize>(
    isa: Isa,
    a_ml: &[f32],
    width: usize,
    b: Strided<'_>,
) -> [[f32; M]; R] {
    let blocks = width / BLOCK;
    assert!(width.is_multiple_of(BLOCK) && a_ml.len() >= M * width, "{M} rows of {width} floats");
    assert!(b.row_bytes == blocks * C::BYTES && b.blocks.len() >= R * b.row_bytes, "{R} rows of blocks");
    let (a, b, row_bytes) = (a_ml.as_ptr(), b.blocks.as_ptr(), b.row_bytes);
    match isa.level() {
        // SAFETY: the operands are long enough (asserted); no instructions are needed.
        Level::Generic => unsafe { dots_of::<lanes::Generic, C, R, M>(blocks, a, b, row_bytes) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the operands are long enough (asserted); an `Isa` exists only when the processor has its instructions.
        Level::Avx2 => unsafe { x86::dots_avx2::<C, R, M>(blocks, a, b, row_bytes) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx512 => unsafe { x86::dots_avx512::<C, R, M>(blocks, a, b, row_bytes) },
    }
}

/// The weights of some blocks, of the last one as many as are asked for.
pub fn unpack<C: Codes>(isa: Isa, blocks: &[u8], out: &mut [f32]) {
    let (whole, part) = out.as_chunks_mut::<BLOCK>();
    let (blocks, last) = blocks.split_at(whole.len() * C::BYTES);
    unpack_whole::<C>(isa, blocks, whole);
    if !part.is_empty() {
        let mut all = [[0.0; BLOCK]];
        unpack_whole::<C>(isa, last, &mut all);
        part.copy_from_slice(&all[0][..part.len()]);
    }
}

fn unpack_whole<C: Codes>(isa: Isa, blocks: &[u8], out: &mut [[f32; BLOCK]]) {
    assert_eq!(blocks.len(), out.len() * C::BYTES, "as many blocks as are unpacked");
    match isa.level() {
        // SAFETY: the operands are equally long (asserted); no instructions are needed.
        Level::Generic => unsafe { unpack_of::<lanes::Generic, C>(blocks.as_ptr(), out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the operands are equally long (asserted); an `Isa` exists only when the processor has its instructions.
        Level::Avx2 => unsafe { x86::unpack_avx2::<C>(blocks.as_ptr(), out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx512 => unsafe { x86::unpack_avx512::<C>(blocks.as_ptr(), out) },
    }
}

/// # Safety
/// `a` holds `M` rows and `b` `R` rows of `blocks` blocks; the processor has the instruction set of `V`.
#[inline(always)]
unsafe fn dots_of<V: Lanes, C: Codes, const R: usize, const M: usize>(
    blocks: usize,
    a: *const f32,
    b: *const u8,
    row_bytes: usize,
) -> [[f32; M]; R] {
    // SAFETY: the caller's promise.
    let mut sums = [[unsafe { V::zero() }; M]; R];
    for block in 0..blocks {
        let (a, b) = (a.wrapping_add(block * BLOCK), b.wrapping_add(block * C::BYTES));
        let row = |r: usize| b.wrapping_add(r * row_bytes);
        // Not a loop: the compiler would leave it one and the sums in memory.
        // SAFETY: block `block < blocks` of rows below `R` and `M`.
        unsafe {
            add_block::<V, C, M>(&mut sums[0], a, blocks * BLOCK, row(0));
            if R > 1 {
                add_block::<V, C, M>(&mut sums[1], a, blocks * BLOCK, row(1));
            }
            if R > 2 {
                add_block::<V, C, M>(&mut sums[2], a, blocks * BLOCK, row(2));
                add_block::<V, C, M>(&mut sums[3], a, blocks * BLOCK, row(3));
            }
        }
    }
    sums.map(|sums| {
        sums.map(|sum| {
            let mut lanes = [0.0; LANES];
            // SAFETY: sixteen floats.
            unsafe { sum.store(lanes.as_mut_ptr()) };
            sum_lanes(lanes)
        })
    })
}

/// Adds the products with one block.
///
/// # Safety
/// A block is readable from `b` and, `width` apart, as many floats of `M` rows from `a`; the processor has the instruction set.
#[inline(always)]
unsafe fn add_block<V: Lanes, C: Codes, const M: usize>(
    sums: &mut [V; M],
    a: *const f32,
    width: usize,
    b: *const u8,
) {
    // SAFETY: the block is readable.
    let opened = unsafe { C::open::<V>(b) };
    for group in 0..GROUPS {
        for half in 0..2 {
            // SAFETY: a block has these runs, in codes and in floats.
            unsafe {
                let weights = C::run::<V>(opened, group, half);
                let a = a.add(group * GROUP + half * LANES);
                for (m, sum) in sums.iter_mut().enumerate() {
                    *sum = V::load(a.add(m * width)).fma(weights, *sum);
                }
            }
        }
    }
}

/// # Safety
/// `blocks` has as many blocks as `out`; the processor has the instruction set of `V`.
#[inline(always)]
unsafe fn unpack_of<V: Lanes, C: Codes>(blocks: *const u8, out: &mut [[f32; BLOCK]]) {
    for (index, out) in out.iter_mut().enumerate() {
        // SAFETY: there are as many blocks as in `out`.
        let opened = unsafe { C::open::<V>(blocks.add(index * C::BYTES)) };
        for group in 0..GROUPS {
            for half in 0..2 {
                let out = &mut out[group * GROUP + half * LANES..][..LANES];
                // SAFETY: a block has these runs; sixteen floats are writable.
                unsafe { C::run::<V>(opened, group, half).store(out.as_mut_ptr()) };
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{BLOCK, Codes, dots_of, unpack_of};
    use crate::cpu::lanes::{Avx2, Avx512};

    macro_rules! compiled_for {
        ($features:literal, $lanes:ty, $dots:ident, $unpack:ident) => {
            /// # Safety
            /// See [`dots_of`].
            #[target_feature(enable = $features)]
            pub unsafe fn $dots<C: Codes, const R: usize, const M: usize>(
                blocks: usize,
                a: *const f32,
                b: *const u8,
                row_bytes: usize,
            ) -> [[f32; M]; R] {
                // SAFETY: the caller's promise.
                unsafe { dots_of::<$lanes, C, R, M>(blocks, a, b, row_bytes) }
            }

            /// # Safety
            /// See [`unpack_of`].
            #[target_feature(enable = $features)]
            pub unsafe fn $unpack<C: Codes>(blocks: *const u8, out: &mut [[f32; BLOCK]]) {
                // SAFETY: the caller's promise.
                unsafe { unpack_of::<$lanes, C>(blocks, out) }
            }
        };
    }

    compiled_for!("avx2,fma", Avx2, dots_avx2, unpack_avx2);
    compiled_for!("avx512f,avx2,fma", Avx512, dots_avx512, unpack_avx512);
}
