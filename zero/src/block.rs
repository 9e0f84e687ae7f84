//! What a network supplies: blocks with an explicit forward and backward.
//!
//! Legend: B sequences, S positions, T = B·S.
//!
//! Blocks run in order forward and in reverse backward. Nothing but the output of a block need be kept between the two:
//! `backward` gets the block's input again and recomputes what it needs (activation checkpointing, Chen et al.,
//! arXiv 1604.06174). Where memory is left the engine asks `forward` for what `backward` would recompute, see
//! [`Context::keep`]; a block that does not answer is simply recomputed. All memory a block uses beside its operands comes from
//! [`Context::arena`] and [`Context::lasting`]; the engine runs every block once over virtual memory and
//! [dry kernels](terrace_kernels::dry) to learn the exact peak, so a block
//! must take the same memory for the same batch shape every time, and never read tensor contents on the host, but for
//! [what rows are those of an expert](terrace_kernels::Experts::starts).

use crate::gradient_parts::Accumulator;
use crate::{Kept, MicroBatch, Result};
use std::fmt::Debug;
use std::ops::Range;
use terrace_device::{Arena, BytesMut};
use terrace_kernels::{
    DType, Epilogue, KernelSet, MatmulSpec, Product, QuantFormat, QuantizedView, Tensor, View, ViewMut,
};

/// One parameter tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamSpec {
    /// Its name in the model's files, for example `model.norm.weight`.
    pub name: String,
    /// Its dimensions.
    pub dims: Vec<usize>,
    /// How it is quantized; `None` for the dtype of the engine. Only frozen weights can be.
    pub quantized: Option<QuantFormat>,
}

impl ParamSpec {
    /// A parameter of the given name and dimensions.
    pub fn new(name: impl Into<String>, dims: &[usize]) -> Self {
        Self { name: name.into(), dims: dims.to_vec(), quantized: None }
    }

    /// The same, stored as `format` says; its rows are the last dimension.
    #[must_use]
    pub fn stored_as(self, format: Option<QuantFormat>) -> Self {
        Self { quantized: format, ..self }
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    /// Bytes, unless quantized of elements of `dtype`.
    pub fn bytes(&self, dtype: DType) -> usize {
        self.quantized.map_or(self.elements() * dtype.size(), |format| format.bytes(&self.dims))
    }
}

/// What the engine is doing with a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Forward without the last block, then backward through all.
    Train,
    /// Forward only; the last block adds its loss.
    Evaluate,
    /// Forward only over a key/value cache; the last block gives the logits of each sequence's last position.
    Generate,
}

/// What a batch is for, see [`Block::check`].
#[derive(Debug, Clone, Copy)]
pub enum BatchUse<'a> {
    /// The shape of batches to come: its numbers mean nothing.
    Sample,
    /// A loss, with or without its gradient.
    Loss,
    /// Logits of a generation.
    Generate {
        /// Positions that the cache has of each row's sequence.
        cached: &'a [usize],
        /// Valid positions of each row.
        added: &'a [usize],
    },
}

/// What a block's `forward` writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputSpec {
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub dims: Vec<usize>,
}

/// The key/value cache a block wants for generation, per sequence and position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvSpec {
    /// Key/value heads, G.
    pub heads: usize,
    /// Head size, K.
    pub head_size: usize,
    /// Values are kept beside keys. Without them a block makes values of what it keeps as keys.
    pub has_values: bool,
}

/// What a recurrent block wants to carry from one pass of a generation to the next, of each sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CarrySpec {
    /// Dimensions of its latest inputs, in the dtype of activations.
    pub recent: Vec<usize>,
    /// Dimensions of its state, in f32.
    pub state: Vec<usize>,
}

/// What a recurrent block carries of all sequences during generation. Of a sequence whose first position is in the batch it means nothing yet.
#[derive(Debug)]
pub struct CarrySlot<'a> {
    /// `[N, …]` as [`CarrySpec::recent`] says.
    pub recent: ViewMut<'a>,
    /// f32 `[N, …]` as [`CarrySpec::state`] says.
    pub state: ViewMut<'a>,
    /// i32 `[B]`: which of the N is that of each sequence of the batch.
    pub slots: View<'a>,
}

/// A block's slice of the key/value cache during generation.
#[derive(Debug)]
pub struct KvSlot<'a> {
    /// Pages of keys `[N, P, G, K]`.
    pub keys: ViewMut<'a>,
    /// Pages of values `[N, P, G, K]`, where [`KvSpec::has_values`] asks for them.
    pub values: Option<ViewMut<'a>>,
    /// i32 `[B, M]`: each sequence's pages, as [`KeyValues::pages`](terrace_kernels::KeyValues::pages) has them. There are pages for
    /// all that is in the cache and for the valid positions of this batch.
    pub pages: View<'a>,
}

/// Everything a block may use besides weights and signals.
#[derive(Debug)]
pub struct Context<'a> {
    /// The operations.
    pub kernels: &'a KernelSet,
    /// Memory for intermediates.
    pub arena: &'a Arena,
    /// Element type of activations.
    pub dtype: DType,
    /// What is being done.
    pub mode: Mode,
    /// Number of sequences, B.
    pub sequences: usize,
    /// Positions per sequence, S.
    pub length: usize,
    /// The micro-batch's inputs on the device.
    pub inputs: &'a [Tensor],
    /// f64 `[1]`: the last block adds the sum of its loss terms.
    pub loss: ViewMut<'a>,
    /// Factor for the gradient of every loss term (one over the number of terms in the step).
    pub loss_scale: f32,
    /// The block's key/value cache in [`Mode::Generate`].
    pub kv: Option<KvSlot<'a>>,
    /// What the block [carries](Block::carries) in [`Mode::Generate`].
    pub carried: Option<CarrySlot<'a>>,
    /// Memory for what [`keep`](Self::keep) leaves: where the engine can, that of the block's gradient, which comes later.
    pub lasting: &'a Arena,
    /// In [`Mode::Train`]: what goes from forward to backward; blocks call [`keep`](Self::keep) and
    /// [`take_kept`](Self::take_kept).
    pub kept: Kept,
}

impl Context<'_> {
    /// In `forward`: whether the engine has room for what `backward` would otherwise recompute.
    pub fn keeps(&self) -> bool {
        matches!(self.kept, Kept::Wanted)
    }

    /// In `forward`, if the engine [has room](Self::keeps): leaves tensors of the arena for the `backward` of the same
    /// micro-batch, which must compute the same bits with them as without. They stay where they are, so it costs memory but no
    /// time. Leave what is expensive to compute and not the block's input or output, which backward gets anyway. Taken from
    /// [`lasting`](Self::lasting) it costs less memory.
    ///
    /// # Panics
    /// If the engine did not ask.
    pub fn keep(&mut self, tensors: Vec<Tensor>) {
        assert!(self.keeps(), "a block may leave tensors only where the engine asks for them");
        self.kept = Kept::Left(tensors);
    }

    /// In `backward`: what `forward` left, in the same order; `None` if it was not asked and backward must recompute.
    pub fn take_kept(&mut self) -> Option<Vec<Tensor>> {
        match std::mem::take(&mut self.kept) {
            Kept::Left(tensors) => Some(tensors),
            Kept::Nothing | Kept::Wanted => None,
        }
    }

    /// Tokens in the micro-batch, T.
    pub fn tokens(&self) -> usize {
        self.sequences * self.length
    }

    /// Input tensor `index` of the micro-batch.
    ///
    /// # Panics
    /// If the batch has no such input: whoever built it and the blocks disagree.
    pub fn input(&self, index: usize) -> View<'_> {
        self.inputs[index].view()
    }

    /// Takes a tensor of the activation dtype.
    ///
    /// # Errors
    /// The arena is exhausted.
    pub fn tensor(&self, dims: &[usize]) -> Result<Tensor> {
        Ok(Tensor::new(self.arena, self.dtype, dims)?)
    }

    /// Takes a tensor of the given dtype.
    ///
    /// # Errors
    /// The arena is exhausted.
    pub fn tensor_of(&self, dtype: DType, dims: &[usize]) -> Result<Tensor> {
        Ok(Tensor::new(self.arena, dtype, dims)?)
    }

    /// Takes a tensor of the activation dtype which is [left](Self::keep) for backward, if the engine asked for that.
    ///
    /// # Errors
    /// The arena is exhausted.
    pub fn lasting_tensor(&self, dims: &[usize]) -> Result<Tensor> {
        self.lasting_tensor_of(self.dtype, dims)
    }

    /// The same, of the given dtype.
    ///
    /// # Errors
    /// The arena is exhausted.
    pub fn lasting_tensor_of(&self, dtype: DType, dims: &[usize]) -> Result<Tensor> {
        Ok(Tensor::new(self.lasting, dtype, dims)?)
    }
}

/// A block's parameters: its own in the order of [`Block::params`], then the borrowed ones.
#[derive(Debug)]
pub struct Weights<'a> {
    views: Vec<Weight<'a>>,
}

/// One parameter as a block sees it.
#[derive(Debug, Clone, Copy)]
pub enum Weight<'a> {
    /// In the dtype of the engine.
    Plain(View<'a>),
    /// In the format that its [`ParamSpec::quantized`] names.
    Quantized(QuantizedView<'a>),
}

impl<'a> Weights<'a> {
    /// Collects views in order.
    pub fn new(views: Vec<View<'a>>) -> Self {
        Self { views: views.into_iter().map(Weight::Plain).collect() }
    }

    /// Collects parameters in order, some of which may be quantized.
    pub fn mixed(views: Vec<Weight<'a>>) -> Self {
        Self { views }
    }

    /// Parameter `index`, which is not quantized.
    ///
    /// # Panics
    /// If there is no such parameter, or it is quantized: the block asked for that and calls [`weight`](Self::weight).
    pub fn get(&self, index: usize) -> View<'a> {
        match self.views[index] {
            Weight::Plain(view) => view,
            Weight::Quantized(view) => panic!("parameter {index} is stored in {}", view.format()),
        }
    }

    /// Parameter `index`, quantized or not.
    ///
    /// # Panics
    /// If there is no such parameter.
    pub fn weight(&self, index: usize) -> Weight<'a> {
        self.views[index]
    }
}

/// The f32 gradient accumulators of a block's parameters, in the order of [`Weights`]. A block *adds* to them.
#[derive(Debug)]
pub struct Gradients<'a> {
    kernels: &'a KernelSet,
    slots: Vec<GradientSlot<'a>>,
    /// The first parameter that has one; those before it are in [parts](Block::gradient_parts).
    first: usize,
    parts: Option<&'a mut dyn Parts>,
}

/// Who takes the gradients of a block's [parts](Block::gradient_parts), each when it is complete.
pub(crate) trait Parts: Debug {
    /// Memory for the next part's.
    fn begin(&mut self) -> Result<Accumulator>;

    /// The slots of its parameters, and the first of them.
    fn slots<'s>(&self, part: &'s mut Accumulator) -> (usize, Vec<GradientSlot<'s>>);

    /// Takes what it adds up to.
    fn complete(&mut self, part: Accumulator) -> Result;
}

/// An accumulator.
#[derive(Debug)]
pub(crate) struct GradientSlot<'a> {
    pub(crate) bytes: BytesMut<'a>,
    pub(crate) dims: Vec<usize>,
    /// Whether it holds a sum; until then its bytes mean nothing. `None` if it does from the start.
    pub(crate) has_sum: Option<&'a mut bool>,
}

impl GradientSlot<'_> {
    /// Whether there is something to add to. From now on there is.
    fn begin(&mut self) -> bool {
        self.has_sum.as_mut().is_none_or(|has_sum| std::mem::replace(*has_sum, true))
    }
}

impl<'a> Gradients<'a> {
    /// Collects accumulators, zeros or sums so far, and their dimensions in order.
    pub fn new(kernels: &'a KernelSet, slots: Vec<(BytesMut<'a>, Vec<usize>)>) -> Self {
        let slot = |(bytes, dims)| GradientSlot { bytes, dims, has_sum: None };
        Self::of(kernels, 0, slots.into_iter().map(slot).collect(), None)
    }

    /// Of the parameters from `first` on; those before it are in `parts`.
    pub(crate) fn of(
        kernels: &'a KernelSet,
        first: usize,
        slots: Vec<GradientSlot<'a>>,
        parts: Option<&'a mut dyn Parts>,
    ) -> Self {
        Self { kernels, slots, first, parts }
    }

    /// Adds to the gradients of the next of the block's [parts](Block::gradient_parts), and to no others. They are complete
    /// when `add` returns, and may be taken away.
    ///
    /// # Errors
    /// That of `add`, or what takes them away failed.
    ///
    /// # Panics
    /// If the block has no more parts than it has completed.
    pub fn part(&mut self, add: impl FnOnce(&mut Gradients<'_>) -> Result) -> Result {
        let kernels = self.kernels;
        let Some(parts) = &mut self.parts else { return add(self) };
        let mut part = parts.begin()?;
        let (first, slots) = parts.slots(&mut part);
        add(&mut Gradients::of(kernels, first, slots, None))?;
        parts.complete(part)
    }

    fn slot(&mut self, index: usize) -> &mut GradientSlot<'a> {
        let slot = index.checked_sub(self.first).and_then(|at| self.slots.get_mut(at));
        slot.unwrap_or_else(|| panic!("parameter {index} has no gradient here: it is not of this part"))
    }

    /// The accumulator of parameter `index`.
    ///
    /// # Errors
    /// A kernel failed.
    ///
    /// # Panics
    /// If there is no such parameter.
    pub fn get(&mut self, index: usize) -> Result<ViewMut<'_>> {
        let kernels = self.kernels;
        let slot = self.slot(index);
        let has_sum = slot.begin();
        let mut view = ViewMut::new(slot.bytes.reborrow(), DType::F32, &slot.dims);
        if !has_sum {
            kernels.elementwise.zero(view.reborrow())?;
        }
        Ok(view)
    }

    /// Adds `dout_RNᵀ · x_RL` to the accumulator `[N, L]` of parameter `index`: the gradient of the weight of `x · Wᵀ`. The first sum
    /// is written over what the memory held, without zeros before it.
    ///
    /// # Errors
    /// A kernel failed.
    ///
    /// # Panics
    /// If there is no such parameter, or the shapes do not go together.
    pub fn add_product(&mut self, index: usize, dout: View<'_>, x: View<'_>) -> Result {
        let kernels = self.kernels;
        let slot = self.slot(index);
        let spec = MatmulSpec { accumulate: slot.begin(), ..MatmulSpec::TN_ACCUMULATE };
        let out = ViewMut::new(slot.bytes.reborrow(), DType::F32, &slot.dims);
        Ok(kernels.matmul.matmul(dout, x, out, spec)?)
    }

    /// [`add_product`](Self::add_product) of each of `products`, an index with its `dout_RN` and `x_RL`, and `beside`: all
    /// [at once](terrace_kernels::Matmul::together), with the same bits.
    ///
    /// # Errors
    /// A kernel failed.
    ///
    /// # Panics
    /// If there is no such parameter, one is there twice, or the shapes do not go together.
    pub fn add_products(
        &mut self,
        products: &[(usize, View<'_>, View<'_>)],
        beside: Vec<Product<'_>>,
    ) -> Result {
        let terms: Vec<_> = products.iter().map(|&(_, dout, x)| [(dout, x)]).collect();
        let mut all = beside;
        let expected = all.len() + products.len();
        let mut places: Vec<Option<usize>> = vec![None; self.slots.len()];
        products.iter().enumerate().for_each(|(at, product)| places[product.0 - self.first] = Some(at));
        for (slot, at) in self.slots.iter_mut().zip(places) {
            let Some(at) = at else { continue };
            let spec = MatmulSpec { accumulate: slot.begin(), ..MatmulSpec::TN_ACCUMULATE };
            let out = ViewMut::new(slot.bytes.reborrow(), DType::F32, &slot.dims);
            all.push(Product { terms: &terms[at], out, spec, epilogue: Epilogue::NONE });
        }
        assert_eq!(all.len(), expected, "each product has a parameter of its own");
        Ok(self.kernels.matmul.together(&mut all)?)
    }
}

/// What the first half of a forward leaves to the second.
#[derive(Debug)]
pub struct Begun {
    /// Which of the block's [parts](Block::parts) it uses, in rising order.
    pub wanted: Vec<usize>,
    /// Whatever the second half needs.
    pub tensors: Vec<Tensor>,
    /// What of that the host knows already.
    pub numbers: Vec<usize>,
}

/// A piece of a network with parameters, a forward and a backward.
pub trait Block: Send + Sync + Debug {
    /// Name for traces and messages, for example `layers.3`.
    fn name(&self) -> &str;

    /// The parameters it owns; together they form one group that travels as one.
    fn params(&self) -> &[ParamSpec];

    /// Names of parameters that it uses but an earlier block owns (tied embeddings).
    fn borrowed(&self) -> &[String] {
        &[]
    }

    /// What `forward` writes for a batch of B sequences of S positions.
    fn output(&self, sequences: usize, length: usize, dtype: DType, mode: Mode) -> OutputSpec;

    /// The key/value cache it needs in [`Mode::Generate`].
    fn kv(&self) -> Option<KvSpec> {
        None
    }

    /// What it carries from pass to pass in [`Mode::Generate`], if it is recurrent.
    fn carries(&self) -> Option<CarrySpec> {
        None
    }

    /// Refuses a batch that it cannot compute with: other inputs than it reads, or numbers outside a table. The engine asks every block
    /// before anything is done; no kernel refuses them later but by a panic.
    ///
    /// # Errors
    /// [`EngineError::Batch`](crate::EngineError::Batch), which says what is wrong with which input.
    fn check(&self, _batch: &MicroBatch, _use: BatchUse<'_>) -> Result {
        Ok(())
    }

    /// How many times a forward or backward over so many rows multiplies with each of its weights, one part of the rows after the
    /// other: what a backend gains from weights that stay packed.
    fn passes(&self, _rows: usize) -> usize {
        1
    }

    /// Parts of its own parameters, as ranges of their indices that follow one another, of which a forward uses some, and knows only on the way
    /// which. None by default.
    fn parts(&self) -> Vec<Range<usize>> {
        Vec::new()
    }

    /// Parts of its own parameters, as ranges of their indices that follow one another from the first on, of which a backward completes one after the
    /// other: it adds to their gradients within [`Gradients::part`], which it calls once for each, and before it adds to those of
    /// the parameters behind them. None by default. The engine may then hold the gradients of one part at a time.
    fn gradient_parts(&self) -> Vec<Range<usize>> {
        Vec::new()
    }

    /// Elements of its parameters that an export holds at once, where files have them in another order than the block.
    fn export_elements(&self) -> usize {
        0
    }

    /// How much of its [parts](Self::parts) a forward over so many rows is expected to use. Where that is little, and one that does not train, the engine may
    /// ask for [halves](Self::begin).
    fn parts_used(&self, _rows: usize) -> f64 {
        1.0
    }

    /// The first half of a [`forward`](Self::forward) that does not train, of a block with [parts](Self::parts), whose weights may be anything
    /// yet.
    ///
    /// # Errors
    /// A kernel or the device failed.
    fn begin(
        &self,
        _cx: &mut Context<'_>,
        _weights: &Weights<'_>,
        _x: Option<View<'_>>,
        _y: ViewMut<'_>,
    ) -> Result<Begun> {
        unreachable!("a block with parts has a forward in halves")
    }

    /// The second half, when the parts that the first one [wants](Begun::wanted) are there. Both take no more memory than `forward` does, and
    /// give the same bits.
    ///
    /// # Errors
    /// A kernel or the device failed.
    fn finish(
        &self,
        _cx: &mut Context<'_>,
        _weights: &Weights<'_>,
        _begun: Begun,
        _y: ViewMut<'_>,
    ) -> Result {
        unreachable!("a block with parts has a forward in halves")
    }

    /// Computes `y` from `x` (`None` for the first block). In [`Mode::Train`] it is not called on the last block; in
    /// [`Mode::Evaluate`] the last block adds to [`Context::loss`] instead of writing `y`, which is then empty.
    ///
    /// If [`Context::keeps`] says so it may [leave](Context::keep) intermediates for `backward`.
    ///
    /// # Errors
    /// A kernel or the device failed.
    fn forward(
        &self,
        cx: &mut Context<'_>,
        weights: &Weights<'_>,
        x: Option<View<'_>>,
        y: ViewMut<'_>,
    ) -> Result;

    /// Recomputes what it needs from `x`, unless forward left it ([`Context::take_kept`]), adds the parameters' gradients to `gradients` and writes `dx` (`None` for the first
    /// block). `dy` is `None` for the last block, which computes its loss here, adds it to [`Context::loss`] and scales the
    /// gradient by [`Context::loss_scale`].
    ///
    /// # Errors
    /// A kernel or the device failed.
    fn backward(
        &self,
        cx: &mut Context<'_>,
        weights: &Weights<'_>,
        x: Option<View<'_>>,
        dy: Option<View<'_>>,
        dx: Option<ViewMut<'_>>,
        gradients: &mut Gradients<'_>,
    ) -> Result;
}
