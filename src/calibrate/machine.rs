//! Which machine a profile is of.

use serde::{Deserialize, Serialize};
use std::time::{SystemTime, UNIX_EPOCH};

/// A machine, as far as a measurement depends on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The processor's name.
    pub cpu: String,
    /// Threads that computed.
    pub threads: usize,
    /// The card's name, if one was used.
    pub card: Option<String>,
    /// When it was measured, in UTC.
    pub date: String,
    /// By which version.
    pub terrace: String,
}

impl Machine {
    /// This one, now.
    pub fn here(threads: usize, card: Option<String>) -> Self {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        Self {
            cpu: cpu_name(&cpuinfo).unwrap_or_else(|| "unknown".into()),
            threads,
            card,
            date: date(SystemTime::now()),
            terrace: env!("CARGO_PKG_VERSION").into(),
        }
    }

    /// What is different in `here`, in words; `None` if this is the same machine.
    pub fn difference(&self, here: &Self) -> Option<String> {
        let card = |m: &Self| m.card.clone().unwrap_or_else(|| "no card".into());
        if self.cpu != here.cpu {
            Some(format!("it is of a machine with {}, this one has {}", self.cpu, here.cpu))
        } else if self.threads != here.threads {
            Some(format!("it was measured with {} threads, this run has {}", self.threads, here.threads))
        } else if here.card.is_some() && self.card != here.card {
            Some(format!("it was measured with {}, this run has {}", card(self), card(here)))
        } else {
            None
        }
    }
}

/// The processor's name in `/proc/cpuinfo`.
pub fn cpu_name(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().into())
}

/// Bytes of the last cache before memory, as Linux tells of the first processor; `None` where it does not.
pub fn last_cache_bytes() -> Option<usize> {
    let sizes = std::fs::read_dir("/sys/devices/system/cpu/cpu0/cache").ok()?;
    let sizes = sizes.filter_map(|index| std::fs::read_to_string(index.ok()?.path().join("size")).ok());
    sizes.filter_map(|size| cache_bytes(&size)).max()
}

/// A size as Linux writes it: `32768K`.
fn cache_bytes(text: &str) -> Option<usize> {
    let text = text.trim();
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let shift = match unit {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => return None,
    };
    number.parse::<usize>().ok()?.checked_mul(1 << shift)
}

/// `2025-03-01T12:00:00Z`. The days of the Gregorian calendar after Howard Hinnant's `civil_from_days`.
fn date(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, rest) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn sizes_of_caches() {
        for (text, bytes) in [
            ("32768K\n", Some(32 << 20)),
            ("512", Some(512)),
            ("1M", Some(1 << 20)),
            ("", None),
            ("K", None),
            ("12X", None),
            ("99999999999999999999K", None),
        ] {
            assert_eq!(cache_bytes(text), bytes, "{text:?}");
        }
    }

    #[test]
    fn dates_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (1_735_689_600, "2025-01-01T00:00:00Z"),
        ] {
            assert_eq!(date(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn what_makes_it_another_machine() {
        let here = Machine::here(2, None);
        assert_eq!(here.difference(&Machine::here(2, None)), None);
        let threads = here.difference(&Machine::here(3, None)).unwrap();
        assert!(threads.contains("2 threads") && threads.contains('3'), "{threads}");
        let other = Machine { cpu: "Abacus".into(), ..here.clone() };
        assert!(other.difference(&here).unwrap().contains("Abacus"));
        let card = here.difference(&Machine::here(2, Some("H200".into()))).unwrap();
        assert!(card.contains("no card") && card.contains("H200"), "{card}");
        let with_card = Machine::here(2, Some("H200".into()));
        assert_eq!(with_card.difference(&here), None, "a run on the CPU needs nothing of the card");
    }
}
