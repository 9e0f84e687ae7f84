//! Who goes first where requests wait: those that somebody waits for soon, and then all others.
//!
//! The urgency of a [`Request`](crate::Request) decides one thing alone: which of the operations that wait for a device, or for a layer
//! that makes one slow, is next. What has begun is neither interrupted nor cancelled, and among equals who came first goes first. So an
//! urgent request waits for what is in flight instead of for everything that was submitted before it.
//!
//! **Nobody starves.** While both wait, one of the others has its turn after every [`URGENT_IN_A_ROW_MAX`] urgent ones, so that every
//! request is done after a bounded number of others, and whoever waits for one (a fence, a buffer that it holds) waits for an end.
//! Rejected: urgent ones always first. A thread that submits them without an end, and itself waits for the space or the fence of one
//! of the others, would wait for ever.
//!
//! Where a queue is full, it is so for each urgency apart: urgent requests do not wait in `submit` for the room that others take.

use std::collections::VecDeque;

/// When somebody waits for a request: which of those that were not begun goes first. What was begun is left alone, equals keep their
/// order, and nobody starves ([`URGENT_IN_A_ROW_MAX`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Urgency {
    /// As soon as it can be had: it goes ahead of all others.
    Soon,
    /// Later, if at all.
    #[default]
    Whenever,
}

/// Urgent operations that go ahead of one that is not, and has waited longer, before it has its turn.
pub const URGENT_IN_A_ROW_MAX: usize = 8;

impl Urgency {
    /// Both, the first one first.
    pub(crate) const ALL: [Self; 2] = [Self::Soon, Self::Whenever];
}

/// What waits for its turn.
#[derive(Debug)]
pub(crate) struct Line<T> {
    /// By urgency; oldest first.
    queues: [VecDeque<T>; 2],
    /// Turns of the urgent while others waited, since one of those had its own.
    in_a_row: usize,
}

impl<T> Line<T> {
    /// An empty line that takes so many of each urgency without allocating.
    pub fn with_capacity(capacity: usize) -> Self {
        Self { queues: Urgency::ALL.map(|_| VecDeque::with_capacity(capacity)), in_a_row: 0 }
    }

    pub fn push(&mut self, urgency: Urgency, item: T) {
        self.queues[urgency as usize].push_back(item);
    }

    pub fn is_empty(&self) -> bool {
        self.queues.iter().all(VecDeque::is_empty)
    }

    /// How many of an urgency wait.
    pub fn len(&self, urgency: Urgency) -> usize {
        self.queues[urgency as usize].len()
    }

    /// The oldest of each urgency.
    pub fn fronts(&self) -> impl Iterator<Item = &T> {
        self.queues.iter().filter_map(VecDeque::front)
    }

    /// Keeps some of what waits.
    pub fn retain(&mut self, keep: impl FnMut(&T) -> bool + Copy) {
        self.queues.iter_mut().for_each(|queue| queue.retain(keep));
    }

    pub fn clear(&mut self) {
        self.queues.iter_mut().for_each(VecDeque::clear);
    }

    /// Gives a turn to one of the queues: its first is next, and stays there until the caller takes it out. `None` if nothing waits.
    pub fn turn(&mut self) -> Option<&mut VecDeque<T>> {
        let [soon, whenever] = &mut self.queues;
        if whenever.is_empty() {
            self.in_a_row = 0;
            return (!soon.is_empty()).then_some(soon);
        }
        if soon.is_empty() || self.in_a_row == URGENT_IN_A_ROW_MAX {
            self.in_a_row = 0;
            return Some(whenever);
        }
        self.in_a_row += 1;
        Some(soon)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(line: &mut Line<usize>) -> Option<usize> {
        line.turn().and_then(VecDeque::pop_front)
    }

    #[test]
    fn the_urgent_go_first_and_equals_in_their_order() {
        let mut line = Line::with_capacity(4);
        for (item, urgency) in
            [Urgency::Whenever, Urgency::Soon, Urgency::Whenever, Urgency::Soon].into_iter().enumerate()
        {
            line.push(urgency, item);
        }
        assert_eq!((line.len(Urgency::Soon), line.fronts().copied().collect::<Vec<_>>()), (2, vec![1, 0]));
        let order: Vec<usize> = std::iter::from_fn(|| next(&mut line)).collect();
        assert_eq!(order, [1, 3, 0, 2]);
        assert!(line.is_empty());
    }

    #[test]
    fn under_a_stream_of_urgent_ones_the_others_have_every_ninth_turn() {
        let mut line = Line::with_capacity(4);
        (0..3).for_each(|item| line.push(Urgency::Whenever, item));
        for turn in 1..=30 {
            line.push(Urgency::Soon, usize::MAX);
            let is_other = next(&mut line) != Some(usize::MAX);
            assert_eq!(is_other, turn <= 27 && turn % (URGENT_IN_A_ROW_MAX + 1) == 0, "turn {turn}");
        }
        assert_eq!(line.len(Urgency::Whenever), 0);
    }

    #[test]
    fn turns_count_only_while_others_wait() {
        let mut line = Line::with_capacity(4);
        for _ in 0..2 * URGENT_IN_A_ROW_MAX {
            line.push(Urgency::Soon, 0);
            assert_eq!(next(&mut line), Some(0));
        }
        line.push(Urgency::Whenever, 1);
        line.push(Urgency::Soon, 2);
        assert_eq!((next(&mut line), next(&mut line)), (Some(2), Some(1)));
    }
}
