//! Which vector instructions to use, decided once when a kernel set is made.

/// An instruction set that this machine has. A value is only made after asking the processor, which is what makes
/// calling code compiled for it sound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Isa {
    level: Level,
    pairs: Option<Pairs>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    Generic,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// What multiplies pairs of bf16, in products of two bf16 matrices. Nothing else asks for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pairs {
    /// The instruction's definition, operation by operation.
    Emulated,
    /// `vdpbf16ps` on 512-bit registers.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
}

impl Isa {
    /// What every machine of this architecture has.
    pub const GENERIC: Self = Self::of(Level::Generic);

    const fn of(level: Level) -> Self {
        Self { level, pairs: None }
    }

    /// All that this machine has, best last.
    pub fn available() -> Vec<Self> {
        let mut all = vec![Self::GENERIC];
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx2") && has!("fma") && has!("f16c") {
                all.push(Self::of(Level::Avx2));
                if has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") {
                    all.push(Self::of(Level::Avx512));
                    if has!("avx512bf16") {
                        all.push(Self { level: Level::Avx512, pairs: Some(Pairs::Avx512Bf16) });
                    }
                }
            }
        }
        all
    }

    /// The best that this machine has.
    pub fn best() -> Self {
        Self::available().pop().unwrap_or(Self::GENERIC)
    }

    /// This one with products of bf16 as [`best`](Self::best) has them where the processor multiplies pairs of bf16, but without
    /// the instruction: slow, and for tests of all that is around it.
    #[doc(hidden)]
    pub fn with_emulated_pairs(self) -> Self {
        Self { pairs: Some(Pairs::Emulated), ..self }
    }

    /// Its name: `generic`, `avx2`, `avx512` or `avx512bf16`; pairs that are emulated are named after it.
    pub fn name(self) -> &'static str {
        match (self.level, self.pairs) {
            (Level::Generic, None) => "generic",
            (Level::Generic, Some(_)) => "generic+pairs",
            #[cfg(target_arch = "x86_64")]
            (Level::Avx2, None) => "avx2",
            #[cfg(target_arch = "x86_64")]
            (Level::Avx2, Some(_)) => "avx2+pairs",
            #[cfg(target_arch = "x86_64")]
            (Level::Avx512, None) => "avx512",
            #[cfg(target_arch = "x86_64")]
            (Level::Avx512, Some(Pairs::Emulated)) => "avx512+pairs",
            #[cfg(target_arch = "x86_64")]
            (Level::Avx512, Some(Pairs::Avx512Bf16)) => "avx512bf16",
        }
    }

    pub(super) fn level(self) -> Level {
        self.level
    }

    pub(super) fn pairs(self) -> Option<Pairs> {
        self.pairs
    }
}

/// Defines a function that takes an [`Isa`] first and runs a body compiled for it. The body is ordinary safe code that
/// the compiler vectorizes; in it `FMA` tells whether multiply and add may be fused (see [`fma`]).
macro_rules! multiversion {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $out:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name(isa: $crate::cpu::Isa, $($arg: $ty),*) $(-> $out)? {
            #[inline(always)]
            #[allow(clippy::extra_unused_type_parameters, reason = "not every body multiplies")]
            fn body<const FMA: bool>($($arg: $ty),*) $(-> $out)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($arg: $ty),*) $(-> $out)? {
                body::<true>($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            fn avx512($($arg: $ty),*) $(-> $out)? {
                body::<true>($($arg),*)
            }

            match isa.level() {
                $crate::cpu::isa::Level::Generic => body::<false>($($arg),*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: an `Isa` exists only when the processor has its instructions.
                $crate::cpu::isa::Level::Avx2 => unsafe { avx2($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                $crate::cpu::isa::Level::Avx512 => unsafe { avx512($($arg),*) },
            }
        }
    };
}

/// `a·b + c`, fused where the instruction exists. Without it `f32::mul_add` would be a library call per element.
#[inline(always)]
pub(super) fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}
