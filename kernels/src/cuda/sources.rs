//! The kernels' sources, which are part of the binary.

use terrace_device::cuda::Source;

/// One `.cu` file.
#[derive(Debug)]
pub(super) struct KernelSource {
    name: &'static str,
    /// With `common.cuh` in front, and `mma.cuh` where the name ends in `_mma`.
    text: &'static str,
    /// The kernels in it.
    pub kernels: &'static [&'static str],
}

impl KernelSource {
    /// For the compiler. Multiplications and additions may be fused; nothing else is approximate.
    pub(super) fn compiled(&self) -> Source<'static> {
        Source { name: self.name, text: self.text, options: &["--std=c++17"], ..Source::default() }
    }
}

macro_rules! source {
    ($name:literal, $($kernel:literal),+) => {
        source!($name behind "", $($kernel),+)
    };
    (tensor_cores $name:literal, $($kernel:literal),+) => {
        source!($name behind concat!("#line 1 \"mma.cuh\"\n", include_str!("mma.cuh"), "\n"), $($kernel),+)
    };
    ($name:literal behind $header:expr, $($kernel:literal),+) => {
        KernelSource {
            name: $name,
            text: concat!(
                "#line 1 \"common.cuh\"\n",
                include_str!("common.cuh"),
                "\n",
                $header,
                "#line 1 \"",
                $name,
                "\"\n",
                include_str!($name)
            ),
            kernels: &[$($kernel),+],
        }
    };
}

/// The operations of a [`KernelSet`](crate::KernelSet).
pub(super) static SOURCES: [KernelSource; 19] = [
    source!(
        "elementwise.cu",
        "elementwise_add",
        "elementwise_add_bias",
        "elementwise_affine",
        "elementwise_multiply",
        "elementwise_scale",
        "elementwise_cap",
        "elementwise_cast",
        "elementwise_zero"
    ),
    source!("gated.cu", "gated_forward", "gated_backward"),
    source!("rms_norm.cu", "rms_norm_forward", "rms_norm_dx", "rms_norm_dweight", "center_rows"),
    source!("reduce.cu", "reduce_sum_rows"),
    source!("rope.cu", "rope_rotate"),
    source!("columns.cu", "columns_copy", "columns_clear", "columns_fold"),
    source!("embedding.cu", "embedding_gather", "embedding_scatter_add"),
    source!(
        "experts.cu",
        "experts_choose",
        "experts_count",
        "experts_starts",
        "experts_rows",
        "experts_route_backward",
        "experts_spread",
        "experts_collect",
        "experts_weigh",
        "experts_weigh_backward"
    ),
    source!(
        "delta.cu",
        "delta_convolve",
        "delta_convolve_state",
        "delta_convolve_backward",
        "delta_gates",
        "delta_gates_backward",
        "delta_gates_sums"
    ),
    source!(
        "delta_scan.cu",
        "delta_scan_64",
        "delta_scan_128",
        "delta_scan_256",
        "delta_begin_64",
        "delta_begin_128",
        "delta_begin_256",
        "delta_back_64",
        "delta_back_128",
        "delta_back_256",
        "delta_finish"
    ),
    source!("cross_entropy.cu", "cross_entropy_rows", "cross_entropy_add"),
    source!("matmul.cu", "matmul_plain"),
    source!(tensor_cores "matmul_mma.cu", "matmul_mma_nt", "matmul_mma_nn", "matmul_mma_tn"),
    source!("quantized.cu", "quantized_thin", "quantized_tile"),
    source!(
        tensor_cores "quantized_mma.cu",
        "quantized_mma_8",
        "quantized_mma_16",
        "quantized_mma_32",
        "quantized_mma_many"
    ),
    source!(
        "attention.cu",
        "attention_forward_64",
        "attention_forward_128",
        "attention_forward_256",
        "attention_forward_256_capped",
        "attention_dq_64",
        "attention_dq_128",
        "attention_dq_128_capped",
        "attention_dkv_64",
        "attention_dkv_128",
        "attention_dkv_128_capped"
    ),
    source!(
        "attention_decode.cu",
        "attention_decode_4",
        "attention_decode_8",
        "attention_decode_4_capped",
        "attention_decode_8_capped",
        "attention_decode_merge",
        "attention_append"
    ),
    source!("sinks.cu", "sinks_add", "sinks_backward"),
    source!(
        tensor_cores "attention_mma.cu",
        "attention_forward_mma_64",
        "attention_forward_mma_128",
        "attention_forward_mma_128_capped",
        "attention_dq_mma_64",
        "attention_dq_mma_128",
        "attention_dq_mma_128_capped",
        "attention_dkv_mma_64",
        "attention_dkv_mma_128",
        "attention_dkv_mma_128_capped"
    ),
];

/// Those on training state.
pub(super) static UPDATE_SOURCES: [KernelSource; 2] = [
    source!("adam.cu", "adam_fp32", "adam_split", "adam_bf16", "adam_compact"),
    source!("sum_of_squares.cu", "sum_of_squares_blocks", "sum_of_squares_add"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_listed_where_it_is() {
        for source in SOURCES.iter().chain(&UPDATE_SOURCES) {
            let defined = source.text.matches("extern \"C\" __global__").count();
            assert_eq!(defined, source.kernels.len(), "{}", source.name);
            for kernel in source.kernels {
                assert!(source.text.contains(&format!("{kernel}(")), "{}: {kernel}", source.name);
            }
        }
    }

    #[test]
    fn every_file_is_a_source() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda");
        let mut files: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.ends_with(".cu"))
            .collect();
        files.sort();
        let mut names: Vec<&str> = SOURCES.iter().chain(&UPDATE_SOURCES).map(|source| source.name).collect();
        names.sort_unstable();
        assert_eq!(files, names);
    }
}
