//! The tool `aio-bench`, driven as its users drive it.
