//! Sixteen lanes of f32, one type per instruction set, for loops that the compiler does not vectorize by itself.
//!
//! An algorithm over [`Lanes`] is written once; what the lanes hold is the same on every instruction set but for the rounding
//! of [`Lanes::fma`], which the generic one does not fuse. Where sixteen lanes are two registers and an algorithm needs more of them
//! than there are, it takes the lanes eight by eight: [`Avx2Half`].
//!
//! Methods are inlined into a caller that is compiled for the instruction set, which is what makes calling them sound.

use super::vector::{LANES, sum_lanes};
use crate::quantized::MXFP4_CODES;
use half::{bf16, f16};

/// As floats.
const MXFP4_FLOATS: [f32; 16] = {
    let (mut floats, mut i) = ([0.0; 16], 0);
    while i < floats.len() {
        floats[i] = MXFP4_CODES[i] as f32;
        i += 1;
    }
    floats
};

/// Sixteen lanes, or a part of them.
pub trait Lanes: Copy {
    /// How many.
    const WIDTH: usize;

    /// As many 32-bit words.
    type Words: Copy;

    /// Zeros.
    ///
    /// # Safety
    /// The processor has the instruction set. This goes for every method.
    unsafe fn zero() -> Self;

    /// The same value in all lanes.
    ///
    /// # Safety
    /// See [`zero`](Self::zero).
    unsafe fn splat(value: f32) -> Self;

    /// As many floats.
    ///
    /// # Safety
    /// They are readable; see [`zero`](Self::zero).
    unsafe fn load(at: *const f32) -> Self;

    /// Writes as many floats.
    ///
    /// # Safety
    /// They are writable; see [`zero`](Self::zero).
    unsafe fn store(self, at: *mut f32);

    /// As many signed bytes as floats.
    ///
    /// # Safety
    /// They are readable; see [`zero`](Self::zero).
    unsafe fn load_i8(at: *const u8) -> Self;

    /// As many bf16 as floats.
    ///
    /// # Safety
    /// They are readable; see [`zero`](Self::zero).
    unsafe fn load_bf16(at: *const bf16) -> Self;

    /// As many of a run of bf16: where that is half of it, the even ones from `part` 0 and the odd ones else.
    ///
    /// # Safety
    /// The run of sixteen is readable; see [`zero`](Self::zero).
    #[inline(always)]
    unsafe fn load_bf16_apart(run: *const bf16, _part: usize) -> Self {
        const { assert!(Self::WIDTH == LANES) };
        // SAFETY: the caller's promise.
        unsafe { Self::load_bf16(run) }
    }

    /// As many f16 as floats.
    ///
    /// # Safety
    /// They are readable; see [`zero`](Self::zero).
    unsafe fn load_f16(at: *const f16) -> Self;

    /// The little-endian bf16 `index` of several, in all lanes.
    ///
    /// # Safety
    /// The aligned pair of them that it belongs to is readable; see [`zero`](Self::zero).
    unsafe fn splat_bf16(at: *const u8, index: usize) -> Self;

    /// Asks for what lies at an address, which need not be readable.
    #[inline(always)]
    fn prefetch(_at: *const u8) {}

    /// As [`prefetch`](Self::prefetch), into a second-level cache.
    #[inline(always)]
    fn prefetch_far(_at: *const u8) {}

    /// Product.
    ///
    /// # Safety
    /// See [`zero`](Self::zero).
    unsafe fn mul(self, other: Self) -> Self;

    /// `self·factor + term`.
    ///
    /// # Safety
    /// See [`zero`](Self::zero).
    unsafe fn fma(self, factor: Self, term: Self) -> Self;

    /// The sum of the lanes of each, added as [`sum_lanes`] does.
    ///
    /// # Safety
    /// See [`zero`](Self::zero).
    #[inline(always)]
    unsafe fn sums(four: [Self; 4]) -> [f32; 4] {
        const { assert!(Self::WIDTH == LANES) };
        let mut sums = [0.0; 4];
        for (sum, lanes) in sums.iter_mut().zip(four) {
            let mut apart = [0.0; LANES];
            // SAFETY: there is room for all of them; the caller's promise.
            unsafe { lanes.store(apart.as_mut_ptr()) };
            *sum = sum_lanes(apart);
        }
        sums
    }

    /// As many little-endian words.
    ///
    /// # Safety
    /// They are readable; see [`zero`](Self::zero).
    unsafe fn load_words(at: *const u8) -> Self::Words;

    /// The upper halves of the words.
    ///
    /// # Safety
    /// See [`zero`](Self::zero).
    unsafe fn upper(words: Self::Words) -> Self::Words;

    /// The bits of the words that are in the mask, which leaves the sign out, as an integer.
    ///
    /// # Safety
    /// See [`zero`](Self::zero).
    unsafe fn masked(words: Self::Words, mask: i32) -> Self;

    /// [`MXFP4_CODES`] of nibble 0 to 3 of each word. What is 0 may have a sign.
    ///
    /// # Safety
    /// See [`zero`](Self::zero).
    unsafe fn looked_up(words: Self::Words, nibble: usize) -> Self;
}

/// For any machine.
#[derive(Clone, Copy)]
pub struct Generic<const WIDTH: usize = LANES>(pub(super) [f32; WIDTH]);

impl<const WIDTH: usize> Lanes for Generic<WIDTH> {
    const WIDTH: usize = WIDTH;
    type Words = [u32; WIDTH];

    #[inline(always)]
    unsafe fn zero() -> Self {
        Self([0.0; WIDTH])
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self([value; WIDTH])
    }

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: readable by the caller's promise.
        Self(unsafe { at.cast::<[f32; WIDTH]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: writable by the caller's promise.
        unsafe { at.cast::<[f32; WIDTH]>().write_unaligned(self.0) };
    }

    #[inline(always)]
    unsafe fn load_i8(at: *const u8) -> Self {
        // SAFETY: readable by the caller's promise.
        let bytes = unsafe { at.cast::<[i8; WIDTH]>().read_unaligned() };
        Self(bytes.map(f32::from))
    }

    #[inline(always)]
    unsafe fn load_bf16(at: *const bf16) -> Self {
        // SAFETY: readable by the caller's promise.
        let narrow = unsafe { at.cast::<[bf16; WIDTH]>().read_unaligned() };
        Self(narrow.map(|x| f32::from_bits(u32::from(x.to_bits()) << 16)))
    }

    #[inline(always)]
    unsafe fn load_f16(at: *const f16) -> Self {
        // SAFETY: readable by the caller's promise.
        let narrow = unsafe { at.cast::<[f16; WIDTH]>().read_unaligned() };
        Self(narrow.map(f16::to_f32))
    }

    #[inline(always)]
    unsafe fn splat_bf16(at: *const u8, index: usize) -> Self {
        // SAFETY: readable by the caller's promise.
        let bytes = unsafe { at.add(2 * index).cast::<[u8; 2]>().read() };
        Self([half::bf16::from_le_bytes(bytes).to_f32(); WIDTH])
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] * other.0[i]))
    }

    #[inline(always)]
    unsafe fn fma(self, factor: Self, term: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] * factor.0[i] + term.0[i]))
    }

    #[inline(always)]
    unsafe fn load_words(at: *const u8) -> [u32; WIDTH] {
        // SAFETY: readable by the caller's promise.
        unsafe { at.cast::<[u32; WIDTH]>().read_unaligned() }.map(u32::from_le)
    }

    #[inline(always)]
    unsafe fn upper(words: [u32; WIDTH]) -> [u32; WIDTH] {
        words.map(|word| word >> 16)
    }

    #[inline(always)]
    unsafe fn masked(words: [u32; WIDTH], mask: i32) -> Self {
        Self(words.map(|word| (word as i32 & mask) as f32))
    }

    #[inline(always)]
    unsafe fn looked_up(words: [u32; WIDTH], nibble: usize) -> Self {
        Self(words.map(|word| MXFP4_FLOATS[(word >> (4 * nibble) & 0xF) as usize]))
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx2Half, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{LANES, Lanes, MXFP4_FLOATS};
    use half::{bf16, f16};
    use std::arch::x86_64::*;

    /// One register of eight.
    #[derive(Clone, Copy)]
    pub struct Avx2Half(pub(in crate::cpu) __m256);

    impl Avx2Half {
        /// The first or the second bf16 of each pair.
        ///
        /// # Safety
        /// See [`Lanes::zero`].
        #[inline(always)]
        unsafe fn of_pairs(pairs: __m256i, first: bool) -> Self {
            // SAFETY: the caller's promise.
            unsafe {
                let bits = if first {
                    _mm256_slli_epi32::<16>(pairs)
                } else {
                    _mm256_and_si256(pairs, _mm256_set1_epi32(0xFFFF_0000u32 as i32))
                };
                Self(_mm256_castsi256_ps(bits))
            }
        }
    }

    impl Lanes for Avx2Half {
        const WIDTH: usize = LANES / 2;
        type Words = __m256i;

        #[inline(always)]
        fn prefetch(at: *const u8) {
            // SAFETY: a prefetch reads nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
        }

        #[inline(always)]
        fn prefetch_far(at: *const u8) {
            // SAFETY: as above.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
        }

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(_mm256_setzero_ps()) }
        }

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(_mm256_set1_ps(value)) }
        }

        #[inline(always)]
        unsafe fn load(at: *const f32) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(_mm256_loadu_ps(at)) }
        }

        #[inline(always)]
        unsafe fn store(self, at: *mut f32) {
            // SAFETY: the caller's promise.
            unsafe { _mm256_storeu_ps(at, self.0) };
        }

        #[inline(always)]
        unsafe fn load_i8(at: *const u8) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast())))) }
        }

        #[inline(always)]
        unsafe fn load_bf16(at: *const bf16) -> Self {
            // SAFETY: the caller's promise.
            unsafe {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
                Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits)))
            }
        }

        #[inline(always)]
        unsafe fn load_bf16_apart(run: *const bf16, part: usize) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self::of_pairs(_mm256_loadu_si256(run.cast()), part == 0) }
        }

        #[inline(always)]
        unsafe fn load_f16(at: *const f16) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(_mm256_cvtph_ps(_mm_loadu_si128(at.cast()))) }
        }

        #[inline(always)]
        unsafe fn splat_bf16(at: *const u8, index: usize) -> Self {
            // SAFETY: the caller's promise.
            unsafe {
                let pair = _mm256_set1_epi32(at.add(index / 2 * 4).cast::<i32>().read_unaligned());
                Self::of_pairs(pair, index.is_multiple_of(2))
            }
        }

        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(_mm256_mul_ps(self.0, other.0)) }
        }

        #[inline(always)]
        unsafe fn fma(self, factor: Self, term: Self) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(_mm256_fmadd_ps(self.0, factor.0, term.0)) }
        }

        #[inline(always)]
        unsafe fn load_words(at: *const u8) -> __m256i {
            // SAFETY: the caller's promise.
            unsafe { _mm256_loadu_si256(at.cast()) }
        }

        #[inline(always)]
        unsafe fn upper(words: __m256i) -> __m256i {
            // SAFETY: the caller's promise.
            unsafe { _mm256_srli_epi32::<16>(words) }
        }

        #[inline(always)]
        unsafe fn masked(words: __m256i, mask: i32) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(_mm256_cvtepi32_ps(_mm256_and_si256(words, _mm256_set1_epi32(mask)))) }
        }

        #[inline(always)]
        unsafe fn looked_up(words: __m256i, nibble: usize) -> Self {
            // SAFETY: the caller's promise; half of the table is eight floats.
            unsafe {
                // The lowest three bits of a lane choose one of eight; the fourth is the sign.
                let places = _mm256_srl_epi32(words, _mm_cvtsi32_si128(4 * nibble as i32));
                let sizes = _mm256_permutevar8x32_ps(_mm256_loadu_ps(MXFP4_FLOATS.as_ptr()), places);
                let signs = _mm256_and_si256(_mm256_slli_epi32::<28>(places), _mm256_set1_epi32(i32::MIN));
                Self(_mm256_or_ps(sizes, _mm256_castsi256_ps(signs)))
            }
        }
    }

    /// The sums of the lanes of four, with as few steps as for one and a half of them.
    ///
    /// # Safety
    /// See [`Lanes::zero`].
    #[inline(always)]
    unsafe fn sums_of_eight(four: [__m256; 4]) -> [f32; 4] {
        // SAFETY: the caller's promise.
        unsafe {
            // Not by `map`, whose closure is not always compiled into its caller and then not for its instructions.
            let halves = [
                [_mm256_castps256_ps128(four[0]), _mm256_extractf128_ps::<1>(four[0])],
                [_mm256_castps256_ps128(four[1]), _mm256_extractf128_ps::<1>(four[1])],
                [_mm256_castps256_ps128(four[2]), _mm256_extractf128_ps::<1>(four[2])],
                [_mm256_castps256_ps128(four[3]), _mm256_extractf128_ps::<1>(four[3])],
            ];
            let (a, b) = (_mm_add_ps(halves[0][0], halves[0][1]), _mm_add_ps(halves[1][0], halves[1][1]));
            let (c, d) = (_mm_add_ps(halves[2][0], halves[2][1]), _mm_add_ps(halves[3][0], halves[3][1]));
            let ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
            let cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
            let mut sums = [0.0; 4];
            _mm_storeu_ps(sums.as_mut_ptr(), _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
            sums
        }
    }

    /// Two registers of eight.
    #[derive(Clone, Copy)]
    pub struct Avx2(Avx2Half, Avx2Half);

    impl Lanes for Avx2 {
        const WIDTH: usize = LANES;
        type Words = (__m256i, __m256i);

        #[inline(always)]
        fn prefetch(at: *const u8) {
            Avx2Half::prefetch(at);
        }

        #[inline(always)]
        fn prefetch_far(at: *const u8) {
            Avx2Half::prefetch_far(at);
        }

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(Avx2Half::zero(), Avx2Half::zero()) }
        }

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(Avx2Half::splat(value), Avx2Half::splat(value)) }
        }

        #[inline(always)]
        unsafe fn load(at: *const f32) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(Avx2Half::load(at), Avx2Half::load(at.add(LANES / 2))) }
        }

        #[inline(always)]
        unsafe fn store(self, at: *mut f32) {
            // SAFETY: the caller's promise.
            unsafe {
                self.0.store(at);
                self.1.store(at.add(LANES / 2));
            }
        }

        #[inline(always)]
        unsafe fn load_i8(at: *const u8) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(Avx2Half::load_i8(at), Avx2Half::load_i8(at.add(LANES / 2))) }
        }

        #[inline(always)]
        unsafe fn load_bf16(at: *const bf16) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(Avx2Half::load_bf16(at), Avx2Half::load_bf16(at.add(LANES / 2))) }
        }

        #[inline(always)]
        unsafe fn load_f16(at: *const f16) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(Avx2Half::load_f16(at), Avx2Half::load_f16(at.add(LANES / 2))) }
        }

        #[inline(always)]
        unsafe fn splat_bf16(at: *const u8, index: usize) -> Self {
            // SAFETY: the caller's promise.
            let half = unsafe { Avx2Half::splat_bf16(at, index) };
            Self(half, half)
        }

        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(self.0.mul(other.0), self.1.mul(other.1)) }
        }

        #[inline(always)]
        unsafe fn fma(self, factor: Self, term: Self) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(self.0.fma(factor.0, term.0), self.1.fma(factor.1, term.1)) }
        }

        #[inline(always)]
        unsafe fn sums(four: [Self; 4]) -> [f32; 4] {
            // SAFETY: the caller's promise.
            unsafe {
                let [a, b, c, d] = four;
                sums_of_eight([
                    _mm256_add_ps(a.0.0, a.1.0),
                    _mm256_add_ps(b.0.0, b.1.0),
                    _mm256_add_ps(c.0.0, c.1.0),
                    _mm256_add_ps(d.0.0, d.1.0),
                ])
            }
        }

        #[inline(always)]
        unsafe fn load_words(at: *const u8) -> Self::Words {
            // SAFETY: the caller's promise.
            unsafe { (Avx2Half::load_words(at), Avx2Half::load_words(at.add(2 * LANES))) }
        }

        #[inline(always)]
        unsafe fn upper(words: Self::Words) -> Self::Words {
            // SAFETY: the caller's promise.
            unsafe { (Avx2Half::upper(words.0), Avx2Half::upper(words.1)) }
        }

        #[inline(always)]
        unsafe fn masked(words: Self::Words, mask: i32) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(Avx2Half::masked(words.0, mask), Avx2Half::masked(words.1, mask)) }
        }

        #[inline(always)]
        unsafe fn looked_up(words: Self::Words, nibble: usize) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(Avx2Half::looked_up(words.0, nibble), Avx2Half::looked_up(words.1, nibble)) }
        }
    }

    /// One register.
    #[derive(Clone, Copy)]
    pub struct Avx512(pub(in crate::cpu) __m512);

    impl Avx512 {
        /// The sum of its halves.
        ///
        /// # Safety
        /// See [`Lanes::zero`].
        #[inline(always)]
        unsafe fn halves(self) -> __m256 {
            // SAFETY: the caller's promise.
            unsafe {
                let upper = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(self.0)));
                _mm256_add_ps(_mm512_castps512_ps256(self.0), upper)
            }
        }
    }

    impl Lanes for Avx512 {
        const WIDTH: usize = LANES;
        type Words = __m512i;

        #[inline(always)]
        fn prefetch(at: *const u8) {
            // SAFETY: a prefetch reads nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
        }

        #[inline(always)]
        fn prefetch_far(at: *const u8) {
            // SAFETY: as above.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
        }

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(_mm512_setzero_ps()) }
        }

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(_mm512_set1_ps(value)) }
        }

        #[inline(always)]
        unsafe fn load(at: *const f32) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(_mm512_loadu_ps(at)) }
        }

        #[inline(always)]
        unsafe fn store(self, at: *mut f32) {
            // SAFETY: the caller's promise.
            unsafe { _mm512_storeu_ps(at, self.0) };
        }

        #[inline(always)]
        unsafe fn load_i8(at: *const u8) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast())))) }
        }

        #[inline(always)]
        unsafe fn load_bf16(at: *const bf16) -> Self {
            // SAFETY: the caller's promise.
            unsafe {
                let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
                Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)))
            }
        }

        #[inline(always)]
        unsafe fn load_f16(at: *const f16) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(at.cast()))) }
        }

        #[inline(always)]
        unsafe fn splat_bf16(at: *const u8, index: usize) -> Self {
            // SAFETY: the caller's promise.
            unsafe {
                let pair = _mm512_set1_epi32(at.add(index / 2 * 4).cast::<i32>().read_unaligned());
                let bits = if index.is_multiple_of(2) {
                    _mm512_slli_epi32::<16>(pair)
                } else {
                    _mm512_and_si512(pair, _mm512_set1_epi32(0xFFFF_0000u32 as i32))
                };
                Self(_mm512_castsi512_ps(bits))
            }
        }

        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(_mm512_mul_ps(self.0, other.0)) }
        }

        #[inline(always)]
        unsafe fn fma(self, factor: Self, term: Self) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(_mm512_fmadd_ps(self.0, factor.0, term.0)) }
        }

        #[inline(always)]
        unsafe fn sums(four: [Self; 4]) -> [f32; 4] {
            // SAFETY: the caller's promise.
            unsafe {
                let [a, b, c, d] = four;
                sums_of_eight([a.halves(), b.halves(), c.halves(), d.halves()])
            }
        }

        #[inline(always)]
        unsafe fn load_words(at: *const u8) -> Self::Words {
            // SAFETY: the caller's promise.
            unsafe { _mm512_loadu_si512(at.cast()) }
        }

        #[inline(always)]
        unsafe fn upper(words: Self::Words) -> Self::Words {
            // SAFETY: the caller's promise.
            unsafe { _mm512_srli_epi32::<16>(words) }
        }

        #[inline(always)]
        unsafe fn masked(words: Self::Words, mask: i32) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(_mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(mask)))) }
        }

        #[inline(always)]
        unsafe fn looked_up(words: __m512i, nibble: usize) -> Self {
            // SAFETY: the caller's promise; the table is sixteen floats.
            unsafe {
                // The lowest four bits of a lane choose one of sixteen.
                let places = _mm512_srl_epi32(words, _mm_cvtsi32_si128(4 * nibble as i32));
                Self(_mm512_permutexvar_ps(places, _mm512_loadu_ps(MXFP4_FLOATS.as_ptr())))
            }
        }
    }
}
