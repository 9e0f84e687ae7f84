//! Modules, functions, launches.

use crate::scene;
use std::ffi::c_void;
use std::sync::Arc;
use terrace_device::cuda::{Compiler, CudaDevice, Function, Module, Source};
use terrace_device::{BytesMut, Device, DeviceError, Region, Stream, StreamKind};

const SOURCE: Source<'_> = Source {
    name: "add_one.cu",
    text: "extern \"C\" __global__ void add_one(int *x, unsigned n) {}",
    headers: &[],
    options: &["--std=c++17"],
};

fn add_one(device: &Arc<CudaDevice>) -> Function {
    let image = Compiler::new(device).with_cache(None).compile(&SOURCE).unwrap();
    Module::load_image(device, &image).unwrap().function("add_one").unwrap()
}

/// Launches `add_one` over the region's integers.
fn launch(device: &CudaDevice, function: &Function, region: &mut Region) -> Result<(), DeviceError> {
    let mut n = (region.bytes().len() / 4) as u32;
    let mut x = region.bytes_mut().address().as_ptr();
    let mut args: [*mut c_void; 2] = [(&raw mut x).cast(), (&raw mut n).cast()];
    // SAFETY: the arguments are what the kernel takes; callers hold the region until they have synchronized.
    unsafe { function.launch(device.compute_stream(), [n.div_ceil(256), 1, 1], [256, 1, 1], 0, &mut args) }
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn a_kernel_runs_in_its_turn() {
    scene("kernels::a_kernel_runs_in_its_turn", &[("TERRACE_MOCK_DELAY_US", "500")], || {
        let device = CudaDevice::open(0).unwrap();
        let function = add_one(&device);
        let arena = device.arena(1 << 16).unwrap();
        let mut region = arena.alloc(1000 * 4).unwrap();
        let compute = device.compute_stream();
        // SAFETY: the region outlives the synchronization below.
        unsafe { compute.fill(region.bytes_mut(), 0).unwrap() };
        for _ in 0..20 {
            launch(&device, &function, &mut region).unwrap();
        }
        let mut back = vec![0u8; 1000 * 4];
        let down = device.stream(StreamKind::Download).unwrap();
        down.wait(&*compute.record().unwrap()).unwrap();
        // SAFETY: both ends outlive the synchronization.
        unsafe { down.copy(region.bytes(), BytesMut::from_host(&mut back)).unwrap() };
        down.synchronize().unwrap();
        assert!(back.chunks(4).all(|x| x == 20i32.to_ne_bytes()));
        assert_eq!(function.registers_and_spill_bytes().unwrap(), (32, 0));
    });
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn a_refused_launch_names_kernel_and_shape() {
    scene("kernels::a_refused_launch_names_kernel_and_shape", &[], || {
        let device = CudaDevice::open(0).unwrap();
        let function = add_one(&device);
        let shaped = |grid, block, shared| {
            let (mut x, mut n) = (std::ptr::null_mut::<u8>(), 0u32);
            let mut args: [*mut c_void; 2] = [(&raw mut x).cast(), (&raw mut n).cast()];
            // SAFETY: the arguments are what the kernel takes; of zero integers it touches none.
            unsafe { function.launch(device.compute_stream(), grid, block, shared, &mut args) }
        };
        let message = shaped([0, 1, 1], [32, 1, 1], 0).unwrap_err().to_string();
        assert!(message.contains("add_one") && message.contains("[0, 1, 1]"), "{message}");
        assert!(shaped([1, 1, 1], [1025, 1, 1], 0).is_err());
        assert!(shaped([1, 1, 1], [32, 1, 1], 100 << 10).is_err(), "more than 48 KiB need leave");
        function.allow_shared_bytes(100 << 10).unwrap();
        shaped([1, 1, 1], [32, 1, 1], 100 << 10).unwrap();
        let message = function.allow_shared_bytes(1 << 20).unwrap_err().to_string();
        assert!(message.contains("1048576") && message.contains("232448"), "{message}");
        device.compute_stream().synchronize().unwrap();
    });
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn images_are_checked() {
    scene("kernels::images_are_checked", &[], || {
        let device = CudaDevice::open(0).unwrap();
        let message = Module::load(&device, b"garbage").unwrap_err().to_string();
        assert!(message.contains("INVALID_IMAGE (200)") && message.contains("neither an image"), "{message}");
        let message = Module::load(&device, b"TERRACE-MOCK-IMAGE sm_80\n").unwrap_err().to_string();
        assert!(message.contains("NO_BINARY_FOR_GPU") && message.contains("sm_80"), "{message}");
        let module = Module::load(&device, b".version 9.0\n.target sm_80\n").unwrap();
        let message = module.function("no_such").unwrap_err().to_string();
        assert!(message.contains("kernel no_such") && message.contains("NOT_FOUND"), "{message}");
        assert_eq!(module.function("add_one").unwrap().name(), "add_one");
    });
}
