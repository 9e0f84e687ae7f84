//! Library facade.
#![forbid(unsafe_code)]
