//! Threads begin with what their own memory node has, and the result is that of one thread.
//!
//! On a machine with one node there is nothing to choose. `scripts/two-nodes.sh` runs this on an emulated machine with two.

use half::bf16;
use memmap2::MmapMut;
use std::collections::{BTreeSet, HashMap};
use std::sync::Mutex;
use std::thread::ThreadId;
use terrace_device::affinity::stay_on_core;
use terrace_kernels::memory_node;
use terrace_optimizer::{
    AdamW, Gradient, Optimizer, Result, StateFormat, StateLayout, StepArgs, THREAD_CHUNK, WeightType,
    optimizer, update_threaded,
};

const PIECES: usize = 32;
const THREADS: usize = 4;

/// Where a piece was, and the thread that updated it.
type Seen = (Option<u32>, Option<u32>);

/// Notes who updates what.
struct Watched {
    inner: Box<dyn Optimizer>,
    seen: Mutex<HashMap<ThreadId, Vec<Seen>>>,
}

impl Optimizer for Watched {
    fn layout(&self) -> &StateLayout {
        self.inner.layout()
    }

    fn update(&self, args: &StepArgs, gradient: Gradient<'_>, state: &mut [&mut [u8]]) -> Result<()> {
        let largest = state.iter().max_by_key(|slice| slice.len()).expect("a format has state");
        let seen = (memory_node::of(largest), memory_node::here());
        self.seen.lock().unwrap().entry(std::thread::current().id()).or_default().push(seen);
        self.inner.update(args, gradient, state)
    }

    fn initialize(&self, weights: &[f32], state: &mut [&mut [u8]]) -> Result<()> {
        self.inner.initialize(weights, state)
    }
}

/// State whose pages are touched first by threads of all cores in turn, a stretch each.
fn state(layout: &StateLayout, elements: usize) -> Vec<MmapMut> {
    let touched = |bytes: usize| {
        let mut memory = MmapMut::map_anon(bytes).unwrap();
        for (core, stretch) in memory.chunks_mut(bytes.div_ceil(THREADS)).enumerate() {
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    assert!(stay_on_core(core), "tests may choose their core");
                    stretch.fill(0);
                });
            });
        }
        memory
    };
    layout.kinds().iter().map(|kind| touched(kind.bytes_for(elements))).collect()
}

fn slices(state: &mut [MmapMut]) -> Vec<&mut [u8]> {
    state.iter_mut().map(|memory| &mut memory[..]).collect()
}

fn hash(state: &[MmapMut]) -> Vec<u64> {
    state.iter().map(|memory| twox_hash::XxHash3_64::oneshot(memory)).collect()
}

#[test]
fn a_thread_begins_with_what_its_node_has() {
    let elements = PIECES * THREAD_CHUNK;
    let layout = StateLayout::new(StateFormat::Fp32, WeightType::Bf16).unwrap();
    let inner = optimizer(AdamW::default().into(), layout).unwrap();
    let gradient: Vec<bf16> = (0..elements).map(|i| bf16::from_f32((i % 97) as f32 - 48.0)).collect();
    let args = StepArgs { step: 1, lr: 1e-3, grad_scale: 1.0, weight_decay: 0.1 };
    let (mut alone, mut together) = (state(&layout, elements), state(&layout, elements));
    inner.update(&args, Gradient::Bf16(&gradient), &mut slices(&mut alone)).unwrap();

    let watched = Watched { inner, seen: Mutex::default() };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(THREADS);
    let pool = pool.start_handler(|index| assert!(stay_on_core(index))).build().unwrap();
    update_threaded(&watched, &pool, &args, Gradient::Bf16(&gradient), &mut slices(&mut together)).unwrap();
    assert_eq!(hash(&together), hash(&alone));

    let seen = watched.seen.into_inner().unwrap();
    assert_eq!(seen.values().map(Vec::len).sum::<usize>(), PIECES, "every piece once");
    let nodes = |of: fn(&Seen) -> Option<u32>| -> BTreeSet<_> { seen.values().flatten().map(of).collect() };
    let (pages, threads) = (nodes(|seen| seen.0), nodes(|seen| seen.1));
    println!("{} memory nodes: pages of {pages:?}, threads on {threads:?}: {seen:?}", memory_node::count());
    if memory_node::count() > 1 && !pages.contains(&None) {
        assert!(pages.len() > 1, "pages come from where they are touched first");
        for pieces in seen.values() {
            let near: Vec<bool> = pieces.iter().map(|(page, thread)| page == thread).collect();
            assert!(near.is_sorted_by(|a, b| a >= b), "what is far comes last: {pieces:?}");
        }
    }
}
