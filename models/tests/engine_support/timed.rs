//! Kernels whose products take their time of a virtual clock; all other operations take none.

use std::sync::Arc;
use std::time::Duration;
use terrace_aio::VirtualClock;
use terrace_kernels::{Epilogue, KernelError, KernelSet, Matmul, MatmulSpec, View, ViewMut};

struct Timed {
    matmul: Arc<dyn Matmul>,
    clock: Arc<VirtualClock>,
    /// Seconds of a multiplication or an addition.
    operation: f64,
}

/// `kernels` with products that take `operation` seconds for each of their 2·M·N·L operations.
pub fn timed(kernels: KernelSet, clock: &Arc<VirtualClock>, operation: f64) -> KernelSet {
    let timed = Timed { matmul: kernels.matmul, clock: Arc::clone(clock), operation };
    KernelSet { matmul: Arc::new(timed), ..kernels }
}

impl Timed {
    fn take(&self, [a, b, out]: [usize; 3]) {
        // M·L · L·N · M·N is the square of M·N·L.
        let operations = 2.0 * (a as f64 * b as f64 * out as f64).sqrt();
        if self.operation > 0.0 {
            self.clock.sleep(Duration::from_secs_f64(operations * self.operation));
        }
    }
}

impl Matmul for Timed {
    fn matmul(
        &self,
        a: View<'_>,
        b: View<'_>,
        out: ViewMut<'_>,
        spec: MatmulSpec,
    ) -> Result<(), KernelError> {
        let elements = [a.shape().elements(), b.shape().elements(), out.shape().elements()];
        self.matmul.matmul(a, b, out, spec)?;
        self.take(elements);
        Ok(())
    }

    fn matmul_nt(
        &self,
        a: View<'_>,
        b: View<'_>,
        out: ViewMut<'_>,
        epilogue: Epilogue<'_>,
    ) -> Result<(), KernelError> {
        let elements = [a.shape().elements(), b.shape().elements(), out.shape().elements()];
        self.matmul.matmul_nt(a, b, out, epilogue)?;
        self.take(elements);
        Ok(())
    }
}
