//! The gated delta rule, which no card has yet.

use super::Cuda;
use crate::{Carried, DeltaRule, DeltaSpec, KernelError, Result, View, ViewMut};

fn refused(op: &'static str) -> Result {
    Err(KernelError { op, detail: "the CUDA backend has no kernel for it; use the CPU".to_owned() })
}

impl DeltaRule for Cuda {
    fn convolve(&self, _: View<'_>, _: View<'_>, _: Option<Carried<'_>>, _: ViewMut<'_>) -> Result {
        refused("convolve")
    }

    fn convolve_backward(
        &self,
        _: View<'_>,
        _: View<'_>,
        _: View<'_>,
        _: ViewMut<'_>,
        _: ViewMut<'_>,
    ) -> Result {
        refused("convolve backward")
    }

    fn gates(
        &self,
        _: View<'_>,
        _: View<'_>,
        _: View<'_>,
        _: View<'_>,
        _: ViewMut<'_>,
        _: ViewMut<'_>,
    ) -> Result {
        refused("gates")
    }

    fn gates_backward(
        &self,
        _: View<'_>,
        _: View<'_>,
        _: View<'_>,
        _: View<'_>,
        _: View<'_>,
        _: View<'_>,
        _: ViewMut<'_>,
        _: ViewMut<'_>,
        _: ViewMut<'_>,
        _: ViewMut<'_>,
    ) -> Result {
        refused("gates backward")
    }

    fn scan(
        &self,
        _: View<'_>,
        _: View<'_>,
        _: View<'_>,
        _: DeltaSpec,
        _: Option<Carried<'_>>,
        _: ViewMut<'_>,
    ) -> Result {
        refused("scan")
    }

    fn scan_backward(
        &self,
        _: View<'_>,
        _: View<'_>,
        _: View<'_>,
        _: DeltaSpec,
        _: View<'_>,
        _: ViewMut<'_>,
        _: ViewMut<'_>,
        _: ViewMut<'_>,
        _: ViewMut<'_>,
    ) -> Result {
        refused("scan backward")
    }
}
