//! Values of flags: what is not one is said in words, with what is expected instead.

use crate::THREADS_MAX;
use crate::config::ByteSize;
use std::num::{NonZeroU64, NonZeroUsize};
use std::str::FromStr;

/// Where to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceName {
    /// The first card that can be used, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU with this number.
    Cuda(u32),
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|n| n.parse().ok())
                .map(Self::Cuda)
                .ok_or_else(|| "expected auto, cpu or cuda:N".into()),
        }
    }
}

impl std::fmt::Display for DeviceName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(n) => write!(f, "cuda:{n}"),
        }
    }
}

/// Most bytes of host memory for copies of what is on disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskCache(pub u64);

impl FromStr for DiskCache {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self(u64::MAX)),
            "none" => Ok(Self(0)),
            _ => text
                .parse()
                .map(|ByteSize(bytes)| Self(bytes))
                .map_err(|_| "expected auto, none, or a size such as 24GiB".into()),
        }
    }
}

/// Decay rates of Adam's two moments, each at least 0 and below 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Betas(pub f64, pub f64);

impl FromStr for Betas {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = |part: &str| part.trim().parse().ok().filter(|b| (0.0..1.0).contains(b));
        text.split_once(',')
            .and_then(|(a, b)| Some(Self(parse(a)?, parse(b)?)))
            .ok_or_else(|| "expected two numbers of at least 0 and below 1, for example 0.9,0.999".into())
    }
}

/// A whole number.
pub(super) fn whole(text: &str) -> Result<u64, String> {
    match text.parse::<i128>() {
        Ok(number) if number < 0 => Err("must not be negative".into()),
        Ok(number) => u64::try_from(number).map_err(|_| "is more than a 64-bit number can hold".into()),
        Err(_) => Err("expected a whole number".into()),
    }
}

/// A whole number of at least 1, as one of the types that hold nothing else.
pub(super) fn count<T: TryFrom<NonZeroU64>>(text: &str) -> Result<T, String> {
    let number = match text.parse::<i128>() {
        Ok(number) if number < 1 => return Err("must be at least 1".into()),
        _ => whole(text)?,
    };
    let too_large = || format!("{number} is more than this machine can count");
    NonZeroU64::new(number).and_then(|number| T::try_from(number).ok()).ok_or_else(too_large)
}

/// A number of threads.
pub(super) fn threads(text: &str) -> Result<NonZeroUsize, String> {
    let number: NonZeroUsize = count(text)?;
    if number.get() > THREADS_MAX { Err(format!("must be at most {THREADS_MAX}")) } else { Ok(number) }
}

/// The size of a file, which holds something.
pub(super) fn shard_size(text: &str) -> Result<ByteSize, String> {
    match text.parse()? {
        ByteSize(0) => Err("a file of no bytes holds no weights; give a size such as 5GB".into()),
        size => Ok(size),
    }
}

/// A number of parameters, such as `40b`, `1.3B` or `124m`.
pub(super) fn parameters(text: &str) -> Result<u64, String> {
    let trimmed = text.trim();
    let (number, factor) = match trimmed.char_indices().next_back() {
        Some((at, 'k' | 'K')) => (&trimmed[..at], 1e3),
        Some((at, 'm' | 'M')) => (&trimmed[..at], 1e6),
        Some((at, 'b' | 'B')) => (&trimmed[..at], 1e9),
        Some((at, 't' | 'T')) => (&trimmed[..at], 1e12),
        _ => (trimmed, 1.0),
    };
    let value = number.parse::<f64>().ok().map(|number| number * factor);
    let value = value.filter(|value| value.is_finite() && (1.0..=1e18).contains(value));
    value
        .map(|value| value.round() as u64)
        .ok_or_else(|| "expected a number such as 40b, 1.3b or 124m".into())
}

/// One of the ids of `--prompt-ids`.
pub(super) fn token_id(text: &str) -> Result<u32, String> {
    let id = text.trim();
    id.parse().map_err(|_| format!("\"{id}\" is not a token id; expected whole numbers such as 1,2,3"))
}

fn float(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|n: &f64| n.is_finite()).ok_or_else(|| "expected a finite number".into())
}

/// A number of at least 0.
pub(super) fn not_negative_float(text: &str) -> Result<f64, String> {
    float(text).and_then(|n| if n >= 0.0 { Ok(n) } else { Err("must not be negative".into()) })
}

/// A number above 0.
pub(super) fn positive_float(text: &str) -> Result<f64, String> {
    float(text).and_then(|n| if n > 0.0 { Ok(n) } else { Err("must be more than zero".into()) })
}

/// A number above 0 that is computed with in 32 bits.
pub(super) fn positive_single(text: &str) -> Result<f64, String> {
    let number = positive_float(text)?;
    match number as f32 {
        0.0 => Err(format!("is too close to zero; the least is {:e}", f32::from_bits(1))),
        single if single.is_infinite() => Err(format!("is too large; the most is {:e}", f32::MAX)),
        _ => Ok(number),
    }
}

/// A number from 0 to 1.
pub(super) fn part(text: &str) -> Result<f64, String> {
    float(text).and_then(|n| if (0.0..=1.0).contains(&n) { Ok(n) } else { Err("must be from 0 to 1".into()) })
}

/// A number above 0 and at most 1.
pub(super) fn probability(text: &str) -> Result<f64, String> {
    float(text)
        .and_then(|n| if n > 0.0 && n <= 1.0 { Ok(n) } else { Err("must be above 0 and at most 1".into()) })
}
