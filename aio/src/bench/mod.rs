//! The measuring code that `aio-bench` and `terrace calibrate` share: a load of a fixed number of blocks in flight, its
//! figures, and [`rates`](rates::measure), which asks for no more than a profile holds.

pub mod cpu;
pub mod histogram;
pub mod left_over;
pub mod load;
pub mod mix;
pub mod pattern;
pub mod rates;
pub mod region;
pub mod space;
