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
    /// What is read of a block once.
    type Opened<V: Lanes>: Copy;

    /// Begins with the lanes from `part` of a block.
    ///
    /// # Safety
    /// It is readable, and has so many lanes; the processor has the instruction set of `V`.
    unsafe fn open<V: Lanes>(block: *const u8, part: usize) -> Self::Opened<V>;

    /// Codes `32·group + 16·half + part ..` of it.
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
    unsafe fn open<V: Lanes>(block: *const u8, part: usize) -> *const u8 {
        // SAFETY: within the block.
        unsafe { block.add(SCALE_BYTES + part) }
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
    unsafe fn open<V: Lanes>(block: *const u8, part: usize) -> Self::Opened<V> {
        // SAFETY: within the block.
        unsafe {
            let words = V::load_words(block.add(SCALE_BYTES + part * size_of::<u32>()));
            [words, V::upper(words)]
        }
    }

    #[inline(always)]
    unsafe fn run<V: Lanes>(words: Self::Opened<V>, group: usize, half: usize) -> V {
        // SAFETY: the processor has the instructions.
        unsafe { V::masked(words[half], 0xF << (4 * group)) }
    }
}

/// Floats that a block of a takes once it is prepared: its elements, and for each group what the offset adds.
pub const PREPARED: usize = BLOCK + GROUPS * LANES;

/// Makes a block of a ready for codes: its elements are multiplied by the shift of their group, which is exact, and what the offset
/// adds to a group's sum goes to `offsets`, lane by lane.
pub fn prepare<C: Codes>(elements: &mut [f32], offsets: &mut [f32]) {
    let groups = elements.as_chunks_mut::<GROUP>().0.iter_mut().zip(offsets.as_chunks_mut::<LANES>().0);
    for ((group, offsets), shift) in groups.zip(C::SHIFTS) {
        for i in 0..LANES {
            offsets[i] = C::OFFSET * (group[i] + group[i + LANES]);
        }
        group.iter_mut().for_each(|a| *a *= shift);
    }
}

/// Most rows of a.
pub const ROWS: usize = 8;
/// Rows of weights that take turns.
pub const COLS: usize = 16;
/// Blocks of the inner size that stay in the first-level cache with eight rows of a: 12 KiB. With fewer rows it is more blocks.
const PIECE: usize = 2;

/// How far ahead, in bytes, codes are asked for with one row of a: beyond what the processor fetches by itself, and little enough to leave a in the
/// first-level cache (2048 took a quarter more cycles in int8). At the end of a row that is the next one.
const AHEAD: usize = 512;

/// Sums of [`COLS`] rows of weights, lane by lane: of row j with row m of a.
pub type Sums = [[[f32; LANES]; ROWS]; COLS];

/// `Σ_l a[m, l]·b[j, l]` of up to [`COLS`] rows of blocks, lanes apart, with `m` rows of prepared blocks: of each block all rows, side
/// by side, and of each row the elements and then the offsets. A single row has all its elements first. Other sums are left as
/// they are.
pub fn dots<C: Codes>(isa: Isa, a: &[f32], m: usize, b: &[u8], sums: &mut Sums) {
    let blocks = a.len() / (m * PREPARED);
    assert!(m > 0 && m <= ROWS && a.len() == blocks * m * PREPARED, "{m} rows of blocks");
    let rows = b.len() / (blocks * C::BYTES);
    assert!(rows <= COLS && b.len() == rows * blocks * C::BYTES, "rows of {blocks} blocks");
    let size = Size { m, rows, blocks, piece: if m == 1 { blocks } else { PIECE * ROWS / m } };
    for sums in &mut sums[..rows] {
        sums[..m].fill([0.0; LANES]);
    }
    let (a, b) = (a.as_ptr(), b.as_ptr());
    match isa.level() {
        // SAFETY: rows of a and b have as many blocks (asserted); no instructions are needed.
        Level::Generic => unsafe { dots_of::<lanes::Generic, C>(a, b, size, sums) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above; an `Isa` exists only when the processor has its instructions.
        Level::Avx2 if m == 1 => unsafe { x86::dots_avx2::<C>(a, b, size, sums) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx2 => unsafe { x86::dots_avx2_by_halves::<C>(a, b, size, sums) },
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
/// `a` and `b` are of that size; the processor has the instruction set of `V`.
#[inline(always)]
unsafe fn dots_of<V: Lanes, C: Codes>(a: *const f32, b: *const u8, size: Size, sums: &mut Sums) {
    let mut first = 0;
    while first < size.blocks {
        let count = size.piece.min(size.blocks - first);
        for (j, sums) in sums.iter_mut().enumerate().take(size.rows) {
            if size.m > 1 {
                // The next turn's rows, in the order of memory, while this one's take turns.
                let next = size.rows * size.blocks + first * size.rows + j * count;
                let at = b.wrapping_add(next * C::BYTES);
                let mut byte = 0;
                while byte < count * C::BYTES {
                    V::prefetch_far(at.wrapping_add(byte));
                    byte += 64;
                }
            }
            let mut r = 0;
            while r < size.m {
                // SAFETY: this row's blocks from the first of the piece; row `r` of a; sums of as many rows.
                unsafe {
                    let codes = b.add((j * size.blocks + first) * C::BYTES);
                    let a = if size.m == 1 {
                        let offsets = a.add(size.blocks * BLOCK + first * GROUPS * LANES);
                        Prepared { elements: a.add(first * BLOCK), offsets, strides: [BLOCK, GROUPS * LANES] }
                    } else {
                        let elements = a.add((first * size.m + r) * PREPARED);
                        let offsets = elements.add(BLOCK);
                        Prepared { elements, offsets, strides: [size.m * PREPARED; 2] }
                    };
                    let sums = sums.as_mut_ptr().add(r);
                    match size.m - r {
                        1 => piece::<V, C, 1>(a, codes, count, sums),
                        2 => piece::<V, C, 2>(a, codes, count, sums),
                        3 => piece::<V, C, 3>(a, codes, count, sums),
                        _ => piece::<V, C, 4>(a, codes, count, sums),
                    }
                }
                r += 4;
            }
        }
        first += size.piece;
    }
}

/// Where rows of prepared blocks begin, and how far it is to their next blocks. Rows are [`PREPARED`] floats apart.
#[derive(Clone, Copy)]
struct Prepared {
    elements: *const f32,
    offsets: *const f32,
    strides: [usize; 2],
}

/// Adds to `R` sums what `count` blocks of a row of weights bring.
///
/// # Safety
/// They are readable, as are `R` rows of as many prepared blocks; there are `R` sums; the processor has the instruction
/// set of `V`.
#[inline(always)]
unsafe fn piece<V: Lanes, C: Codes, const R: usize>(
    a: Prepared,
    codes: *const u8,
    count: usize,
    sums: *mut [f32; LANES],
) {
    // No closures here: they would not be compiled for the instruction set.
    for part in (0..LANES).step_by(V::WIDTH) {
        // SAFETY: within the blocks and the sums, by the caller's promise.
        unsafe {
            let mut registers = [V::zero(); R];
            for (r, register) in registers.iter_mut().enumerate() {
                *register = V::load(sums.add(r).cast::<f32>().add(part));
            }
            let (mut elements, mut offsets, mut at) = (a.elements.add(part), a.offsets.add(part), codes);
            for _ in 0..count {
                if R == 1 {
                    V::prefetch(at.wrapping_add(AHEAD));
                }
                let opened = C::open::<V>(at, part);
                for group in 0..GROUPS {
                    let (low, high) = (C::run::<V>(opened, group, 0), C::run::<V>(opened, group, 1));
                    let scale = V::splat_bf16(at, group);
                    for (r, register) in registers.iter_mut().enumerate() {
                        let run = elements.add(r * PREPARED + group * GROUP);
                        let offset = if C::OFFSET == 0.0 {
                            V::zero()
                        } else {
                            V::load(offsets.add(r * PREPARED + group * LANES))
                        };
                        let sum = V::load(run).fma(low, offset);
                        let sum = V::load(run.add(LANES)).fma(high, sum);
                        *register = sum.fma(scale, *register);
                    }
                }
                at = at.add(C::BYTES);
                elements = elements.wrapping_add(a.strides[0]);
                offsets = offsets.wrapping_add(a.strides[1]);
            }
            for (r, register) in registers.into_iter().enumerate() {
                register.store(sums.add(r).cast::<f32>().add(part));
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
        let (at, opened) =
            unsafe { (blocks.add(index * C::BYTES), C::open::<V>(blocks.add(index * C::BYTES), 0)) };
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
    use super::{BLOCK, Codes, Size, Sums, dots_of, unpack_of};
    use crate::cpu::lanes::{Avx2, Avx2Half, Avx512};

    macro_rules! dots {
        ($features:literal, $lanes:ty, $dots:ident) => {
            /// # Safety
            /// See [`dots_of`].
            #[target_feature(enable = $features)]
            pub unsafe fn $dots<C: Codes>(a: *const f32, b: *const u8, size: Size, sums: &mut Sums) {
                // SAFETY: the caller's promise.
                unsafe { dots_of::<$lanes, C>(a, b, size, sums) }
            }
        };
    }

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

    dots!("avx2,fma", Avx2, dots_avx2);
    dots!("avx2,fma", Avx2Half, dots_avx2_by_halves);
    dots!("avx512f,avx2,fma", Avx512, dots_avx512);
    unpack!("avx2,fma", Avx2, unpack_avx2);
    unpack!("avx512f,avx2,fma", Avx512, unpack_avx512);
}
