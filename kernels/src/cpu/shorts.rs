//! Groups of 32 16-bit integers, for products of codes: two products are added in one instruction where the processor has it.
//!
//! Sums of integers are exact; how many lanes they are spread over is that of the instruction set.

use super::lanes::{Generic, Lanes};
use crate::quantized::GROUP;

/// 16-bit integers beside lanes of f32.
pub trait Shorts: Lanes {
    /// As many as a group has codes.
    type Shorts: Copy;

    /// As they lie in memory.
    ///
    /// # Safety
    /// They are readable; the processor has the instruction set. The second goes for every method.
    unsafe fn load_i16(at: *const i16) -> Self::Shorts;

    /// As many signed bytes.
    ///
    /// # Safety
    /// They are readable; see [`load_i16`](Self::load_i16).
    unsafe fn extend_i8(at: *const u8) -> Self::Shorts;

    /// The codes of int4 in a nibble of each: of nibbles 0 to 2 where they lie, `16ᵏ·q` of nibble k; the last is shifted down to `q`.
    ///
    /// # Safety
    /// See [`load_i16`](Self::load_i16).
    unsafe fn nibble(words: Self::Shorts, nibble: usize) -> Self::Shorts;

    /// [`MXFP4_CODES`](crate::quantized::MXFP4_CODES) of the lower nibble of every byte, and of the upper one, each a signed byte in its place.
    ///
    /// # Safety
    /// See [`load_i16`](Self::load_i16).
    unsafe fn look_up(words: Self::Shorts) -> [Self::Shorts; 2];

    /// The signed byte of each: byte 0 times 2⁸, or byte 1 as it is.
    ///
    /// # Safety
    /// See [`load_i16`](Self::load_i16).
    unsafe fn signed_byte(bytes: Self::Shorts, byte: usize) -> Self::Shorts;

    /// Products, each element's in one lane, added to others of it: at least neighbours, `a[2i]·b[2i] + a[2i + 1]·b[2i + 1]`.
    ///
    /// # Safety
    /// See [`load_i16`](Self::load_i16).
    unsafe fn products(a: Self::Shorts, b: Self::Shorts) -> Self::Words;

    /// Signed integers as floats.
    ///
    /// # Safety
    /// See [`load_i16`](Self::load_i16).
    unsafe fn float(words: Self::Words) -> Self;
}

impl Shorts for Generic<8> {
    type Shorts = [i16; GROUP];

    #[inline(always)]
    unsafe fn load_i16(at: *const i16) -> [i16; GROUP] {
        // SAFETY: readable by the caller's promise.
        unsafe { at.cast::<[i16; GROUP]>().read_unaligned() }.map(i16::from_le)
    }

    #[inline(always)]
    unsafe fn extend_i8(at: *const u8) -> [i16; GROUP] {
        // SAFETY: readable by the caller's promise.
        unsafe { at.cast::<[i8; GROUP]>().read_unaligned() }.map(i16::from)
    }

    #[inline(always)]
    unsafe fn nibble(words: [i16; GROUP], nibble: usize) -> [i16; GROUP] {
        words.map(|word| {
            if nibble == 3 {
                (word as u16 >> 12) as i16 - 8
            } else {
                (word & 0xF << (4 * nibble)) - (8 << (4 * nibble))
            }
        })
    }

    #[inline(always)]
    unsafe fn look_up(words: [i16; GROUP]) -> [[i16; GROUP]; 2] {
        // Not in the table, which would be element by element.
        let bytes: [u8; 2 * GROUP] = bytemuck::cast(words);
        [bytemuck::cast(bytes.map(mxfp4)), bytemuck::cast(bytes.map(|byte| mxfp4(byte >> 4)))]
    }

    #[inline(always)]
    unsafe fn signed_byte(bytes: [i16; GROUP], byte: usize) -> [i16; GROUP] {
        bytes.map(|two| if byte == 0 { two << 8 } else { two >> 8 })
    }

    #[inline(always)]
    unsafe fn products(a: [i16; GROUP], b: [i16; GROUP]) -> [u32; 8] {
        let product = |i: usize| i32::from(a[i]) * i32::from(b[i]);
        let neighbours = |i: usize| product(2 * i).wrapping_add(product(2 * i + 1));
        std::array::from_fn(|i| neighbours(i).wrapping_add(neighbours(i + 8)) as u32)
    }

    #[inline(always)]
    unsafe fn float(words: [u32; 8]) -> Self {
        Self(words.map(|word| word as i32 as f32))
    }
}

/// [`MXFP4_CODES`](crate::quantized::MXFP4_CODES) of the lower nibble, as a signed byte.
#[inline(always)]
fn mxfp4(code: u8) -> u8 {
    let (place, sign) = (code & 7, (code >> 3 & 1).wrapping_neg());
    // Steps of one up to 4, of two up to 8, then of four.
    let size = place + place.saturating_sub(4) + 2 * place.saturating_sub(6);
    (size ^ sign).wrapping_sub(sign)
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Shorts;
    use crate::cpu::lanes::{Avx2Half, Avx512};
    use crate::quantized::MXFP4_CODES;
    use std::arch::x86_64::*;

    impl Shorts for Avx2Half {
        type Shorts = [__m256i; 2];

        #[inline(always)]
        unsafe fn load_i16(at: *const i16) -> [__m256i; 2] {
            // SAFETY: the caller's promise.
            unsafe { [_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(16).cast())] }
        }

        #[inline(always)]
        unsafe fn extend_i8(at: *const u8) -> [__m256i; 2] {
            // SAFETY: the caller's promise.
            unsafe {
                [
                    _mm256_cvtepi8_epi16(_mm_loadu_si128(at.cast())),
                    _mm256_cvtepi8_epi16(_mm_loadu_si128(at.add(16).cast())),
                ]
            }
        }

        #[inline(always)]
        unsafe fn nibble(words: [__m256i; 2], nibble: usize) -> [__m256i; 2] {
            // SAFETY: the caller's promise.
            unsafe {
                // No closure: it would not be compiled for the instruction set.
                [half_nibble(words[0], nibble), half_nibble(words[1], nibble)]
            }
        }

        #[inline(always)]
        unsafe fn look_up(words: [__m256i; 2]) -> [[__m256i; 2]; 2] {
            // SAFETY: the caller's promise.
            unsafe {
                let (first, second) = (half_look_up(words[0]), half_look_up(words[1]));
                [[first[0], second[0]], [first[1], second[1]]]
            }
        }

        #[inline(always)]
        unsafe fn signed_byte(bytes: [__m256i; 2], byte: usize) -> [__m256i; 2] {
            // SAFETY: the caller's promise.
            unsafe {
                if byte == 0 {
                    return [_mm256_slli_epi16::<8>(bytes[0]), _mm256_slli_epi16::<8>(bytes[1])];
                }
                [_mm256_srai_epi16::<8>(bytes[0]), _mm256_srai_epi16::<8>(bytes[1])]
            }
        }

        #[inline(always)]
        unsafe fn products(a: [__m256i; 2], b: [__m256i; 2]) -> __m256i {
            // SAFETY: the caller's promise.
            unsafe { _mm256_add_epi32(_mm256_madd_epi16(a[0], b[0]), _mm256_madd_epi16(a[1], b[1])) }
        }

        #[inline(always)]
        unsafe fn float(words: __m256i) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(_mm256_cvtepi32_ps(words)) }
        }
    }

    /// [`Shorts::nibble`] of half a group.
    ///
    /// # Safety
    /// The processor has AVX2.
    #[inline(always)]
    unsafe fn half_nibble(words: __m256i, nibble: usize) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe {
            if nibble == 3 {
                return _mm256_sub_epi16(_mm256_srli_epi16::<12>(words), _mm256_set1_epi16(8));
            }
            let kept = _mm256_and_si256(words, _mm256_set1_epi16(0xF << (4 * nibble)));
            _mm256_sub_epi16(kept, _mm256_set1_epi16(8 << (4 * nibble)))
        }
    }

    /// [`Shorts::look_up`] of half a group.
    ///
    /// # Safety
    /// The processor has AVX2.
    #[inline(always)]
    unsafe fn half_look_up(words: __m256i) -> [__m256i; 2] {
        // SAFETY: the caller's promise; the table is sixteen bytes.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(MXFP4_CODES.as_ptr().cast()));
            let nibbles = _mm256_set1_epi8(0xF);
            [
                _mm256_shuffle_epi8(table, _mm256_and_si256(words, nibbles)),
                _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16::<4>(words), nibbles)),
            ]
        }
    }

    impl Shorts for Avx512 {
        type Shorts = __m512i;

        #[inline(always)]
        unsafe fn load_i16(at: *const i16) -> __m512i {
            // SAFETY: the caller's promise.
            unsafe { _mm512_loadu_si512(at.cast()) }
        }

        #[inline(always)]
        unsafe fn extend_i8(at: *const u8) -> __m512i {
            // SAFETY: the caller's promise.
            unsafe { _mm512_cvtepi8_epi16(_mm256_loadu_si256(at.cast())) }
        }

        #[inline(always)]
        unsafe fn nibble(words: __m512i, nibble: usize) -> __m512i {
            // SAFETY: the caller's promise.
            unsafe {
                if nibble == 3 {
                    return _mm512_sub_epi16(_mm512_srli_epi16::<12>(words), _mm512_set1_epi16(8));
                }
                let kept = _mm512_and_si512(words, _mm512_set1_epi16(0xF << (4 * nibble)));
                _mm512_sub_epi16(kept, _mm512_set1_epi16(8 << (4 * nibble)))
            }
        }

        #[inline(always)]
        unsafe fn look_up(words: __m512i) -> [__m512i; 2] {
            // SAFETY: the caller's promise; the table is sixteen bytes.
            unsafe {
                let table = _mm512_broadcast_i32x4(_mm_loadu_si128(MXFP4_CODES.as_ptr().cast()));
                let nibbles = _mm512_set1_epi8(0xF);
                [
                    _mm512_shuffle_epi8(table, _mm512_and_si512(words, nibbles)),
                    _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16::<4>(words), nibbles)),
                ]
            }
        }

        #[inline(always)]
        unsafe fn signed_byte(bytes: __m512i, byte: usize) -> __m512i {
            // SAFETY: the caller's promise.
            unsafe { if byte == 0 { _mm512_slli_epi16::<8>(bytes) } else { _mm512_srai_epi16::<8>(bytes) } }
        }

        #[inline(always)]
        unsafe fn products(a: __m512i, b: __m512i) -> __m512i {
            // SAFETY: the caller's promise.
            unsafe { _mm512_madd_epi16(a, b) }
        }

        #[inline(always)]
        unsafe fn float(words: __m512i) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Self(_mm512_cvtepi32_ps(words)) }
        }
    }
}
