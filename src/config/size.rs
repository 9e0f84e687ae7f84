//! Sizes in bytes as people write them: `512MiB`, `24GiB`, `1.5GB`, `4096`.
//!
//! `KiB`, `MiB`, `GiB`, `TiB` and the bare letters `K`, `M`, `G`, `T` are powers of 1024; `KB`, `MB`, `GB`, `TB` are powers
//! of 1000. Case does not matter, a space between number and unit is fine.

use serde::{Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ByteSize(pub u64);

impl ByteSize {
    /// The number of bytes.
    pub fn bytes(self) -> u64 {
        self.0
    }
}

impl fmt::Display for ByteSize {
    /// Three significant digits and a binary unit: `1.50 GiB`, `24.0 GiB`, `512 B`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        // 999.5 would print as "1000": three digits are full, so the next unit takes over.
        while value >= 999.5 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        let text = match value {
            _ if unit == 0 => format!("{value:.0} {}", UNITS[unit]),
            v if v < 9.995 => format!("{v:.2} {}", UNITS[unit]),
            v if v < 99.95 => format!("{v:.1} {}", UNITS[unit]),
            v => format!("{v:.0} {}", UNITS[unit]),
        };
        f.pad(&text)
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let trimmed = text.trim();
        let split =
            trimmed.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_')).unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let number = number.replace('_', "");
        if number.is_empty() {
            return Err(format!(
                "'{text}' is not a size; write a number and a unit, for example 512MiB or 24GiB"
            ));
        }
        let factor = unit_factor(unit.trim()).ok_or_else(|| {
            format!(
                "'{}' is not a unit of size; use KiB, MiB, GiB, TiB, KB, MB, GB, TB or none for bytes",
                unit.trim()
            )
        })?;
        let bytes = if let Ok(whole) = number.parse::<u64>() {
            whole.checked_mul(factor)
        } else {
            let value: f64 = number.parse().map_err(|_| format!("'{number}' is not a number"))?;
            if factor == 1 {
                return Err(format!(
                    "'{text}' is not a whole number of bytes; did you forget the unit (GiB, MiB)?"
                ));
            }
            let bytes = (value * factor as f64).round();
            (bytes < u64::MAX as f64).then_some(bytes as u64)
        };
        bytes.map(ByteSize).ok_or_else(|| format!("'{text}' is more bytes than a 64-bit number can hold"))
    }
}

fn unit_factor(unit: &str) -> Option<u64> {
    Some(match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_as_people_write_them() {
        let cases: [(&str, u64); 14] = [
            ("4096", 4096),
            ("0", 0),
            ("512MiB", 512 << 20),
            ("24GiB", 24 << 30),
            ("24g", 24 << 30),
            ("1.5GB", 1_500_000_000),
            ("1.5GiB", 3 << 29),
            ("1.5 gib", 3 << 29),
            (" 2TiB ", 2 << 40),
            ("10kb", 10_000),
            ("10K", 10_240),
            ("7B", 7),
            ("1_000MB", 1_000_000_000),
            ("18446744073709551615", u64::MAX),
        ];
        for (text, bytes) in cases {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_says_why() {
        for (text, reason) in [
            ("", "not a size"),
            ("GiB", "not a size"),
            ("-1GiB", "not a size"),
            ("12 apples", "not a unit"),
            ("12Gib/s", "not a unit"),
            ("1.5", "forget the unit"),
            ("1.2.3GiB", "not a number"),
            ("99999999TiB", "64-bit"),
            ("18446744073709551616.0KiB", "64-bit"),
            ("18446744073709551616", "forget the unit"),
        ] {
            let error = text.parse::<ByteSize>().unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn shown_with_three_digits() {
        for (bytes, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "0.98 KiB"),
            (1024, "1.00 KiB"),
            (1536, "1.50 KiB"),
            (10 << 20, "10.0 MiB"),
            (512 << 20, "512 MiB"),
            (1000 << 20, "0.98 GiB"),
            (24 << 30, "24.0 GiB"),
            (u64::MAX, "16384 PiB"),
        ] {
            assert_eq!(ByteSize(bytes).to_string(), text);
        }
    }
}
