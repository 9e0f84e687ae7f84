//! Which vector instructions to use, decided once when a kernel set is made.

/// An instruction set that this machine has. A value is only made after asking the processor, which is what makes
/// calling code compiled for it sound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Isa(Level);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    Generic,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// What every machine of this architecture has.
    pub const GENERIC: Self = Self(Level::Generic);

    /// All that this machine has, best last.
    pub fn available() -> Vec<Self> {
        let mut all = vec![Self::GENERIC];
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx2") && has!("fma") && has!("f16c") {
                all.push(Self(Level::Avx2));
                if has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") {
                    all.push(Self(Level::Avx512));
                }
            }
        }
        all
    }

    /// The best that this machine has.
    pub fn best() -> Self {
        Self::available().pop().unwrap_or(Self::GENERIC)
    }

    /// Its name: `generic`, `avx2` or `avx512`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Level::Generic => "generic",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
        }
    }

    pub(super) fn level(self) -> Level {
        self.0
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
