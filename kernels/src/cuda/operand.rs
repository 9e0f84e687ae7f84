//! What kernels call the dtypes.

use crate::quantized::QuantFormat;
use crate::{DType, GateFunction};

/// The code of a dtype in `common.cuh`. Operations check dtypes before they launch.
pub(super) fn code(dtype: DType) -> i32 {
    match dtype {
        DType::F32 => 0,
        DType::BF16 => 1,
        DType::F16 => 2,
        DType::F64 | DType::I32 => unreachable!("no kernel takes {dtype} where the dtype is open"),
    }
}

/// The code of a format in `quantized.cu`.
pub(super) fn format_code(format: QuantFormat) -> i32 {
    match format {
        QuantFormat::Int8 => 0,
        QuantFormat::Int4 => 1,
        QuantFormat::Mxfp4 => 2,
    }
}

/// The code of a function in `gated.cu`.
pub(super) fn gate_code(f: GateFunction) -> i32 {
    match f {
        GateFunction::Silu => 0,
        GateFunction::Gelu => 1,
        GateFunction::GeluTanh => 2,
        GateFunction::ClampedSwish => 3,
        GateFunction::Sigmoid => 4,
    }
}
