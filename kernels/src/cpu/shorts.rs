//! Sixteen 16-bit integers, for products of codes: two products are added in one instruction where the processor has it.
//!
//! Sums of integers are exact, so they are the same on every instruction set.

use super::lanes::{Generic, Lanes};

/// Sixteen 16-bit integers beside eight lanes of f32.
pub trait Shorts: Lanes {
    /// Sixteen.
    type Shorts: Copy;

    /// As they lie in memory.
    ///
    /// # Safety
    /// They are readable; the processor has the instruction set. The second goes for every method.
    unsafe fn load_i16(at: *const i16) -> Self::Shorts;

    /// Sixteen signed bytes.
    ///
    /// # Safety
    /// They are readable; see [`load_i16`](Self::load_i16).
    unsafe fn extend_i8(at: *const u8) -> Self::Shorts;

    /// The codes of int4 in a nibble of each: of nibbles 0 to 2 where they lie, `16ᵏ·q` of nibble k; the last is shifted down to `q`.
    ///
    /// # Safety
    /// See [`load_i16`](Self::load_i16).
    unsafe fn nibble(words: Self::Shorts, nibble: usize) -> Self::Shorts;

    /// Products of neighbours, added: element i is `a[2i]·b[2i] + a[2i + 1]·b[2i + 1]`.
    ///
    /// # Safety
    /// See [`load_i16`](Self::load_i16).
    unsafe fn products(a: Self::Shorts, b: Self::Shorts) -> Self::Words;

    /// Sums.
    ///
    /// # Safety
    /// See [`load_i16`](Self::load_i16).
    unsafe fn add_words(a: Self::Words, b: Self::Words) -> Self::Words;

    /// Signed integers as floats.
    ///
    /// # Safety
    /// See [`load_i16`](Self::load_i16).
    unsafe fn float(words: Self::Words) -> Self;
}

impl Shorts for Generic<8> {
    type Shorts = [i16; 16];

    #[inline(always)]
    unsafe fn load_i16(at: *const i16) -> [i16; 16] {
        // SAFETY: readable by the caller's promise.
        unsafe { at.cast::<[i16; 16]>().read_unaligned() }.map(i16::from_le)
    }

    #[inline(always)]
    unsafe fn extend_i8(at: *const u8) -> [i16; 16] {
        // SAFETY: readable by the caller's promise.
        unsafe { at.cast::<[i8; 16]>().read_unaligned() }.map(i16::from)
    }

    #[inline(always)]
    unsafe fn nibble(words: [i16; 16], nibble: usize) -> [i16; 16] {
        words.map(|word| {
            if nibble == 3 {
                (word as u16 >> 12) as i16 - 8
            } else {
                (word & 0xF << (4 * nibble)) - (8 << (4 * nibble))
            }
        })
    }

    #[inline(always)]
    unsafe fn products(a: [i16; 16], b: [i16; 16]) -> [u32; 8] {
        let product = |i: usize| i32::from(a[i]) * i32::from(b[i]);
        std::array::from_fn(|i| product(2 * i).wrapping_add(product(2 * i + 1)) as u32)
    }

    #[inline(always)]
    unsafe fn add_words(a: [u32; 8], b: [u32; 8]) -> [u32; 8] {
        std::array::from_fn(|i| a[i].wrapping_add(b[i]))
    }

    #[inline(always)]
    unsafe fn float(words: [u32; 8]) -> Self {
        Self(words.map(|word| word as i32 as f32))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Shorts;
    use crate::cpu::lanes::Avx2Half;
    use std::arch::x86_64::*;

    impl Shorts for Avx2Half {
        type Shorts = __m256i;

        #[inline(always)]
        unsafe fn load_i16(at: *const i16) -> __m256i {
            // SAFETY: the caller's promise.
            unsafe { _mm256_loadu_si256(at.cast()) }
        }

        #[inline(always)]
        unsafe fn extend_i8(at: *const u8) -> __m256i {
            // SAFETY: the caller's promise.
            unsafe { _mm256_cvtepi8_epi16(_mm_loadu_si128(at.cast())) }
        }

        #[inline(always)]
        unsafe fn nibble(words: __m256i, nibble: usize) -> __m256i {
            // SAFETY: the caller's promise.
            unsafe {
                if nibble == 3 {
                    return _mm256_sub_epi16(_mm256_srli_epi16::<12>(words), _mm256_set1_epi16(8));
                }
                let kept = _mm256_and_si256(words, _mm256_set1_epi16(0xF << (4 * nibble)));
                _mm256_sub_epi16(kept, _mm256_set1_epi16(8 << (4 * nibble)))
            }
        }

        #[inline(always)]
        unsafe fn products(a: __m256i, b: __m256i) -> __m256i {
            // SAFETY: the caller's promise.
            unsafe { _mm256_madd_epi16(a, b) }
        }

        #[inline(always)]
        unsafe fn add_words(a: __m256i, b: __m256i) -> __m256i {
            // SAFETY: the caller's promise.
            unsafe { _mm256_add_epi32(a, b) }
        }

        #[inline(always)]
        unsafe fn float(words: __m256i) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(_mm256_cvtepi32_ps(words)) }
        }
    }
}
