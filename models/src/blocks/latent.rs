//! The attention half of a decoder layer whose keys and values are made of a latent (DeepSeek-AI, "DeepSeek-V2", arXiv 2405.04434): of
//! `h = norm(x)` come the latent and the rotated part of all heads' keys, `[c, r] = kv_a(h)`, of the latent what differs between heads,
//! `[k, v] = kv_b(norm(c))`, and queries of the same or of a latent of their own, `q = b(norm(a(h)))`.
//!
//! N elements of queries and keys that are not rotated, P behind them that are, K = N + P, U elements of values, L of the latent, Q of that of
//! queries. Attention has heads of one size: values are followed by K − U zeros.
//!
//! In generation the cache holds what keys and values are made of, `[norm(c), r]`, once for all heads, and nothing is made of it: the products
//! with `kv_b` are taken from the other side. With the rows `k_h` and `v_h` of it that are a head's, scores are `(q·k_h)·norm(c)` and `q·r`, and what
//! attention sums up are latents, of which `v_h` makes the head's result (section 2.1.2 there).

use super::TILE_ROWS;
use super::attention::{Attended, flat, spec};
use super::layers::{
    After, Linear, Norm, Params, add_branch, backward_together, forward_together, input_backward, tiles,
};
use crate::batch::{INV_FREQ, POSITIONS, STARTS};
use crate::{LatentAttention, ModelConfig};
use terrace_kernels::{
    AttentionSpec, DType, Epilogue, KeyValues, MatmulSpec, Product, RopeDirection, RopeLayout, Tensor, View,
    ViewMut,
};
use terrace_zero::{Context, Gradients, KvSpec, Result, Weights};

/// Of the norms of latents, whatever that of the others is: transformers leaves it at its default.
const LATENT_EPS: f32 = 1e-6;

/// Parameters of such a half.
///
/// Memory beside operands, in elements of the activation dtype (norms and statistics left out): forward T·(Q + L + P + H·(N + U) + 4H·K) in
/// attention, in generation T·(L + P)·(2H + 1); backward T·(Q + L + P + H·(N + U) + 7H·K). A layer that keeps leaves
/// T·(Q + L + P + H·(N + U) + 2H·K).
#[derive(Debug)]
pub(crate) struct Latent {
    before: Option<Norm>,
    after: After,
    query: Query,
    kv_a: Linear,
    norm: Norm,
    kv_b: Linear,
    output: Linear,
    /// What multiplies rotated queries and keys.
    rotary_scale: f32,
    spec: AttentionSpec,
    heads: usize,
    shape: LatentAttention,
}

/// What queries are made of.
#[derive(Debug)]
enum Query {
    Hidden(Linear),
    Latent { a: Linear, norm: Norm, b: Linear, rank: usize },
}

/// What the projections give; queries and the last of `kv_a` are rotated.
#[derive(Debug)]
pub(crate) struct Compressed {
    /// `[T, H·K]`.
    q: Tensor,
    /// `[T, L + P]`.
    kv_a: Tensor,
    /// `[T, Q]`.
    q_a: Option<Tensor>,
}

/// What attention without a cache leaves for backward.
#[derive(Debug)]
pub(crate) struct Expanded {
    compressed: Compressed,
    /// `[T, H·(N + U)]`.
    kv: Tensor,
    attended: Attended,
}

/// Gradients of what attention reads, in the shapes of [`Compressed`] and [`Expanded`].
struct ExpandedGradients {
    q: Tensor,
    kv_a: Tensor,
    kv: Tensor,
}

impl Expanded {
    /// For [`Latent::expanded`].
    pub(crate) fn into_tensors(self) -> impl Iterator<Item = Tensor> {
        let Self { compressed: Compressed { q, kv_a, q_a }, kv, attended: Attended { out_BSHK, lse_BHS } } =
            self;
        [q, kv_a, kv, out_BSHK, lse_BHS].into_iter().chain(q_a)
    }
}

impl Latent {
    /// Takes its parameters from the layer's list.
    pub(crate) fn new(
        config: &ModelConfig,
        shape: &LatentAttention,
        layer: usize,
        params: &mut Params,
    ) -> Self {
        let (hidden, heads, biased) = (config.hidden, config.heads, config.qkv_bias);
        let (queries, inner) = (heads * shape.head_size(), heads * (shape.plain + shape.values));
        let (before, after) = After::around(config, params, ["input_layernorm", "post_attention_layernorm"]);
        Self {
            before,
            after,
            query: match shape.query_rank {
                None => Query::Hidden(params.linear("self_attn.q_proj", queries, hidden, false)),
                Some(rank) => Query::Latent {
                    a: params.linear("self_attn.q_a_proj", rank, hidden, biased),
                    norm: params.norm("self_attn.q_a_layernorm", rank, LATENT_EPS),
                    b: params.linear("self_attn.q_b_proj", queries, rank, false),
                    rank,
                },
            },
            kv_a: params.linear("self_attn.kv_a_proj_with_mqa", shape.rank + shape.rotated, hidden, biased),
            norm: params.norm("self_attn.kv_a_layernorm", shape.rank, LATENT_EPS),
            // Its rows are multiplied from either side.
            kv_b: params.plain_linear("self_attn.kv_b_proj", inner, shape.rank, false),
            output: params.linear("self_attn.o_proj", hidden, heads * shape.values, config.output_bias),
            rotary_scale: config.rope.attention_factor(),
            spec: spec(config, layer, shape.head_size()),
            heads,
            shape: *shape,
        }
    }

    /// The cache it appends to in generation: latents and rotated parts of keys.
    pub(crate) fn kv(&self) -> KvSpec {
        KvSpec { heads: 1, head_size: self.cached(), has_values: false }
    }

    /// Elements of a position in the cache, L + P.
    fn cached(&self) -> usize {
        self.shape.rank + self.shape.rotated
    }

    /// `y = x + after(o(attend(x)))`, of which nothing else stays.
    pub(crate) fn forward(
        &self,
        cx: &mut Context<'_>,
        weights: &Weights<'_>,
        x_TD: View<'_>,
        y_TD: ViewMut<'_>,
    ) -> Result {
        let out_TU = match cx.kv {
            Some(_) => {
                let compressed = self.project(cx, weights, x_TD)?;
                self.attend_cache(cx, weights, compressed)?
            }
            None => {
                let expanded = self.expand(cx, weights, x_TD)?;
                self.narrowed(cx, &expanded.attended.out_BSHK)?
            }
        };
        add_branch(cx, weights, (self.output, self.after), out_TU.view(), x_TD, y_TD, false)?;
        Ok(())
    }

    /// Norm and projections of `x_TD`, and the rotation.
    fn project(&self, cx: &Context<'_>, weights: &Weights<'_>, x_TD: View<'_>) -> Result<Compressed> {
        let tokens = x_TD.shape().rows();
        let mut q = cx.lasting_tensor(&[tokens, self.heads * self.shape.head_size()])?;
        let mut kv_a = cx.lasting_tensor(&[tokens, self.cached()])?;
        let mut q_a = match self.query {
            Query::Hidden(_) => None,
            Query::Latent { rank, .. } => Some(cx.lasting_tensor(&[tokens, rank])?),
        };
        for (start, end) in tiles(tokens, TILE_ROWS) {
            let x_RD = x_TD.rows(start, end);
            let normed = self.before.map(|norm| norm.forward(cx, weights, x_RD)).transpose()?;
            let h_RD = normed.as_ref().map_or(x_RD, |normed| normed.out.view());
            let of_query = (self.query.first(), q_a.as_mut().unwrap_or(&mut q));
            let layers = [of_query, (self.kv_a, &mut kv_a)];
            let mut layers = layers.map(|(layer, out)| (layer, out.view_mut().rows(start, end)));
            forward_together(cx, weights, h_RD, &mut layers)?;
            drop(normed);
            if let (Query::Latent { norm, b, .. }, Some(q_a)) = (&self.query, &q_a) {
                let normed = norm.forward(cx, weights, q_a.view().rows(start, end))?;
                b.forward_into(cx, weights, normed.out.view(), q.view_mut().rows(start, end))?;
            }
        }
        self.rotate_queries(cx, q.view_mut(), RopeDirection::Forward)?;
        self.rotate_key(cx, kv_a.view_mut(), RopeDirection::Forward)?;
        Ok(Compressed { q, kv_a, q_a })
    }

    /// Attention over the sequence itself.
    pub(crate) fn expand(&self, cx: &Context<'_>, weights: &Weights<'_>, x_TD: View<'_>) -> Result<Expanded> {
        let compressed = self.project(cx, weights, x_TD)?;
        let tokens = cx.tokens();
        let mut kv = cx.lasting_tensor(&[tokens, self.heads * (self.shape.plain + self.shape.values)])?;
        for (start, end) in tiles(tokens, TILE_ROWS) {
            let c_RL = self.normed(cx, weights, compressed.kv_a.view().rows(start, end))?;
            self.kv_b.forward_into(cx, weights, c_RL.view(), kv.view_mut().rows(start, end))?;
        }
        let dims = self.dims(cx);
        let mut out_BSHK = cx.lasting_tensor(&dims)?;
        let mut lse_BHS = cx.lasting_tensor_of(DType::F32, &[cx.sequences, self.heads, cx.length])?;
        let (k_BSHK, v_BSHK) = self.keys_and_values(cx, &compressed, &kv)?;
        let keys = KeyValues::rows(k_BSHK.view(), v_BSHK.view());
        let (q_BSHK, starts) = (compressed.q.view().reshape(&dims), cx.input(STARTS));
        let (out, lse) = (out_BSHK.view_mut(), lse_BHS.view_mut());
        cx.kernels.attention.forward(q_BSHK, keys, starts, out, lse, self.spec)?;
        Ok(Expanded { compressed, kv, attended: Attended { out_BSHK, lse_BHS } })
    }

    /// Attention over the cache, to which the sequence is appended: `[T, H·U]`.
    fn attend_cache(
        &self,
        cx: &mut Context<'_>,
        weights: &Weights<'_>,
        compressed: Compressed,
    ) -> Result<Tensor> {
        let Compressed { q, mut kv_a, q_a } = compressed;
        drop(q_a);
        let c_TL = self.normed(cx, weights, kv_a.view())?;
        cx.kernels.columns.copy(c_TL.view(), 0, kv_a.view_mut(), 0, self.shape.rank)?;
        drop(c_TL);
        let q_BSHC = self.absorbed(cx, weights, &q)?;
        drop(q);
        let mut out_BSHC = cx.tensor(q_BSHC.shape().dims())?;
        let mut lse_BHS = cx.tensor_of(DType::F32, &[cx.sequences, self.heads, cx.length])?;
        let (kernel, starts) = (&cx.kernels.attention, &cx.inputs[STARTS]);
        let new = kv_a.view().reshape(&[cx.sequences, cx.length, 1, self.cached()]);
        let slot = cx.kv.as_mut().expect("it is asked for");
        // Rows of padding go where there is a page for them, as in attention without a latent.
        kernel.append(new, None, starts.view(), slot.pages, slot.keys.reborrow())?;
        let keys = KeyValues { k: slot.keys.view(), v: slot.keys.view(), pages: Some(slot.pages) };
        let (out, lse) = (out_BSHC.view_mut(), lse_BHS.view_mut());
        kernel.forward(q_BSHC.view(), keys, starts.view(), out, lse, self.spec)?;
        drop((q_BSHC, lse_BHS, kv_a));
        self.values_of(cx, weights, &out_BSHC)
    }

    /// Queries as the cache wants them, `[B, S, H, L + P]`: of each head `q·k_h` in the place of what is not rotated.
    fn absorbed(&self, cx: &Context<'_>, weights: &Weights<'_>, q_TQ: &Tensor) -> Result<Tensor> {
        let LatentAttention { rank, plain, rotated, .. } = self.shape;
        let (tokens, heads) = (cx.tokens(), self.heads);
        let mut wide = cx.tensor(&[cx.sequences, cx.length, heads, self.cached()])?;
        let of_heads = wide.view_mut().reshape(&[tokens * heads, self.cached()]);
        cx.kernels.columns.copy(self.heads(q_TQ.view()), plain, of_heads, rank, rotated)?;
        let to = wide.view_mut().reshape(&[tokens, heads * self.cached()]);
        self.of_heads(cx, weights, q_TQ.view(), plain, to, rank, MatmulSpec::NN)?;
        Ok(wide)
    }

    /// What each head makes of the latents that attention summed up, `[T, H·U]`.
    fn values_of(&self, cx: &Context<'_>, weights: &Weights<'_>, out_BSHC: &Tensor) -> Result<Tensor> {
        let LatentAttention { rank, values, .. } = self.shape;
        let mut out_TU = cx.tensor(&[cx.tokens(), self.heads * values])?;
        self.of_heads(cx, weights, flat(out_BSHC), rank, out_TU.view_mut(), values, MatmulSpec::NT)?;
        Ok(out_TU)
    }

    /// Each head's first `inputs` elements of `x`, which has rows of all heads, times its rows of `kv_b`, those of keys as they are or those
    /// of values transposed, to its first `outputs` elements of `out`.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    fn of_heads(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        x: View<'_>,
        inputs: usize,
        mut out: ViewMut<'_>,
        outputs: usize,
        spec: MatmulSpec,
    ) -> Result {
        let (tokens, heads, columns) = (cx.tokens(), self.heads, &cx.kernels.columns);
        let (x_width, out_width) = (x.shape().last() / heads, out.shape().last() / heads);
        let rows = |head: usize| (head * tokens, (head + 1) * tokens);
        let (mut x_HTI, mut out_HTO) =
            (cx.tensor(&[heads * tokens, inputs])?, cx.tensor(&[heads * tokens, outputs])?);
        for head in 0..heads {
            let (from, end) = rows(head);
            columns.copy(x, head * x_width, x_HTI.view_mut().rows(from, end), 0, inputs)?;
        }
        let (plain, inner) = (self.shape.plain, self.shape.plain + self.shape.values);
        let (first, last) = if spec == MatmulSpec::NN { (0, plain) } else { (plain, inner) };
        let weight = weights.get(self.kv_b.weight);
        let term = |head: usize| {
            let (from, end) = rows(head);
            [(x_HTI.view().rows(from, end), weight.rows(head * inner + first, head * inner + last))]
        };
        let terms: Vec<_> = (0..heads).map(term).collect();
        let mut left = out_HTO.view_mut();
        let mut products = Vec::with_capacity(heads);
        for terms in &terms {
            let (out, rest) = left.split_rows(tokens);
            left = rest;
            products.push(Product { terms, out, spec, epilogue: Epilogue::NONE });
        }
        cx.kernels.matmul.together(&mut products)?;
        for head in 0..heads {
            let (from, end) = rows(head);
            columns.copy(out_HTO.view().rows(from, end), 0, out.reborrow(), head * out_width, outputs)?;
        }
        Ok(())
    }

    /// Whether [`residual`](Self::residual) gives something that backward needs.
    pub(crate) fn needs_branch(&self) -> bool {
        self.after.needs_branch()
    }

    /// `y = x + after(o(attended))`. With a norm `o(attended)` stays for [`backward`](Self::backward).
    pub(crate) fn residual(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        expanded: &Expanded,
        x_TD: View<'_>,
        y_TD: ViewMut<'_>,
    ) -> Result<Option<Tensor>> {
        let out_TU = self.narrowed(cx, &expanded.attended.out_BSHK)?;
        add_branch(cx, weights, (self.output, self.after), out_TU.view(), x_TD, y_TD, true)
    }

    /// On entry `dx` is the gradient of `y`; on return that of `x`. `branch_TD` is what [`residual`](Self::residual) gave.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    pub(crate) fn backward(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        x_TD: View<'_>,
        expanded: Expanded,
        branch_TD: Option<Tensor>,
        dx_TD: ViewMut<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        let of_branch = branch_TD.as_ref().map(Tensor::view);
        let dbranch_TD = self.after.backward(cx, weights, dx_TD.view(), of_branch, gradients)?;
        drop(branch_TD);
        let dy_TD = dbranch_TD.as_ref().map_or(dx_TD.view(), Tensor::view);
        let out_TU = self.narrowed(cx, &expanded.attended.out_BSHK)?;
        let mut dout_TU = cx.tensor(out_TU.view().shape().dims())?;
        let output = [(self.output, dy_TD)];
        backward_together(cx, weights, &output, out_TU.view(), dout_TU.view_mut(), gradients)?;
        drop((out_TU, dbranch_TD));
        let dout_BSHK = self.widened(cx, dout_TU)?;

        let (ExpandedGradients { q: dq, kv_a: mut dkv_a, kv: dkv }, kv_a, q_a) =
            self.attend_backward(cx, expanded, dout_BSHK)?;
        let c_TL = self.latent(cx, kv_a.view())?;
        drop(kv_a);
        let of_latent = [(self.kv_b, dkv.view())];
        let dc_TL = latent_backward(cx, weights, self.norm, &of_latent, c_TL.view(), gradients)?;
        drop((dkv, c_TL));
        cx.kernels.columns.copy(dc_TL.view(), 0, dkv_a.view_mut(), 0, self.shape.rank)?;
        drop(dc_TL);
        let dquery = match (&self.query, q_a) {
            (Query::Latent { norm, b, .. }, Some(q_a)) => {
                latent_backward(cx, weights, *norm, &[(*b, flat(&dq))], q_a.view(), gradients)?
            }
            _ => dq,
        };
        let branches = [(self.query.first(), flat(&dquery)), (self.kv_a, dkv_a.view())];
        input_backward(cx, weights, self.before, &branches, x_TD, dx_TD, gradients)
    }

    /// From the gradient of attention's output to those of what it was made of; and what is left of that: `kv_a` and `q_a`.
    fn attend_backward(
        &self,
        cx: &Context<'_>,
        expanded: Expanded,
        dout_BSHK: Tensor,
    ) -> Result<(ExpandedGradients, Tensor, Option<Tensor>)> {
        let dims = self.dims(cx);
        let LatentAttention { rank, plain, rotated, values, .. } = self.shape;
        let Expanded { compressed, kv, attended } = expanded;
        let (k_BSHK, v_BSHK) = self.keys_and_values(cx, &compressed, &kv)?;
        let dims_kv = kv.shape();
        drop(kv);
        let (mut q, mut dk, mut dv) = (cx.tensor(&dims)?, cx.tensor(&dims)?, cx.tensor(&dims)?);
        cx.kernels.attention.backward(
            compressed.q.view().reshape(&dims),
            k_BSHK.view(),
            v_BSHK.view(),
            attended.out_BSHK.view(),
            attended.lse_BHS.view(),
            dout_BSHK.view(),
            q.view_mut(),
            dk.view_mut(),
            dv.view_mut(),
            self.spec,
        )?;
        let Compressed { q: rotated_q, kv_a: of_forward, q_a } = compressed;
        drop((k_BSHK, v_BSHK, attended, dout_BSHK, rotated_q));
        self.rotate_queries(cx, q.view_mut(), RopeDirection::Backward)?;
        let columns = &cx.kernels.columns;
        let mut kv = cx.tensor(dims_kv.dims())?;
        let (of_k, of_v) = (self.heads(dk.view()), self.heads(dv.view()));
        let inner = [of_k.shape().rows(), plain + values];
        columns.copy(of_k, 0, kv.view_mut().reshape(&inner), 0, plain)?;
        columns.copy(of_v, 0, kv.view_mut().reshape(&inner), plain, values)?;
        let mut kv_a = cx.tensor(of_forward.shape().dims())?;
        columns.fold(of_k, plain, kv_a.view_mut(), rank, rotated)?;
        self.rotate_key(cx, kv_a.view_mut(), RopeDirection::Backward)?;
        Ok((ExpandedGradients { q, kv_a, kv }, of_forward, q_a))
    }

    /// Keys and values of all heads, `[B, S, H, K]` each.
    fn keys_and_values(
        &self,
        cx: &Context<'_>,
        compressed: &Compressed,
        kv: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let LatentAttention { rank, plain, rotated, values, .. } = self.shape;
        let (rows, size) = (cx.tokens() * self.heads, self.shape.head_size());
        let columns = &cx.kernels.columns;
        let kv = kv.view().reshape(&[rows, plain + values]);
        let mut k = cx.tensor(&self.dims(cx))?;
        columns.copy(kv, 0, k.view_mut().reshape(&[rows, size]), 0, plain)?;
        columns.copy(compressed.kv_a.view(), rank, k.view_mut().reshape(&[rows, size]), plain, rotated)?;
        let mut v = cx.tensor(&self.dims(cx))?;
        columns.copy(kv, plain, v.view_mut().reshape(&[rows, size]), 0, values)?;
        columns.clear(v.view_mut().reshape(&[rows, size]), values, size - values)?;
        Ok((k, v))
    }

    /// The latent by itself, `[R, L]`.
    fn latent(&self, cx: &Context<'_>, kv_a: View<'_>) -> Result<Tensor> {
        let mut c_RL = cx.tensor(&[kv_a.shape().rows(), self.shape.rank])?;
        cx.kernels.columns.copy(kv_a, 0, c_RL.view_mut(), 0, self.shape.rank)?;
        Ok(c_RL)
    }

    /// The latent's norm, `[R, L]`.
    fn normed(&self, cx: &Context<'_>, weights: &Weights<'_>, kv_a: View<'_>) -> Result<Tensor> {
        let c_RL = self.latent(cx, kv_a)?;
        Ok(self.norm.forward(cx, weights, c_RL.view())?.out)
    }

    /// What attention gives without what follows values, `[T, H·U]`.
    fn narrowed(&self, cx: &Context<'_>, out_BSHK: &Tensor) -> Result<Tensor> {
        let values = self.shape.values;
        let mut out_TU = cx.tensor(&[cx.tokens(), self.heads * values])?;
        let rows = [cx.tokens() * self.heads, values];
        let out = out_TU.view_mut().reshape(&rows);
        cx.kernels.columns.copy(self.heads(out_BSHK.view()), 0, out, 0, values)?;
        Ok(out_TU)
    }

    /// The same back: zeros where nothing depends on what there is.
    fn widened(&self, cx: &Context<'_>, out_TU: Tensor) -> Result<Tensor> {
        let (values, size) = (self.shape.values, self.shape.head_size());
        let rows = cx.tokens() * self.heads;
        let mut out_BSHK = cx.tensor(&self.dims(cx))?;
        let narrow = out_TU.view().reshape(&[rows, values]);
        cx.kernels.columns.copy(narrow, 0, out_BSHK.view_mut().reshape(&[rows, size]), 0, values)?;
        let wide = out_BSHK.view_mut().reshape(&[rows, size]);
        cx.kernels.columns.clear(wide, values, size - values)?;
        drop(out_TU);
        Ok(out_BSHK)
    }

    fn rotate_queries(&self, cx: &Context<'_>, q: ViewMut<'_>, direction: RopeDirection) -> Result {
        let q_THK = q.reshape(&[cx.tokens(), self.heads, self.shape.head_size()]);
        self.rotate(cx, q_THK, self.shape.plain, direction)
    }

    fn rotate_key(&self, cx: &Context<'_>, kv_a: ViewMut<'_>, direction: RopeDirection) -> Result {
        let alone = kv_a.reshape(&[cx.tokens(), 1, self.shape.rank + self.shape.rotated]);
        self.rotate(cx, alone, self.shape.rank, direction)
    }

    fn rotate(&self, cx: &Context<'_>, x: ViewMut<'_>, first: usize, direction: RopeDirection) -> Result {
        let layout = RopeLayout { first, pairs: self.shape.pairs };
        let (positions, inv_freq) = (cx.input(POSITIONS), cx.input(INV_FREQ));
        Ok(cx.kernels.rope.rotate(x, positions, inv_freq, layout, self.rotary_scale, direction)?)
    }

    /// Whole heads as rows.
    fn heads<'a>(&self, x_BSHK: View<'a>) -> View<'a> {
        let size = self.shape.head_size();
        x_BSHK.reshape(&[x_BSHK.shape().elements() / size, size])
    }

    fn dims(&self, cx: &Context<'_>) -> [usize; 4] {
        [cx.sequences, cx.length, self.heads, self.shape.head_size()]
    }

    /// The first of `kept`, which [`Expanded::into_tensors`] gave.
    pub(crate) fn expanded(&self, kept: &mut dyn FnMut() -> Tensor) -> Expanded {
        let [q, kv_a, kv, out_BSHK, lse_BHS] = std::array::from_fn(|_| kept());
        let q_a = matches!(self.query, Query::Latent { .. }).then(kept);
        let compressed = Compressed { q, kv_a, q_a };
        Expanded { compressed, kv, attended: Attended { out_BSHK, lse_BHS } }
    }
}

impl Query {
    /// What reads the hidden state.
    fn first(&self) -> Linear {
        match self {
            Self::Hidden(linear) => *linear,
            Self::Latent { a, .. } => *a,
        }
    }
}

/// The gradient of a latent from those of layers that read its norm.
fn latent_backward(
    cx: &Context<'_>,
    weights: &Weights<'_>,
    norm: Norm,
    layers: &[(Linear, View<'_>)],
    latent: View<'_>,
    gradients: &mut Gradients<'_>,
) -> Result<Tensor> {
    let mut dlatent = cx.tensor(latent.shape().dims())?;
    cx.kernels.elementwise.zero(dlatent.view_mut())?;
    input_backward(cx, weights, Some(norm), layers, latent, dlatent.view_mut(), gradients)?;
    Ok(dlatent)
}
