//! Which operation comes next: reading and writing in an exact ratio of bytes, each through blocks of its own.
//!
//! An optimizer reads one generation of its state and writes the next, so in a mixed run reads go to the first half of a
//! file and writes to the second, and nothing that is in flight overlaps.

use crate::OpKind;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Bytes read to bytes written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mix {
    pub read: u32,
    pub write: u32,
}

/// What a measurement does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Read,
    Write,
    Mixed(Mix),
}

/// One operation: a block of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Op {
    pub kind: OpKind,
    pub block: u64,
}

/// The endless sequence of a directory's operations.
#[derive(Debug, Clone)]
pub struct Schedule {
    mix: Mix,
    /// Accumulated share of reading, in units of `mix.read + mix.write`.
    credit: u64,
    read: Walk,
    write: Walk,
}

/// The blocks one direction goes through.
#[derive(Debug, Clone)]
struct Walk {
    blocks: Range<u64>,
    next: u64,
    /// State of the generator in random order.
    random: Option<u64>,
}

impl FromStr for Mix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let part = |text: &str| text.parse::<u32>().ok().filter(|part| (1..=1_000_000).contains(part));
        let parts = text.split_once(':').and_then(|(read, write)| Some((part(read)?, part(write)?)));
        let (read, write) = parts.ok_or("a mix is READ:WRITE in bytes, such as 1:1 or 10:12")?;
        Ok(Self { read, write })
    }
}

impl fmt::Display for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.read, self.write)
    }
}

impl Direction {
    /// As users see it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Mixed(_) => "mixed",
        }
    }

    /// Whether anything is written.
    pub fn writes(self) -> bool {
        self != Self::Read
    }

    /// The mix, if both directions move.
    pub fn mix(self) -> Option<Mix> {
        if let Self::Mixed(mix) = self { Some(mix) } else { None }
    }
}

impl Schedule {
    /// A sequence over a file of `blocks` blocks (at least two when mixed), in random order if there is a seed.
    pub fn new(direction: Direction, blocks: u64, seed: Option<u64>) -> Self {
        let walk = |blocks: Range<u64>| Walk {
            next: blocks.start,
            random: seed.map(|seed| seed ^ blocks.start ^ 0x5851_f42d_4c95_7f2d),
            blocks,
        };
        let (mix, read, write) = match direction {
            Direction::Read => (Mix { read: 1, write: 0 }, 0..blocks, 0..0),
            Direction::Write => (Mix { read: 0, write: 1 }, 0..0, 0..blocks),
            Direction::Mixed(mix) => (mix, 0..blocks / 2, blocks / 2..blocks),
        };
        Self { mix, credit: 0, read: walk(read), write: walk(write) }
    }

    /// The next operation. After any number of them, the bytes read are within one block of their exact share.
    pub fn next_op(&mut self) -> Op {
        let whole = u64::from(self.mix.read + self.mix.write);
        self.credit += u64::from(self.mix.read);
        if self.credit >= whole {
            self.credit -= whole;
            Op { kind: OpKind::Read, block: self.read.next() }
        } else {
            Op { kind: OpKind::Write, block: self.write.next() }
        }
    }
}

impl Walk {
    fn next(&mut self) -> u64 {
        let len = self.blocks.end - self.blocks.start;
        if let Some(state) = &mut self.random {
            // xorshift64*; the high bits choose.
            *state ^= *state >> 12;
            *state ^= *state << 25;
            *state ^= *state >> 27;
            let bits = state.wrapping_mul(0x2545_f491_4f6c_dd1d);
            return self.blocks.start + ((u128::from(bits) * u128::from(len)) >> 64) as u64;
        }
        let block = self.next;
        self.next = if block + 1 == self.blocks.end { self.blocks.start } else { block + 1 };
        block
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_ratio_is_exact_in_bytes(read in 1u32..40, write in 1u32..40, periods in 1u64..20, extra in 0u64..80) {
            let mut schedule = Schedule::new(Direction::Mixed(Mix { read, write }), 64, None);
            let whole = u64::from(read + write);
            let mut reads = 0;
            for done in 1..=periods * whole + extra {
                reads += u64::from(schedule.next_op().kind == OpKind::Read);
                prop_assert_eq!(reads, done * u64::from(read) / whole);
            }
        }

        #[test]
        fn reads_and_writes_never_share_a_block(blocks in 2u64..50, seed in proptest::option::of(1u64..)) {
            let mut schedule = Schedule::new(Direction::Mixed(Mix { read: 10, write: 12 }), blocks, seed);
            for _ in 0..200 {
                let op = schedule.next_op();
                let range = if op.kind == OpKind::Read { 0..blocks / 2 } else { blocks / 2..blocks };
                prop_assert!(range.contains(&op.block));
            }
        }
    }

    #[test]
    fn sequential_order_covers_the_file_again_and_again() {
        let mut schedule = Schedule::new(Direction::Write, 3, None);
        let blocks: Vec<u64> = (0..7).map(|_| schedule.next_op().block).collect();
        assert_eq!(blocks, [0, 1, 2, 0, 1, 2, 0]);
    }

    #[test]
    fn a_mix_is_two_positive_numbers() {
        assert_eq!("10:12".parse(), Ok(Mix { read: 10, write: 12 }));
        for wrong in ["", "1", "0:1", "1:0", "a:b", "1:2:3", "-1:2"] {
            assert!(wrong.parse::<Mix>().is_err(), "{wrong}");
        }
    }
}
