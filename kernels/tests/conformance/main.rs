//! One suite per operation, run over every backend and instruction set that this machine has, against the reference;
//! and the reference's gradients against finite differences. `cargo xtask cuda-mock` runs the same suites over the CUDA
//! backend, on a driver that plays a card (`cuda.rs`).
//!
//! Every comparison is with the reference's f32 result for the same (already rounded) operands. Allowed is one rounding to
//! the result's dtype plus a tolerance for f32 accumulation that each suite states.

mod activation;
mod attention;
mod canary;
mod columns;
mod cuda;
mod delta;
mod dry;
mod elementwise;
mod embedding;
mod epilogue;
mod experts;
mod gradients;
mod loss;
mod matmul;
mod norm;
mod quantized;
mod rope;
mod sinks;
mod support;
mod tensor_cores;
mod threads;
mod together;
