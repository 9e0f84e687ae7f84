//! Launching kernels by name.

use super::operand;
use super::sources::KernelSource;
use crate::{View, ViewMut};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;
use terrace_device::cuda::{Compiler, CudaDevice, CudaStream, Function, Module};
use terrace_device::{Bytes, BytesMut, DeviceError, Space, Stream};

/// Most parameters of a kernel.
const PARAMETERS_MAX: usize = 32;

/// The values of a kernel's parameters, in order.
#[derive(Debug, Clone)]
pub(super) struct Arguments {
    /// A value's bytes come first, whatever the order of bytes.
    words: [[u8; 8]; PARAMETERS_MAX],
    count: usize,
    space: Space,
}

impl Arguments {
    pub(super) fn new(space: Space) -> Self {
        Self { words: [[0; 8]; PARAMETERS_MAX], count: 0, space }
    }

    /// The address of every argument, valid while `self` is borrowed.
    fn addresses(&mut self) -> Vec<*mut c_void> {
        self.words[..self.count].iter_mut().map(|word| word.as_mut_ptr().cast()).collect()
    }

    /// An operand that is read: its address and dtype.
    #[must_use]
    pub(super) fn read(self, view: View<'_>) -> Self {
        self.bytes(view.bytes()).int(operand::code(view.dtype()))
    }

    /// An operand that is written, or read and written.
    #[must_use]
    pub(super) fn write(self, view: &ViewMut<'_>) -> Self {
        self.read(view.view())
    }

    /// An operand that is read where there is one; else a null address.
    #[must_use]
    pub(super) fn optional(self, view: Option<View<'_>>) -> Self {
        match view {
            Some(view) => self.read(view),
            None => self.push(&0u64.to_ne_bytes()).int(0),
        }
    }

    /// An operand of the one dtype that the kernel knows, where there is one; else a null address.
    #[must_use]
    pub(super) fn only_if(self, view: Option<View<'_>>) -> Self {
        match view {
            Some(view) => self.only(view),
            None => self.push(&0u64.to_ne_bytes()),
        }
    }

    /// An operand of the one dtype that the kernel knows.
    #[must_use]
    pub(super) fn only(self, view: View<'_>) -> Self {
        self.bytes(view.bytes())
    }

    /// An address.
    #[must_use]
    pub(super) fn bytes(self, bytes: Bytes<'_>) -> Self {
        assert_eq!(bytes.space(), self.space, "operands are memory that the kernels reach");
        self.push(&(bytes.address().as_ptr() as u64).to_ne_bytes())
    }

    /// A 64-bit number.
    #[must_use]
    pub(super) fn long(self, value: usize) -> Self {
        self.push(&(value as i64).to_ne_bytes())
    }

    /// A 32-bit number.
    #[must_use]
    pub(super) fn int(self, value: i32) -> Self {
        self.push(&value.to_ne_bytes())
    }

    /// A size of an operand that exists in memory, and so is far from 2³¹ along one dimension.
    #[must_use]
    pub(super) fn size(self, value: usize) -> Self {
        self.int(i32::try_from(value).expect("a dimension has fewer than 2³¹ elements"))
    }

    /// A flag.
    #[must_use]
    pub(super) fn flag(self, value: bool) -> Self {
        self.int(i32::from(value))
    }

    /// A 32-bit float.
    #[must_use]
    pub(super) fn float(self, value: f32) -> Self {
        self.push(&value.to_ne_bytes())
    }

    fn push(mut self, value: &[u8]) -> Self {
        self.words[self.count][..value.len()].copy_from_slice(value);
        self.count += 1;
        self
    }
}

/// The kernels, loaded on a card.
#[derive(Debug)]
pub(super) struct OnCard {
    functions: HashMap<&'static str, Function>,
    stream: Arc<CudaStream>,
    device: Arc<CudaDevice>,
}

impl OnCard {
    /// The kernels of some sources.
    pub(super) fn new(
        device: &Arc<CudaDevice>,
        stream: &Arc<CudaStream>,
        sources: &[KernelSource],
    ) -> Result<Self, DeviceError> {
        let compiler = Compiler::new(device);
        let mut functions: HashMap<&'static str, Function> = HashMap::new();
        for source in sources {
            let module = Module::load_image(device, &compiler.compile(&source.compiled())?)?;
            for &kernel in source.kernels {
                functions.insert(kernel, module.function(kernel)?);
            }
        }
        for (kernel, shared_bytes) in super::attention::large_shared_bytes() {
            if let Some(function) = functions.get(kernel) {
                function.allow_shared_bytes(shared_bytes)?;
            }
        }
        Ok(Self { functions, stream: Arc::clone(stream), device: Arc::clone(device) })
    }
}

impl OnCard {
    /// Enqueues a kernel.
    ///
    /// # Safety
    /// As [`Function::launch`], for the kernel of this name.
    ///
    /// # Errors
    /// The launch was refused, or an earlier asynchronous operation failed.
    pub(super) unsafe fn launch(
        &self,
        kernel: &'static str,
        grid: [u32; 3],
        threads: u32,
        shared_bytes: u32,
        arguments: &mut Arguments,
    ) -> Result<(), DeviceError> {
        let function = self.functions.get(kernel).expect("every kernel is in the list of sources");
        let mut addresses = arguments.addresses();
        // SAFETY: the caller's promise is the same.
        unsafe { function.launch(&self.stream, grid, [threads, 1, 1], shared_bytes, &mut addresses) }
    }

    /// Enqueues a copy within the card.
    ///
    /// # Safety
    /// As [`Stream::copy`].
    ///
    /// # Errors
    /// The driver refused.
    pub(super) unsafe fn copy(&self, from: Bytes<'_>, to: BytesMut<'_>) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.stream.copy(from, to) }
    }

    /// Copies to the host, and waits for that and all before it.
    ///
    /// # Errors
    /// The driver refused, or an earlier asynchronous operation failed.
    pub(super) fn read_back(&self, from: Bytes<'_>, to: &mut [u8]) -> Result<(), DeviceError> {
        assert_eq!(from.space(), self.space(), "operands are memory that the kernels reach");
        // SAFETY: both are borrowed until the stream has done the copy; what writes `from` is ordered by the stream.
        unsafe { self.stream.copy(from, BytesMut::from_host(to)) }?;
        self.stream.synchronize()
    }

    /// The memory that kernels reach.
    pub(super) fn space(&self) -> Space {
        Space::Device(self.device.properties().ordinal)
    }

    pub(super) fn multiprocessors(&self) -> u32 {
        self.device.properties().multiprocessors
    }
}
