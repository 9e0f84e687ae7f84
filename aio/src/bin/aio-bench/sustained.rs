//! Whether a drive keeps its rate: the first window against the last third, and where the rate dropped.

use serde::Serialize;

/// A fall of less than this share is noise.
const DROP_MIN: f64 = 0.20;

/// How a rate changed over a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sustained {
    /// In the first tenth of the run.
    pub first_gigabytes_per_second: f64,
    /// In its last third.
    pub last_third_gigabytes_per_second: f64,
    /// The second as a share of the first.
    pub kept: f64,
    /// Where the rate dropped for good, if it did.
    pub drop: Option<Drop>,
}

/// The place of a drop.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Drop {
    pub seconds: f64,
    /// Moved until then.
    pub bytes: u64,
    pub before_gigabytes_per_second: f64,
    pub after_gigabytes_per_second: f64,
}

/// Examines the bytes of consecutive windows of `window_seconds`; `None` when there are too few.
pub fn examine(windows: &[u64], window_seconds: f64) -> Option<Sustained> {
    if windows.len() < 6 {
        return None;
    }
    let rate = |part: &[u64]| part.iter().sum::<u64>() as f64 / 1e9 / (part.len() as f64 * window_seconds);
    let first = rate(&windows[..windows.len().div_ceil(10)]);
    let last = rate(&windows[windows.len() - windows.len() / 3..]);
    let at = change_point(windows);
    let (before, after) = (rate(&windows[..at]), rate(&windows[at..]));
    let drop = (after < (1.0 - DROP_MIN) * before).then(|| Drop {
        seconds: at as f64 * window_seconds,
        bytes: windows[..at].iter().sum(),
        before_gigabytes_per_second: before,
        after_gigabytes_per_second: after,
    });
    Some(Sustained {
        first_gigabytes_per_second: first,
        last_third_gigabytes_per_second: last,
        kept: if first > 0.0 { last / first } else { 1.0 },
        drop,
    })
}

/// The place that parts the windows into two most different halves: the largest variance between them.
fn change_point(windows: &[u64]) -> usize {
    let total: f64 = windows.iter().map(|&w| w as f64).sum();
    let count = windows.len() as f64;
    let mut before = 0.0;
    let mut best = (0.0, 1);
    for at in 1..windows.len() {
        before += windows[at - 1] as f64;
        let left = at as f64;
        let difference = before / left - (total - before) / (count - left);
        let between = left * (count - left) * difference * difference;
        if between > best.0 {
            best = (between, at);
        }
    }
    best.1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drop_is_found_where_it_is() {
        let windows: Vec<u64> = [vec![2_000_000_000; 12], vec![500_000_000; 18]].concat();
        let found = examine(&windows, 0.5).unwrap();
        assert!((found.first_gigabytes_per_second - 4.0).abs() < 1e-9);
        assert!((found.last_third_gigabytes_per_second - 1.0).abs() < 1e-9);
        let drop = found.drop.unwrap();
        assert_eq!((drop.seconds, drop.bytes), (6.0, 24_000_000_000));
    }

    #[test]
    fn a_steady_rate_has_no_drop() {
        let windows: Vec<u64> = (0..30).map(|i| 1_000_000 + i % 3 * 1000).collect();
        assert_eq!(examine(&windows, 1.0).unwrap().drop, None);
        assert_eq!(examine(&windows[..5], 1.0), None);
        assert_eq!(examine(&[0; 8], 1.0).unwrap().drop, None);
    }
}
