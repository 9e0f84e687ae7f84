//! Blocks of codes to weights, over [`Lanes`].

use crate::QuantFormat;
use crate::cpu::Isa;
use crate::cpu::isa::Level;
use crate::cpu::lanes::{self, Lanes};
use crate::cpu::vector::LANES;
use crate::quantized::{BLOCK, GROUP, GROUPS, SCALE_BYTES};

const _: () = assert!(GROUP == 2 * LANES && GROUPS == 4, "a group is two runs of lanes");

/// How a block's codes become floats, run by run of sixteen.
pub trait Codes {
    /// Bytes of a block.
    const BYTES: usize;
    /// What is to be added to a code `c` of group g, after a multiplication by `SHIFTS[g]`, for the weight divided by its scale.
    const OFFSET: f32;
    /// See [`OFFSET`](Self::OFFSET).
    const SHIFTS: [f32; GROUPS];
    /// What is read of a block once.
    type Opened<V: Lanes>: Copy;

    /// Begins with a block.
    ///
    /// # Safety
    /// It is readable, and `V` has sixteen lanes; the processor has the instruction set of `V`.
    unsafe fn open<V: Lanes>(block: *const u8) -> Self::Opened<V>;

    /// Sixteen codes from `32·group + 16·half` of it.
    ///
    /// # Safety
    /// As for [`open`](Self::open), of the same block.
    unsafe fn run<V: Lanes>(opened: Self::Opened<V>, group: usize, half: usize) -> V;
}

/// [`QuantFormat::Int8`].
pub struct Int8;

impl Codes for Int8 {
    const BYTES: usize = QuantFormat::Int8.block_bytes();
    const OFFSET: f32 = 0.0;
    const SHIFTS: [f32; GROUPS] = [1.0; GROUPS];
    type Opened<V: Lanes> = *const u8;

    #[inline(always)]
    unsafe fn open<V: Lanes>(block: *const u8) -> *const u8 {
        // SAFETY: within the block.
        unsafe { block.add(SCALE_BYTES) }
    }

    #[inline(always)]
    unsafe fn run<V: Lanes>(codes: *const u8, group: usize, half: usize) -> V {
        // SAFETY: within the block.
        unsafe { V::load_i8(codes.add(GROUP * group + LANES * half)) }
    }
}

/// [`QuantFormat::Int4`].
pub struct Int4;

impl Codes for Int4 {
    const BYTES: usize = QuantFormat::Int4.block_bytes();
    const OFFSET: f32 = -8.0;
    // The mask leaves the codes of group g multiplied by 16ᵍ.
    const SHIFTS: [f32; GROUPS] = [1.0, 1.0 / 16.0, 1.0 / 256.0, 1.0 / 4096.0];
    type Opened<V: Lanes> = [V::Words; 2];

    #[inline(always)]
    unsafe fn open<V: Lanes>(block: *const u8) -> Self::Opened<V> {
        // SAFETY: within the block.
        unsafe {
            let words = V::load_words(block.add(SCALE_BYTES));
            [words, V::upper(words)]
        }
    }

    #[inline(always)]
    unsafe fn run<V: Lanes>(words: Self::Opened<V>, group: usize, half: usize) -> V {
        // SAFETY: the processor has the instructions.
        unsafe { V::masked(words[half], 0xF << (4 * group)) }
    }
}

/// [`QuantFormat::Mxfp4`].
pub struct Mxfp4;

impl Codes for Mxfp4 {
    const BYTES: usize = QuantFormat::Mxfp4.block_bytes();
    const OFFSET: f32 = 0.0;
    const SHIFTS: [f32; GROUPS] = [1.0; GROUPS];
    type Opened<V: Lanes> = [V::Words; 2];

    #[inline(always)]
    unsafe fn open<V: Lanes>(block: *const u8) -> Self::Opened<V> {
        // SAFETY: within the block.
        unsafe { Int4::open::<V>(block) }
    }

    #[inline(always)]
    unsafe fn run<V: Lanes>(words: Self::Opened<V>, group: usize, half: usize) -> V {
        // SAFETY: the processor has the instructions.
        unsafe { V::looked_up(words[half], group) }
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
/// `blocks` has as many blocks as `out`; the processor has the instruction set of `V`.
#[inline(always)]
unsafe fn unpack_of<V: Lanes, C: Codes>(blocks: *const u8, out: &mut [[f32; BLOCK]]) {
    for (index, out) in out.iter_mut().enumerate() {
        // SAFETY: there are as many blocks as in `out`.
        let (at, opened) =
            unsafe { (blocks.add(index * C::BYTES), C::open::<V>(blocks.add(index * C::BYTES))) };
        for group in 0..GROUPS {
            for half in 0..2 {
                let out = &mut out[group * GROUP + half * LANES..][..LANES];
                // SAFETY: a block has these runs; sixteen floats are writable.
                unsafe {
                    let scale = V::splat_bf16(at, group);
                    let factor = scale.mul(V::splat(C::SHIFTS[group]));
                    let weights =
                        C::run::<V>(opened, group, half).fma(factor, scale.mul(V::splat(C::OFFSET)));
                    weights.store(out.as_mut_ptr());
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{BLOCK, Codes, unpack_of};
    use crate::cpu::lanes::{Avx2, Avx512};

    macro_rules! unpack {
        ($features:literal, $lanes:ty, $unpack:ident) => {
            /// # Safety
            /// See [`unpack_of`].
            #[target_feature(enable = $features)]
            pub unsafe fn $unpack<C: Codes>(blocks: *const u8, out: &mut [[f32; BLOCK]]) {
                // SAFETY: the caller's promise.
                unsafe { unpack_of::<$lanes, C>(blocks, out) }
            }
        };
    }

    unpack!("avx2,fma", Avx2, unpack_avx2);
    unpack!("avx512f,avx2,fma", Avx512, unpack_avx512);
}
