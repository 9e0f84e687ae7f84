//! The innermost product: one micro tile of the result, held in registers over a block of k.
//!
//! Tile sizes fill the register file: accumulators, one row of `b`, one broadcast element of `a`.
//!
//! | instruction set | mr × nr | registers |
//! |---|---|---|
//! | generic (SSE2) | 4 × 8 | 8 + 2 + 1 of 16 |
//! | AVX2 | 6 × 16 | 12 + 2 + 1 of 16 |
//! | AVX-512 | 8 × 48 | 24 + 3 + 1 of 32 |
//!
//! Those of pairs of bf16 are in [`pairs`](super::pairs).

use crate::cpu::Isa;
use crate::cpu::isa::Level;

/// `(words, a panel, b panel, c, stride of c, add to c)`.
type Run<W> = unsafe fn(usize, *const W, *const W, *mut f32, usize, bool);

/// The innermost product of one instruction set, of panels of words `W`: an f32 for each k, or a
/// [`Pair`](super::pairs::Pair) for two.
#[derive(Clone, Copy)]
pub struct Micro<W = f32> {
    /// Rows of a micro tile.
    pub mr: usize,
    /// Columns of a micro tile.
    pub nr: usize,
    pub(super) run: Run<W>,
}

impl Micro {
    /// The one for `isa`.
    pub fn of(isa: Isa) -> Self {
        match isa.level() {
            Level::Generic => Self::generic::<4, 8>(),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => Self { mr: 6, nr: 16, run: x86::avx2 },
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => Self { mr: 8, nr: 48, run: x86::avx512 },
        }
    }

    /// One for any machine, of any size up to [`TILE_MAX`](super::TILE_MAX).
    pub fn generic<const MR: usize, const NR: usize>() -> Self {
        Self { mr: MR, nr: NR, run: generic::<MR, NR> }
    }
}

impl<W> Micro<W> {
    /// `c[mr, nr] (+)= Σ_k a[k, mr]·b[k, nr]`, k ascending from zero, then added to `c` if asked.
    ///
    /// # Safety
    /// `a` holds `words·mr` and `b` `words·nr` words; `c` is valid for mr rows of nr floats, `stride` apart.
    #[inline]
    pub unsafe fn run(self, words: usize, a: *const W, b: *const W, c: *mut f32, stride: usize, add: bool) {
        // SAFETY: the caller's promise; `run` was chosen for an instruction set that the processor has.
        unsafe { (self.run)(words, a, b, c, stride, add) }
    }
}

/// # Safety
/// See [`Micro::run`].
unsafe fn generic<const MR: usize, const NR: usize>(
    depth: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    stride: usize,
    add: bool,
) {
    let mut sums = [[0.0f32; NR]; MR];
    for k in 0..depth {
        // SAFETY: within the panels.
        let (a, b) = unsafe { (&*a.add(k * MR).cast::<[f32; MR]>(), &*b.add(k * NR).cast::<[f32; NR]>()) };
        for i in 0..MR {
            for j in 0..NR {
                sums[i][j] += a[i] * b[j];
            }
        }
    }
    for (i, sums) in sums.iter().enumerate() {
        // SAFETY: row i of the tile.
        let row = unsafe { &mut *c.add(i * stride).cast::<[f32; NR]>() };
        for (out, sum) in row.iter_mut().zip(sums) {
            *out = if add { *out + sum } else { *sum };
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::pack::prefetch;
    use std::arch::x86_64::*;

    macro_rules! micro {
        ($name:ident, $features:literal, $mr:literal x $vectors:literal of $lanes:literal,
         $zero:ident, $load:ident, $store:ident, $splat:ident, $fma:ident, $add:ident) => {
            /// # Safety
            /// See [`Micro::run`](super::Micro::run); the processor has the features.
            #[target_feature(enable = $features)]
            pub unsafe fn $name(
                depth: usize,
                mut a: *const f32,
                mut b: *const f32,
                c: *mut f32,
                stride: usize,
                add: bool,
            ) {
                // SAFETY: every pointer stays within the panels and the tile, by the caller's promise.
                unsafe {
                    let mut sums = [[$zero(); $vectors]; $mr];
                    for i in 0..$mr {
                        for v in 0..$vectors {
                            prefetch(c.wrapping_add(i * stride + v * $lanes));
                        }
                    }
                    for _ in 0..depth {
                        let row: [_; $vectors] = std::array::from_fn(|v| $load(b.add(v * $lanes)));
                        for i in 0..$mr {
                            let factor = $splat(*a.add(i));
                            for v in 0..$vectors {
                                sums[i][v] = $fma(factor, row[v], sums[i][v]);
                            }
                        }
                        a = a.add($mr);
                        b = b.add($vectors * $lanes);
                    }
                    for i in 0..$mr {
                        for v in 0..$vectors {
                            let at = c.add(i * stride + v * $lanes);
                            let sum = sums[i][v];
                            $store(at, if add { $add($load(at), sum) } else { sum });
                        }
                    }
                }
            }
        };
    }

    micro!(avx2, "avx2,fma", 6 x 2 of 8, _mm256_setzero_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_set1_ps,
           _mm256_fmadd_ps, _mm256_add_ps);
    micro!(avx512, "avx512f", 8 x 3 of 16, _mm512_setzero_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_set1_ps,
           _mm512_fmadd_ps, _mm512_add_ps);
}
