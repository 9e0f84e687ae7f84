//! Every byte of every tier, before the first allocation.

use std::fmt;

/// Where bytes can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// The device's own memory. On the CPU there is none: everything is [`Tier::Host`].
    Device,
    /// Host memory.
    Host,
    /// Files.
    Disk,
}

/// One term of a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanEntry {
    /// Where.
    pub tier: Tier,
    /// What for, in words a user understands.
    pub purpose: String,
    /// How many units, for example slots.
    pub count: u64,
    /// Bytes of one unit.
    pub unit_bytes: u64,
}

impl PlanEntry {
    /// Bytes of the term.
    pub fn bytes(&self) -> u64 {
        self.count * self.unit_bytes
    }
}

/// The terms of every tier. A plan only ever grows while it is being made; pools are allocated from the finished one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    entries: Vec<PlanEntry>,
}

impl MemoryPlan {
    /// Adds `count` units of `unit_bytes` for `purpose`. Empty terms are left out.
    pub fn add(&mut self, tier: Tier, purpose: impl Into<String>, count: u64, unit_bytes: u64) {
        if count * unit_bytes > 0 {
            self.entries.push(PlanEntry { tier, purpose: purpose.into(), count, unit_bytes });
        }
    }

    /// Total bytes of one tier.
    pub fn total(&self, tier: Tier) -> u64 {
        self.entries.iter().filter(|e| e.tier == tier).map(PlanEntry::bytes).sum()
    }

    /// The terms.
    pub fn entries(&self) -> &[PlanEntry] {
        &self.entries
    }

    /// The terms of one tier, a line each, largest first.
    pub fn breakdown(&self, tier: Tier) -> String {
        let mut terms: Vec<_> = self.entries.iter().filter(|e| e.tier == tier).collect();
        terms.sort_by_key(|e| std::cmp::Reverse(e.bytes()));
        terms.iter().fold(String::new(), |mut text, e| {
            use fmt::Write;
            let unit = ByteSize(e.unit_bytes);
            let _ = writeln!(
                text,
                "  {:>12}  {} ({} × {unit})",
                ByteSize(e.bytes()).to_string(),
                e.purpose,
                e.count
            );
            text
        })
    }
}

/// Bytes, printed in binary units with three digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

impl ByteSize {
    /// The next size that prints without rounding: what is asked for in words must be enough when it is typed in.
    #[must_use]
    pub fn rounded_up(self) -> Self {
        let (mut value, mut unit_bytes) = (self.0 as f64, 1.0);
        while value >= 1024.0 {
            value /= 1024.0;
            unit_bytes *= 1024.0;
        }
        let scale = match value {
            _ if self.0 < 1024 => return self,
            v if v < 10.0 => 100.0,
            v if v < 100.0 => 10.0,
            _ => 1.0,
        };
        Self(((value * scale).ceil() / scale * unit_bytes).round() as u64)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        let text = match (unit, value) {
            (0, _) => format!("{} B", self.0),
            (_, v) if v < 10.0 => format!("{v:.2} {}", UNITS[unit]),
            (_, v) if v < 100.0 => format!("{v:.1} {}", UNITS[unit]),
            (_, v) => format!("{v:.0} {}", UNITS[unit]),
        };
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        for (bytes, text) in
            [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (256 << 20, "256 MiB"), (3 << 39, "1.50 TiB")]
        {
            assert_eq!(ByteSize(bytes).to_string(), text);
        }
    }

    #[test]
    fn sizes_to_type_in_are_enough() {
        for (bytes, text) in
            [(1000, "1000 B"), (1025, "1.01 KiB"), (1 << 20, "1.00 MiB"), ((10 << 20) + 1, "10.1 MiB")]
        {
            let up = ByteSize(bytes).rounded_up();
            assert_eq!(up.to_string(), text);
            assert!(up.0 >= bytes, "{up}");
        }
    }

    #[test]
    fn a_plan_adds_up_per_tier() {
        let mut plan = MemoryPlan::default();
        plan.add(Tier::Host, "weights", 3, 100);
        plan.add(Tier::Host, "nothing", 0, 100);
        plan.add(Tier::Disk, "state", 1, 7);
        assert_eq!((plan.total(Tier::Host), plan.total(Tier::Disk), plan.entries().len()), (300, 7, 2));
        assert!(plan.breakdown(Tier::Host).contains("weights"));
    }
}
