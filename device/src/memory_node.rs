//! Which memory node of the host pages come from.

use std::ffi::{c_int, c_uint, c_ulong};
use std::ptr::{NonNull, null, null_mut};
use std::sync::OnceLock;

/// `MPOL_PREFERRED` of Linux: from the node while it has pages, else from the others.
const PREFERRED: c_int = 1;
/// `MPOL_F_ADDR`: of an address, not of the calling thread.
const OF_ADDRESS: c_ulong = 2;
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

/// Memory nodes of this machine; 1 where the system does not say.
pub fn count() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| {
        let online = std::fs::read_to_string("/sys/devices/system/node/online");
        online.ok().and_then(|list| members(list.trim())).unwrap_or(1).max(1)
    })
}

/// How many numbers a list such as `0-3,8` has.
fn members(list: &str) -> Option<usize> {
    let numbers = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?)?.checked_add(1)
    };
    list.split(',').map(numbers).sum()
}

/// The node that the first page of `bytes` comes from. `None` where the system does not tell (containers may forbid it).
pub fn of(bytes: &[u8]) -> Option<u32> {
    const NODE: c_ulong = 1;
    let mut node: c_int = -1;
    // SAFETY: `node` is written to; no mask is asked for; the page belongs to the slice, whose bytes stay what they are.
    let result = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut node,
            null_mut::<c_ulong>(),
            0 as c_ulong,
            bytes.as_ptr(),
            NODE | OF_ADDRESS,
        )
    };
    if result == 0 { u32::try_from(node).ok() } else { None }
}

/// The node of the core that the calling thread runs on just now.
pub fn here() -> Option<u32> {
    let (mut core, mut node): (c_uint, c_uint) = (0, 0);
    // SAFETY: both are written to; the last argument has no use since Linux 2.6.24.
    let result = unsafe { libc::syscall(libc::SYS_getcpu, &raw mut core, &raw mut node, null::<u8>()) };
    (result == 0).then_some(node)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostMemory;

    #[test]
    fn lists_have_members() {
        for (list, count) in
            [("0", Some(1)), ("0-1", Some(2)), ("0-3,8,10-11", Some(7)), ("", None), ("3-1", None)]
        {
            assert_eq!(members(list), count, "{list}");
        }
        assert!(count() >= 1);
    }

    /// On a machine with one node there is no other answer, and on others pages come from where they are touched, if there is room.
    #[test]
    fn pages_and_threads_have_a_node() {
        let bytes = vec![1_u8; 1 << 16];
        let (page, thread) = (of(&bytes), here());
        assert!(thread.is_some(), "nothing forbids this call");
        assert!(count() > 1 || page.is_none() || page == thread, "{page:?} {thread:?}");
    }

    /// The policy of a page: its mode and the first word of its nodes.
    fn policy(start: NonNull<u8>) -> Option<(c_int, c_ulong)> {
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
