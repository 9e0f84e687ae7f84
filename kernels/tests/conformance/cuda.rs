//! The CUDA backend as a fixture: every operation on host tensors, by way of device memory.
//!
//! An operand is copied into a region of the card with guards around it, the operation runs, and what it may write is
//! copied back. Operands that it may only read, and all guards, must have kept their bytes. In the second variant operands
//! begin at odd places, so that no kernel may load 16 bytes at once; in the third products go to cuBLASLt.
//!
//! `cargo xtask cuda-mock` runs all suites on it, over a driver that plays a card, with the kernels compiled for the CPU.

use crate::support::Host;
use std::sync::Arc;
use terrace_device::cuda::{CudaDevice, CudaStream};
use terrace_device::{Arena, Bytes, BytesMut, Device, Region, Stream};
use terrace_kernels::cuda::{self, CudaConfig};
use terrace_kernels::{
    Activation, Attention, AttentionSpec, Carried, Columns, CrossEntropy, DeltaRule, DeltaSpec, Elementwise,
    Embedding, Epilogue, Experts, GateFunction, Gating, KernelSet, KeyValues, Matmul, MatmulSpec,
    QuantizedMatmul, QuantizedView, Reduce, Residual, Result, RmsNorm, Rope, RopeDirection, RopeLayout,
    Sinks, View, ViewMut,
};
use terrace_kernels::{DType, reference};

/// Set by `cargo xtask cuda-mock`: the kernels' library.
const VARIABLE: &str = "TERRACE_SHIM_LIBRARY";

/// All variants with the plain kernels, if there is a driver to run them on.
pub fn backends() -> Option<Vec<(String, KernelSet)>> {
    let variant = |name: &str, misplaced, own_products| {
        let config = CudaConfig { own_products, plain_kernels: true };
        Some((name.to_owned(), on_device(misplaced, config)?))
    };
    Some(vec![
        variant("cuda", 0, true)?,
        variant("cuda, operands at odd places", 1, true)?,
        variant("cuda, cuBLASLt", 0, false)?,
    ])
}

/// A set for operands that begin `misplaced` elements after even places.
pub fn on_device(misplaced: usize, config: CudaConfig) -> Option<KernelSet> {
    std::env::var_os(VARIABLE)?;
    let device = CudaDevice::open(0).expect("the driver that was asked for");
    let stream = Arc::clone(device.compute_stream());
    let set = cuda::with_config(&device, &stream, config).expect("kernels that compile");
    let arena = device.arena(64 << 20).expect("memory for operands");
    let card = Arc::new(OnDevice { set, arena, stream, misplaced });
    Some(KernelSet {
        matmul: card.clone(),
        quantized_matmul: card.clone(),
        rms_norm: card.clone(),
        rope: card.clone(),
        columns: card.clone(),
        attention: card.clone(),
        sinks: card.clone(),
        activation: card.clone(),
        embedding: card.clone(),
        cross_entropy: card.clone(),
        elementwise: card.clone(),
        reduce: card.clone(),
        experts: card.clone(),
        delta_rule: card,
    })
}

/// Runs a set on operands in host memory.
struct OnDevice {
    set: KernelSet,
    arena: Arena,
    stream: Arc<CudaStream>,
    /// Elements that operands begin after a multiple of 256 bytes.
    misplaced: usize,
}

const GUARD: usize = 256;
const GUARD_BYTE: u8 = 0xA5;

/// A copy of an operand on the card.
struct Copied {
    region: Region,
    start: usize,
    before: Vec<u8>,
}

impl OnDevice {
    fn copy(&self, bytes: Bytes<'_>, element: usize) -> Copied {
        let start = GUARD + self.misplaced * element;
        let mut before = vec![GUARD_BYTE; start + bytes.len() + GUARD];
        before[start..start + bytes.len()].copy_from_slice(bytes.host());
        let mut region = self.arena.alloc(before.len()).expect("operands that fit");
        // SAFETY: both ends live until the stream has done the copy.
        unsafe { self.stream.copy(Bytes::from_host(&before), region.bytes_mut()) }.unwrap();
        self.stream.synchronize().unwrap();
        Copied { region, start, before }
    }

    fn view(&self, view: View<'_>) -> Copied {
        self.copy(view.bytes(), view.dtype().size())
    }

    /// What the card holds now, guards included.
    fn now(&self, copied: &Copied) -> Vec<u8> {
        let mut now = vec![0; copied.before.len()];
        // SAFETY: as in `copy`.
        unsafe { self.stream.copy(copied.region.bytes(), BytesMut::from_host(&mut now)) }.unwrap();
        self.stream.synchronize().unwrap();
        now
    }

    fn unchanged(&self, what: &str, operands: &[&Copied]) {
        for (i, operand) in operands.iter().enumerate() {
            assert!(
                self.now(operand) == operand.before,
                "{what} changed operand {i}, which it may only read"
            );
        }
    }

    /// Copies a result back.
    fn result(&self, what: &str, copied: &Copied, out: ViewMut<'_>) {
        let (now, out) = (self.now(copied), out.into_bytes().into_host());
        let end = copied.start + out.len();
        let guards = now[..copied.start].iter().chain(&now[end..]);
        assert!(guards.copied().all(|byte| byte == GUARD_BYTE), "{what} wrote beyond its result");
        out.copy_from_slice(&now[copied.start..end]);
    }
}

/// Copies of what a product adds.
struct Added {
    bias: Option<Copied>,
    residual: Option<Copied>,
}

impl OnDevice {
    fn epilogue(&self, epilogue: Epilogue<'_>) -> Added {
        let residual = match epilogue.residual {
            Residual::Of(residual) => Some(self.view(residual)),
            Residual::None | Residual::InPlace => None,
        };
        Added { bias: epilogue.bias.map(|bias| self.view(bias)), residual }
    }
}

impl Added {
    fn of<'a>(&'a self, host: Epilogue<'a>) -> Epilogue<'a> {
        let residual = match (&self.residual, host.residual) {
            (Some(copied), Residual::Of(view)) => Residual::Of(copied.of(view)),
            (_, other) => other,
        };
        Epilogue { bias: self.bias.as_ref().zip(host.bias).map(|(copied, view)| copied.of(view)), residual }
    }

    fn all(&self) -> Vec<&Copied> {
        self.bias.iter().chain(&self.residual).collect()
    }
}

impl Copied {
    fn bytes(&self) -> Bytes<'_> {
        self.region.bytes().slice(self.start, self.before.len() - GUARD)
    }

    fn of<'a>(&'a self, view: View<'_>) -> View<'a> {
        View::new(self.bytes(), view.dtype(), view.shape().dims())
    }

    fn of_mut<'a>(&'a mut self, view: &ViewMut<'_>) -> ViewMut<'a> {
        let end = self.before.len() - GUARD;
        ViewMut::new(self.region.bytes_mut().slice(self.start, end), view.dtype(), view.shape().dims())
    }
}

/// Runs `$call` on copies of the operands: names of views that are read, then of views that are written.
macro_rules! on_device {
    ($self:ident, [$($read:ident),*], [$($write:ident),+], $call:expr) => {{
        let what = stringify!($call).split('(').next().unwrap_or_default();
        // The sources' bytes, and their copies under the sources' names.
        $(let $read = ($self.view($read), $read);)*
        $(let mut $write = ($self.view($write.view()), $write);)+
        {
            $(let $read = $read.0.of($read.1);)*
            $(let $write = $write.0.of_mut(&$write.1);)+
            $call?;
        }
        $self.unchanged(what, &[$(&$read.0),*]);
        $($self.result(what, &$write.0, $write.1);)+
        Ok(())
    }};
}

impl Matmul for OnDevice {
    fn matmul(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>, spec: MatmulSpec) -> Result {
        on_device!(self, [a, b], [out], self.set.matmul.matmul(a, b, out, spec))
    }

    fn matmul_nt(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>, epilogue: Epilogue<'_>) -> Result {
        let added = self.epilogue(epilogue);
        let on_card = added.of(epilogue);
        let done = on_device!(self, [a, b], [out], self.set.matmul.matmul_nt(a, b, out, on_card));
        self.unchanged("matmul_nt", &added.all());
        done
    }
}

impl QuantizedMatmul for OnDevice {
    fn matmul_nt(
        &self,
        a: View<'_>,
        b: QuantizedView<'_>,
        out: ViewMut<'_>,
        epilogue: Epilogue<'_>,
    ) -> Result {
        let (codes, added) = (self.copy(b.bytes(), 1), self.epilogue(epilogue));
        let b = QuantizedView::new(codes.bytes(), b.format(), b.shape().dims());
        let (on_card, products) = (added.of(epilogue), &self.set.quantized_matmul);
        let done = on_device!(self, [a], [out], products.matmul_nt(a, b, out, on_card));
        self.unchanged("matmul_nt", &[&codes]);
        self.unchanged("matmul_nt", &added.all());
        done
    }
}

impl RmsNorm for OnDevice {
    fn forward(
        &self,
        x: View<'_>,
        weight: View<'_>,
        eps: f32,
        out: ViewMut<'_>,
        rstd: ViewMut<'_>,
    ) -> Result {
        on_device!(self, [x, weight], [out, rstd], self.set.rms_norm.forward(x, weight, eps, out, rstd))
    }

    fn backward(
        &self,
        dout: View<'_>,
        x: View<'_>,
        weight: View<'_>,
        rstd: View<'_>,
        dx: ViewMut<'_>,
        accumulate_dx: bool,
        dweight: ViewMut<'_>,
    ) -> Result {
        on_device!(
            self,
            [dout, x, weight, rstd],
            [dx, dweight],
            self.set.rms_norm.backward(dout, x, weight, rstd, dx, accumulate_dx, dweight)
        )
    }

    fn center(&self, x: View<'_>, out: ViewMut<'_>, accumulate: bool) -> Result {
        on_device!(self, [x], [out], self.set.rms_norm.center(x, out, accumulate))
    }
}

impl Rope for OnDevice {
    fn rotate(
        &self,
        x: ViewMut<'_>,
        positions: View<'_>,
        inv_freq: View<'_>,
        layout: RopeLayout,
        scale: f32,
        direction: RopeDirection,
    ) -> Result {
        let rope = &self.set.rope;
        on_device!(
            self,
            [positions, inv_freq],
            [x],
            rope.rotate(x, positions, inv_freq, layout, scale, direction)
        )
    }
}

impl Columns for OnDevice {
    fn copy(&self, x: View<'_>, from: usize, out: ViewMut<'_>, to: usize, width: usize) -> Result {
        on_device!(self, [x], [out], self.set.columns.copy(x, from, out, to, width))
    }

    fn fold(&self, x: View<'_>, from: usize, out: ViewMut<'_>, to: usize, width: usize) -> Result {
        on_device!(self, [x], [out], self.set.columns.fold(x, from, out, to, width))
    }

    fn clear(&self, out: ViewMut<'_>, at: usize, width: usize) -> Result {
        on_device!(self, [], [out], self.set.columns.clear(out, at, width))
    }
}

impl Attention for OnDevice {
    fn forward(
        &self,
        q: View<'_>,
        KeyValues { k, v, pages }: KeyValues<'_>,
        starts: View<'_>,
        out: ViewMut<'_>,
        lse: ViewMut<'_>,
        spec: AttentionSpec,
    ) -> Result {
        let attention = &self.set.attention;
        let Some(pages) = pages else {
            return on_device!(
                self,
                [q, k, v, starts],
                [out, lse],
                attention.forward(q, KeyValues::rows(k, v), starts, out, lse, spec)
            );
        };
        on_device!(
            self,
            [q, k, v, pages, starts],
            [out, lse],
            attention.forward(q, KeyValues { k, v, pages: Some(pages) }, starts, out, lse, spec)
        )
    }

    fn append(
        &self,
        k: View<'_>,
        values: Option<(View<'_>, ViewMut<'_>)>,
        starts: View<'_>,
        pages: View<'_>,
        to_k: ViewMut<'_>,
    ) -> Result {
        let attention = &self.set.attention;
        let Some((v, to_v)) = values else {
            return on_device!(
                self,
                [k, starts, pages],
                [to_k],
                attention.append(k, None, starts, pages, to_k)
            );
        };
        on_device!(
            self,
            [k, v, starts, pages],
            [to_k, to_v],
            attention.append(k, Some((v, to_v)), starts, pages, to_k)
        )
    }

    fn backward(
        &self,
        q: View<'_>,
        k: View<'_>,
        v: View<'_>,
        out: View<'_>,
        lse: View<'_>,
        dout: View<'_>,
        dq: ViewMut<'_>,
        dk: ViewMut<'_>,
        dv: ViewMut<'_>,
        spec: AttentionSpec,
    ) -> Result {
        on_device!(
            self,
            [q, k, v, out, lse, dout],
            [dq, dk, dv],
            self.set.attention.backward(q, k, v, out, lse, dout, dq, dk, dv, spec)
        )
    }
}

impl Sinks for OnDevice {
    fn add(&self, sinks: View<'_>, out: ViewMut<'_>, lse: ViewMut<'_>) -> Result {
        on_device!(self, [sinks], [out, lse], self.set.sinks.add(sinks, out, lse))
    }

    fn backward(
        &self,
        sinks: View<'_>,
        out: View<'_>,
        lse: View<'_>,
        dout: View<'_>,
        dsinks: ViewMut<'_>,
    ) -> Result {
        on_device!(
            self,
            [sinks, out, lse, dout],
            [dsinks],
            self.set.sinks.backward(sinks, out, lse, dout, dsinks)
        )
    }
}

impl Activation for OnDevice {
    fn gated(&self, f: GateFunction, gate: View<'_>, up: View<'_>, out: ViewMut<'_>) -> Result {
        on_device!(self, [gate, up], [out], self.set.activation.gated(f, gate, up, out))
    }

    fn gated_backward(
        &self,
        f: GateFunction,
        gate: View<'_>,
        up: View<'_>,
        dout: View<'_>,
        dgate: ViewMut<'_>,
        dup: ViewMut<'_>,
    ) -> Result {
        let activation = &self.set.activation;
        on_device!(
            self,
            [gate, up, dout],
            [dgate, dup],
            activation.gated_backward(f, gate, up, dout, dgate, dup)
        )
    }
}

impl Embedding for OnDevice {
    fn gather(&self, ids: View<'_>, table: View<'_>, out: ViewMut<'_>) -> Result {
        on_device!(self, [ids, table], [out], self.set.embedding.gather(ids, table, out))
    }

    fn scatter_add(&self, ids: View<'_>, dout: View<'_>, dtable: ViewMut<'_>) -> Result {
        on_device!(self, [ids, dout], [dtable], self.set.embedding.scatter_add(ids, dout, dtable))
    }
}

impl CrossEntropy for OnDevice {
    fn loss(&self, logits: View<'_>, labels: View<'_>, loss: ViewMut<'_>) -> Result {
        on_device!(self, [logits, labels], [loss], self.set.cross_entropy.loss(logits, labels, loss))
    }

    fn loss_and_gradient(
        &self,
        logits: ViewMut<'_>,
        labels: View<'_>,
        scale: f32,
        cap: Option<f32>,
        loss: ViewMut<'_>,
    ) -> Result {
        let cross_entropy = &self.set.cross_entropy;
        on_device!(
            self,
            [labels],
            [logits, loss],
            cross_entropy.loss_and_gradient(logits, labels, scale, cap, loss)
        )
    }
}

impl Elementwise for OnDevice {
    fn add(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>) -> Result {
        on_device!(self, [a, b], [out], self.set.elementwise.add(a, b, out))
    }

    fn add_assign(&self, acc: ViewMut<'_>, x: View<'_>) -> Result {
        on_device!(self, [x], [acc], self.set.elementwise.add_assign(acc, x))
    }

    fn add_bias(&self, x: ViewMut<'_>, bias: View<'_>) -> Result {
        on_device!(self, [bias], [x], self.set.elementwise.add_bias(x, bias))
    }

    fn affine(&self, x: ViewMut<'_>, factor: f32, offset: f32) -> Result {
        on_device!(self, [], [x], self.set.elementwise.affine(x, factor, offset))
    }

    fn multiply(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>) -> Result {
        on_device!(self, [a, b], [out], self.set.elementwise.multiply(a, b, out))
    }

    fn scale(&self, x: ViewMut<'_>, factor: View<'_>) -> Result {
        on_device!(self, [factor], [x], self.set.elementwise.scale(x, factor))
    }

    fn cap(&self, x: ViewMut<'_>, cap: f32) -> Result {
        on_device!(self, [], [x], self.set.elementwise.cap(x, cap))
    }

    fn cast(&self, x: View<'_>, out: ViewMut<'_>) -> Result {
        on_device!(self, [x], [out], self.set.elementwise.cast(x, out))
    }

    fn zero(&self, out: ViewMut<'_>) -> Result {
        on_device!(self, [], [out], self.set.elementwise.zero(out))
    }
}

impl Reduce for OnDevice {
    fn sum_rows(&self, x: View<'_>, out: ViewMut<'_>) -> Result {
        on_device!(self, [x], [out], self.set.reduce.sum_rows(x, out))
    }
}

impl Experts for OnDevice {
    fn route(
        &self,
        logits: View<'_>,
        gating: Gating<'_>,
        weights: ViewMut<'_>,
        chosen: ViewMut<'_>,
        rows: ViewMut<'_>,
        starts: ViewMut<'_>,
    ) -> Result {
        let bias = gating.bias.map(|bias| self.view(bias));
        let of_card = bias.as_ref().zip(gating.bias).map(|(copied, view)| copied.of(view));
        let gating = Gating { bias: of_card, ..gating };
        let done = on_device!(
            self,
            [logits],
            [weights, chosen, rows, starts],
            self.set.experts.route(logits, gating, weights, chosen, rows, starts)
        );
        self.unchanged("route", &bias.iter().collect::<Vec<_>>());
        done
    }

    fn route_backward(
        &self,
        logits: View<'_>,
        gating: Gating<'_>,
        weights: View<'_>,
        chosen: View<'_>,
        dweights: View<'_>,
        dlogits: ViewMut<'_>,
    ) -> Result {
        on_device!(
            self,
            [logits, weights, chosen, dweights],
            [dlogits],
            self.set.experts.route_backward(logits, gating, weights, chosen, dweights, dlogits)
        )
    }

    fn starts(&self, starts: View<'_>, routed: usize) -> Result<Vec<usize>> {
        let copied = self.view(starts);
        let numbers = self.set.experts.starts(copied.of(starts), routed);
        self.unchanged("starts", &[&copied]);
        numbers
    }

    fn spread(&self, x: View<'_>, rows: View<'_>, out: ViewMut<'_>) -> Result {
        on_device!(self, [x, rows], [out], self.set.experts.spread(x, rows, out))
    }

    fn collect(&self, x: View<'_>, rows: View<'_>, residual: Residual<'_>, out: ViewMut<'_>) -> Result {
        let experts = &self.set.experts;
        let Residual::Of(added) = residual else {
            return on_device!(self, [x, rows], [out], experts.collect(x, rows, residual, out));
        };
        on_device!(self, [x, rows, added], [out], experts.collect(x, rows, Residual::Of(added), out))
    }

    fn weigh(&self, x: View<'_>, rows: View<'_>, weights: View<'_>, out: ViewMut<'_>) -> Result {
        on_device!(self, [x, rows, weights], [out], self.set.experts.weigh(x, rows, weights, out))
    }

    fn weigh_backward(
        &self,
        d: ViewMut<'_>,
        x: View<'_>,
        rows: View<'_>,
        weights: View<'_>,
        dweights: ViewMut<'_>,
    ) -> Result {
        let experts = &self.set.experts;
        on_device!(
            self,
            [x, rows, weights],
            [d, dweights],
            experts.weigh_backward(d, x, rows, weights, dweights)
        )
    }
}

impl DeltaRule for OnDevice {
    fn convolve(
        &self,
        x: View<'_>,
        weight: View<'_>,
        carried: Option<Carried<'_>>,
        out: ViewMut<'_>,
    ) -> Result {
        let rule = &self.set.delta_rule;
        let Some(Carried { state, slots, starts, last }) = carried else {
            return on_device!(self, [x, weight], [out], rule.convolve(x, weight, None, out));
        };
        on_device!(
            self,
            [x, weight, slots, starts, last],
            [state, out],
            rule.convolve(x, weight, Some(Carried { state, slots, starts, last }), out)
        )
    }

    fn convolve_backward(
        &self,
        x: View<'_>,
        weight: View<'_>,
        dout: View<'_>,
        dx: ViewMut<'_>,
        dweight: ViewMut<'_>,
    ) -> Result {
        let rule = &self.set.delta_rule;
        on_device!(
            self,
            [x, weight, dout],
            [dx, dweight],
            rule.convolve_backward(x, weight, dout, dx, dweight)
        )
    }

    fn gates(
        &self,
        a: View<'_>,
        b: View<'_>,
        a_log: View<'_>,
        dt_bias: View<'_>,
        decay: ViewMut<'_>,
        beta: ViewMut<'_>,
    ) -> Result {
        let rule = &self.set.delta_rule;
        on_device!(self, [a, b, a_log, dt_bias], [decay, beta], rule.gates(a, b, a_log, dt_bias, decay, beta))
    }

    fn gates_backward(
        &self,
        a: View<'_>,
        b: View<'_>,
        a_log: View<'_>,
        dt_bias: View<'_>,
        ddecay: View<'_>,
        dbeta: View<'_>,
        da: ViewMut<'_>,
        db: ViewMut<'_>,
        da_log: ViewMut<'_>,
        ddt_bias: ViewMut<'_>,
    ) -> Result {
        let rule = &self.set.delta_rule;
        on_device!(
            self,
            [a, b, a_log, dt_bias, ddecay, dbeta],
            [da, db, da_log, ddt_bias],
            rule.gates_backward(a, b, a_log, dt_bias, ddecay, dbeta, da, db, da_log, ddt_bias)
        )
    }

    fn scan(
        &self,
        qkv: View<'_>,
        decay: View<'_>,
        beta: View<'_>,
        spec: DeltaSpec,
        carried: Option<Carried<'_>>,
        out: ViewMut<'_>,
    ) -> Result {
        let rule = &self.set.delta_rule;
        let Some(Carried { state, slots, starts, last }) = carried else {
            return on_device!(self, [qkv, decay, beta], [out], rule.scan(qkv, decay, beta, spec, None, out));
        };
        on_device!(
            self,
            [qkv, decay, beta, slots, starts, last],
            [state, out],
            rule.scan(qkv, decay, beta, spec, Some(Carried { state, slots, starts, last }), out)
        )
    }

    fn scan_backward(
        &self,
        qkv: View<'_>,
        decay: View<'_>,
        beta: View<'_>,
        spec: DeltaSpec,
        dout: View<'_>,
        dqkv: ViewMut<'_>,
        ddecay: ViewMut<'_>,
        dbeta: ViewMut<'_>,
        scratch: ViewMut<'_>,
    ) -> Result {
        let rule = &self.set.delta_rule;
        on_device!(
            self,
            [qkv, decay, beta, dout],
            [dqkv, ddecay, dbeta, scratch],
            rule.scan_backward(qkv, decay, beta, spec, dout, dqkv, ddecay, dbeta, scratch)
        )
    }
}

const REASON: &str = "the mock driver is on the library path";

/// The suites were run on the card that was asked for, and it does products in two ways.
#[test]
#[ignore = "needs a driver: `cargo xtask cuda-mock`"]
fn the_card_is_there() {
    let has_library = terrace_device::cuda::Library::CublasLt.is_found();
    assert_eq!(backends().expect(REASON).len(), 3);
    // The driver that plays a card has one beside it.
    let is_played = std::env::var_os("TERRACE_SHIM_LIBRARY").is_some_and(|library| library != "card");
    assert!(has_library || !is_played);
}

/// Operands that the card cannot reach are a defect of the caller.
#[test]
#[ignore = "needs a driver: `cargo xtask cuda-mock`"]
#[should_panic(expected = "operands are memory that the kernels reach")]
fn host_operands_are_refused() {
    let device = CudaDevice::open(0).expect(REASON);
    let set = cuda::kernel_set(&device, device.compute_stream()).expect(REASON);
    let x = Host::zeros(DType::F32, &[8]);
    let _ = set.elementwise.cast(x.view(), Host::zeros(DType::BF16, &[8]).view_mut());
}

/// More rows than there is memory for their losses are added in stretches, still in order.
#[test]
#[ignore = "needs a driver: `cargo xtask cuda-mock`"]
fn losses_of_many_rows() {
    let rows = 131_072 + 70;
    let logits = Host::random(DType::F32, &[rows, 3], 2.0, 1);
    let labels = Host::of(DType::I32, &[rows], (0..rows).map(|r| (r % 4) as f64 - 1.0));
    let loss_of = |set: &KernelSet| {
        let mut loss = Host::zeros(DType::F64, &[1]);
        set.cross_entropy.loss(logits.view(), labels.view(), loss.view_mut()).unwrap();
        loss.values()[0]
    };
    let expected = loss_of(&reference::kernel_set());
    let found = loss_of(&backends().expect(REASON)[0].1);
    assert!((found - expected).abs() < 1e-6 * expected, "{found} instead of {expected}");
}
