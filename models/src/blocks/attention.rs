//! The attention half of a decoder layer with its norm and residual: `y = x + o(attend(rope(qkv(norm(x)))))`, or, of models whose norms
//! follow, `y = x + norm(o(attend(rope(qkv(x)))))`; of some what is added is multiplied by a number, or what `o` reads by `σ(g(norm(x)))`.
//!
//! Values may have a norm without weights, and be what keys are before theirs: then there is no projection of values, and that of keys gets
//! the gradients of both.

use super::TILE_ROWS;
use super::layers::{
    After, Linear, Norm, Normed, Params, activate, add_branch, backward_together, forward_together,
    input_backward, tiles,
};
use crate::batch::{INV_FREQ, POSITIONS, STARTS, WINDOW_INV_FREQ, factor_inputs};
use crate::{KvHeads, ModelConfig, QkNorm};
use terrace_kernels::{
    AttentionSpec, DType, GateFunction, KeyValues, RopeDirection, RopeLayout, RopePairs, Tensor, View,
    ViewMut,
};
use terrace_zero::{Context, Gradients, KvSpec, Result, Weights};

/// Parameters of the attention half.
#[derive(Debug)]
pub(crate) struct Attention {
    /// Of the input.
    before: Option<Norm>,
    after: After,
    query: Linear,
    /// Of what attention gives.
    gate: Option<Linear>,
    key: Linear,
    /// What keys are, before their norm, without one.
    value: Option<Linear>,
    output: Linear,
    /// Norms of queries and keys: of each head, or of all together.
    qk_norms: Option<(QkNorm, Norm, Norm)>,
    /// Of each head of values.
    value_norm: Option<Norm>,
    /// A number for each query head.
    sinks: Option<usize>,
    /// The input with the frequencies, and what multiplies rotated queries and keys; `None` where they are not rotated.
    rotary: Option<(usize, f32)>,
    pairs: RopePairs,
    /// The inputs with what multiplies queries behind that, and the numbers of their rows.
    factors: Option<[usize; 2]>,
    spec: AttentionSpec,
    heads: usize,
    kv_heads: usize,
    head_size: usize,
}

/// What the projections give: `[T, H·K]`, twice `[T, G·K]`, or once where keys are values, too, and a gate
/// `[T, H·K]` of some.
///
/// Without norms, or with those of rotated heads, queries and keys are rotated in place, so that after [`Attention::attend`] they hold the
/// rotated ones.
#[derive(Debug)]
pub(crate) struct Projected {
    pub(crate) q: Tensor,
    pub(crate) k: Tensor,
    pub(crate) v: Option<Tensor>,
    pub(crate) gate: Option<Tensor>,
}

impl Projected {
    pub(crate) fn gate(&self) -> Option<View<'_>> {
        self.gate.as_ref().map(Tensor::view)
    }

    /// What is left when attention is done.
    pub(crate) fn into_gate(self) -> Option<Tensor> {
        self.gate
    }
}

/// Queries and keys as attention sees them, apart from the projections because of their norms, and values that have a norm.
#[derive(Debug)]
struct Heads {
    q_BSHK: Tensor,
    q_rstd: Tensor,
    k_BSGK: Tensor,
    k_rstd: Tensor,
    v: Option<Normed>,
}

/// The result of attention.
#[derive(Debug)]
pub(crate) struct Attended {
    pub(crate) out_BSHK: Tensor,
    pub(crate) lse_BHS: Tensor,
}

/// Gradients of queries, keys and values, in the shapes of [`Projected`].
#[derive(Debug)]
struct ProjectedGradients {
    dq: Tensor,
    dk: Tensor,
    dv: Option<Tensor>,
}

impl Attention {
    /// Takes its parameters from the layer's list.
    pub(crate) fn new(config: &ModelConfig, layer: usize, params: &mut Params) -> Self {
        let KvHeads { count: kv_heads, size: head_size } = config.heads_of(layer);
        let (hidden, eps) = (config.hidden, config.norm_eps);
        let (queries, keys) = (config.query_width(layer), config.kv_width(layer));
        let (before, after) = After::around(config, params, config.family.norms_of_attention());
        let is_rotated = !config.unrotated.contains(&layer);
        Self {
            before,
            after,
            query: params.linear("self_attn.q_proj", queries, hidden, config.qkv_bias),
            gate: config
                .gated_attention
                .then(|| params.linear("self_attn.q_gate_proj", queries, hidden, config.qkv_bias)),
            key: params.linear("self_attn.k_proj", keys, hidden, config.qkv_bias),
            value: config
                .projects_values(layer)
                .then(|| params.linear("self_attn.v_proj", keys, hidden, config.qkv_bias)),
            output: params.linear("self_attn.o_proj", hidden, queries, config.output_bias),
            qk_norms: config.qk_norm.and_then(|kind| {
                let [of_query, of_key] = match kind {
                    QkNorm::PerHead | QkNorm::PerRotatedHead => [head_size; 2],
                    QkNorm::AllHeads => [queries, keys],
                    QkNorm::PerRotatedHeadWithoutWeights => {
                        let norm = Params::norm_without_weight(eps);
                        return is_rotated.then_some((kind, norm, norm));
                    }
                };
                let [query, key] = config.family.norms_of_heads();
                let query = params.norm(query, of_query, eps);
                Some((kind, query, params.norm(key, of_key, eps)))
            }),
            value_norm: config.value_norm.then(|| Params::norm_without_weight(eps)),
            sinks: config.has_sinks.then(|| params.numbers("self_attn.sinks", &[config.heads])),
            rotary: is_rotated.then(|| {
                match config.window_rope.as_ref().filter(|_| config.windows[layer].is_some()) {
                    Some(rope) => (WINDOW_INV_FREQ, rope.attention_factor()),
                    None => (INV_FREQ, config.rope.attention_factor()),
                }
            }),
            pairs: config.rope_pairs,
            factors: factor_inputs(config).filter(|_| {
                !(is_rotated && config.query_factor.is_some_and(|factor| factor.unrotated_alone))
            }),
            spec: spec(config, layer, head_size),
            heads: config.heads,
            kv_heads,
            head_size,
        }
    }

    /// What normalizes the input.
    pub(crate) fn norm(&self) -> Option<Norm> {
        self.before
    }

    /// The cache it appends to in generation.
    pub(crate) fn kv(&self) -> KvSpec {
        KvSpec { heads: self.kv_heads, head_size: self.head_size, has_values: true }
    }

    /// Norm and the three projections of `x_TD`.
    pub(crate) fn project(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        x_TD: View<'_>,
    ) -> Result<Projected> {
        let tokens = x_TD.shape().rows();
        let kv_width = self.kv_heads * self.head_size;
        let mut q = cx.lasting_tensor(&[tokens, self.heads * self.head_size])?;
        let mut k = cx.lasting_tensor(&[tokens, kv_width])?;
        let mut v = self.value.map(|_| cx.lasting_tensor(&[tokens, kv_width])).transpose()?;
        let gate = self.gate.map(|_| cx.lasting_tensor(&[tokens, self.heads * self.head_size]));
        let mut gate = gate.transpose()?;
        for (start, end) in tiles(tokens, TILE_ROWS) {
            let x_RD = x_TD.rows(start, end);
            let normed = self.before.map(|norm| norm.forward(cx, weights, x_RD)).transpose()?;
            let h_RD = normed.as_ref().map_or(x_RD, |normed| normed.out.view());
            let q = (self.query, q.view_mut().rows(start, end));
            let k = (self.key, k.view_mut().rows(start, end));
            let others = [self.value.zip(v.as_mut()), self.gate.zip(gate.as_mut())].into_iter().flatten();
            let others = others.map(|(layer, out)| (layer, out.view_mut().rows(start, end)));
            let mut layers: Vec<_> = [q, k].into_iter().chain(others).collect();
            forward_together(cx, weights, h_RD, &mut layers)?;
        }
        Ok(Projected { q, k, v, gate })
    }

    /// Head norms, rotation and attention over the sequence itself, or over the cache when there is one.
    pub(crate) fn attend(
        &self,
        cx: &mut Context<'_>,
        weights: &Weights<'_>,
        projected: &mut Projected,
    ) -> Result<Attended> {
        if self.turns_projected() {
            self.turn(cx, projected)?;
        }
        if self.qk_norms.is_none() {
            self.multiply(cx, &mut projected.q)?;
        }
        let heads = self.normed(cx, weights, projected)?;
        let v = values(heads.as_ref(), projected);
        let Projected { q, k, .. } = &*projected;
        let (q, k) = heads.as_ref().map_or((q, k), |heads| (&heads.q_BSHK, &heads.k_BSGK));
        let dims_q = self.dims_q(cx);
        let mut out_BSHK = cx.lasting_tensor(&dims_q)?;
        let mut lse_BHS = cx.lasting_tensor_of(DType::F32, &[cx.sequences, self.heads, cx.length])?;
        let (kernel, starts) = (&cx.kernels.attention, &cx.inputs[STARTS]);
        let q_BSHK = q.view().reshape(&dims_q);
        let (out, lse) = (out_BSHK.view_mut(), lse_BHS.view_mut());
        let dims_k = self.dims_k(cx);
        let (k_BSGK, v_BSGK) = (k.view().reshape(&dims_k), v.view().reshape(&dims_k));
        let keys = match &mut cx.kv {
            None => KeyValues::rows(k_BSGK, v_BSGK),
            // Rows of padding go where there is a page for them: no valid query sees them, and the next ones overwrite them.
            Some(slot) => {
                let values = slot.values.as_mut().expect("this block asked for values");
                let (to_k, of_v) = (slot.keys.reborrow(), Some((v_BSGK, values.reborrow())));
                kernel.append(k_BSGK, of_v, starts.view(), slot.pages, to_k)?;
                KeyValues { k: slot.keys.view(), v: values.view(), pages: Some(slot.pages) }
            }
        };
        kernel.forward(q_BSHK, keys, starts.view(), out, lse, self.spec)?;
        if let Some(sinks) = self.sinks {
            cx.kernels.sinks.add(weights.get(sinks), out_BSHK.view_mut(), lse_BHS.view_mut())?;
        }
        Ok(Attended { out_BSHK, lse_BHS })
    }

    /// Whether [`residual`](Self::residual) gives something that backward needs.
    pub(crate) fn needs_branch(&self) -> bool {
        self.after.needs_branch()
    }

    /// Whether there is a projection of values.
    pub(crate) fn projects_values(&self) -> bool {
        self.value.is_some()
    }

    /// Whether there is a gate.
    pub(crate) fn is_gated(&self) -> bool {
        self.gate.is_some()
    }

    /// What the output projection reads, if that is not what attention gives.
    fn gated(&self, cx: &Context<'_>, out_TQ: View<'_>, gate_TQ: Option<View<'_>>) -> Result<Option<Tensor>> {
        let Some(gate_TQ) = gate_TQ else { return Ok(None) };
        activate(cx, GateFunction::Sigmoid, gate_TQ, out_TQ).map(Some)
    }

    /// `y = x + after(o(attended))`. With a norm `o(attended)` stays for [`backward`](Self::backward) if `stays`.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    pub(crate) fn residual(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        attended: &Attended,
        gate_TQ: Option<View<'_>>,
        x_TD: View<'_>,
        y_TD: ViewMut<'_>,
        stays: bool,
    ) -> Result<Option<Tensor>> {
        let out_TQ = flat(&attended.out_BSHK);
        let gated_TQ = self.gated(cx, out_TQ, gate_TQ)?;
        let input_TQ = gated_TQ.as_ref().map_or(out_TQ, Tensor::view);
        add_branch(cx, weights, (self.output, self.after), input_TQ, x_TD, y_TD, stays)
    }

    /// On entry `dx` is the gradient of `y`; on return that of `x`. `branch_TD` is what [`residual`](Self::residual) gave.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    pub(crate) fn backward(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        x_TD: View<'_>,
        projected: Projected,
        attended: Attended,
        branch_TD: Option<Tensor>,
        dx_TD: ViewMut<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        let of_branch = branch_TD.as_ref().map(Tensor::view);
        let dbranch_TD = self.after.backward(cx, weights, dx_TD.view(), of_branch, gradients)?;
        drop(branch_TD);
        let dy_TD = dbranch_TD.as_ref().map_or(dx_TD.view(), Tensor::view);
        let mut dout_BSHK = cx.tensor(&self.dims_q(cx))?;
        let out_TQ = flat(&attended.out_BSHK);
        let dims_TQ = out_TQ.shape();
        let gated_TQ = self.gated(cx, out_TQ, projected.gate())?;
        let input_TQ = gated_TQ.as_ref().map_or(out_TQ, Tensor::view);
        let dinput_TQ = dout_BSHK.view_mut().reshape(dims_TQ.dims());
        backward_together(cx, weights, &[(self.output, dy_TD)], input_TQ, dinput_TQ, gradients)?;
        drop((dbranch_TD, gated_TQ));
        let mut dgate_TQ = None;
        if let Some(gate_TQ) = projected.gate() {
            // The gradient of what was gated becomes that of what attention gave.
            let (mut dgate, mut dout) = (cx.tensor(dims_TQ.dims())?, cx.tensor(&self.dims_q(cx))?);
            let (dgated, to_out) = (flat(&dout_BSHK), dout.view_mut().reshape(dims_TQ.dims()));
            let (f, to_gate) = (GateFunction::Sigmoid, dgate.view_mut());
            cx.kernels.activation.gated_backward(f, gate_TQ, out_TQ, dgated, to_gate, to_out)?;
            dout_BSHK = dout;
            dgate_TQ = Some(dgate);
        }
        let of_projected = self.attend_backward(cx, weights, &projected, attended, dout_BSHK, gradients)?;
        drop(projected);
        let branches = [(self.query, flat(&of_projected.dq)), (self.key, flat(&of_projected.dk))];
        let value = self.value.zip(of_projected.dv.as_ref().map(|dv| flat(dv)));
        let gate = self.gate.zip(dgate_TQ.as_ref().map(Tensor::view));
        let branches: Vec<_> = branches.into_iter().chain(value).chain(gate).collect();
        input_backward(cx, weights, self.before, &branches, x_TD, dx_TD, gradients)
    }

    /// From the gradient of attention's output to those of the projections.
    fn attend_backward(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        projected: &Projected,
        attended: Attended,
        dout_BSHK: Tensor,
        gradients: &mut Gradients<'_>,
    ) -> Result<ProjectedGradients> {
        // What `attend` rotated in place must not be turned twice.
        let heads = self.normed(cx, weights, projected)?;
        if let Some(sinks) = self.sinks {
            let Attended { out_BSHK: out, lse_BHS: lse } = &attended;
            let (out, lse, dsinks) = (out.view(), lse.view(), gradients.get(sinks)?);
            cx.kernels.sinks.backward(weights.get(sinks), out, lse, dout_BSHK.view(), dsinks)?;
        }
        let (dims_q, dims_k) = (self.dims_q(cx), self.dims_k(cx));
        let mut dq = cx.tensor(&dims_q)?;
        let mut dk = cx.tensor(&dims_k)?;
        let mut dv = cx.tensor(&dims_k)?;
        let (q, k) =
            heads.as_ref().map_or((&projected.q, &projected.k), |heads| (&heads.q_BSHK, &heads.k_BSGK));
        cx.kernels.attention.backward(
            q.view().reshape(&dims_q),
            k.view().reshape(&dims_k),
            values(heads.as_ref(), projected).view().reshape(&dims_k),
            attended.out_BSHK.view(),
            attended.lse_BHS.view(),
            dout_BSHK.view(),
            dq.view_mut(),
            dk.view_mut(),
            dv.view_mut(),
            self.spec,
        )?;
        drop((attended, dout_BSHK));
        self.multiply(cx, &mut dq)?;
        if !self.norms_rotated() {
            self.turn_back(cx, &mut dq, &mut dk)?;
        }
        if let (Some((_, q_norm, k_norm)), Some(heads)) = (self.qk_norms, heads) {
            let Heads { q_BSHK, q_rstd, k_BSGK, k_rstd, v: normed } = heads;
            drop((q_BSHK, k_BSGK));
            let (q, k) = (projected.q.view(), projected.k.view());
            dq = self.head_norm_backward(cx, weights, q_norm, &dq, q, &q_rstd, None, gradients)?;
            if let Some((norm, Normed { out, rstd })) = self.value_norm.zip(normed) {
                drop(out);
                let v = projected.v.as_ref().map_or(k, Tensor::view);
                dv = self.head_norm_backward(cx, weights, norm, &dv, v, &rstd, None, gradients)?;
            }
            if !self.projects_values() {
                // Keys that are values get the gradients of both.
                let dk =
                    self.head_norm_backward(cx, weights, k_norm, &dk, k, &k_rstd, Some(dv), gradients)?;
                return Ok(ProjectedGradients { dq, dk, dv: None });
            }
            dk = self.head_norm_backward(cx, weights, k_norm, &dk, k, &k_rstd, None, gradients)?;
        }
        if self.norms_rotated() {
            self.turn_back(cx, &mut dq, &mut dk)?;
        }
        Ok(ProjectedGradients { dq, dk, dv: Some(dv) })
    }

    /// Whether queries and keys are normalized when they have been rotated.
    fn norms_rotated(&self) -> bool {
        matches!(self.qk_norms, Some((QkNorm::PerRotatedHead | QkNorm::PerRotatedHeadWithoutWeights, ..)))
    }

    /// Whether what projections give is rotated itself.
    fn turns_projected(&self) -> bool {
        self.qk_norms.is_none() || self.norms_rotated()
    }

    /// Rotates what projections give, in place.
    fn turn(&self, cx: &Context<'_>, projected: &mut Projected) -> Result {
        self.rotate(cx, projected.q.view_mut(), self.heads, RopeDirection::Forward)?;
        self.rotate(cx, projected.k.view_mut(), self.kv_heads, RopeDirection::Forward)
    }

    fn turn_back(&self, cx: &Context<'_>, dq: &mut Tensor, dk: &mut Tensor) -> Result {
        self.rotate(cx, dq.view_mut(), self.heads, RopeDirection::Backward)?;
        self.rotate(cx, dk.view_mut(), self.kv_heads, RopeDirection::Backward)
    }

    /// Multiplies queries by what belongs to their positions, or their gradient. Holds as much again for the while.
    fn multiply(&self, cx: &Context<'_>, q: &mut Tensor) -> Result {
        let Some([factors, rows]) = self.factors else { return Ok(()) };
        let dims_TQ = [cx.tokens(), self.heads * self.head_size];
        let mut out_TQ = cx.tensor(&dims_TQ)?;
        let (rows, factors) = (cx.input(rows), cx.input(factors));
        cx.kernels.experts.weigh(q.view().reshape(&dims_TQ), rows, factors, out_TQ.view_mut())?;
        Ok(cx.kernels.elementwise.cast(out_TQ.view(), q.view_mut().reshape(&dims_TQ))?)
    }

    /// Queries and keys with norms in new tensors, rotated there unless that was done before, and values that have a norm; `None` without norms.
    fn normed(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        projected: &Projected,
    ) -> Result<Option<Heads>> {
        let Some((kind, q_norm, k_norm)) = self.qk_norms else { return Ok(None) };
        let (dims_q, dims_k) = (self.dims_q(cx), self.dims_k(cx));
        let (q, k) = match kind {
            QkNorm::PerHead | QkNorm::PerRotatedHead | QkNorm::PerRotatedHeadWithoutWeights => {
                (projected.q.view().reshape(&dims_q), projected.k.view().reshape(&dims_k))
            }
            QkNorm::AllHeads => (projected.q.view(), projected.k.view()),
        };
        let mut q = q_norm.forward(cx, weights, q)?;
        let mut k = k_norm.forward(cx, weights, k)?;
        if !self.turns_projected() {
            self.rotate(cx, q.out.view_mut(), self.heads, RopeDirection::Forward)?;
            self.rotate(cx, k.out.view_mut(), self.kv_heads, RopeDirection::Forward)?;
        }
        self.multiply(cx, &mut q.out)?;
        let of_values = projected.v.as_ref().unwrap_or(&projected.k).view().reshape(&dims_k);
        let v = self.value_norm.map(|norm| norm.forward(cx, weights, of_values)).transpose()?;
        Ok(Some(Heads { q_BSHK: q.out, q_rstd: q.rstd, k_BSGK: k.out, k_rstd: k.rstd, v }))
    }

    fn rotate(&self, cx: &Context<'_>, x: ViewMut<'_>, heads: usize, direction: RopeDirection) -> Result {
        let Some((frequencies, scale)) = self.rotary else { return Ok(()) };
        let x = x.reshape(&[cx.tokens(), heads, self.head_size]);
        let (positions, inv_freq) = (cx.input(POSITIONS), cx.input(frequencies));
        let layout = RopeLayout { first: 0, pairs: self.pairs };
        Ok(cx.kernels.rope.rotate(x, positions, inv_freq, layout, scale, direction)?)
    }

    /// The gradient of what was normalized, added to what it has from elsewhere.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    fn head_norm_backward(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        norm: Norm,
        dout: &Tensor,
        x: View<'_>,
        rstd: &Tensor,
        so_far: Option<Tensor>,
        gradients: &mut Gradients<'_>,
    ) -> Result<Tensor> {
        let accumulate = so_far.is_some();
        let mut dx = so_far.map_or_else(|| cx.tensor(dout.shape().dims()), Ok)?;
        // Rows are heads, or tokens.
        let rows = rstd.shape().elements();
        let dims = [rows, dout.shape().elements() / rows.max(1)];
        let (dout, x, to) = (dout.view().reshape(&dims), x.reshape(&dims), dx.view_mut().reshape(&dims));
        norm.backward(cx, weights, dout, x, rstd.view(), to, accumulate, gradients)?;
        Ok(dx)
    }

    fn dims_q(&self, cx: &Context<'_>) -> [usize; 4] {
        [cx.sequences, cx.length, self.heads, self.head_size]
    }

    fn dims_k(&self, cx: &Context<'_>) -> [usize; 4] {
        [cx.sequences, cx.length, self.kv_heads, self.head_size]
    }
}

/// How a layer with heads of that size attends.
pub(super) fn spec(config: &ModelConfig, layer: usize, head_size: usize) -> AttentionSpec {
    AttentionSpec {
        scale: config.multipliers.attention.unwrap_or_else(|| (head_size as f32).sqrt().recip()),
        window: config.windows[layer],
        cap: config.score_cap,
        chunk: config.chunks[layer],
    }
}

/// `[B, S, heads, K]` as `[T, heads·K]`; what has two dimensions stays.
pub(super) fn flat(x: &Tensor) -> View<'_> {
    let dims = x.shape();
    match *dims.dims() {
        [sequences, length, heads, size] => x.view().reshape(&[sequences * length, heads * size]),
        _ => x.view(),
    }
}

/// Values as attention sees them.
fn values<'t>(heads: Option<&'t Heads>, projected: &'t Projected) -> &'t Tensor {
    let normed = heads.and_then(|heads| heads.v.as_ref()).map(|normed| &normed.out);
    normed.or(projected.v.as_ref()).expect("values that are keys have a norm")
}
