//! The gated delta rule: the layer around it by the kernels of `delta.cu`, the rule by those of `delta_scan.cu`.

use super::launch::Arguments;
use super::{Cuda, THREADS, VECTOR};
use crate::check::ScanDims;
use crate::ops::Waves;
use crate::{Carried, DeltaRule, DeltaSpec, Result, View, ViewMut, check};

/// Positions of a thread that convolves, as in `delta.cu`.
const POSITIONS: usize = 16;

/// Channels of a block that goes back through a convolution.
const CHANNELS: usize = 32;

/// Heads, and threads, of a block that adds gradients of rows.
const SUM_HEADS: usize = 32;
const SUM_THREADS: u32 = 1024;

/// Threads of a block that has a part of a state, as in `delta_scan.cu`: four for each column.
const SCAN_THREADS: u32 = 4 * Waves::COLUMNS as u32;

/// Warps of a block that adds what parts of states have left.
const WARPS: usize = THREADS as usize / 32;

impl DeltaRule for Cuda {
    fn convolve(
        &self,
        x: View<'_>,
        weight: View<'_>,
        carried: Option<Carried<'_>>,
        out: ViewMut<'_>,
    ) -> Result {
        const OP: &str = "convolve";
        let dims = check::convolve(x, weight, carried.as_ref(), &out);
        if dims.tokens() * dims.channels == 0 {
            return Ok(());
        }
        let carried = carried.as_ref();
        // Without rows of a state there is nothing before a sequence.
        let held = carried.filter(|_| dims.taps > 1);
        let mut arguments =
            self.arguments().read(x).read(weight).optional(held.map(|held| held.state.view()));
        arguments = arguments.only_if(held.map(|held| held.slots)).only_if(held.map(|held| held.starts));
        arguments =
            arguments.write(&out).long(dims.sequences).long(dims.length).long(dims.channels).size(dims.taps);
        let runs = dims.sequences * dims.length.div_ceil(POSITIONS) * dims.channels.div_ceil(VECTOR);
        self.launch_flat(OP, "delta_convolve", runs, &mut arguments)?;
        let Some(held) = held else { return Ok(()) };
        let mut arguments = self.arguments().read(x).write(&held.state).only(held.slots).only(held.starts);
        arguments = arguments.only(held.last).long(dims.sequences).long(dims.length).long(dims.channels);
        arguments = arguments.size(dims.taps);
        self.launch_flat(OP, "delta_convolve_state", dims.sequences * dims.channels, &mut arguments)
    }

    fn convolve_backward(
        &self,
        x: View<'_>,
        weight: View<'_>,
        dout: View<'_>,
        dx: ViewMut<'_>,
        dweight: ViewMut<'_>,
    ) -> Result {
        let dims = check::convolve_backward(x, weight, dout, &dx, &dweight);
        if dims.tokens() * dims.channels == 0 {
            return Ok(());
        }
        let mut arguments = self.arguments().read(x).read(weight).read(dout).write(&dx).only(dweight.view());
        arguments = arguments.long(dims.sequences).long(dims.length).long(dims.channels).size(dims.taps);
        let grid = [self.blocks(dims.channels.div_ceil(CHANNELS)), 1, 1];
        self.launch("convolve backward", "delta_convolve_backward", grid, THREADS, 0, &mut arguments)
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
        let dims = check::gates(a, b, a_log, dt_bias, &decay, &beta);
        if dims.rows * dims.width == 0 {
            return Ok(());
        }
        let mut arguments = self.arguments().read(a).read(b).read(a_log).read(dt_bias).only(decay.view());
        arguments = arguments.only(beta.view()).long(dims.rows).long(dims.width);
        self.launch_flat("gates", "delta_gates", dims.rows * dims.width, &mut arguments)
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
        const OP: &str = "gates backward";
        let dims = check::gates_backward(a, b, a_log, dt_bias, ddecay, dbeta, &da, &db, &da_log, &ddt_bias);
        if dims.rows * dims.width == 0 {
            return Ok(());
        }
        let mut arguments =
            self.arguments().read(a).read(b).read(a_log).read(dt_bias).only(ddecay).only(dbeta);
        arguments = arguments.write(&da).write(&db).long(dims.rows).long(dims.width);
        self.launch_flat(OP, "delta_gates_backward", dims.rows * dims.width, &mut arguments)?;
        let mut arguments = self.arguments().read(a).read(a_log).read(dt_bias).only(ddecay);
        arguments = arguments.only(da_log.view()).only(ddt_bias.view()).long(dims.rows).long(dims.width);
        let grid = [self.blocks(dims.width.div_ceil(SUM_HEADS)), 1, 1];
        self.launch(OP, "delta_gates_sums", grid, SUM_THREADS, 0, &mut arguments)
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
        let dims = check::scan(qkv, decay, beta, spec, carried.as_ref(), &out);
        if dims.tokens() == 0 {
            return Ok(());
        }
        let carried = carried.as_ref();
        let mut arguments = self.scan_arguments(&dims, qkv, [decay, beta]);
        arguments = arguments.only_if(carried.map(|carried| carried.state.view()));
        arguments = arguments.only_if(carried.map(|carried| carried.slots));
        arguments = arguments.only_if(carried.map(|carried| carried.starts));
        arguments = arguments.only_if(carried.map(|carried| carried.last));
        arguments = arguments.write(&out);
        let grid = [self.blocks(dims.pairs() * spec.value_size.div_ceil(Waves::COLUMNS)), 1, 1];
        self.launch("scan", kernels(spec).scan, grid, SCAN_THREADS, 0, &mut arguments)
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
        const OP: &str = "scan backward";
        let dims = check::scan_backward(qkv, decay, beta, spec, dout, &dqkv, &ddecay, &dbeta, &scratch);
        if dims.tokens() == 0 {
            return Ok(());
        }
        let (waves, kernels) = (Waves::new(dims.sequences, dims.length, spec), kernels(spec));
        for first in (0..dims.pairs()).step_by(waves.pairs) {
            let pairs = waves.pairs.min(dims.pairs() - first);
            let wave = |arguments: Arguments| {
                let arguments = arguments.only(scratch.view()).long(first).size(pairs).size(waves.positions);
                arguments.size(waves.stretches).size(waves.parts).size(waves.key_size)
            };
            let parts = [self.blocks(pairs * waves.parts), 1, 1];
            let operands = || wave(self.scan_arguments(&dims, qkv, [decay, beta]));
            self.launch(OP, kernels.begin, parts, SCAN_THREADS, 0, &mut operands())?;
            for stretch in (0..waves.stretches).rev() {
                let mut arguments = operands().size(stretch).read(dout).write(&dqkv);
                self.launch(OP, kernels.back, parts, SCAN_THREADS, 0, &mut arguments)?;
                let mut arguments = wave(self.sizes(&dims, self.arguments().read(qkv))).size(stretch);
                arguments = arguments.write(&dqkv).only(ddecay.view()).only(dbeta.view());
                let items = pairs / spec.group() * waves.positions;
                let grid = [self.blocks(items.div_ceil(WARPS)), 1, 1];
                self.launch(OP, "delta_finish", grid, THREADS, 0, &mut arguments)?;
            }
        }
        Ok(())
    }
}

/// The kernels for keys of up to some size.
struct Kernels {
    scan: &'static str,
    begin: &'static str,
    back: &'static str,
}

fn kernels(spec: DeltaSpec) -> Kernels {
    match spec.key_size {
        0..=64 => Kernels { scan: "delta_scan_64", begin: "delta_begin_64", back: "delta_back_64" },
        65..=128 => Kernels { scan: "delta_scan_128", begin: "delta_begin_128", back: "delta_back_128" },
        _ => Kernels { scan: "delta_scan_256", begin: "delta_begin_256", back: "delta_back_256" },
    }
}
const _: () = assert!(DeltaSpec::KEY_SIZE_MAX == 256, "the last kernels are for all others");

impl Cuda {
    /// What every kernel of the rule begins with.
    fn scan_arguments(&self, dims: &ScanDims, qkv: View<'_>, [decay, beta]: [View<'_>; 2]) -> Arguments {
        self.sizes(dims, self.arguments().read(qkv).only(decay).only(beta))
    }

    fn sizes(&self, dims: &ScanDims, arguments: Arguments) -> Arguments {
        let DeltaSpec { key_heads, value_heads, key_size, value_size } = dims.heads;
        let arguments = arguments.long(dims.sequences).long(dims.length).size(key_heads).size(value_heads);
        arguments.size(key_size).size(value_size)
    }
}
