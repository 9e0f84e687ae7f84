//! What every optimizer looks like to the engine: a pure function from a gradient to new state bytes.

use half::{bf16, f16};
use rayon::prelude::*;
use terrace_kernels::memory_node;

use crate::error::Result;
use crate::layout::{KINDS_MAX, StateLayout};
use crate::nodes::share_out;

/// Parameters per piece of [`update_threaded`]. Fixed, so that the pieces never depend on the thread count, and a
/// multiple of any block that a block-scaled format may use.
pub const THREAD_CHUNK: usize = 1 << 16;

/// What changes from step to step or from parameter group to parameter group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepArgs {
    /// The number of this step; the first is 1.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// Multiplied into every gradient, in f32: the clip coefficient over the loss scale. 1 changes nothing.
    pub grad_scale: f32,
    /// Decoupled weight decay of this parameter group.
    pub weight_decay: f64,
}

impl StepArgs {
    /// Says early what every update would refuse.
    ///
    /// # Errors
    /// [`OptimizerError::Hyperparameter`](crate::OptimizerError::Hyperparameter): the step is 0, or the learning rate, the weight decay
    /// or the gradient's scale is negative or not finite.
    pub fn check(&self) -> Result<()> {
        crate::ranges::check_args(self)
    }
}

/// The gradient of a chunk as compute left it in host memory.
#[derive(Debug, Clone, Copy)]
pub enum Gradient<'a> {
    /// As it crosses the link by default.
    Bf16(&'a [bf16]),
    /// From compute in f16, which needs its loss scaled; [`StepArgs::grad_scale`] takes the scale out again.
    F16(&'a [f16]),
    /// For weights that compute uses in f32.
    F32(&'a [f32]),
}

impl<'a> Gradient<'a> {
    /// Parameters covered.
    pub fn len(&self) -> usize {
        match self {
            Self::Bf16(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::F32(values) => values.len(),
        }
    }

    /// Whether no parameter is covered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first `at` values and the rest.
    ///
    /// # Panics
    /// When `at > self.len()`.
    pub fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Self::Bf16(values) => {
                let (head, tail) = values.split_at(at);
                (Self::Bf16(head), Self::Bf16(tail))
            }
            Self::F16(values) => {
                let (head, tail) = values.split_at(at);
                (Self::F16(head), Self::F16(tail))
            }
            Self::F32(values) => {
                let (head, tail) = values.split_at(at);
                (Self::F32(head), Self::F32(tail))
            }
        }
    }

    /// Consecutive pieces of `len` values; the last may be shorter.
    pub fn chunks(self, len: usize) -> impl Iterator<Item = Gradient<'a>> {
        let mut rest = self;
        std::iter::from_fn(move || {
            let (head, tail) = rest.split_at(len.min(rest.len()));
            rest = tail;
            (!head.is_empty()).then_some(head)
        })
    }
}

/// Updates the state of any run of parameters in place.
///
/// An update is element-wise: the bits of a parameter's new state depend on its own state, its own gradient and the
/// [`StepArgs`] alone, so any division into chunks and any number of threads gives the same result. In
/// [`StateFormat::Bf16`](crate::StateFormat::Bf16) this holds for pairs of parameters, and in
/// [`StateFormat::Compact`](crate::StateFormat::Compact) for blocks of [`COMPACT_BLOCK`](crate::COMPACT_BLOCK): a chunk
/// begins where a pair or block does.
pub trait Optimizer: Send + Sync {
    /// Which slices [`update`](Self::update) takes.
    fn layout(&self) -> &StateLayout;

    /// Updates one chunk in place on the calling thread.
    ///
    /// `state` holds the raw bytes of each kind, in the order of [`StateLayout::kinds`], exactly
    /// `gradient.len()` parameters long and in the machine's byte order. Slices must be aligned for their elements
    /// (4 bytes suffice; disk buffers have far more).
    ///
    /// # Errors
    /// Slices that do not match the layout, and hyperparameters out of range; the state is then untouched.
    fn update(&self, args: &StepArgs, gradient: Gradient<'_>, state: &mut [&mut [u8]]) -> Result<()>;

    /// Fills the state of a chunk that has never been stepped: the master is `weights`, the moments are zero.
    ///
    /// # Errors
    /// Slices that do not match the layout; the state is then untouched.
    fn initialize(&self, weights: &[f32], state: &mut [&mut [u8]]) -> Result<()>;
}

/// A run of parameters that is updated beside others.
#[derive(Debug)]
pub struct Part<'a> {
    /// What this run gets.
    pub args: StepArgs,
    /// Of its parameters.
    pub gradient: Gradient<'a>,
    /// As [`Optimizer::update`] takes it.
    pub state: Vec<&'a mut [u8]>,
}

/// [`Optimizer::update`] divided over the threads of `pool` in pieces of [`THREAD_CHUNK`] parameters. On a machine with several
/// memory nodes a thread begins with those that its own node has.
///
/// Gives the same bits as one call on one thread.
///
/// # Errors
/// Those of [`Optimizer::update`]; the state is then untouched.
pub fn update_threaded(
    optimizer: &dyn Optimizer,
    pool: &rayon::ThreadPool,
    args: &StepArgs,
    gradient: Gradient<'_>,
    state: &mut [&mut [u8]],
) -> Result<()> {
    let state = state.iter_mut().map(|slice| &mut **slice).collect();
    update_parts(optimizer, pool, vec![Part { args: *args, gradient, state }])
}

/// [`update_threaded`] for many runs at once. Threads come together once for all of them, and not for each: sixteen threads that did so
/// for every million parameters moved about half of what memory can.
///
/// # Errors
/// Those of [`Optimizer::update`]; the state of all runs is then untouched.
pub fn update_parts(optimizer: &dyn Optimizer, pool: &rayon::ThreadPool, parts: Vec<Part<'_>>) -> Result<()> {
    let layout = optimizer.layout();
    for part in &parts {
        part.args.check()?;
        layout.check(part.gradient.len(), &part.state)?;
    }
    let parameters: usize = parts.iter().map(|part| part.gradient.len()).sum();
    if parameters <= THREAD_CHUNK || pool.current_num_threads() == 1 {
        return parts
            .into_iter()
            .try_for_each(|mut part| optimizer.update(&part.args, part.gradient, &mut part.state));
    }
    let args: Vec<StepArgs> = parts.iter().map(|part| part.args).collect();
    let wholes = parts.into_iter().map(|part| (part.gradient, part.state)).collect();
    in_pieces(layout, pool, wholes, |at, gradient, state| optimizer.update(&args[at], gradient, state))
}

/// Calls `update` for pieces of [`THREAD_CHUNK`] parameters of each of `wholes`, with its number there, on the threads of `pool`. The state of all
/// has passed `layout`'s check.
pub(crate) fn in_pieces<E: Send>(
    layout: &StateLayout,
    pool: &rayon::ThreadPool,
    wholes: Vec<(Gradient<'_>, Vec<&mut [u8]>)>,
    update: impl Fn(usize, Gradient<'_>, &mut [&mut [u8]]) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let wholes = wholes.into_iter().enumerate();
    let wholes = wholes.map(|(at, (gradient, state))| Piece::new(layout, at, gradient, state));
    let update =
        |mut piece: Piece<'_>| update(piece.of, piece.gradient, &mut piece.state[..layout.kinds().len()]);
    if memory_node::count() == 1 {
        let wholes: Vec<_> = wholes.collect();
        return pool
            .install(|| wholes.into_par_iter().try_for_each(|whole| in_halves(layout, whole, &update)));
    }
    let mut pieces = Vec::new();
    for mut rest in wholes {
        while rest.gradient.len() > THREAD_CHUNK {
            let (piece, tail) = rest.split_at(layout, THREAD_CHUNK);
            pieces.push(piece);
            rest = tail;
        }
        pieces.push(rest);
    }
    let node_of = |piece: &Piece<'_>| {
        let largest = piece.state.iter().max_by_key(|slice| slice.len());
        largest.and_then(|slice| memory_node::of(slice))
    };
    share_out(pool, pieces, node_of, memory_node::here, update)
}

/// Halves `piece` between two threads until there is a [`THREAD_CHUNK`] or less of it.
fn in_halves<E: Send>(
    layout: &StateLayout,
    piece: Piece<'_>,
    update: &(impl Fn(Piece<'_>) -> Result<(), E> + Sync),
) -> Result<(), E> {
    let chunks = piece.gradient.len().div_ceil(THREAD_CHUNK);
    if chunks <= 1 {
        return update(piece);
    }
    let (head, tail) = piece.split_at(layout, chunks / 2 * THREAD_CHUNK);
    let (head, tail) = rayon::join(|| in_halves(layout, head, update), || in_halves(layout, tail, update));
    head.and(tail)
}

/// A run of parameters.
struct Piece<'a> {
    /// The number of what it is a piece of.
    of: usize,
    gradient: Gradient<'a>,
    /// A slice of each kind of the layout; what follows them is empty.
    state: [&'a mut [u8]; KINDS_MAX],
}

impl<'a> Piece<'a> {
    fn new(layout: &StateLayout, of: usize, gradient: Gradient<'a>, state: Vec<&'a mut [u8]>) -> Self {
        assert_eq!(state.len(), layout.kinds().len(), "the slices were checked");
        let mut slices = state.into_iter();
        Self { of, gradient, state: std::array::from_fn(|_| slices.next().unwrap_or_default()) }
    }

    /// The first `at` parameters, a multiple of [`THREAD_CHUNK`], and the rest.
    fn split_at(self, layout: &StateLayout, at: usize) -> (Self, Self) {
        let mut tails: [&mut [u8]; KINDS_MAX] = Default::default();
        let mut state = self.state;
        for ((slice, tail), kind) in state.iter_mut().zip(&mut tails).zip(layout.kinds()) {
            (*slice, *tail) = std::mem::take(slice).split_at_mut(kind.bytes_for(at));
        }
        let (head, tail) = self.gradient.split_at(at);
        (Self { gradient: head, state, ..self }, Self { of: self.of, gradient: tail, state: tails })
    }
}
