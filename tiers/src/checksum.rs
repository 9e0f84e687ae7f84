//! The checksum of chunks and manifest slots: XXH3, 64 bits (Collet, <https://github.com/Cyan4973/xxHash>).
//!
//! It guards against torn and misplaced writes and against bit rot, not against an adversary.

/// XXH3-64 of `bytes`.
pub fn checksum(bytes: &[u8]) -> u64 {
    twox_hash::XxHash3_64::oneshot(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of the C library (0.8.4): what is on disk stays readable, and every length takes its own path.
    #[test]
    fn xxh3_of_the_reference() {
        for (len, expected) in [
            (0, 0x2d06_8005_38d3_94c2),
            (3, 0xc348_9259_e968_ad9e),
            (100, 0x6dbb_812c_f19d_012e),
            (200, 0x7c64_f3b1_7285_e96a),
            (300, 0x7e3e_c985_b925_cacc),
            (1 << 17, 0x209b_69c6_2cad_3da0),
        ] {
            let bytes: Vec<u8> = (0..len).map(|i: usize| (i * 7 + i / 251) as u8).collect();
            assert_eq!(checksum(&bytes), expected, "{len} bytes");
        }
    }
}
