//! The one decision every engine makes after every completion: done, go on from here, or fail.
//!
//! Kernels may transfer less than was asked for (a signal, the 2 GiB cap, a nearly full disk) and direct I/O must
//! go on from an aligned position, so the state keeps two numbers: how many bytes are known to be transferred
//! and where the next transfer starts. The machine is pure: it never does I/O, which is why uring, threads and
//! the simulation can share it and a property test can exhaust it.
//!
//! **Termination.** Every completion either advances the known bytes, or consumes one of a bounded number of
//! interruptions, or ends the transfer.

use crate::OpKind;
use std::ops::Range;

/// Consecutive EINTR/EAGAIN results after which a transfer is given up.
const INTERRUPTIONS_MAX: u32 = 10_000;

/// A contiguous transfer on its way. Positions are bytes from the start of the transfer.
#[derive(Debug, Clone)]
pub(crate) struct Progress {
    kind: OpKind,
    len: usize,
    align: usize,
    transfer_bytes_max: usize,
    /// Where the next transfer starts: a multiple of `align`.
    resume: usize,
    /// Bytes known to be transferred: `resume <= known < resume + align`.
    known: usize,
    interruptions: u32,
}

/// What to do after a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Every byte was transferred.
    Done,
    /// Submit [`Progress::next`].
    Continue,
    /// Give up.
    Fail(Failure),
}

/// Why a transfer was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// A read found the end of the file after this many bytes.
    Eof,
    /// A write stopped making progress without an error.
    Stuck,
    /// More bytes were reported than were asked for.
    Overrun,
    /// The operating system's error number (positive).
    Errno(i32),
}

impl Progress {
    /// A transfer of `len` bytes in steps that start and end on multiples of `align`, each of at most
    /// `transfer_bytes_max` bytes (rounded down to the alignment, but at least one alignment unit).
    ///
    /// # Panics
    /// If `len` is zero or not a multiple of `align`: the splitter never makes such pieces.
    pub fn new(kind: OpKind, len: usize, align: usize, transfer_bytes_max: usize) -> Self {
        assert!(align > 0 && len > 0 && len.is_multiple_of(align), "a piece is whole alignment units");
        let transfer_bytes_max = (transfer_bytes_max - transfer_bytes_max % align).max(align);
        Self { kind, len, align, transfer_bytes_max, resume: 0, known: 0, interruptions: 0 }
    }

    /// The range to transfer next.
    pub fn next(&self) -> Range<usize> {
        self.resume..self.resume + self.transfer_bytes_max.min(self.len - self.resume)
    }

    /// Bytes known to be transferred.
    pub fn known_bytes(&self) -> usize {
        self.known
    }

    /// Takes the result of transferring [`next`](Self::next): a byte count or a positive error number.
    pub fn complete(&mut self, result: Result<usize, i32>) -> Step {
        let asked = self.next();
        let count = match result {
            Ok(count) => count,
            Err(libc::EINTR | libc::EAGAIN) if self.interruptions < INTERRUPTIONS_MAX => {
                self.interruptions += 1;
                return Step::Continue;
            }
            Err(errno) => return Step::Fail(Failure::Errno(errno)),
        };
        if count > asked.len() {
            return Step::Fail(Failure::Overrun);
        }
        let reached = asked.start + count;
        if reached <= self.known {
            // The same unaligned stop twice, or nothing at all: for a read that is the end of the file.
            return Step::Fail(if self.kind == OpKind::Read { Failure::Eof } else { Failure::Stuck });
        }
        self.known = reached;
        self.resume = reached - reached % self.align;
        self.interruptions = 0;
        if reached == self.len { Step::Done } else { Step::Continue }
    }
}

/// The kernel's convention for a completion (`-errno` or a count) as a `Result`.
pub(crate) fn from_kernel(res: i32) -> Result<usize, i32> {
    usize::try_from(res).map_err(|_| -res)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_whole_transfer_is_done_at_once() {
        let mut progress = Progress::new(OpKind::Read, 8192, 4096, usize::MAX);
        assert_eq!(progress.next(), 0..8192);
        assert_eq!(progress.complete(Ok(8192)), Step::Done);
    }

    #[test]
    fn a_short_direct_transfer_resumes_on_the_alignment() {
        let mut progress = Progress::new(OpKind::Write, 8192, 4096, usize::MAX);
        assert_eq!(progress.complete(Ok(5000)), Step::Continue);
        assert_eq!(progress.next(), 4096..8192);
        assert_eq!(progress.known_bytes(), 5000);
        assert_eq!(progress.complete(Ok(4096)), Step::Done);
    }

    #[test]
    fn the_end_of_a_file_inside_a_block_is_found() {
        let mut progress = Progress::new(OpKind::Read, 8192, 4096, usize::MAX);
        assert_eq!(progress.complete(Ok(5000)), Step::Continue);
        assert_eq!(progress.complete(Ok(904)), Step::Fail(Failure::Eof));
        assert_eq!(progress.known_bytes(), 5000);
    }

    #[test]
    fn nothing_is_eof_for_reads_and_stuck_for_writes() {
        assert_eq!(Progress::new(OpKind::Read, 8, 1, 8).complete(Ok(0)), Step::Fail(Failure::Eof));
        assert_eq!(Progress::new(OpKind::Write, 8, 1, 8).complete(Ok(0)), Step::Fail(Failure::Stuck));
    }

    #[test]
    fn interruptions_are_retried_but_not_for_ever() {
        let mut progress = Progress::new(OpKind::Read, 8, 1, 8);
        for _ in 0..INTERRUPTIONS_MAX {
            assert_eq!(progress.complete(Err(libc::EINTR)), Step::Continue);
        }
        assert_eq!(progress.complete(Err(libc::EAGAIN)), Step::Fail(Failure::Errno(libc::EAGAIN)));
    }

    #[test]
    fn errors_and_overruns_end_it() {
        let mut progress = Progress::new(OpKind::Read, 8, 1, 8);
        assert_eq!(progress.complete(Ok(9)), Step::Fail(Failure::Overrun));
        assert_eq!(progress.complete(Err(libc::EIO)), Step::Fail(Failure::Errno(libc::EIO)));
    }

    #[test]
    fn a_negative_kernel_result_is_a_positive_errno() {
        assert_eq!(from_kernel(-libc::ENOSPC), Err(libc::ENOSPC));
        assert_eq!(from_kernel(17), Ok(17));
    }

    proptest! {
        /// Against any kernel that makes progress, every byte moves exactly as asked and the machine terminates.
        #[test]
        fn every_byte_is_covered(
            units in 1usize..40,
            align_log2 in 0u32..13,
            transfer_max in 1usize..20_000,
            shorts in proptest::collection::vec((0u8..10, 1usize..10_000), 1..50),
            write: bool,
        ) {
            let align = 1usize << align_log2;
            let len = units * align;
            let kind = if write { OpKind::Write } else { OpKind::Read };
            let mut progress = Progress::new(kind, len, align, transfer_max);
            let mut covered = vec![false; len];
            // One whole transfer in the cycle, so that it is not interruptions for ever.
            let mut shorts = shorts.into_iter().chain([(9, 1)]).cycle();
            for round in 0..1_000_000 {
                prop_assert!(round < 999_999, "the machine does not terminate");
                let range = progress.next();
                prop_assert!(!range.is_empty() && range.end <= len);
                prop_assert_eq!(range.start % align, 0);
                prop_assert_eq!(range.len() % align, 0);
                prop_assert!(range.len() <= transfer_max.max(align));
                let (dice, amount) = shorts.next().expect("a cycle of a non-empty vector does not end");
                let result = match dice {
                    0 => Err(libc::EINTR),
                    // At least one unit, so that an unaligned stop is never repeated.
                    1..=5 => Ok(range.len().min(amount.max(align))),
                    _ => Ok(range.len()),
                };
                if let Ok(count) = result {
                    covered[range.start..range.start + count].fill(true);
                }
                match progress.complete(result) {
                    Step::Done => break,
                    Step::Continue => {}
                    Step::Fail(failure) => prop_assert!(false, "failed: {failure:?}"),
                }
            }
            prop_assert!(covered.iter().all(|&byte| byte));
        }

        /// A file that ends inside the range is always reported as such, with the exact number of bytes there.
        #[test]
        fn eof_is_exact(units in 1usize..40, align_log2 in 0u32..13, cut in 0.0f64..1.0, max in 1usize..20_000) {
            let align = 1usize << align_log2;
            let len = units * align;
            let end = (len as f64 * cut) as usize;
            let mut progress = Progress::new(OpKind::Read, len, align, max);
            loop {
                let range = progress.next();
                match progress.complete(Ok(range.end.min(end).saturating_sub(range.start))) {
                    Step::Continue => {}
                    Step::Fail(Failure::Eof) => break,
                    other => prop_assert!(false, "{other:?}"),
                }
            }
            prop_assert_eq!(progress.known_bytes(), end);
        }
    }
}
