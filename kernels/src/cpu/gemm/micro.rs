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
//! Those of pairs of bf16 are in [`pairs`](super::pairs). Where fewer columns are left than a panel of `b` has, fewer vectors of it are
//! multiplied: half of the heads' sizes and many a hidden size are no multiple of 48.

use crate::cpu::Isa;
use crate::cpu::isa::Level;

/// `(words, a panel, b panel, c, stride of c, add to c)`.
pub(super) type Run<W> = unsafe fn(usize, *const W, *const W, *mut f32, usize, bool);

/// The innermost product of one instruction set, of panels of words `W`: an f32 for each k, or a
/// [`Pair`](super::pairs::Pair) for two.
#[derive(Clone, Copy)]
pub struct Micro<W: 'static = f32> {
    /// Rows of a micro tile.
    pub mr: usize,
    /// Columns of a micro tile.
    pub nr: usize,
    /// Columns of a vector.
    pub lanes: usize,
    /// With one vector of columns, two, … as many as a panel has.
    pub(super) runs: &'static [Run<W>],
}

impl Micro {
    /// The one for `isa`.
    pub fn of(isa: Isa) -> Self {
        match isa.level() {
            Level::Generic => Self::generic::<4, 8>(),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => Self { mr: 6, nr: 16, lanes: 8, runs: &[x86::avx2::<1>, x86::avx2::<2>] },
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                let runs: &[Run<f32>] = &[x86::avx512::<1>, x86::avx512::<2>, x86::avx512::<3>];
                Self { mr: 8, nr: 48, lanes: 16, runs }
            }
        }
    }

    /// One for any machine, of any size up to [`TILE_MAX`](super::TILE_MAX).
    pub fn generic<const MR: usize, const NR: usize>() -> Self {
        Self { mr: MR, nr: NR, lanes: NR, runs: &[generic::<MR, NR>] }
    }
}

impl<W: Copy> Micro<W> {
    /// The columns that are multiplied where `cols` are left: whole vectors of at most a panel.
    #[inline]
    pub fn width(self, cols: usize) -> usize {
        cols.next_multiple_of(self.lanes).min(self.nr)
    }

    /// Columns of whole panels that take as long as `cols` do. The sums of a single vector wait for one another.
    pub fn paid(self, cols: usize) -> usize {
        let (whole, rest) = (cols / self.nr * self.nr, cols % self.nr);
        whole + if rest == 0 { 0 } else { self.width(rest).max(self.nr / 2) }
    }

    /// `c[mr, width] (+)= Σ_k a[k, mr]·b[k, ..width]`, k ascending from zero, then added to `c` if asked. The rows of `b` are `nr` apart.
    ///
    /// # Safety
    /// `width` is what [`width`](Self::width) gives for some columns; `a` holds `words·mr` and `b` `words·nr` words; `c` is valid for mr
    /// rows of `width` floats, `stride` apart.
    #[inline]
    pub unsafe fn run(
        self,
        width: usize,
        words: usize,
        a: *const W,
        b: *const W,
        (c, stride): (*mut f32, usize),
        add: bool,
    ) {
        let run = self.runs[width / self.lanes - 1];
        // SAFETY: the caller's promise; `runs` were chosen for an instruction set that the processor has.
        unsafe { run(words, a, b, c, stride, add) }
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
            pub unsafe fn $name<const VECTORS: usize>(
                depth: usize,
                mut a: *const f32,
                mut b: *const f32,
                c: *mut f32,
                stride: usize,
                add: bool,
            ) {
                // SAFETY: every pointer stays within the panels and the tile, by the caller's promise.
                unsafe {
                    let mut sums = [[$zero(); VECTORS]; $mr];
                    for i in 0..$mr {
                        for v in 0..VECTORS {
                            prefetch(c.wrapping_add(i * stride + v * $lanes));
                        }
                    }
                    for _ in 0..depth {
                        let row: [_; VECTORS] = std::array::from_fn(|v| $load(b.add(v * $lanes)));
                        for i in 0..$mr {
                            let factor = $splat(*a.add(i));
                            for v in 0..VECTORS {
                                sums[i][v] = $fma(factor, row[v], sums[i][v]);
                            }
                        }
                        a = a.add($mr);
                        b = b.add($vectors * $lanes);
                    }
                    for i in 0..$mr {
                        for v in 0..VECTORS {
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
