//! A CUDA device.

use super::context::{Context, ContextGuard};
use super::driver::{self, check};
use super::memory::{DeviceMemory, PinnedMemory, PinnedUse, register};
use super::probe;
use super::stream::CudaStream;
use crate::{Arena, Device, DeviceError, Pinned, Space, Stream, StreamKind, memory_node};
use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdevice_attribute as Attribute};
use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

/// The oldest card whose tensor cores multiply bf16 (Ampere).
pub const CAPABILITY_MIN: Capability = Capability { major: 8, minor: 0 };

/// A card's generation, which decides what its code must be compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[expect(missing_docs, reason = "the two halves of `9.0`")]
pub struct Capability {
    pub major: u32,
    pub minor: u32,
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl Capability {
    /// As one number: 90 for 9.0.
    pub fn number(self) -> u32 {
        self.major * 10 + self.minor
    }
}

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    /// The card's name.
    pub name: String,
    /// Its number in this process.
    pub ordinal: u32,
    /// Its generation.
    pub capability: Capability,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Its address on the bus, as `0000:3b:00.0`.
    pub bus_id: String,
    /// Multiprocessors, each of which runs one or more blocks at a time.
    pub multiprocessors: u32,
    /// Bytes of shared memory that a block may use once its function allows it.
    pub shared_bytes_max: u32,
    /// Bytes of the second-level cache.
    pub cache_bytes: u64,
    /// Copies that run beside kernels and each other.
    pub copy_engines: u32,
}

impl Properties {
    /// Reads the properties of a device; the driver must have been started.
    pub(super) fn read(ordinal: u32) -> Result<(CUdevice, Self), DeviceError> {
        let count = device_count()?;
        let refusal = DeviceError::NoSuchDevice { ordinal, count };
        let Some(number) = c_int::try_from(ordinal).ok().filter(|_| ordinal < count) else {
            return Err(refusal);
        };
        let mut device: CUdevice = 0;
        // SAFETY: the driver was started; `device` is writable.
        check(unsafe { sys::cuDeviceGet(&raw mut device, number) }, "looking up the device")?;
        let mut memory_bytes = 0;
        // SAFETY: the driver gave `device`; `memory_bytes` is writable.
        let result = unsafe { sys::cuDeviceTotalMem_v2(&raw mut memory_bytes, device) };
        check(result, "asking for the device's memory")?;
        let number = |what| attribute(device, what);
        let properties = Self {
            // SAFETY: the driver writes at most `len` bytes, a zero among them.
            name: text("asking for the device's name", |at, len| unsafe {
                sys::cuDeviceGetName(at, len, device)
            })?,
            ordinal,
            capability: Capability {
                major: number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                minor: number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            },
            memory_bytes: memory_bytes as u64,
            // SAFETY: as for the name.
            bus_id: text("asking for the device's place on the bus", |at, len| unsafe {
                sys::cuDeviceGetPCIBusId(at, len, device)
            })?
            .to_lowercase(),
            multiprocessors: number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes_max: number(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            cache_bytes: number(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.into(),
            copy_engines: number(Attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT)?,
        };
        Ok((device, properties))
    }
}

/// How many devices the driver shows; the driver must have been started.
pub(super) fn device_count() -> Result<u32, DeviceError> {
    let mut count: c_int = 0;
    // SAFETY: the driver was started; `count` is writable.
    match unsafe { sys::cuDeviceGetCount(&raw mut count) } {
        // The second where the driver found none when it was started.
        sys::CUresult::CUDA_ERROR_NO_DEVICE | sys::CUresult::CUDA_ERROR_NOT_INITIALIZED => Ok(0),
        result => check(result, "counting devices").map(|()| count.unsigned_abs()),
    }
}

fn attribute(device: CUdevice, what: Attribute) -> Result<u32, DeviceError> {
    let mut value: c_int = 0;
    // SAFETY: the driver gave `device`; `value` is writable.
    let result = unsafe { sys::cuDeviceGetAttribute(&raw mut value, what, device) };
    check(result, "asking for the device's properties")?;
    Ok(value.unsigned_abs())
}

fn text(doing: &str, write: impl FnOnce(*mut c_char, c_int) -> sys::CUresult) -> Result<String, DeviceError> {
    let mut bytes = [0u8; 128];
    check(write(bytes.as_mut_ptr().cast(), 127), doing)?;
    let text = CStr::from_bytes_until_nul(&bytes).expect("the last byte stays zero");
    Ok(text.to_string_lossy().into_owned())
}

/// An NVIDIA card.
///
/// Kernels and the engine must agree on the order of work, so [`StreamKind::Compute`] always gives one and the same
/// stream, [`compute_stream`](Self::compute_stream); copies get a new stream at every call.
#[derive(Debug)]
pub struct CudaDevice {
    properties: Properties,
    /// Of the host, near the card.
    memory_node: Option<u32>,
    /// Of the host, that the driver refused.
    unpinned_bytes: AtomicU64,
    warnings: Mutex<Vec<String>>,
    compute: Arc<CudaStream>,
    context: Arc<Context>,
}

impl CudaDevice {
    /// Opens a device by its number.
    ///
    /// # Errors
    /// There is no driver, no such device, or it is older than [`CAPABILITY_MIN`].
    pub fn open(ordinal: u32) -> Result<Arc<Self>, DeviceError> {
        driver::start()?;
        let (device, properties) = Properties::read(ordinal)?;
        if properties.capability < CAPABILITY_MIN {
            let detail = format!(
                "its compute capability is {}, and the kernels need {CAPABILITY_MIN} or newer (Ampere), the first \
                 with bf16; use another card or `HostDevice`",
                properties.capability
            );
            return Err(DeviceError::Unsupported { device: properties.name, detail });
        }
        let context = Arc::new(Context::retain(device, ordinal)?);
        let compute = Arc::new(CudaStream::new(Arc::clone(&context), StreamKind::Compute)?);
        let memory_node = probe::memory_node(&properties.bus_id);
        let (unpinned_bytes, warnings) = (AtomicU64::new(0), Mutex::default());
        Ok(Arc::new(Self { properties, memory_node, unpinned_bytes, warnings, compute, context }))
    }

    /// What the device is.
    pub fn properties(&self) -> &Properties {
        &self.properties
    }

    /// The stream that kernels run on.
    pub fn compute_stream(&self) -> &Arc<CudaStream> {
        &self.compute
    }

    /// As [`Device::stream`], by its type.
    ///
    /// # Errors
    /// The driver refused.
    pub fn cuda_stream(&self, kind: StreamKind) -> Result<Arc<CudaStream>, DeviceError> {
        match kind {
            StreamKind::Compute => Ok(Arc::clone(&self.compute)),
            StreamKind::Upload | StreamKind::Download => {
                Ok(Arc::new(CudaStream::new(Arc::clone(&self.context), kind)?))
            }
        }
    }

    /// Makes the device's context current on this thread, for calls of libraries that need it (cuBLAS, NCCL).
    ///
    /// # Errors
    /// The driver refused.
    pub fn enter(&self) -> Result<ContextGuard<'_>, DeviceError> {
        self.context.enter()
    }

    /// The context's handle, valid while the device lives.
    pub fn raw_context(&self) -> CUcontext {
        self.context.raw()
    }

    /// Bytes of the device's memory that are free now, and bytes there are.
    ///
    /// # Errors
    /// The driver refused.
    pub fn memory(&self) -> Result<(usize, usize), DeviceError> {
        self.context.memory()
    }

    /// Zeroed host memory that the device reaches directly, for one direction of copies.
    ///
    /// # Errors
    /// The system can pin no more memory.
    pub fn pinned_memory(&self, bytes: usize, used_for: PinnedUse) -> Result<PinnedMemory, DeviceError> {
        PinnedMemory::new(Arc::clone(&self.context), bytes, used_for)
    }

    /// Events made so far, those in the pool included. It stops growing once a step's events are all from the pool.
    pub fn events_made(&self) -> usize {
        self.context.events_made()
    }

    /// Remembers what a user should know of, but what the device does without.
    pub fn warn(&self, warning: String) {
        self.warnings.lock().unwrap_or_else(PoisonError::into_inner).push(warning);
    }

    /// What [`warn`](Self::warn) remembered since this was last called.
    pub fn take_warnings(&self) -> Vec<String> {
        std::mem::take(&mut self.warnings.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Device for CudaDevice {
    fn name(&self) -> &str {
        &self.properties.name
    }

    fn unified(&self) -> bool {
        false
    }

    fn arena(&self, bytes: usize) -> Result<Arena, DeviceError> {
        let memory = DeviceMemory::new(Arc::clone(&self.context), bytes)?;
        let base = memory.base();
        let space = Space::Device(self.context.ordinal());
        // SAFETY: the driver aligns allocations to 256 bytes (checked there); the memory is `bytes` long and handed to the
        // arena to keep.
        Ok(unsafe { Arena::from_raw(base, bytes, space, None, Box::new(memory)) })
    }

    fn stream(&self, kind: StreamKind) -> Result<Arc<dyn Stream>, DeviceError> {
        Ok(self.cuda_stream(kind)?)
    }

    /// Its pages come from the memory node that the card is attached to, as far as nobody has touched them and it has room.
    unsafe fn pin(&self, start: NonNull<u8>, len: usize) -> Result<Pinned, DeviceError> {
        let _ = self.memory_node.is_some_and(|node| memory_node::prefer(start, len, node));
        // SAFETY: the caller's promise is the same.
        let pinned = unsafe { register(Arc::clone(&self.context), start, len) };
        pinned.inspect_err(|_| _ = self.unpinned_bytes.fetch_add(len as u64, Relaxed))
    }

    fn unpinned_bytes(&self) -> u64 {
        self.unpinned_bytes.load(Relaxed)
    }
}
