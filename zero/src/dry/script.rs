//! A block's requests to the arena, played again for other micro-batches.

use super::{operations, too_many_operations};
use crate::kept::Shapes;
use crate::{Context, Kept, Result};
use std::collections::HashMap;
use terrace_device::{Region, Request};
use terrace_kernels::{Tensor, dry};

/// What a block asks of the arena for one micro-batch. It asks the same for every other, which need not be gone through: what is asked in
/// the same order comes to lie where the block's own tensors would.
pub(super) struct Script {
    steps: Vec<Play>,
    /// What is left for backward, by the numbers of its regions; `None` if the block left it open.
    left: Option<(Vec<usize>, Shapes)>,
    operations: u64,
}

/// Regions have numbers: first those that the block is given, then each as it is taken.
#[derive(Debug)]
enum Play {
    Take(usize),
    Give(usize),
}

impl Script {
    /// Plays what is known of `block`, or lets it do its `work` and notes that.
    pub(super) fn perform(
        scripts: &mut HashMap<usize, Self>,
        block: usize,
        (counter, repeated): (&dry::Counter, &mut u64),
        cx: &mut Context<'_>,
        work: impl FnOnce(&mut Context<'_>) -> Result,
    ) -> Result {
        if let Some(script) = scripts.get(&block) {
            *repeated = repeated.checked_add(script.operations).ok_or_else(too_many_operations)?;
            return script.play(cx);
        }
        let given: Vec<usize> = match &cx.kept {
            Kept::Left(tensors) => tensors.iter().map(Tensor::start).collect(),
            Kept::Nothing | Kept::Wanted => Vec::new(),
        };
        let (arena, before) = (cx.arena, operations(counter)?);
        let (done, requests) = arena.requests_of(|| work(cx));
        done?;
        let script = Self::of(given, &requests, &cx.kept, operations(counter)? - before);
        scripts.extend(script.map(|script| (block, script)));
        Ok(())
    }

    /// `None` if the block holds memory of its own from one micro-batch to the next.
    fn of(given: Vec<usize>, requests: &[Request], kept: &Kept, operations: u64) -> Option<Self> {
        let (first, mut steps) = (given.len(), Vec::with_capacity(requests.len()));
        // By where they begin, the numbers of the regions that are not given back.
        let mut numbers: HashMap<usize, usize> = given.into_iter().zip(0..).collect();
        let mut next = first;
        for request in requests {
            steps.push(match *request {
                Request::Take { bytes, start } => {
                    numbers.insert(start, next);
                    next += 1;
                    Play::Take(bytes)
                }
                Request::Give { start } => Play::Give(numbers.remove(&start)?),
            });
        }
        let left = match kept {
            Kept::Left(tensors) => {
                let of = |tensor: &Tensor| numbers.get(&tensor.start()).copied();
                Some((tensors.iter().map(of).collect::<Option<Vec<_>>>()?, Shapes::of(tensors)))
            }
            Kept::Nothing | Kept::Wanted => None,
        };
        let all_left = left.as_ref().map_or(0, |(numbers, _)| numbers.len());
        let taken = numbers.values().filter(|&&number| number >= first).count();
        (taken == all_left).then_some(Self { steps, left, operations })
    }

    fn play(&self, cx: &mut Context<'_>) -> Result {
        let mut regions: Vec<Option<Region>> = match std::mem::take(&mut cx.kept) {
            Kept::Left(tensors) => tensors.into_iter().map(|tensor| Some(tensor.into_region())).collect(),
            asked => {
                cx.kept = asked;
                Vec::new()
            }
        };
        for step in &self.steps {
            match *step {
                Play::Take(bytes) => regions.push(Some(cx.arena.alloc(bytes)?)),
                Play::Give(number) => regions[number] = None,
            }
        }
        if let Some((numbers, shapes)) = &self.left {
            let taken = numbers.iter().map(|&number| regions[number].take().expect("it is left"));
            cx.kept = Kept::Left(shapes.clone().over(taken.collect()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_device::Arena;
    use terrace_kernels::DType;

    /// What a block asks while it works; it is given what begins there.
    fn script(arena: &Arena, given: Vec<usize>, work: impl FnOnce(&Arena) -> Kept) -> Option<Script> {
        let (kept, requests) = arena.requests_of(|| work(arena));
        Script::of(given, &requests, &kept, 7)
    }

    #[test]
    fn what_is_taken_is_given_back_or_left() {
        let arena = Arena::virtual_memory();
        let tensor = |dims: &[usize]| Tensor::new(&arena, DType::F32, dims).unwrap();
        let (given, other) = (tensor(&[64]), tensor(&[3]));
        let place = given.start();
        // The place of what was given is that of what is left.
        let work = |arena: &Arena| {
            drop(given);
            let small = arena.alloc(1).unwrap();
            let left = Tensor::new(arena, DType::F32, &[2, 500]).unwrap();
            drop(small);
            Kept::Left(vec![left])
        };
        let script = script(&arena, vec![place], work).unwrap();
        let words: Vec<_> = script.steps.iter().map(|step| format!("{step:?}")).collect();
        assert_eq!(words, ["Give(0)", "Take(1)", "Take(4000)", "Give(1)"]);
        assert_eq!(script.left.as_ref().unwrap().0, [2]);
        assert_eq!(script.operations, 7);
        drop(other);
    }

    #[test]
    fn a_block_with_memory_of_its_own_has_no_script() {
        let arena = Arena::virtual_memory();
        let mut own = None;
        let keeps = |arena: &Arena| {
            own = Some(arena.alloc(10).unwrap());
            Kept::Nothing
        };
        assert!(script(&arena, vec![], keeps).is_none());
        let lets_go = |_: &Arena| {
            own = None;
            Kept::Nothing
        };
        assert!(script(&arena, vec![], lets_go).is_none());
        let asks = |arena: &Arena| {
            drop(arena.alloc(10).unwrap());
            Kept::Wanted
        };
        assert!(script(&arena, vec![], asks).is_some_and(|script| script.left.is_none()));
    }
}
