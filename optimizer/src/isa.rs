//! Which instruction set the loops over parameters run on.
//!
//! The loops are plain Rust with `#[inline(always)]` bodies; `pulp` instantiates them once per instruction set
//! and keeps the one `unsafe` fact, that the processor has it, behind a token. Nothing is contracted into fused
//! multiply-adds, so that every instruction set gives the same bits.

use std::fmt;

/// An instruction set that this processor has.
#[derive(Debug, Clone, Copy)]
pub struct Isa(Token);

#[derive(Debug, Clone, Copy)]
enum Token {
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2(pulp::x86::V3),
    #[cfg(target_arch = "x86_64")]
    Avx512(pulp::x86::V4),
}

impl Isa {
    /// The widest that this processor has. The processor is asked once per process.
    pub fn best() -> Self {
        Self::available().last().unwrap_or(Self(Token::Baseline))
    }

    /// All that this processor has, the narrowest first: what the crate was compiled for, then AVX2, then AVX-512.
    pub fn available() -> impl Iterator<Item = Self> {
        let baseline = std::iter::once(Self(Token::Baseline));
        #[cfg(target_arch = "x86_64")]
        let wider = {
            let avx2 = pulp::x86::V3::try_new().map(Token::Avx2);
            let avx512 = pulp::x86::V4::try_new().map(Token::Avx512);
            avx2.into_iter().chain(avx512).map(Self)
        };
        #[cfg(not(target_arch = "x86_64"))]
        let wider = std::iter::empty();
        baseline.chain(wider)
    }

    /// Runs `pass` compiled for this instruction set.
    #[inline(always)]
    pub(crate) fn run<P: pulp::NullaryFnOnce>(self, pass: P) -> P::Output {
        match self.0 {
            Token::Baseline => pass.call(),
            #[cfg(target_arch = "x86_64")]
            Token::Avx2(token) => token.vectorize(pass),
            #[cfg(target_arch = "x86_64")]
            Token::Avx512(token) => token.vectorize(pass),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self.0 {
            Token::Baseline => "baseline",
            #[cfg(target_arch = "x86_64")]
            Token::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Token::Avx512(_) => "avx512",
        })
    }
}
