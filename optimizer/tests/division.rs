//! How the parameters are cut into chunks, and over how many threads, changes no bit; and what does not fit is
//! refused before anything is written.

mod common;

use common::{Arrived, State, layout, layouts, noise};
use half::bf16;
use terrace_optimizer::{
    AdamW, COMPACT_BLOCK, Gradient, OptimizerError, Part, StateFormat, StepArgs, SumOfSquares, THREAD_CHUNK,
    WeightType, adamw, update_parts, update_threaded,
};

/// Odd, and more than two thread chunks.
const PARAMS: usize = 2 * THREAD_CHUNK + 12_345;

const GRADIENT_TYPES: [&str; 3] = ["bf16", "f16", "f32"];

#[test]
fn chunks_change_nothing() {
    let gradient: Vec<bf16> = noise(5, 1000).iter().map(|x| bf16::from_f32(*x)).collect();
    for layout in layouts() {
        let optimizer = adamw(AdamW::default(), layout);
        let mut start = State::initialized(optimizer.as_ref(), &noise(4, 1000));
        let args = AdamW::default().step(1, 1e-3);
        optimizer.update(&args, Gradient::Bf16(&gradient), &mut start.slices()).unwrap();
        let mut whole = start.clone();
        let args = AdamW::default().step(2, 1e-3);
        optimizer.update(&args, Gradient::Bf16(&gradient), &mut whole.slices()).unwrap();
        // 1 to 9 cover every remainder of the vector widths; 997 leaves a short last chunk.
        for chunk in (1..10).chain([64, 127, 997]) {
            // Pairs and blocks are not divided.
            let chunk = match layout.format() {
                StateFormat::Compact => chunk * COMPACT_BLOCK,
                StateFormat::Bf16 => 2 * chunk,
                _ => chunk,
            };
            let mut cut = start.clone();
            let mut slices = cut.slices();
            let mut kinds: Vec<_> = slices
                .iter_mut()
                .zip(layout.kinds())
                .map(|(slice, kind)| slice.chunks_mut(kind.bytes_for(chunk)))
                .collect();
            for piece in Gradient::Bf16(&gradient).chunks(chunk) {
                let mut state: Vec<&mut [u8]> = kinds.iter_mut().filter_map(Iterator::next).collect();
                optimizer.update(&args, piece, &mut state).unwrap();
            }
            drop(kinds);
            drop(slices);
            assert_eq!(cut, whole, "{layout:?} in chunks of {chunk}");
        }
    }
}

#[test]
fn threads_change_nothing() {
    let (weights, gradient) = (noise(4, PARAMS), noise(5, PARAMS));
    for layout in layouts() {
        let optimizer = adamw(AdamW::default(), layout);
        let start = State::initialized(optimizer.as_ref(), &weights);
        let mut serial = start.clone();
        let args = AdamW::default().step(1, 1e-3);
        optimizer.update(&args, Gradient::F32(&gradient), &mut serial.slices()).unwrap();
        for threads in [1, 2, 3, 7] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut threaded = start.clone();
            let slices = &mut threaded.slices();
            update_threaded(optimizer.as_ref(), &pool, &args, Gradient::F32(&gradient), slices).unwrap();
            assert_eq!(threaded, serial, "{layout:?} on {threads} threads");
        }
    }
}

/// Runs with arguments of their own, whose lengths have nothing to do with pieces, as if each were updated alone.
#[test]
fn runs_together_change_nothing() {
    let lengths = [64, 0, 3 * THREAD_CHUNK + 128, THREAD_CHUNK, 4096];
    let gradients: Vec<Vec<f32>> = lengths.iter().map(|&n| noise(n as u32 + 7, n)).collect();
    let args = |at: usize| StepArgs { weight_decay: 0.1 * at as f64, ..AdamW::default().step(1, 1e-3) };
    for layout in layouts() {
        let optimizer = adamw(AdamW::default(), layout);
        let start = |n: usize| State::initialized(optimizer.as_ref(), &noise(n as u32 + 5, n));
        let start: Vec<State> = lengths.into_iter().map(start).collect();
        let mut alone = start.clone();
        for (at, (state, gradient)) in alone.iter_mut().zip(&gradients).enumerate() {
            optimizer.update(&args(at), Gradient::F32(gradient), &mut state.slices()).unwrap();
        }
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut together = start.clone();
            let parts = together.iter_mut().zip(&gradients).enumerate().map(|(at, (state, gradient))| Part {
                args: args(at),
                gradient: Gradient::F32(gradient),
                state: state.slices(),
            });
            update_parts(optimizer.as_ref(), &pool, parts.collect()).unwrap();
            assert!(together == alone, "{layout:?} on {threads} threads");
            // The last does not fit, or has arguments that none may have: nothing is touched.
            for is_short in [true, false] {
                let mut refused = start.clone();
                let parts = refused.iter_mut().zip(&gradients).enumerate();
                let parts = parts.map(|(at, (state, gradient))| {
                    let is_last = at + 1 == lengths.len();
                    let gradient = if is_last && is_short { &gradient[..64] } else { gradient };
                    let lr = if is_last && !is_short { f64::NAN } else { 1e-3 };
                    let args = StepArgs { lr, ..args(at) };
                    Part { args, gradient: Gradient::F32(gradient), state: state.slices() }
                });
                let error = update_parts(optimizer.as_ref(), &pool, parts.collect()).unwrap_err();
                assert_eq!(
                    matches!(error, OptimizerError::KindLength { params: 64, .. }),
                    is_short,
                    "{error}"
                );
                assert!(refused == start, "{layout:?} on {threads} threads");
            }
        }
    }
}

#[test]
fn where_a_slice_starts_changes_nothing() {
    for layout in layouts() {
        let optimizer = adamw(AdamW::default(), layout);
        for params in [1, 22, 31, 33, 100, 1024] {
            let (weights, gradient) = (noise(4, params + 1), noise(5, params + 1));
            let args = AdamW::default().step(1, 1e-3);
            let mut aligned = State::initialized(optimizer.as_ref(), &weights[1..]);
            optimizer.update(&args, Gradient::F32(&gradient[1..]), &mut aligned.slices()).unwrap();
            // Four bytes past a multiple of eight, with a mark on either side.
            let lengths: Vec<_> = layout.kinds().iter().map(|kind| kind.bytes_for(params)).collect();
            let mut buffers: Vec<Vec<u64>> = lengths.iter().map(|n| vec![u64::MAX; n / 8 + 3]).collect();
            let bytes = buffers.iter_mut().map(|words| bytemuck::cast_slice_mut::<u64, u8>(words));
            let mut shifted: Vec<_> = bytes.zip(&lengths).map(|(bytes, n)| &mut bytes[4..4 + n]).collect();
            optimizer.initialize(&weights[1..], &mut shifted).unwrap();
            optimizer.update(&args, Gradient::F32(&gradient[1..]), &mut shifted).unwrap();
            assert!(shifted.concat() == aligned.bytes(), "{layout:?} {params}");
            for (words, n) in buffers.iter().zip(lengths) {
                let bytes: &[u8] = bytemuck::cast_slice(words);
                let around = bytes[..4].iter().chain(&bytes[4 + n..]);
                assert!(around.into_iter().all(|byte| *byte == 0xff), "{layout:?} {params} wrote outside");
            }
        }
    }
}

/// A gradient of 16-bit values may begin at any even address.
#[test]
fn where_a_gradient_starts_changes_nothing() {
    let config = AdamW::default();
    for layout in layouts() {
        let optimizer = adamw(config, layout);
        let cases =
            [1, 22, 33, 1027].into_iter().flat_map(|params| GRADIENT_TYPES.map(|name| (params, name)));
        for (params, gradient_type) in cases {
            let start = State::initialized(optimizer.as_ref(), &noise(4, params));
            let update = |gradient: Gradient<'_>| {
                let (mut state, mut sum) = (start.clone(), SumOfSquares::new());
                optimizer.update(&config.step(1, 1e-3), gradient, &mut state.slices()).unwrap();
                sum.add(gradient);
                (state, sum.total().to_bits())
            };
            let arrived = Arrived::new(gradient_type, noise(5, params));
            let expected = update(arrived.gradient());
            for place in 0..8 {
                let mut words = vec![u64::MAX; params + 8];
                let shifted = arrived.copied_to(bytemuck::cast_slice_mut(&mut words), place);
                assert!(update(shifted) == expected, "{layout:?} {params} {gradient_type} at {place}");
            }
        }
    }
}

#[test]
fn an_empty_chunk_is_fine() {
    for layout in layouts() {
        let optimizer = adamw(AdamW::default(), layout);
        let mut state = State::initialized(optimizer.as_ref(), &[]);
        optimizer.update(&AdamW::default().step(1, 1.0), Gradient::F32(&[]), &mut state.slices()).unwrap();
    }
}

#[test]
fn slices_that_do_not_fit_are_refused() {
    let optimizer = adamw(AdamW::default(), layout(StateFormat::Split, WeightType::Bf16));
    let mut state = State::initialized(optimizer.as_ref(), &noise(1, 16));
    let before = state.clone();
    let args = AdamW::default().step(1, 1.0);
    let gradient = noise(2, 17);

    let error = optimizer.update(&args, Gradient::F32(&gradient), &mut state.slices()).unwrap_err();
    assert!(matches!(error, OptimizerError::KindLength { params: 17, .. }), "{error}");
    let error =
        optimizer.update(&args, Gradient::F32(&gradient[..16]), &mut state.slices()[..3]).unwrap_err();
    assert_eq!(error, OptimizerError::KindCount { expected: 4, found: 3 });
    let mut slices = state.slices();
    let mut shifted: Vec<&mut [u8]> = slices.iter_mut().map(|slice| &mut slice[1..]).collect();
    assert!(optimizer.initialize(&gradient[..16], &mut shifted).is_err());
    let lengths = [2, 2, 4, 4].map(|bytes| 8 * bytes);
    let mut shifted: Vec<&mut [u8]> =
        slices.iter_mut().zip(lengths).map(|(slice, length)| &mut slice[1..=length]).collect();
    let error = optimizer.initialize(&gradient[..8], &mut shifted).unwrap_err();
    assert!(matches!(error, OptimizerError::Misaligned { align: 2, .. }), "{error}");
    assert_eq!(state, before);
}

#[test]
fn hyperparameters_out_of_range_are_refused() {
    let good = AdamW::default();
    let step = good.step(1, 1e-3);
    let cases = [
        (AdamW { beta1: 1.0, ..good }, step, "beta1"),
        (AdamW { beta2: -0.1, ..good }, step, "beta2"),
        (AdamW { eps: f64::NAN, ..good }, step, "eps"),
        (good, StepArgs { step: 0, ..step }, "step"),
        (good, StepArgs { lr: f64::INFINITY, ..step }, "learning rate"),
        (good, StepArgs { weight_decay: -1.0, ..step }, "weight_decay"),
    ];
    for (config, args, name) in cases {
        let optimizer = adamw(config, layout(StateFormat::Split, WeightType::Bf16));
        let mut state = State::initialized(optimizer.as_ref(), &[1.0]);
        let before = state.clone();
        let error = optimizer.update(&args, Gradient::F32(&[1.0]), &mut state.slices()).unwrap_err();
        assert!(error.to_string().starts_with(name), "{error}");
        assert_eq!(state, before);
    }
}
