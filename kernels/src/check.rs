//! Shape and dtype checks shared by every backend.
//!
//! A wrong shape is a defect of the calling code, so these assert. They look at shapes and dtypes only and never at
//! bytes, which is why a planning run over virtual memory makes the same checks as a real one.

mod columns;
mod delta;

pub use columns::*;
pub use delta::*;

use crate::tensor::Shape;
use crate::{
    AttentionSpec, DType, Epilogue, ExpertGroups, Gating, GroupScore, KernelError, KeyValues, MatmulSpec,
    Product, QuantizedView, Residual, Result, RopeLayout, View, ViewMut,
};

/// Sizes of a matrix product.
#[derive(Debug, Clone, Copy)]
pub struct ProductDims {
    pub m: usize,
    pub n: usize,
    pub l: usize,
}

/// Sizes of a tensor seen as rows.
#[derive(Debug, Clone, Copy)]
pub struct RowDims {
    pub rows: usize,
    pub width: usize,
}

/// Sizes of a rotation.
#[derive(Debug, Clone, Copy)]
pub struct RopeDims {
    pub tokens: usize,
    pub heads: usize,
    pub head_size: usize,
    /// Pairs of elements of a head that are rotated (P).
    pub half: usize,
}

/// Sizes of an attention call.
#[derive(Debug, Clone, Copy)]
pub struct AttentionDims {
    /// Sequences (B).
    pub batch: usize,
    /// Query positions per sequence (S).
    pub queries: usize,
    /// Rows of keys and values per sequence (C).
    pub capacity: usize,
    /// Query heads (H).
    pub heads: usize,
    /// Key and value heads (G).
    pub kv_heads: usize,
    /// Elements per head (K).
    pub head_size: usize,
    /// Where keys are in pages.
    pub paging: Option<Paging>,
}

/// Sizes of pages of keys and values.
#[derive(Debug, Clone, Copy)]
pub struct Paging {
    /// Pages in all (N).
    pub pages: usize,
    /// Positions of a page (P), a power of two.
    pub positions: usize,
    /// Pages of a sequence (M).
    pub per_sequence: usize,
}

impl Paging {
    /// Positions of a sequence (C).
    pub fn capacity(&self) -> usize {
        self.per_sequence * self.positions
    }
}

/// Sizes of an append.
#[derive(Debug, Clone, Copy)]
pub struct AppendDims {
    /// Sequences (B).
    pub batch: usize,
    /// Positions per sequence (S).
    pub length: usize,
    /// Elements of a row (G·K).
    pub width: usize,
    pub paging: Paging,
}

/// Sizes of an operation on sinks of attention.
#[derive(Debug, Clone, Copy)]
pub struct SinkDims {
    /// Sequences (B).
    pub batch: usize,
    /// Query positions per sequence (S).
    pub queries: usize,
    /// Query heads (H).
    pub heads: usize,
    /// Elements per head (K).
    pub head_size: usize,
}

impl SinkDims {
    /// Queries of all sequences and heads.
    pub fn rows(&self) -> usize {
        self.batch * self.queries * self.heads
    }

    /// Where lse has those of a head of a sequence.
    pub fn lse(&self, b: usize, h: usize) -> usize {
        (b * self.heads + h) * self.queries
    }

    /// Where out has a query of a head of a sequence.
    pub fn out(&self, b: usize, s: usize, h: usize) -> usize {
        ((b * self.queries + s) * self.heads + h) * self.head_size
    }
}

/// Sizes of a choice of experts.
#[derive(Debug, Clone, Copy)]
pub struct ChoiceDims {
    /// T.
    pub tokens: usize,
    /// E.
    pub experts: usize,
    /// Experts of a token (X).
    pub choices: usize,
}

impl ChoiceDims {
    /// Routed rows (R).
    pub fn routed(&self) -> usize {
        self.tokens * self.choices
    }
}

/// Sizes of an operation on routed rows.
#[derive(Debug, Clone, Copy)]
pub struct RoutedDims {
    /// T.
    pub tokens: usize,
    /// Experts of a token (X).
    pub choices: usize,
    /// Elements of a row (D or F).
    pub width: usize,
}

impl RoutedDims {
    /// Routed rows (R).
    pub fn routed(&self) -> usize {
        self.tokens * self.choices
    }
}

impl AttentionDims {
    /// Query heads that share one key/value head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

pub fn matmul(a: View<'_>, b: View<'_>, out: &ViewMut<'_>, spec: MatmulSpec) -> ProductDims {
    let (a_shape, b_shape, out_shape) = (a.shape(), b.shape(), out.shape());
    let (m, l) = flip((a_shape.rows(), a_shape.last()), spec.trans_a);
    let (l_b, n) = flip((b_shape.rows(), b_shape.last()), spec.trans_b);
    assert_eq!(l, l_b, "matmul: inner sizes of {a_shape:?} and {b_shape:?} agree under {spec:?}");
    assert_eq!(
        (out_shape.rows(), out_shape.last()),
        (m, n),
        "matmul: the result of {a_shape:?} and {b_shape:?} under {spec:?} is [{m}, {n}]"
    );
    float("matmul", "a", a.dtype());
    float("matmul", "b", b.dtype());
    float("matmul", "out", out.dtype());
    assert!(
        !spec.accumulate || out.dtype() == DType::F32,
        "matmul: only f32 accumulates, not {}",
        out.dtype()
    );
    ProductDims { m, n, l }
}

pub fn matmul_nt(a: View<'_>, b: View<'_>, out: &ViewMut<'_>, epilogue: &Epilogue<'_>) -> ProductDims {
    let dims = matmul(a, b, out, MatmulSpec::NT);
    self::epilogue("matmul", &dims, epilogue);
    dims
}

pub fn product(product: &Product<'_>) {
    let Product { terms, out, spec, epilogue } = product;
    assert!(!terms.is_empty(), "matmul: a sum has a term");
    for &(a, b) in *terms {
        let dims = matmul(a, b, out, *spec);
        self::epilogue("matmul", &dims, epilogue);
    }
    assert!(
        terms.len() == 1 || out.dtype() == DType::F32,
        "matmul: several terms are summed in f32, not {}",
        out.dtype()
    );
    assert!(
        epilogue.is_none() || (terms.len() == 1 && *spec == MatmulSpec::NT),
        "matmul: an epilogue belongs to one product of the layout of a linear layer"
    );
}

fn epilogue(op: &str, dims: &ProductDims, epilogue: &Epilogue<'_>) {
    if let Some(bias) = epilogue.bias {
        same(op, "bias", dims.n, bias.shape().elements());
        float(op, "bias", bias.dtype());
    }
    if let Residual::Of(residual) = epilogue.residual {
        same(op, "residual", dims.m * dims.n, residual.shape().elements());
        float(op, "residual", residual.dtype());
    }
}

pub fn quantized_matmul(
    a: View<'_>,
    b: QuantizedView<'_>,
    out: &ViewMut<'_>,
    epilogue: &Epilogue<'_>,
) -> ProductDims {
    let (a_shape, b_shape, out_shape) = (a.shape(), b.shape(), out.shape());
    let (m, n, l) = (a_shape.rows(), b_shape.rows(), a_shape.last());
    assert_eq!(l, b_shape.last(), "quantized matmul: inner sizes of {a_shape:?} and {b_shape:?} agree");
    assert_eq!(
        (out_shape.rows(), out_shape.last()),
        (m, n),
        "quantized matmul: the result of {a_shape:?} and {b_shape:?} is [{m}, {n}]"
    );
    float("quantized matmul", "a", a.dtype());
    float("quantized matmul", "out", out.dtype());
    let dims = ProductDims { m, n, l };
    self::epilogue("quantized matmul", &dims, epilogue);
    dims
}

pub fn norm_forward(x: View<'_>, weight: View<'_>, out: &ViewMut<'_>, rstd: &ViewMut<'_>) -> RowDims {
    let dims = rows("rms_norm", x);
    float("rms_norm", "weight", weight.dtype());
    same("rms_norm", "out", x.shape().elements(), out.shape().elements());
    float("rms_norm", "out", out.dtype());
    same("rms_norm", "weight", dims.width, weight.shape().elements());
    same("rms_norm", "rstd", dims.rows, rstd.shape().elements());
    exact("rms_norm", "rstd", rstd.dtype(), DType::F32);
    dims
}

pub fn center(x: View<'_>, out: &ViewMut<'_>) -> RowDims {
    let dims = rows("center", x);
    same("center", "out", x.shape().elements(), out.shape().elements());
    float("center", "out", out.dtype());
    dims
}

pub fn norm_backward(
    dout: View<'_>,
    x: View<'_>,
    weight: View<'_>,
    rstd: View<'_>,
    dx: &ViewMut<'_>,
    dweight: &ViewMut<'_>,
) -> RowDims {
    let dims = rows("rms_norm backward", x);
    for (name, dtype) in [("dout", dout.dtype()), ("weight", weight.dtype()), ("dx", dx.dtype())] {
        float("rms_norm backward", name, dtype);
    }
    same("rms_norm backward", "dout", x.shape().elements(), dout.shape().elements());
    same("rms_norm backward", "dx", x.shape().elements(), dx.shape().elements());
    same("rms_norm backward", "weight", dims.width, weight.shape().elements());
    same("rms_norm backward", "dweight", dims.width, dweight.shape().elements());
    same("rms_norm backward", "rstd", dims.rows, rstd.shape().elements());
    exact("rms_norm backward", "rstd", rstd.dtype(), DType::F32);
    exact("rms_norm backward", "dweight", dweight.dtype(), DType::F32);
    dims
}

pub fn rope(x: &ViewMut<'_>, positions: View<'_>, inv_freq: View<'_>, layout: RopeLayout) -> RopeDims {
    let shape = x.shape();
    let dims = shape.dims();
    assert!(dims.len() >= 3, "rope: x is [tokens, heads, head size], not {shape:?}");
    float("rope", "x", x.dtype());
    let (heads, head_size) = (dims[dims.len() - 2], dims[dims.len() - 1]);
    let tokens = dims[..dims.len() - 2].iter().product();
    let half = inv_freq.shape().elements();
    let first = layout.first;
    assert!(
        first <= head_size && 2 * half <= head_size - first,
        "rope: {half} pairs of elements from {first} are in a head of {head_size}"
    );
    same("rope", "positions", tokens, positions.shape().elements());
    exact("rope", "positions", positions.dtype(), DType::I32);
    exact("rope", "inv_freq", inv_freq.dtype(), DType::F32);
    RopeDims { tokens, heads, head_size, half }
}

fn attention(q: View<'_>, KeyValues { k, v, pages }: KeyValues<'_>) -> AttentionDims {
    let (q_shape, k_shape) = (q.shape(), k.shape());
    let &[batch, queries, heads, head_size] = q_shape.dims() else {
        panic!("attention: q is [B, S, H, K], not {q_shape:?}");
    };
    let &[outer, rows, kv_heads, head_size_k] = k_shape.dims() else {
        panic!("attention: k is [B, C, G, K] or [N, P, G, K], not {k_shape:?}");
    };
    assert_eq!(k_shape, v.shape(), "attention: k and v have one shape");
    assert_eq!(head_size, head_size_k, "attention: q {q_shape:?} matches k {k_shape:?}");
    assert!(
        kv_heads > 0 && heads.is_multiple_of(kv_heads),
        "attention: {heads} query heads are a multiple of {kv_heads} key heads"
    );
    for (name, dtype) in [("q", q.dtype()), ("k", k.dtype()), ("v", v.dtype())] {
        float("attention", name, dtype);
    }
    let paging = pages.map(|pages| paging("attention", pages, batch, k_shape));
    if paging.is_none() {
        assert_eq!(batch, outer, "attention: q {q_shape:?} matches k {k_shape:?}");
    }
    let capacity = paging.map_or(rows, |paging| paging.capacity());
    AttentionDims { batch, queries, capacity, heads, kv_heads, head_size, paging }
}

/// `pages` of `batch` sequences, of keys or values of this shape.
fn paging(op: &str, pages: View<'_>, batch: usize, cache: Shape) -> Paging {
    exact(op, "pages", pages.dtype(), DType::I32);
    let table = pages.shape();
    let &[sequences, per_sequence] = table.dims() else {
        panic!("{op}: pages are [B, M], not {table:?}");
    };
    same(op, "rows of pages", batch, sequences);
    let &[pages, positions, _, _] = cache.dims() else {
        panic!("{op}: a cache in pages is [N, P, G, K], not {cache:?}");
    };
    assert!(
        positions.is_power_of_two() && positions >= KeyValues::PAGE_MIN,
        "{op}: a page holds a power of two of positions, at least {}, not {positions}",
        KeyValues::PAGE_MIN
    );
    Paging { pages, positions, per_sequence }
}

/// What queries see, and what scores are multiplied with and capped by.
pub fn attention_spec(AttentionSpec { scale, window, cap, chunk }: AttentionSpec) {
    assert!(scale > 0.0, "attention: scores are multiplied by a positive number");
    assert!(cap.is_none_or(|cap| cap > 0.0), "attention: a cap is positive");
    assert!(window != Some(0) && chunk != Some(0), "attention: a query sees at least its own position");
    assert!(window.is_none() || chunk.is_none(), "attention: a window or chunks, not both");
}

pub fn attention_forward(
    q: View<'_>,
    keys: KeyValues<'_>,
    starts: View<'_>,
    out: &ViewMut<'_>,
    lse: &ViewMut<'_>,
) -> AttentionDims {
    let dims = attention(q, keys);
    assert!(dims.capacity >= dims.queries, "attention: {dims:?} has room for every query's own key");
    same("attention", "starts", dims.batch, starts.shape().elements());
    exact("attention", "starts", starts.dtype(), DType::I32);
    same("attention", "out", q.shape().elements(), out.shape().elements());
    float("attention", "out", out.dtype());
    same("attention", "lse", dims.batch * dims.heads * dims.queries, lse.shape().elements());
    exact("attention", "lse", lse.dtype(), DType::F32);
    dims
}

#[expect(clippy::too_many_arguments, reason = "the operands of the operation")]
pub fn attention_backward(
    q: View<'_>,
    k: View<'_>,
    v: View<'_>,
    out: View<'_>,
    lse: View<'_>,
    dout: View<'_>,
    dq: &ViewMut<'_>,
    dk: &ViewMut<'_>,
    dv: &ViewMut<'_>,
) -> AttentionDims {
    let dims = attention(q, KeyValues::rows(k, v));
    assert_eq!(
        dims.capacity, dims.queries,
        "attention backward: training sees every key of its own sequence"
    );
    let (of_q, of_k) = (q.shape().elements(), k.shape().elements());
    let operands = [
        ("out", out.shape(), out.dtype(), of_q),
        ("dout", dout.shape(), dout.dtype(), of_q),
        ("dq", dq.shape(), dq.dtype(), of_q),
        ("dk", dk.shape(), dk.dtype(), of_k),
        ("dv", dv.shape(), dv.dtype(), of_k),
    ];
    for (name, shape, dtype, elements) in operands {
        same("attention backward", name, elements, shape.elements());
        float("attention backward", name, dtype);
    }
    same("attention backward", "lse", dims.batch * dims.heads * dims.queries, lse.shape().elements());
    exact("attention backward", "lse", lse.dtype(), DType::F32);
    dims
}

pub fn sinks_add(sinks: View<'_>, out: &ViewMut<'_>, lse: &ViewMut<'_>) -> SinkDims {
    self::sinks("sinks", sinks, out.view(), lse.view())
}

pub fn sinks_backward(
    sinks: View<'_>,
    out: View<'_>,
    lse: View<'_>,
    dout: View<'_>,
    dsinks: &ViewMut<'_>,
) -> SinkDims {
    let dims = self::sinks("sinks backward", sinks, out, lse);
    same("sinks backward", "dout", out.shape().elements(), dout.shape().elements());
    float("sinks backward", "dout", dout.dtype());
    same("sinks backward", "dsinks", dims.heads, dsinks.shape().elements());
    exact("sinks backward", "dsinks", dsinks.dtype(), DType::F32);
    dims
}

fn sinks(op: &str, sinks: View<'_>, out: View<'_>, lse: View<'_>) -> SinkDims {
    let shape = out.shape();
    let &[batch, queries, heads, head_size] = shape.dims() else {
        panic!("{op}: out is [B, S, H, K], not {shape:?}");
    };
    same(op, "sinks", heads, sinks.shape().elements());
    float(op, "sinks", sinks.dtype());
    float(op, "out", out.dtype());
    assert_eq!(
        lse.shape().dims(),
        [batch, heads, queries],
        "{op}: lse of out {shape:?} is [B, H, S], not {:?}",
        lse.shape()
    );
    exact(op, "lse", lse.dtype(), DType::F32);
    SinkDims { batch, queries, heads, head_size }
}

pub fn append(
    k: View<'_>,
    values: &Option<(View<'_>, ViewMut<'_>)>,
    starts: View<'_>,
    pages: View<'_>,
    to_k: &ViewMut<'_>,
) -> AppendDims {
    let (shape, cache) = (k.shape(), to_k.shape());
    let &[batch, length, kv_heads, head_size] = shape.dims() else {
        panic!("append: k is [B, S, G, K], not {shape:?}");
    };
    if let Some((v, to_v)) = values {
        assert_eq!(shape, v.shape(), "append: k and v have one shape");
        assert_eq!(cache, to_v.shape(), "append: pages of k and v have one shape");
        float("append", "v", v.dtype());
        float("append", "pages of v", to_v.dtype());
    }
    let paging = paging("append", pages, batch, cache);
    assert_eq!(cache.dims()[2..], [kv_heads, head_size], "append: k {shape:?} matches its pages {cache:?}");
    same("append", "starts", batch, starts.shape().elements());
    exact("append", "starts", starts.dtype(), DType::I32);
    float("append", "k", k.dtype());
    float("append", "pages of k", to_k.dtype());
    AppendDims { batch, length, width: kv_heads * head_size, paging }
}

/// Every page is one of those there are; `pages` are the bytes a real backend sees.
pub fn pages(paging: &Paging, pages: &[i32]) {
    for &page in pages {
        assert!(page < 0 || (page as usize) < paging.pages, "page {page} is one of {}", paging.pages);
    }
}

/// Every position is within the keys; `starts` are the bytes a real backend sees.
pub fn starts(dims: &AttentionDims, starts: &[i32]) {
    for &start in starts {
        assert!(
            start >= 0 && start as usize + dims.queries <= dims.capacity,
            "attention: {} queries from position {start} fit in {} keys",
            dims.queries,
            dims.capacity
        );
    }
}

/// Every id is one of a table's rows; `ids` are the bytes a real backend sees.
pub fn ids(op: &str, rows: usize, ids: &[i32]) {
    for (at, &id) in ids.iter().enumerate() {
        assert!(usize::try_from(id).is_ok_and(|id| id < rows), "{op}: id {id} at {at} is one of {rows} rows");
    }
}

pub fn gather(ids: View<'_>, table: View<'_>, out: &ViewMut<'_>) -> RowDims {
    let (tokens, width) = (ids.shape().elements(), table.shape().last());
    exact("gather", "ids", ids.dtype(), DType::I32);
    float("gather", "table", table.dtype());
    float("gather", "out", out.dtype());
    same("gather", "out", tokens * width, out.shape().elements());
    RowDims { rows: tokens, width }
}

pub fn scatter_add(ids: View<'_>, dout: View<'_>, dtable: &ViewMut<'_>) -> RowDims {
    let (tokens, width) = (ids.shape().elements(), dtable.shape().last());
    exact("scatter_add", "ids", ids.dtype(), DType::I32);
    float("scatter_add", "dout", dout.dtype());
    exact("scatter_add", "dtable", dtable.dtype(), DType::F32);
    same("scatter_add", "dout", tokens * width, dout.shape().elements());
    RowDims { rows: tokens, width }
}

pub fn cross_entropy(logits: View<'_>, labels: View<'_>, loss: &ViewMut<'_>) -> RowDims {
    let dims = rows("cross_entropy", logits);
    exact("cross_entropy", "labels", labels.dtype(), DType::I32);
    exact("cross_entropy", "loss", loss.dtype(), DType::F64);
    same("cross_entropy", "labels", dims.rows, labels.shape().elements());
    same("cross_entropy", "loss", 1, loss.shape().elements());
    dims
}

/// One operand of an operation that goes element by element: its name, number of elements and dtype.
pub type Operand = (&'static str, usize, DType);

/// All operands are float and have as many elements as the first; the number of elements.
pub fn elementwise(op: &'static str, operands: &[Operand]) -> usize {
    let elements = operands[0].1;
    for &(name, count, dtype) in operands {
        same(op, name, elements, count);
        float(op, name, dtype);
    }
    elements
}

/// A view as an [`Operand`].
pub fn read(name: &'static str, view: View<'_>) -> Operand {
    (name, view.shape().elements(), view.dtype())
}

/// A mutable view as an [`Operand`].
pub fn write(name: &'static str, view: &ViewMut<'_>) -> Operand {
    (name, view.shape().elements(), view.dtype())
}

pub fn scale(x: &ViewMut<'_>, factor: View<'_>) -> usize {
    float("scale", "factor", factor.dtype());
    same("scale", "factor", 1, factor.shape().elements());
    elementwise("scale", &[write("x", x)])
}

pub fn add_bias(x: &ViewMut<'_>, bias: View<'_>) -> RowDims {
    let dims = rows("add_bias", x.view());
    float("add_bias", "bias", bias.dtype());
    same("add_bias", "bias", dims.width, bias.shape().elements());
    dims
}

pub fn sum_rows(x: View<'_>, out: &ViewMut<'_>) -> RowDims {
    let dims = rows("sum_rows", x);
    exact("sum_rows", "out", out.dtype(), DType::F32);
    same("sum_rows", "out", dims.width, out.shape().elements());
    dims
}

/// Number of values.
pub fn sum_of_squares(gradient: View<'_>, total: &ViewMut<'_>) -> usize {
    float("sum_of_squares", "gradient", gradient.dtype());
    exact("sum_of_squares", "total", total.dtype(), DType::F64);
    same("sum_of_squares", "total", 1, total.shape().elements());
    gradient.shape().elements()
}

pub fn route(
    logits: View<'_>,
    gating: Gating<'_>,
    weights: &ViewMut<'_>,
    chosen: &ViewMut<'_>,
    rows: &ViewMut<'_>,
    starts: &ViewMut<'_>,
) -> ChoiceDims {
    let dims = choices("route", logits, weights.view(), chosen.view());
    exact("route", "rows", rows.dtype(), DType::I32);
    exact("route", "starts", starts.dtype(), DType::I32);
    matrix("route", "rows", [dims.tokens, dims.choices], rows.shape());
    same("route", "starts", dims.experts + 1, starts.shape().elements());
    if let Some(bias) = gating.bias {
        exact("route", "bias", bias.dtype(), DType::F32);
        same("route", "bias", dims.experts, bias.shape().elements());
    }
    if let Some(groups) = gating.groups {
        self::groups(groups, dims);
    }
    assert!(i32::try_from(dims.routed()).is_ok(), "route: {} routed rows have numbers in i32", dims.routed());
    dims
}

pub fn route_backward(
    logits: View<'_>,
    weights: View<'_>,
    chosen: View<'_>,
    dweights: View<'_>,
    dlogits: &ViewMut<'_>,
) -> ChoiceDims {
    let dims = choices("route backward", logits, weights, chosen);
    exact("route backward", "dweights", dweights.dtype(), DType::F32);
    float("route backward", "dlogits", dlogits.dtype());
    matrix("route backward", "dweights", [dims.tokens, dims.choices], dweights.shape());
    matrix("route backward", "dlogits", [dims.tokens, dims.experts], dlogits.shape());
    dims
}

fn groups(ExpertGroups { count, kept, by }: ExpertGroups, dims: ChoiceDims) {
    let ChoiceDims { experts, choices, .. } = dims;
    assert!(
        (1..=ExpertGroups::COUNT_MAX).contains(&count) && experts.is_multiple_of(count),
        "route: {experts} experts are in equal groups, at most {}, not in {count}",
        ExpertGroups::COUNT_MAX
    );
    assert!((1..=count).contains(&kept), "route: 1 to {count} groups are kept, not {kept}");
    let size = experts / count;
    assert!(choices <= kept * size, "route: {choices} choices are among {kept} groups of {size} experts");
    assert!(
        by == GroupScore::Largest || size > 1,
        "route: a group has two experts whose scores are added, not {size}"
    );
}

fn choices(op: &str, logits: View<'_>, weights: View<'_>, chosen: View<'_>) -> ChoiceDims {
    let RowDims { rows: tokens, width: experts } = rows(op, logits);
    let choices = chosen.shape().last();
    assert!((1..=experts).contains(&choices), "{op}: a token chooses 1 to {experts} experts, not {choices}");
    exact(op, "weights", weights.dtype(), DType::F32);
    exact(op, "chosen", chosen.dtype(), DType::I32);
    matrix(op, "weights", [tokens, choices], weights.shape());
    matrix(op, "chosen", [tokens, choices], chosen.shape());
    ChoiceDims { tokens, experts, choices }
}

/// Number of experts.
pub fn expert_starts(starts: View<'_>) -> usize {
    let elements = starts.shape().elements();
    exact("starts", "starts", starts.dtype(), DType::I32);
    assert!(elements > 1, "starts: {elements} elements are those of no expert");
    elements - 1
}

/// The first routed row of each expert and the number of all, from the bytes a real backend sees.
pub fn first_rows(starts: &[i32], routed: usize) -> Result<Vec<usize>> {
    let firsts: Option<Vec<usize>> = starts.iter().map(|start| usize::try_from(*start).ok()).collect();
    let are_ranges = |firsts: &Vec<usize>| {
        firsts.is_sorted() && firsts.first() == Some(&0) && firsts.last() == Some(&routed)
    };
    firsts.filter(are_ranges).ok_or_else(|| KernelError {
        op: "starts",
        detail: format!(
            "first rows of experts that do not divide {routed} routed rows; `route` wrote others"
        ),
    })
}

pub fn spread(x: View<'_>, rows: View<'_>, out: &ViewMut<'_>) -> RoutedDims {
    let dims = routed("spread", rows, x.shape().last());
    float("spread", "x", x.dtype());
    float("spread", "out", out.dtype());
    matrix("spread", "x", [dims.tokens, dims.width], x.shape());
    matrix("spread", "out", [dims.routed(), dims.width], out.shape());
    dims
}

pub fn collect(x: View<'_>, rows: View<'_>, residual: &Residual<'_>, out: &ViewMut<'_>) -> RoutedDims {
    let dims = routed("collect", rows, x.shape().last());
    float("collect", "x", x.dtype());
    float("collect", "out", out.dtype());
    matrix("collect", "x", [dims.routed(), dims.width], x.shape());
    matrix("collect", "out", [dims.tokens, dims.width], out.shape());
    if let Residual::Of(residual) = residual {
        float("collect", "residual", residual.dtype());
        same("collect", "residual", dims.tokens * dims.width, residual.shape().elements());
    }
    dims
}

pub fn weigh(x: View<'_>, rows: View<'_>, weights: View<'_>, out: &ViewMut<'_>) -> RoutedDims {
    let dims = routed("weigh", rows, x.shape().last());
    float("weigh", "x", x.dtype());
    float("weigh", "out", out.dtype());
    exact("weigh", "weights", weights.dtype(), DType::F32);
    matrix("weigh", "x", [dims.routed(), dims.width], x.shape());
    matrix("weigh", "out", [dims.routed(), dims.width], out.shape());
    matrix("weigh", "weights", [dims.tokens, dims.choices], weights.shape());
    dims
}

pub fn weigh_backward(
    d: &ViewMut<'_>,
    x: View<'_>,
    rows: View<'_>,
    weights: View<'_>,
    dweights: &ViewMut<'_>,
) -> RoutedDims {
    let dims = weigh(x, rows, weights, d);
    exact("weigh backward", "dweights", dweights.dtype(), DType::F32);
    matrix("weigh backward", "dweights", [dims.tokens, dims.choices], dweights.shape());
    dims
}

/// Sizes from `rows[T, X]`.
fn routed(op: &str, rows: View<'_>, width: usize) -> RoutedDims {
    exact(op, "rows", rows.dtype(), DType::I32);
    RoutedDims { tokens: rows.shape().rows(), choices: rows.shape().last(), width }
}

fn rows(op: &str, x: View<'_>) -> RowDims {
    float(op, "x", x.dtype());
    RowDims { rows: x.shape().rows(), width: x.shape().last() }
}

/// The shape is that of a matrix, leading dimensions flattened to rows.
fn matrix(op: &str, operand: &str, expected: [usize; 2], shape: Shape) {
    assert_eq!([shape.rows(), shape.last()], expected, "{op}: {operand} is {expected:?}, not {shape:?}");
}

fn flip(pair: (usize, usize), swap: bool) -> (usize, usize) {
    if swap { (pair.1, pair.0) } else { pair }
}

fn same(op: &str, operand: &str, expected: usize, found: usize) {
    assert_eq!(expected, found, "{op}: {operand} has {expected} elements, not {found}");
}

fn float(op: &str, operand: &str, dtype: DType) {
    assert!(
        matches!(dtype, DType::F32 | DType::BF16 | DType::F16),
        "{op}: {operand} is f32, bf16 or f16, not {dtype}"
    );
}

fn exact(op: &str, operand: &str, dtype: DType, expected: DType) {
    assert_eq!(dtype, expected, "{op}: {operand} is {expected}, not {dtype}");
}
