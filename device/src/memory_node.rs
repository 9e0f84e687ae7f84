//! Which memory node of the host pages come from.

use std::ffi::{c_int, c_ulong};
use std::ptr::NonNull;

/// `MPOL_PREFERRED` of Linux: from the node while it has pages, else from the others.
const PREFERRED: c_int = 1;
/// Nodes that a mask of ours can name; Linux has at most 1024.
const NODES: usize = 1024;
const WORD: usize = c_ulong::BITS as usize;

/// Asks that pages of a range which nobody has touched yet come from `node`, where it has any left. The range begins with a page. False
/// where the system does not do that (containers may forbid it); pages then come from the node of whoever touches them first.
pub(crate) fn prefer(start: NonNull<u8>, bytes: usize, node: u32) -> bool {
    let node = node as usize;
    let mut mask: [c_ulong; NODES / WORD] = [0; NODES / WORD];
    let Some(word) = mask.get_mut(node / WORD) else { return false };
    *word |= 1 << (node % WORD);
    // SAFETY: the call looks at the mask, which has a bit more than it is told, and changes no byte of the range, mapped or not.
    let result = unsafe {
        libc::syscall(libc::SYS_mbind, start.as_ptr(), bytes, PREFERRED, mask.as_ptr(), NODES as c_ulong, 0)
    };
    result == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostMemory;

    /// The policy of a page: its mode and the first word of its nodes.
    fn policy(start: NonNull<u8>) -> Option<(c_int, c_ulong)> {
        const OF_ADDRESS: c_int = 2;
        let (mut mode, mut mask): (c_int, [c_ulong; NODES / WORD]) = (-1, [0; NODES / WORD]);
        // SAFETY: both are writable, and the mask has as many bits as are said.
        let result = unsafe {
            libc::syscall(
                libc::SYS_get_mempolicy,
                &raw mut mode,
                mask.as_mut_ptr(),
                NODES as c_ulong,
                start.as_ptr(),
                OF_ADDRESS,
            )
        };
        (result == 0).then_some((mode, mask[0]))
    }

    #[test]
    fn pages_prefer_a_node() {
        let memory = HostMemory::new(1 << 16).unwrap();
        let Some(before) = policy(memory.base()) else { return };
        assert_eq!(before.0, 0, "where it is touched first");
        if prefer(memory.base(), memory.bytes(), 0) {
            assert_eq!(policy(memory.base()), Some((PREFERRED, 1)));
        }
        assert!(!prefer(memory.base(), memory.bytes(), NODES as u32), "there is no such node");
    }
}
