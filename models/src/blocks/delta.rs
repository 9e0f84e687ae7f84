//! The first half of a decoder layer with the gated delta rule (Yang et al., arXiv 2412.06464) in the place of attention, as Qwen 3.5 has it:
//! `y = x + o(norm(S(qkv, a, b))·silu(z))`, where qkv, z, a and b are projections of `norm(x)`, and S is the
//! [rule](terrace_kernels::DeltaRule) behind a short convolution.
//!
//! C channels of queries, keys and values, H heads of values of V elements, N = H·V.

use super::TILE_ROWS;
use super::layers::{
    After, Linear, Norm, Normed, Params, add_branch, backward_together, forward_together, input_backward,
    tiles,
};
use crate::batch::{LAST, STARTS};
use crate::{DeltaNet, ModelConfig};
use terrace_kernels::{Carried, DType, DeltaSpec, GateFunction, Tensor, View, ViewMut, delta_scratch};
use terrace_zero::{CarrySpec, Context, Gradients, Result, Weights};

/// Parameters of such a half.
///
/// Memory beside operands, in elements of the activation dtype (norms, gates of heads and statistics left out): forward T·(2C + 2N) in the rule and
/// T·3N behind it; backward the larger of T·(C + 6N) and, with [`delta_scratch`] f32 beside it, T·(3C + 3N). A layer that keeps leaves
/// T·(C + 2N + 2H) of that.
#[derive(Debug)]
pub(crate) struct Delta {
    before: Option<Norm>,
    after: After,
    qkv: Linear,
    z: Linear,
    b: Linear,
    a: Linear,
    /// `[C, 1, W]`.
    convolution: usize,
    taps: usize,
    /// `[H]`.
    a_log: usize,
    /// `[H]`.
    dt_bias: usize,
    /// Of the heads of what the rule gives.
    norm: Norm,
    output: Linear,
    spec: DeltaSpec,
}

/// What the projections give: `[T, C]`, `[T, N]` and twice `[T, H]`.
#[derive(Debug)]
pub(crate) struct Channels {
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
}

/// The gates of all positions and heads, f32 `[T, H]`.
struct Gates {
    decay: Tensor,
    beta: Tensor,
}

impl Channels {
    pub(crate) fn z(&self) -> View<'_> {
        self.z.view()
    }

    /// In the order of [`from_tensors`](Self::from_tensors).
    pub(crate) fn into_tensors(self) -> [Tensor; 4] {
        let Self { qkv, z, b, a } = self;
        [qkv, z, b, a]
    }

    pub(crate) fn from_tensors([qkv, z, b, a]: [Tensor; 4]) -> Self {
        Self { qkv, z, b, a }
    }
}

impl Delta {
    /// Takes its parameters from the layer's list.
    pub(crate) fn new(config: &ModelConfig, delta: &DeltaNet, params: &mut Params) -> Self {
        let (hidden, spec, taps) = (config.hidden, delta.spec, delta.taps);
        let (channels, heads) = (spec.channels(), spec.value_heads);
        let values = heads * spec.value_size;
        let (before, after) = After::around(config, params, ["input_layernorm", "post_attention_layernorm"]);
        Self {
            before,
            after,
            qkv: params.linear("linear_attn.in_proj_qkv", channels, hidden, false),
            z: params.linear("linear_attn.in_proj_z", values, hidden, false),
            b: params.plain_linear("linear_attn.in_proj_b", heads, hidden, false),
            a: params.plain_linear("linear_attn.in_proj_a", heads, hidden, false),
            convolution: params.numbers("linear_attn.conv1d.weight", &[channels, 1, taps]),
            taps,
            a_log: params.numbers("linear_attn.A_log", &[heads]),
            dt_bias: params.numbers("linear_attn.dt_bias", &[heads]),
            norm: params.plain_norm("linear_attn.norm", spec.value_size, config.norm_eps),
            output: params.linear("linear_attn.out_proj", hidden, values, false),
            spec,
        }
    }

    /// What it carries in generation: the latest inputs of the convolution, and a state for each head.
    pub(crate) fn carries(&self) -> CarrySpec {
        let DeltaSpec { value_heads, key_size, value_size, .. } = self.spec;
        CarrySpec {
            recent: vec![self.taps - 1, self.spec.channels()],
            state: vec![value_heads, key_size, value_size],
        }
    }

    /// Norm and projections of `x_TD`.
    pub(crate) fn project(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        x_TD: View<'_>,
    ) -> Result<Channels> {
        let tokens = x_TD.shape().rows();
        let heads = self.spec.value_heads;
        let mut qkv = cx.lasting_tensor(&[tokens, self.spec.channels()])?;
        let mut z = cx.lasting_tensor(&[tokens, heads * self.spec.value_size])?;
        let mut b = cx.lasting_tensor(&[tokens, heads])?;
        let mut a = cx.lasting_tensor(&[tokens, heads])?;
        for (start, end) in tiles(tokens, TILE_ROWS) {
            let x_RD = x_TD.rows(start, end);
            let normed = self.before.map(|norm| norm.forward(cx, weights, x_RD)).transpose()?;
            let h_RD = normed.as_ref().map_or(x_RD, |normed| normed.out.view());
            let layers = [(self.qkv, &mut qkv), (self.z, &mut z), (self.b, &mut b), (self.a, &mut a)];
            let mut layers = layers.map(|(layer, out)| (layer, out.view_mut().rows(start, end)));
            forward_together(cx, weights, h_RD, &mut layers)?;
        }
        Ok(Channels { qkv, z, b, a })
    }

    /// The rule over the sequences, or from what they carried on: `[T, N]`.
    pub(crate) fn scan(
        &self,
        cx: &mut Context<'_>,
        weights: &Weights<'_>,
        channels: &Channels,
    ) -> Result<Tensor> {
        let mut out_TN = cx.lasting_tensor(channels.z.shape().dims())?;
        let mut carried = cx.carried.take();
        let (starts, last) = (cx.inputs[STARTS].view(), cx.inputs[LAST].view());
        let mut qkv_TC = cx.tensor(channels.qkv.shape().dims())?;
        let recent = carried.as_mut().map(|carried| Carried {
            state: carried.recent.reborrow(),
            slots: carried.slots,
            starts,
            last,
        });
        self.convolve(cx, weights, channels, recent, qkv_TC.view_mut())?;
        let Gates { decay, beta } = self.gates(cx, weights, channels)?;
        let state = carried.as_mut().map(|carried| Carried {
            state: carried.state.reborrow(),
            slots: carried.slots,
            starts,
            last,
        });
        let (qkv_BSC, out) = (self.sequences(cx, qkv_TC.view()), out_TN.view_mut());
        let out_BSHV = out.reshape(&self.dims_out(cx));
        cx.kernels.delta_rule.scan(qkv_BSC, decay.view(), beta.view(), self.spec, state, out_BSHV)?;
        cx.carried = carried;
        Ok(out_TN)
    }

    /// Whether [`residual`](Self::residual) gives something that backward needs.
    pub(crate) fn needs_branch(&self) -> bool {
        self.after.needs_branch()
    }

    /// `y = x + after(o(norm(scanned)·silu(z)))`. With a norm what comes of `o` stays for [`backward`](Self::backward) if `stays`.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    pub(crate) fn residual(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        z_TN: View<'_>,
        scanned_TN: View<'_>,
        x_TD: View<'_>,
        y_TD: ViewMut<'_>,
        stays: bool,
    ) -> Result<Option<Tensor>> {
        let gated_TN = self.gated(cx, weights, z_TN, scanned_TN)?;
        add_branch(cx, weights, (self.output, self.after), gated_TN.view(), x_TD, y_TD, stays)
    }

    /// On entry `dx` is the gradient of `y`; on return that of `x`. `branch_TD` is what [`residual`](Self::residual) gave.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    pub(crate) fn backward(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        x_TD: View<'_>,
        channels: Channels,
        scanned_TN: Tensor,
        branch_TD: Option<Tensor>,
        dx_TD: ViewMut<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        let of_branch = branch_TD.as_ref().map(Tensor::view);
        let dbranch_TD = self.after.backward(cx, weights, dx_TD.view(), of_branch, gradients)?;
        drop(branch_TD);
        let dy_TD = dbranch_TD.as_ref().map_or(dx_TD.view(), Tensor::view);
        let dims_TN = scanned_TN.shape();
        let gated_TN = self.gated(cx, weights, channels.z.view(), scanned_TN.view())?;
        let mut dgated_TN = cx.tensor(dims_TN.dims())?;
        let output = [(self.output, dy_TD)];
        backward_together(cx, weights, &output, gated_TN.view(), dgated_TN.view_mut(), gradients)?;
        drop((gated_TN, dbranch_TD));

        let scanned = self.heads(scanned_TN.view());
        let Normed { out, rstd } = self.norm.forward(cx, weights, scanned)?;
        let (mut dz, mut dnormed) = (cx.tensor(dims_TN.dims())?, cx.tensor(dims_TN.dims())?);
        let (z, normed, dgated) = (channels.z.view(), out.view().reshape(dims_TN.dims()), dgated_TN.view());
        let (to_z, to_normed) = (dz.view_mut(), dnormed.view_mut());
        cx.kernels.activation.gated_backward(GateFunction::Silu, z, normed, dgated, to_z, to_normed)?;
        drop((out, dgated_TN));
        let mut dscanned = cx.tensor(dims_TN.dims())?;
        let (dout, to) = (self.heads(dnormed.view()), dscanned.view_mut().reshape(scanned.shape().dims()));
        self.norm.backward(cx, weights, dout, scanned, rstd.view(), to, false, gradients)?;
        drop((dnormed, rstd, scanned_TN));

        let dchannels = self.scan_backward(cx, weights, &channels, dz, dscanned, gradients)?;
        drop(channels);
        let branches = [
            (self.qkv, dchannels.qkv.view()),
            (self.z, dchannels.z.view()),
            (self.b, dchannels.b.view()),
            (self.a, dchannels.a.view()),
        ];
        input_backward(cx, weights, self.before, &branches, x_TD, dx_TD, gradients)
    }

    /// From the gradient of what the rule gave to those of the projections, of which that of z is there.
    fn scan_backward(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        channels: &Channels,
        z: Tensor,
        dscanned: Tensor,
        gradients: &mut Gradients<'_>,
    ) -> Result<Channels> {
        let rule = &cx.kernels.delta_rule;
        let (dims_TC, dims_TH) = (channels.qkv.shape(), channels.a.shape());
        let mut qkv_TC = cx.tensor(dims_TC.dims())?;
        self.convolve(cx, weights, channels, None, qkv_TC.view_mut())?;
        let Gates { decay, beta } = self.gates(cx, weights, channels)?;
        let mut dconvolved = cx.tensor(dims_TC.dims())?;
        let of_gates = || cx.tensor_of(DType::F32, dims_TH.dims());
        let (mut ddecay, mut dbeta) = (of_gates()?, of_gates()?);
        let mut scratch = cx.tensor_of(DType::F32, &[delta_scratch(cx.sequences, cx.length, self.spec)])?;
        rule.scan_backward(
            self.sequences(cx, qkv_TC.view()),
            decay.view(),
            beta.view(),
            self.spec,
            dscanned.view().reshape(&self.dims_out(cx)),
            dconvolved.view_mut().reshape(&self.dims_qkv(cx)),
            ddecay.view_mut(),
            dbeta.view_mut(),
            scratch.view_mut(),
        )?;
        drop((scratch, decay, beta, qkv_TC, dscanned));

        let (mut a, mut b) = (cx.tensor(dims_TH.dims())?, cx.tensor(dims_TH.dims())?);
        // Accumulators are lent one at a time.
        let mut dheads = cx.tensor_of(DType::F32, &[2, self.spec.value_heads])?;
        cx.kernels.elementwise.zero(dheads.view_mut())?;
        let (da_log, ddt_bias) = dheads.view_mut().split_rows(1);
        let (a_log, dt_bias) = (weights.get(self.a_log), weights.get(self.dt_bias));
        let (of_a, of_b) = (channels.a.view(), channels.b.view());
        let (ddecay, dbeta) = (ddecay.view(), dbeta.view());
        let (to_a, to_b) = (a.view_mut(), b.view_mut());
        rule.gates_backward(of_a, of_b, a_log, dt_bias, ddecay, dbeta, to_a, to_b, da_log, ddt_bias)?;
        for (row, index) in [self.a_log, self.dt_bias].into_iter().enumerate() {
            let sum = dheads.view().rows(row, row + 1).reshape(&[self.spec.value_heads]);
            cx.kernels.elementwise.add_assign(gradients.get(index)?, sum)?;
        }
        let mut qkv = cx.tensor(dims_TC.dims())?;
        let dweight = gradients.get(self.convolution)?.reshape(&[self.spec.channels(), self.taps]);
        rule.convolve_backward(
            self.sequences(cx, channels.qkv.view()),
            self.taps(weights),
            self.sequences(cx, dconvolved.view()),
            qkv.view_mut().reshape(&self.dims_qkv(cx)),
            dweight,
        )?;
        Ok(Channels { qkv, z, b, a })
    }

    fn convolve(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        channels: &Channels,
        carried: Option<Carried<'_>>,
        out_TC: ViewMut<'_>,
    ) -> Result {
        let (x, out) = (self.sequences(cx, channels.qkv.view()), out_TC.reshape(&self.dims_qkv(cx)));
        Ok(cx.kernels.delta_rule.convolve(x, self.taps(weights), carried, out)?)
    }

    fn gates(&self, cx: &Context<'_>, weights: &Weights<'_>, channels: &Channels) -> Result<Gates> {
        let gate = || cx.tensor_of(DType::F32, channels.a.shape().dims());
        let mut gates = Gates { decay: gate()?, beta: gate()? };
        let (a, b) = (channels.a.view(), channels.b.view());
        let (a_log, dt_bias) = (weights.get(self.a_log), weights.get(self.dt_bias));
        let (decay, beta) = (gates.decay.view_mut(), gates.beta.view_mut());
        cx.kernels.delta_rule.gates(a, b, a_log, dt_bias, decay, beta)?;
        Ok(gates)
    }

    /// What the output projection reads, tile by tile.
    fn gated(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        z_TN: View<'_>,
        scanned_TN: View<'_>,
    ) -> Result<Tensor> {
        let mut gated_TN = cx.tensor(z_TN.shape().dims())?;
        for (start, end) in tiles(z_TN.shape().rows(), TILE_ROWS) {
            let (z_RN, scanned_RN) = (z_TN.rows(start, end), scanned_TN.rows(start, end));
            let normed = self.norm.forward(cx, weights, self.heads(scanned_RN))?;
            let up = normed.out.view().reshape(z_RN.shape().dims());
            let to = gated_TN.view_mut().rows(start, end);
            cx.kernels.activation.gated(GateFunction::Silu, z_RN, up, to)?;
        }
        Ok(gated_TN)
    }

    /// `[C, W]`.
    fn taps<'a>(&self, weights: &Weights<'a>) -> View<'a> {
        weights.get(self.convolution).reshape(&[self.spec.channels(), self.taps])
    }

    /// `[T, N]` as rows of heads.
    fn heads<'a>(&self, x_TN: View<'a>) -> View<'a> {
        let rows = x_TN.shape().rows() * self.spec.value_heads;
        x_TN.reshape(&[rows, self.spec.value_size])
    }

    /// `[T, C]` as `[B, S, C]`.
    fn sequences<'a>(&self, cx: &Context<'_>, x_TC: View<'a>) -> View<'a> {
        x_TC.reshape(&self.dims_qkv(cx))
    }

    fn dims_qkv(&self, cx: &Context<'_>) -> [usize; 3] {
        [cx.sequences, cx.length, self.spec.channels()]
    }

    fn dims_out(&self, cx: &Context<'_>) -> [usize; 4] {
        [cx.sequences, cx.length, self.spec.value_heads, self.spec.value_size]
    }
}
