//! A network of one's own under the engine: hand-written blocks, their state on disk, a small memory budget.
//!
//! The network predicts the next character of this file from the eight before it. What the engine needs from it is in the three
//! `impl Block`s: names and shapes of parameters, a forward, a backward. Where parameters, gradients, moments and activations
//! live, and when they move, is none of their business.
//!
//! ```text
//! cargo run --release --example embed_your_own_block
//! ```

#![allow(non_snake_case, reason = "tensor names carry their shape as a suffix")]

use terrace::{
    BatchLimits, Block, Context, DType, Engine, EngineConfig, Epilogue, GateFunction, Gradients, HostTensor,
    IoConfig, MatmulSpec, MicroBatch, Mode, OutputSpec, ParamSpec, Residual, Result, StateFormat, Tensor,
    Tier, TrainingConfig, View, ViewMut, WeightSource, Weights, cpu_backend, tiers::ByteSize,
};

// Tensor names carry their shape, in these letters: `x_TD` is `[T, D]`.
const C: usize = 8; // characters a prediction sees
const V: usize = 128; // kinds of characters
const D: usize = 128; // hidden size
const F: usize = 512; // inner size of a hidden block
const T: usize = 256; // predictions in a step
const LAYERS: usize = 8;
const STEPS: u64 = 100;

/// First block: the sum of one table row per character of the context. Inputs 0..C of a batch are the characters.
#[derive(Debug)]
struct Embed(Vec<ParamSpec>);

#[rustfmt::skip] // Short methods on one line each.
impl Block for Embed {
    fn name(&self) -> &str { "embed" }
    fn params(&self) -> &[ParamSpec] { &self.0 }
    fn output(&self, _: usize, _: usize, dtype: DType, _: Mode) -> OutputSpec { OutputSpec { dtype, dims: vec![T, D] } }
    fn forward(&self, cx: &mut Context<'_>, w: &Weights<'_>, _: Option<View<'_>>, mut y_TD: ViewMut<'_>) -> Result {
        // All memory a block needs beside its operands comes from the context; the plan has counted it.
        let mut row_TD = cx.tensor(&[T, D])?;
        cx.kernels.elementwise.zero(y_TD.reborrow())?;
        for c in 0..C {
            cx.kernels.embedding.gather(cx.input(c), w.get(c), row_TD.view_mut())?;
            cx.kernels.elementwise.add_assign(y_TD.reborrow(), row_TD.view())?;
        }
        Ok(())
    }
    fn backward(&self, cx: &mut Context<'_>, _: &Weights<'_>, _: Option<View<'_>>, dy: Option<View<'_>>,
                _: Option<ViewMut<'_>>, gradients: &mut Gradients<'_>) -> Result {
        let dy_TD = dy.expect("only the last block has no dy");
        (0..C).try_for_each(|c| Ok(cx.kernels.embedding.scatter_add(cx.input(c), dy_TD, gradients.get(c)?)?))
    }
}

/// `y = x + down·(silu(gate·x) ∘ up·x)`. Parameters: 0 gate `[F, D]`, 1 up `[F, D]`, 2 down `[D, F]`.
#[derive(Debug)]
struct Hidden(String, Vec<ParamSpec>);

impl Hidden {
    /// gate·x, up·x and silu(gate·x) ∘ up·x. The memory goes back to the plan's arena when the tensors are dropped.
    fn inner(cx: &Context<'_>, w: &Weights<'_>, x_TD: View<'_>) -> Result<[Tensor; 3]> {
        let (k, mut gate_TF, mut up_TF) =
            (cx.kernels, cx.lasting_tensor(&[T, F])?, cx.lasting_tensor(&[T, F])?);
        k.matmul.matmul(x_TD, w.get(0), gate_TF.view_mut(), MatmulSpec::NT)?;
        k.matmul.matmul(x_TD, w.get(1), up_TF.view_mut(), MatmulSpec::NT)?;
        let mut act_TF = cx.lasting_tensor(&[T, F])?;
        k.activation.gated(GateFunction::Silu, gate_TF.view(), up_TF.view(), act_TF.view_mut())?;
        Ok([gate_TF, up_TF, act_TF])
    }
}

#[rustfmt::skip]
impl Block for Hidden {
    fn name(&self) -> &str { &self.0 }
    fn params(&self) -> &[ParamSpec] { &self.1 }
    fn output(&self, _: usize, _: usize, dtype: DType, _: Mode) -> OutputSpec { OutputSpec { dtype, dims: vec![T, D] } }
    fn forward(&self, cx: &mut Context<'_>, w: &Weights<'_>, x: Option<View<'_>>, y_TD: ViewMut<'_>) -> Result {
        let (x_TD, k) = (x.expect("never the first block"), cx.kernels);
        let inner = Self::inner(cx, w, x_TD)?;
        // What is added to a product goes along with it: no pass over y, and one rounding.
        let around = Epilogue { residual: Residual::Of(x_TD), ..Epilogue::NONE };
        k.matmul.matmul_nt(inner[2].view(), w.get(2), y_TD, around)?;
        // Where the plan has room for them, backward gets these tensors instead of computing them again.
        if cx.keeps() { cx.keep(inner.into()) }
        Ok(())
    }
    fn backward(&self, cx: &mut Context<'_>, w: &Weights<'_>, x: Option<View<'_>>, dy: Option<View<'_>>,
                dx: Option<ViewMut<'_>>, gradients: &mut Gradients<'_>) -> Result {
        let (x_TD, dy_TD, mut dx_TD) = (x.expect("never first"), dy.expect("never last"), dx.expect("never first"));
        let k = cx.kernels;
        // Where nothing but the block's input was kept the forward is repeated up to what the gradients need.
        let [gate_TF, up_TF, act_TF] = match cx.take_kept() {
            Some(kept) => kept.try_into().expect("what forward kept"),
            None => Self::inner(cx, w, x_TD)?,
        };
        // Parameter gradients are added to f32 accumulators, which sum over the micro-batches of a step.
        gradients.add_product(2, dy_TD, act_TF.view())?;
        let mut dact_TF = act_TF;
        k.matmul.matmul(dy_TD, w.get(2), dact_TF.view_mut(), MatmulSpec::NN)?;
        let [mut dgate_TF, mut dup_TF] = [cx.tensor(&[T, F])?, cx.tensor(&[T, F])?];
        k.activation.gated_backward(
            GateFunction::Silu, gate_TF.view(), up_TF.view(), dact_TF.view(), dgate_TF.view_mut(), dup_TF.view_mut())?;
        gradients.add_product(0, dgate_TF.view(), x_TD)?;
        gradients.add_product(1, dup_TF.view(), x_TD)?;
        // dx = dy + dgate·gate + dup·up. Adding products in place needs an f32 result, which dx is here.
        let add = MatmulSpec { accumulate: true, ..MatmulSpec::NN };
        k.elementwise.cast(dy_TD, dx_TD.reborrow())?;
        k.matmul.matmul(dgate_TF.view(), w.get(0), dx_TD.reborrow(), add)?;
        Ok(k.matmul.matmul(dup_TF.view(), w.get(1), dx_TD, add)?)
    }
}

/// Last block: logits and cross-entropy with the characters to predict, input C of a batch. It writes no signal but its loss.
#[derive(Debug)]
struct Head(Vec<ParamSpec>);

#[rustfmt::skip]
impl Block for Head {
    fn name(&self) -> &str { "head" }
    fn params(&self) -> &[ParamSpec] { &self.0 }
    fn output(&self, _: usize, _: usize, dtype: DType, _: Mode) -> OutputSpec { OutputSpec { dtype, dims: vec![0] } }
    fn forward(&self, cx: &mut Context<'_>, w: &Weights<'_>, x: Option<View<'_>>, _: ViewMut<'_>) -> Result {
        // Only evaluation gets here: in training the loss is a part of the last block's backward.
        let mut logits_TV = cx.tensor(&[T, V])?;
        cx.kernels.matmul.matmul(x.expect("never first"), w.get(0), logits_TV.view_mut(), MatmulSpec::NT)?;
        Ok(cx.kernels.cross_entropy.loss(logits_TV.view(), cx.inputs[C].view(), cx.loss.reborrow())?)
    }
    fn backward(&self, cx: &mut Context<'_>, w: &Weights<'_>, x: Option<View<'_>>, _: Option<View<'_>>,
                dx: Option<ViewMut<'_>>, gradients: &mut Gradients<'_>) -> Result {
        let (x_TD, dx_TD, k) = (x.expect("never first"), dx.expect("never first"), cx.kernels);
        let mut logits_TV = cx.tensor(&[T, V])?;
        k.matmul.matmul(x_TD, w.get(0), logits_TV.view_mut(), MatmulSpec::NT)?;
        // Replaces the logits by their gradient, times one over the number of predictions in the whole step.
        let (labels_T, scale) = (cx.inputs[C].view(), cx.loss_scale);
        k.cross_entropy.loss_and_gradient(logits_TV.view_mut(), labels_T, scale, None, cx.loss.reborrow())?;
        gradients.add_product(0, logits_TV.view(), x_TD)?;
        Ok(k.matmul.matmul(logits_TV.view(), w.get(0), dx_TD, MatmulSpec::NN)?)
    }
}

fn blocks() -> Vec<Box<dyn Block>> {
    let tables = (0..C).map(|c| ParamSpec::new(format!("embed.{c}"), &[V, D])).collect();
    let mut blocks: Vec<Box<dyn Block>> = vec![Box::new(Embed(tables))];
    for layer in 0..LAYERS {
        let param = |name, dims: &[usize]| ParamSpec::new(format!("hidden.{layer}.{name}"), dims);
        let params = vec![param("gate", &[F, D]), param("up", &[F, D]), param("down", &[D, F])];
        blocks.push(Box::new(Hidden(format!("hidden.{layer}"), params)));
    }
    blocks.push(Box::new(Head(vec![ParamSpec::new("head", &[V, D])])));
    blocks
}

/// Initial weights, uniform in ±1/√columns. The engine asks range by range, so an element depends on its name and index alone.
struct Init;

impl WeightSource for Init {
    fn read(&mut self, param: &ParamSpec, start: usize, out: &mut [f32]) -> Result {
        let seed = param.name.bytes().fold(7u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01B3));
        let bound = 1.0 / (param.dims[1] as f32).sqrt();
        for (i, value) in out.iter_mut().enumerate() {
            let mut bits = (seed ^ (start + i) as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            bits = (bits ^ (bits >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            *value = ((bits >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * bound;
        }
        Ok(())
    }
}

/// T predictions from consecutive places of the text, beginning somewhere else every step.
fn batch(text: &[u8], step: u64) -> MicroBatch {
    let start = (step as usize * 7 * T) % (text.len() - T - C);
    let column = |shift: usize| -> HostTensor {
        let values: Vec<i32> = (0..T).map(|t| i32::from(text[start + t + shift] % V as u8)).collect();
        HostTensor::from_i32(&[T], &values)
    };
    MicroBatch { sequences: 1, length: T, inputs: (0..=C).map(column).collect(), loss_terms: T as u64 }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let text = include_bytes!("embed_your_own_block.rs");
    let disk = tempfile::tempdir()?;
    let limits = BatchLimits { sequences: 1, length: T, micro_batches: 1, cache_length: 0, cache_pages: 0 };
    let config = EngineConfig {
        training: Some(TrainingConfig { state: StateFormat::Fp32, ..TrainingConfig::default() }),
        host_budget: 16 << 20,
        ..EngineConfig::new(DType::F32, limits)
    };
    let builder = Engine::builder(config).backend(cpu_backend(1, &IoConfig::default())?).disks([disk.path()]);
    let mut engine = builder.clone().create(blocks(), &batch(text, 0), &mut Init)?;
    let [host, stored] = [Tier::Host, Tier::Disk].map(|tier| ByteSize(engine.memory_plan().total(tier)));
    println!("{} parameters; plan: {host} of memory, {stored} on disk", engine.parameters());
    let before = engine.evaluate(&batch(text, 0))?.loss_sum / T as f64;
    while engine.step() < STEPS {
        let report = engine.train_step(&[batch(text, engine.step())], 2e-3)?;
        if report.step % 20 == 0 {
            println!("step {}: loss {:.3}", report.step, report.loss);
        }
        if report.step == STEPS / 2 {
            // A run may end at any time; here after its last step is committed, too, which the next one would do otherwise.
            engine.flush()?;
            // The state's directory has a lock: close it first.
            drop(engine);
            engine = builder.clone().resume(blocks(), &batch(text, 0))?;
        }
    }
    let after = engine.evaluate(&batch(text, 0))?.loss_sum / T as f64;
    println!("loss on the first {T} places: {before:.3} before, {after:.3} after");
    assert!(after < before - 1.0, "the network learns");
    Ok(())
}
