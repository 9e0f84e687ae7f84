//! The tensor-core kernels, run on the CPU: single instructions against the tables of the PTX manual, attention and
//! products against the reference, with error bounds that follow from the operands.
//!
//! The kernels are called by name in the library that `cargo xtask cuda-shim` builds; `TERRACE_SHIM_LIBRARY` says where it
//! is, and without it the tests do nothing. Every case runs in the natural order of blocks and threads and in drawn
//! ones, with the same bits each time. What surrounds an operand is NaN before a launch and unchanged after it.

mod attention;
mod instructions;
mod matmul;
mod shim;
mod tensor;
