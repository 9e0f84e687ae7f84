//! Sizes and figures as users write and read them. `K`, `M` and `G` are binary, as `KiB`, `MiB` and `GiB` are.

/// `4096`, `512KiB`, `1M`, `2GiB`.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match &text[digits.len()..] {
        "" | "B" => 1,
        "KiB" | "K" | "k" => 1 << 10,
        "MiB" | "M" | "m" => 1 << 20,
        "GiB" | "G" | "g" => 1 << 30,
        "TiB" | "T" | "t" => 1 << 40,
        other => {
            return Err(format!("{other} is not a unit: use KiB, MiB, GiB or TiB (K, M, G, T for short)"));
        }
    };
    let count: u64 = digits.trim().parse().map_err(|_| format!("{text} is not a size such as 512MiB"))?;
    count.checked_mul(unit).ok_or_else(|| format!("{text} is too large"))
}

/// Bytes as the shortest exact size: `1 MiB`, `4 KiB`, `1000 B`.
pub fn size(bytes: u64) -> String {
    let units = [("TiB", 1u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    let exact = units.iter().find(|(_, unit)| bytes >= *unit && bytes.is_multiple_of(*unit));
    exact.map_or_else(|| format!("{bytes} B"), |(name, unit)| format!("{} {name}", bytes / unit))
}

/// Bytes with two digits, for what is not a round size.
pub fn about(bytes: u64) -> String {
    let units = [("TiB", 1u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    let largest = units.iter().find(|(_, unit)| bytes >= *unit);
    largest.map_or_else(
        || format!("{bytes} B"),
        |(name, unit)| format!("{:.1} {name}", bytes as f64 / *unit as f64),
    )
}

/// Nanoseconds in the unit that suits them.
pub fn latency(ns: u64) -> String {
    let us = ns as f64 / 1e3;
    match us {
        us if us < 100.0 => format!("{us:.1} us"),
        us if us < 10_000.0 => format!("{us:.0} us"),
        us if us < 10_000_000.0 => format!("{:.1} ms", us / 1e3),
        us => format!("{:.1} s", us / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_binary() {
        for (text, bytes) in
            [("4096", 4096), ("1K", 1024), ("2KiB", 2048), ("1M", 1 << 20), ("3GiB", 3 << 30)]
        {
            assert_eq!(parse_size(text), Ok(bytes));
        }
        for wrong in ["", "x", "1KB", "1.5M", "-1", "99999999999T"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
        assert_eq!(
            (size(1 << 20), size(4096 + 1), size(3 << 30)),
            ("1 MiB".into(), "4097 B".into(), "3 GiB".into())
        );
    }
}
