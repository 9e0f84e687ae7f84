//! The checksum of chunks and manifest slots: XXH3, 64 bits (Collet, <https://github.com/Cyan4973/xxHash>).
//!
//! It guards against torn and misplaced writes and against bit rot, not against an adversary.

/// XXH3-64 of `bytes`.
pub fn checksum(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}
