//! Tests of the models against transformers and torch, with and without the engine.
#![forbid(unsafe_code)]
#![allow(non_snake_case, reason = "tensor names carry their shape as a suffix")]

mod adamw;
mod ahead;
mod batches;
#[path = "../card/mod.rs"]
mod card;
mod composite;
mod configs;
mod delta;
mod demand;
mod engine;
mod export;
mod families;
mod fixture;
mod gemma2;
mod gemma4;
mod gpt_oss;
mod keys;
mod latent;
mod llama4;
mod memory;
mod pages;
mod parity;
mod quantized;
mod runner;
mod shared;
mod tiling;
mod weights;
