//! A resident runner: all weights in one arena, blocks one after the other, no engine.
//!
//! It runs over host memory or, for planning runs, over virtual memory. Host arenas are poisoned, so that reading what nobody
//! wrote gives NaN. Every call of a block gets a fresh arena for its intermediates, whose peak is recorded.

use std::collections::HashMap;
use terrace_device::host::HostDevice;
use terrace_device::{Arena, Device, Space};
use terrace_kernels::{DType, KernelSet, Tensor};
use terrace_models::Model;
use terrace_zero::{
    Block, CACHE_PAGE, CarrySlot, Context, Gradients, HostTensor, Kept, KvSlot, MicroBatch, Mode, ParamSpec,
    WeightSource, Weights,
};

/// Weights, signals and gradients.
const STATE_BYTES: usize = 16 << 20;

/// Peak of a block's intermediates: block, what it did, bytes.
pub type Peak = (String, &'static str, usize);

pub struct Runner {
    pub model: Model,
    pub dtype: DType,
    pub peaks: Vec<Peak>,
    /// Capacity of the arena that each block gets.
    pub scratch_bytes: usize,
    kernels: KernelSet,
    state: Arena,
    weights: HashMap<String, Tensor>,
}

/// The key/value cache of a generation.
pub struct Cache {
    /// Keys and values per block that has them.
    slots: Vec<Option<(Tensor, Option<Tensor>)>>,
    /// What recurrent blocks carry: latest inputs and states.
    carried: Vec<Option<(Tensor, Tensor)>>,
    /// Sequences in reverse order.
    places: Tensor,
    pages: Tensor,
    pub lengths: Vec<usize>,
}

impl Runner {
    /// Weights from `source`, in `dtype`.
    pub fn new(model: Model, kernels: KernelSet, dtype: DType, source: &mut dyn WeightSource) -> Self {
        let state = HostDevice::discrete().arena(STATE_BYTES).unwrap();
        let mut runner = Self::build(model, dtype, kernels, state);
        for param in runner.params() {
            let mut values = vec![0.0; param.elements()];
            source.read(&param, 0, &mut values).unwrap();
            runner.set(&param, &values);
        }
        runner
    }

    /// A planning run: no memory and nothing computed.
    pub fn dry(model: Model, dtype: DType) -> Self {
        let (kernels, _) = terrace_kernels::dry::kernel_set();
        let state = Arena::virtual_memory();
        let mut runner = Self::build(model, dtype, kernels, state);
        for param in runner.params() {
            let tensor = Tensor::new(&runner.state, dtype, &param.dims).unwrap();
            runner.weights.insert(param.name, tensor);
        }
        runner
    }

    fn build(model: Model, dtype: DType, kernels: KernelSet, state: Arena) -> Self {
        let (peaks, weights) = (Vec::new(), HashMap::new());
        Self { model, dtype, peaks, scratch_bytes: 1 << 20, kernels, state, weights }
    }

    pub fn params(&self) -> Vec<ParamSpec> {
        self.model.blocks.iter().flat_map(|block| block.params().to_vec()).collect()
    }

    /// Replaces a parameter, rounding to the runner's dtype.
    pub fn set(&mut self, param: &ParamSpec, values: &[f32]) {
        let bytes = match self.dtype {
            DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            DType::BF16 => {
                values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect::<Vec<_>>()
            }
            other => panic!("no tests in {other}"),
        };
        let tensor = self.upload(&HostTensor { dtype: self.dtype, dims: param.dims.clone(), bytes });
        self.weights.insert(param.name.clone(), tensor);
    }

    /// Bytes of a parameter.
    pub fn weight_bytes(&self, name: &str) -> &[u8] {
        self.weights[name].view().bytes().host()
    }

    /// Forward and backward; returns the sum of loss terms and adds to `gradients`.
    pub fn train(
        &mut self,
        batch: &MicroBatch,
        loss_scale: f32,
        gradients: &mut HashMap<String, Vec<f32>>,
    ) -> f64 {
        let mut run = Run::new(self, batch, Mode::Train, loss_scale);
        let (last, earlier) = run.model.blocks.split_last().unwrap();
        let mut outputs: Vec<Tensor> = Vec::new();
        for block in earlier {
            let y = run.forward(&**block, outputs.last(), (None, None));
            outputs.push(y);
        }
        let mut dy: Option<Tensor> = None;
        for block in std::iter::once(last).chain(earlier.iter().rev()) {
            let x = outputs.pop();
            let mut dx = x.as_ref().map(|x| run.tensor(x.dtype(), x.shape().dims()));
            run.backward(&**block, x.as_ref(), dy.as_ref(), dx.as_mut(), gradients);
            dy = dx;
        }
        run.finish()
    }

    /// Sum of loss terms.
    pub fn evaluate(&mut self, batch: &MicroBatch) -> f64 {
        let mut run = Run::new(self, batch, Mode::Evaluate, f32::NAN);
        let mut x = None;
        for block in &run.model.blocks {
            x = Some(run.forward(&**block, x.as_ref(), (None, None)));
        }
        run.finish()
    }

    pub fn cache(&self, sequences: usize, capacity: usize) -> Cache {
        let per_sequence = capacity.div_ceil(CACHE_PAGE);
        let slot = |block: &dyn Block| {
            let kv = block.kv()?;
            let dims = [sequences * per_sequence, CACHE_PAGE, kv.heads, kv.head_size];
            let tensor = || Tensor::new(&self.state, self.dtype, &dims).unwrap();
            Some((tensor(), kv.has_values.then(tensor)))
        };
        let slots = self.model.blocks.iter().map(|block| slot(&**block)).collect();
        // The sequences' pages alternate.
        let page = |at: usize| (at % per_sequence * sequences + at / per_sequence) as i32;
        let table: Vec<i32> = (0..sequences * per_sequence).map(page).collect();
        let pages = self.upload(&HostTensor::from_i32(&[sequences, per_sequence], &table));
        let of_sequences = |dtype, dims: &[usize]| {
            let dims: Vec<usize> = [sequences].iter().chain(dims).copied().collect();
            Tensor::new(&self.state, dtype, &dims).unwrap()
        };
        let carried = self.model.blocks.iter().map(|block| {
            let spec = block.carries()?;
            Some((of_sequences(self.dtype, &spec.recent), of_sequences(DType::F32, &spec.state)))
        });
        let carried = carried.collect();
        let places: Vec<i32> = (0..sequences as i32).rev().collect();
        let places = self.upload(&HostTensor::from_i32(&[sequences], &places));
        Cache { slots, carried, places, pages, lengths: vec![0; sequences] }
    }

    /// Logits `[B][V]` of each sequence's last token (none in a planning run).
    pub fn generate(&mut self, batch: &MicroBatch, cache: &mut Cache) -> Vec<Vec<f32>> {
        let mut run = Run::new(self, batch, Mode::Generate, f32::NAN);
        let mut x: Option<Tensor> = None;
        for ((block, slot), carried) in run.model.blocks.iter().zip(&mut cache.slots).zip(&mut cache.carried)
        {
            let slot = slot.as_mut().map(|(keys, values)| KvSlot {
                keys: keys.view_mut(),
                values: values.as_mut().map(Tensor::view_mut),
                pages: cache.pages.view(),
            });
            let carried = carried.as_mut().map(|(recent, state)| CarrySlot {
                recent: recent.view_mut(),
                state: state.view_mut(),
                slots: cache.places.view(),
            });
            x = Some(run.forward(&**block, x.as_ref(), (slot, carried)));
        }
        run.finish();
        let logits_BV = x.unwrap();
        if logits_BV.view().bytes().space() != Space::Host {
            return Vec::new();
        }
        floats(&logits_BV).chunks(logits_BV.shape().last()).map(<[f32]>::to_vec).collect()
    }

    fn upload(&self, tensor: &HostTensor) -> Tensor {
        let mut copy = Tensor::new(&self.state, tensor.dtype, &tensor.dims).unwrap();
        let view = copy.view_mut();
        if view.view().bytes().space() == Space::Host {
            view.into_bytes().into_host().copy_from_slice(&tensor.bytes);
        }
        copy
    }
}

/// One pass of one micro-batch.
struct Run<'a> {
    model: &'a Model,
    kernels: &'a KernelSet,
    state: &'a Arena,
    weights: &'a HashMap<String, Tensor>,
    peaks: &'a mut Vec<Peak>,
    scratch_bytes: usize,
    dtype: DType,
    mode: Mode,
    sequences: usize,
    length: usize,
    inputs: Vec<Tensor>,
    loss: Tensor,
    loss_scale: f32,
}

impl<'a> Run<'a> {
    fn new(runner: &'a mut Runner, batch: &MicroBatch, mode: Mode, loss_scale: f32) -> Self {
        let inputs = batch.inputs.iter().map(|input| runner.upload(input)).collect();
        let loss = runner.upload(&HostTensor { dtype: DType::F64, dims: vec![1], bytes: vec![0; 8] });
        Self {
            model: &runner.model,
            kernels: &runner.kernels,
            state: &runner.state,
            weights: &runner.weights,
            peaks: &mut runner.peaks,
            scratch_bytes: runner.scratch_bytes,
            dtype: runner.dtype,
            mode,
            sequences: batch.sequences,
            length: batch.length,
            inputs,
            loss,
            loss_scale,
        }
    }

    fn tensor(&self, dtype: DType, dims: &[usize]) -> Tensor {
        Tensor::new(self.state, dtype, dims).unwrap()
    }

    fn forward(
        &mut self,
        block: &dyn Block,
        x: Option<&Tensor>,
        (kv, carried): (Option<KvSlot<'_>>, Option<CarrySlot<'_>>),
    ) -> Tensor {
        let spec = block.output(self.sequences, self.length, self.dtype, self.mode);
        let mut y = self.tensor(spec.dtype, &spec.dims);
        let weights = self.weights;
        let what = match self.mode {
            Mode::Train => "train forward",
            Mode::Evaluate => "evaluate",
            Mode::Generate => "generate",
        };
        self.with_context(block, what, (kv, carried), |cx| {
            block.forward(cx, &views(block, weights), x.map(Tensor::view), y.view_mut()).unwrap();
        });
        y
    }

    fn backward(
        &mut self,
        block: &dyn Block,
        x: Option<&Tensor>,
        dy: Option<&Tensor>,
        dx: Option<&mut Tensor>,
        gradients: &mut HashMap<String, Vec<f32>>,
    ) {
        let names = weight_names(block);
        let host = self.state.alloc(1).unwrap().bytes().space() == Space::Host;
        let dims = |name: &str| self.weights[name].shape().dims().to_vec();
        let mut accumulators: Vec<(Tensor, Vec<usize>)> = names
            .iter()
            .map(|name| {
                let mut tensor = self.tensor(DType::F32, &dims(name));
                if host {
                    let old = gradients.get(*name).cloned();
                    let old = old.unwrap_or_else(|| vec![0.0; tensor.shape().elements()]);
                    let bytes = tensor.view_mut().into_bytes().into_host();
                    for (bytes, value) in bytes.chunks_mut(4).zip(old) {
                        bytes.copy_from_slice(&value.to_le_bytes());
                    }
                }
                (tensor, dims(name))
            })
            .collect();
        let slots =
            accumulators.iter_mut().map(|(t, dims)| (t.view_mut().into_bytes(), dims.clone())).collect();
        let mut slots = Gradients::new(self.kernels, slots);
        let weights = self.weights;
        self.with_context(block, "backward", (None, None), |cx| {
            let (x, dy) = (x.map(Tensor::view), dy.map(Tensor::view));
            let dx = dx.map(Tensor::view_mut);
            block.backward(cx, &views(block, weights), x, dy, dx, &mut slots).unwrap();
        });
        drop(slots);
        if host {
            for (name, (tensor, _)) in names.iter().zip(&accumulators) {
                gradients.insert((*name).to_owned(), floats(tensor));
            }
        }
    }

    fn with_context(
        &mut self,
        block: &dyn Block,
        what: &'static str,
        (kv, carried): (Option<KvSlot<'_>>, Option<CarrySlot<'_>>),
        body: impl FnOnce(&mut Context<'_>),
    ) {
        let host = self.loss.view().bytes().space() == Space::Host;
        let arena = match host {
            true => HostDevice::discrete().arena(self.scratch_bytes).unwrap(),
            false => Arena::virtual_memory(),
        };
        let mut context = Context {
            kernels: self.kernels,
            arena: &arena,
            lasting: &arena,
            dtype: self.dtype,
            mode: self.mode,
            sequences: self.sequences,
            length: self.length,
            inputs: &self.inputs,
            loss: self.loss.view_mut(),
            loss_scale: self.loss_scale,
            kv,
            carried,
            kept: Kept::Nothing,
        };
        body(&mut context);
        assert_eq!(arena.used(), 0, "{} gave everything back", block.name());
        self.peaks.push((block.name().to_owned(), what, arena.peak()));
    }

    fn finish(self) -> f64 {
        match self.loss.view().bytes().space() {
            Space::Host => f64::from_le_bytes(self.loss.view().bytes().host().try_into().unwrap()),
            _ => 0.0,
        }
    }
}

fn weight_names(block: &dyn Block) -> Vec<&str> {
    let own = block.params().iter().map(|param| param.name.as_str());
    own.chain(block.borrowed().iter().map(String::as_str)).collect()
}

fn views<'a>(block: &dyn Block, weights: &'a HashMap<String, Tensor>) -> Weights<'a> {
    Weights::new(weight_names(block).into_iter().map(|name| weights[name].view()).collect())
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    let bytes = tensor.view().bytes().host();
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}
