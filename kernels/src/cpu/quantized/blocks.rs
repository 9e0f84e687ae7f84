//! Blocks of codes to weights, and weights times activations, over [`Lanes`].

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
    /// Whether two rows of a share what is unpacked: not if masks and halves of words already fill sixteen registers.
    const PAIRS: bool;
    /// What is read of a block once.
    type Opened<V: Lanes>: Copy;

    /// Begins with a block.
    ///
    /// # Safety
    /// It is readable; the processor has the instruction set of `V`.
    unsafe fn open<V: Lanes>(block: *const u8) -> Self::Opened<V>;

    /// Codes `32·group + 16·half ..` of it.
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
    const PAIRS: bool = true;
    type Opened<V: Lanes> = *const u8;

    #[inline(always)]
    unsafe fn open<V: Lanes>(block: *const u8) -> *const u8 {
        block
    }

    #[inline(always)]
    unsafe fn run<V: Lanes>(block: *const u8, group: usize, half: usize) -> V {
        // SAFETY: within the block.
        unsafe { V::load_i8(block.add(SCALE_BYTES + GROUP * group + LANES * half)) }
    }
}

/// [`QuantFormat::Int4`].
pub struct Int4;

impl Codes for Int4 {
    const BYTES: usize = QuantFormat::Int4.block_bytes();
    const OFFSET: f32 = -8.0;
    // The mask leaves the codes of group g multiplied by 16ᵍ.
    const SHIFTS: [f32; GROUPS] = [1.0, 1.0 / 16.0, 1.0 / 256.0, 1.0 / 4096.0];
    const PAIRS: bool = false;
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

/// Floats that a row of a takes once it is prepared for `width` columns, whole blocks.
pub const fn prepared_len(width: usize) -> usize {
    width + width / 2
}

/// Makes a row of a, of which the first `width` floats are there, ready for codes: elements are multiplied by the shift of their
/// group, which is exact, and what the offset adds to a group's sum follows, lane by lane.
pub fn prepare<C: Codes>(row: &mut [f32], width: usize) {
    let (a, offsets) = row.split_at_mut(width);
    let groups = a.as_chunks_mut::<GROUP>().0.iter_mut().zip(offsets.as_chunks_mut::<LANES>().0);
    for (index, (group, offsets)) in groups.enumerate() {
        let shift = C::SHIFTS[index % GROUPS];
        for i in 0..LANES {
            offsets[i] = C::OFFSET * (group[i] + group[i + LANES]);
        }
        group.iter_mut().for_each(|a| *a *= shift);
    }
}

/// How far ahead, in bytes, codes are asked for: beyond what the processor fetches by itself, and little enough to leave a in the
/// first-level cache (2048 took a quarter more cycles in int8). At the end of a row that is the next one.
const AHEAD: usize = 512;

/// `Σ_l a[m, l]·b[l]` of a row of blocks, lanes apart, with the first `M` prepared rows of `width` columns.
pub fn dots<C: Codes, const M: usize>(isa: Isa, a: &[f32], width: usize, b: &[u8]) -> [[f32; LANES]; M] {
    assert!(width.is_multiple_of(BLOCK) && a.len() >= M * prepared_len(width), "{M} rows of {width} floats");
    assert_eq!(b.len(), width / BLOCK * C::BYTES, "the blocks of a row");
    match isa.level() {
        // SAFETY: rows of a and b are equally long (asserted); no instructions are needed.
        Level::Generic => unsafe { dots_of::<lanes::Generic, C, M>(a.as_ptr(), width, b) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: rows of a and b are equally long (asserted); an `Isa` exists only when the processor has its instructions.
        Level::Avx2 => unsafe { x86::dots_avx2::<C, M>(a.as_ptr(), width, b) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx512 => unsafe { x86::dots_avx512::<C, M>(a.as_ptr(), width, b) },
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
/// `a` holds `M` prepared rows of `width` columns, as many as `b` has; the processor has the instruction set of `V`.
#[inline(always)]
unsafe fn dots_of<V: Lanes, C: Codes, const M: usize>(
    a: *const f32,
    width: usize,
    b: &[u8],
) -> [[f32; LANES]; M] {
    // SAFETY: the processor has the instructions.
    let mut sums = [unsafe { V::zero() }; M];
    for (block, codes) in b.chunks_exact(C::BYTES).enumerate() {
        let at = codes.as_ptr();
        V::prefetch(at.wrapping_add(AHEAD));
        // SAFETY: a whole block.
        let opened = unsafe { C::open::<V>(at) };
        for group in 0..GROUPS {
            // SAFETY: the block has this group, and the rows of a the elements and offsets that belong to it.
            unsafe {
                let (low, high) = (C::run::<V>(opened, group, 0), C::run::<V>(opened, group, 1));
                let scale = V::splat_bf16(at, group);
                for (m, sum) in sums.iter_mut().enumerate() {
                    let row = a.add(m * prepared_len(width));
                    let elements = row.add(block * BLOCK + group * GROUP);
                    let offset = if C::OFFSET == 0.0 {
                        V::zero()
                    } else {
                        V::load(row.add(width + (block * GROUPS + group) * LANES))
                    };
                    let part = V::load(elements).fma(low, offset);
                    let part = V::load(elements.add(LANES)).fma(high, part);
                    *sum = part.fma(scale, *sum);
                }
            }
        }
    }
    // No closures here: they would not be compiled for the instruction set.
    let mut lanes = [[0.0; LANES]; M];
    for (sum, lanes) in sums.into_iter().zip(&mut lanes) {
        // SAFETY: sixteen floats.
        unsafe { sum.store(lanes.as_mut_ptr()) };
    }
    lanes
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
    use super::{BLOCK, Codes, LANES, dots_of, unpack_of};
    use crate::cpu::lanes::{Avx2, Avx512};

    macro_rules! compiled_for {
        ($features:literal, $lanes:ty, $dots:ident, $unpack:ident) => {
            /// # Safety
            /// See [`dots_of`].
            #[target_feature(enable = $features)]
            pub unsafe fn $dots<C: Codes, const M: usize>(
                a: *const f32,
                width: usize,
                b: &[u8],
            ) -> [[f32; LANES]; M] {
                // SAFETY: the caller's promise.
                unsafe { dots_of::<$lanes, C, M>(a, width, b) }
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
