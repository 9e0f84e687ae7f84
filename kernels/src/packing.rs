//! Right sides of products that stay packed from one product to the next.
//!
//! A backend that reorders an operand before it multiplies does so in every product. Weights stay what they are while several
//! micro-batches pass through a block: whoever runs them gives the backend memory in which the reordered weights may stay meanwhile, by
//! tagging [their view](crate::View::kept_packed) with a place. Results have the same bits with and without.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use terrace_device::DeviceError;
use terrace_device::host::HostMemory;

/// Where what is packed begins: at a cache line.
const ALIGN: usize = 64;

/// Memory for packed operands. It is given out once, to whoever comes first, and again after [`restart`](Self::restart).
#[derive(Debug)]
pub struct Packing {
    memory: HostMemory,
    taken: AtomicUsize,
}

/// The place of one operand: nothing, until a product packs it.
#[derive(Debug)]
pub struct Packed<'p> {
    packing: &'p Packing,
    /// Offset and length of what is packed, by [`Order`]. `None` where there was no room.
    orders: [OnceLock<Option<(usize, usize)>>; 4],
}

/// How an operand is packed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Order {
    pub(crate) transposed: bool,
    /// As f32.
    pub(crate) widened: bool,
}

impl Packing {
    /// Maps so many bytes of host memory.
    ///
    /// # Errors
    /// The operating system has no memory left.
    pub fn new(bytes: usize) -> Result<Self, DeviceError> {
        Ok(Self { memory: HostMemory::new(bytes)?, taken: AtomicUsize::new(0) })
    }

    /// Gives all memory out anew.
    pub fn restart(&mut self) {
        self.taken = AtomicUsize::new(0);
    }

    /// A place for one operand.
    pub fn place(&self) -> Packed<'_> {
        Packed { packing: self, orders: Default::default() }
    }

    /// The offset of `bytes` that nobody else has or gets before [`restart`](Self::restart).
    fn take(&self, bytes: usize) -> Option<usize> {
        let step = bytes.next_multiple_of(ALIGN);
        let within = |taken: usize| taken.checked_add(step).filter(|end| *end <= self.memory.bytes());
        self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within).ok()
    }
}

impl Packed<'_> {
    /// What `pack` made of `bytes` of memory when this was first called for this order, if there was room for it. The operand and what
    /// `pack` does are the same every time.
    pub(crate) fn get_or_pack(
        &self,
        order: Order,
        bytes: usize,
        pack: impl FnOnce(&mut [u8]),
    ) -> Option<&[u8]> {
        let place = usize::from(order.transposed) + 2 * usize::from(order.widened);
        let packed = self.orders[place].get_or_init(|| {
            let offset = self.packing.take(bytes)?;
            // SAFETY: `take` gives a range within the memory that nobody else has: ranges are given out again only by `restart`, which
            // has the packing alone, so that no place is left that has one. The memory is mapped, and zeroed in the beginning.
            pack(unsafe {
                std::slice::from_raw_parts_mut(self.packing.memory.base().add(offset).as_ptr(), bytes)
            });
            Some((offset, bytes))
        });
        let (offset, len) = (*packed)?;
        assert_eq!(len, bytes, "an operand is packed in one way");
        // SAFETY: as above; who has packed it is through with it.
        Some(unsafe { std::slice::from_raw_parts(self.packing.memory.base().add(offset).as_ptr(), bytes) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_given_out_once() {
        let mut packing = Packing::new(4096).unwrap();
        let order = |transposed| Order { transposed, widened: false };
        for round in 1..3u8 {
            packing.restart();
            let (first, second) = (packing.place(), packing.place());
            let packed = first.get_or_pack(order(true), 3000, |memory| memory.fill(round)).unwrap();
            assert_eq!((packed.len(), packed[2999]), (3000, round));
            let other = first.get_or_pack(order(false), 1000, |memory| memory.fill(9)).unwrap();
            assert_eq!((other.as_ptr() as usize % ALIGN, other[0]), (0, 9));
            assert!(second.get_or_pack(order(true), 100, |_| panic!("there is no room")).is_none());
            let again = first.get_or_pack(order(true), 3000, |_| panic!("it is packed")).unwrap();
            assert!(again.iter().all(|byte| *byte == round));
        }
    }
}
