//! What a user reads when something is wrong, and that it says what to do.

use crate::{scene, scene_output};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use terrace_device::cuda::{CudaDevice, PinnedUse, probe};
use terrace_device::{Bytes, Device, DeviceError, StableBytes, Stream, StreamKind, Upload};

fn refusal<T: std::fmt::Debug>(result: Result<T, DeviceError>) -> String {
    result.unwrap_err().to_string()
}

#[track_caller]
fn assert_says(message: &str, parts: &[&str]) {
    let missing: Vec<_> = parts.iter().filter(|part| !message.contains(**part)).collect();
    assert!(missing.is_empty(), "{missing:?} not in: {message}");
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn a_stub_is_no_driver() {
    scene("errors::a_stub_is_no_driver", &[("TERRACE_MOCK_FAIL", "cuInit:1:34")], || {
        let message = refusal(CudaDevice::open(0));
        assert_says(
            &message,
            &["driver cannot be used", "libcuda", "stub", "LD_LIBRARY_PATH", "`HostDevice`"],
        );
        let probe = probe();
        assert_eq!((probe.devices.len(), probe.problem), (0, Some(message)));
    });
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn a_driver_that_does_not_start_says_why() {
    scene("errors::a_driver_that_does_not_start_says_why", &[("TERRACE_MOCK_FAIL", "cuInit:1:999")], || {
        assert_says(&refusal(CudaDevice::open(0)), &["does not start", "CUDA_ERROR_UNKNOWN (999)"]);
    });
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn an_updated_driver_asks_for_a_restart() {
    scene("errors::an_updated_driver_asks_for_a_restart", &[("TERRACE_MOCK_FAIL", "cuInit:1:803")], || {
        let message = refusal(CudaDevice::open(0));
        assert_says(&message, &["CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)", "restart the machine"]);
    });
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn a_wrong_number_is_told_how_many_there_are() {
    scene("errors::a_wrong_number_is_told_how_many_there_are", &[("TERRACE_MOCK_DEVICES", "2")], || {
        let message = refusal(CudaDevice::open(2));
        assert_says(&message, &["no CUDA device 2", "shows 2", "CUDA_VISIBLE_DEVICES", "terrace report"]);
        assert_says(&refusal(CudaDevice::open(u32::MAX)), &["4294967295"]);
        CudaDevice::open(1).unwrap();
    });
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn an_old_card_is_refused() {
    scene("errors::an_old_card_is_refused", &[("TERRACE_MOCK_SM", "75")], || {
        let message = refusal(CudaDevice::open(0));
        assert_says(&message, &["Mock Accelerator 0", "7.5", "8.0 or newer", "bf16", "`HostDevice`"]);
        assert_eq!(probe().devices.len(), 1, "a report lists it all the same");
    });
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn too_little_memory_says_how_much_is_free() {
    let settings = [("TERRACE_MOCK_MEMORY", "64MiB"), ("TERRACE_MOCK_FAIL", "cuMemHostAlloc:1:2")];
    scene("errors::too_little_memory_says_how_much_is_free", &settings, || {
        let device = CudaDevice::open(0).unwrap();
        let held = device.arena(16 << 20).unwrap();
        let message = refusal(device.arena(50 << 20));
        assert_says(
            &message,
            &["52428800 bytes of device memory", "50331648 of its 67108864 bytes are free"],
        );
        drop(held);
        device.arena(50 << 20).unwrap();
        let message = refusal(device.pinned_memory(4096, PinnedUse::Download));
        assert_says(&message, &["4096 bytes of pinned host memory", "CUDA_ERROR_OUT_OF_MEMORY"]);
    });
}

/// Says when it is given back.
struct Held(Vec<u8>, Arc<AtomicBool>);

impl Drop for Held {
    fn drop(&mut self) {
        self.1.store(true, Ordering::Relaxed);
    }
}

impl Deref for Held {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

// SAFETY: as for the vector, which nobody resizes.
unsafe impl StableBytes for Held {}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn a_lost_device_says_to_start_again() {
    scene(
        "errors::a_lost_device_says_to_start_again",
        &[("TERRACE_MOCK_FAIL", "cuEventSynchronize:1:700")],
        || {
            let device = CudaDevice::open(0).unwrap();
            let arena = device.arena(1 << 16).unwrap();
            let up = device.stream(StreamKind::Upload).unwrap();
            let held = Held(vec![1u8; 256], Arc::default());
            let given_back = Arc::clone(&held.1);
            let upload = Upload::start(&*up, held, arena.alloc(256).unwrap()).unwrap();
            let message = refusal(up.synchronize());
            let advice =
                ["lost while", "CUDA_ERROR_ILLEGAL_ADDRESS (700)", "start the command again", "step is safe"];
            assert_says(&message, &advice);
            // Every later call, and none hangs.
            assert!(matches!(device.arena(1), Err(DeviceError::Lost { .. })));
            assert!(matches!(up.record(), Err(DeviceError::Lost { .. })));
            assert!(matches!(device.memory(), Err(DeviceError::Lost { .. })));
            drop(upload);
            assert_eq!(arena.used(), 256, "memory under a transfer whose end nobody can tell is leaked");
            assert!(given_back.load(Ordering::Relaxed), "but not what is only read");
        },
    );
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn a_failed_call_says_what_was_being_done() {
    let failures =
        "cuMemcpyHtoDAsync_v2:1,cuEventRecord:2,cuEventRecord:4,cuEventRecord:5,cuStreamCreate:3:304";
    scene("errors::a_failed_call_says_what_was_being_done", &[("TERRACE_MOCK_FAIL", failures)], || {
        let device = CudaDevice::open(0).unwrap();
        let arena = device.arena(1 << 16).unwrap();
        let up = device.stream(StreamKind::Upload).unwrap();
        let start = || Upload::start(&*up, vec![1u8; 100], arena.alloc(100).unwrap());
        assert_says(&refusal(start()), &["while uploading", "CUDA_ERROR_OPERATING_SYSTEM (304)"]);
        assert_eq!(arena.used(), 0, "a copy that was not enqueued keeps nothing");
        start().unwrap().ready_on(&**device.compute_stream()).unwrap();
        assert_says(&refusal(start()), &["while recording an event"]);
        assert_eq!(arena.used(), 0, "a copy without an event is waited for");
        assert_says(&refusal(start()), &["while recording an event"]);
        assert_eq!(arena.used(), 256, "a copy that cannot be waited for keeps its memory");
        assert_says(&refusal(device.stream(StreamKind::Download)), &["while making a stream"]);
    });
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn a_copy_between_the_wrong_spaces_is_a_defect() {
    scene("errors::a_copy_between_the_wrong_spaces_is_a_defect", &[("TERRACE_MOCK_DEVICES", "2")], || {
        let [first, second] = [0, 1].map(|ordinal| CudaDevice::open(ordinal).unwrap());
        let arena = first.arena(4096).unwrap();
        let mut region = arena.alloc(16).unwrap();
        let copy = std::panic::AssertUnwindSafe(|| {
            // SAFETY: both ends outlive the call, which panics before it enqueues anything.
            unsafe { second.compute_stream().copy(Bytes::from_host(&[0; 16]), region.bytes_mut()) }
        });
        let panic = std::panic::catch_unwind(copy).unwrap_err();
        assert_says(
            panic.downcast_ref::<String>().unwrap(),
            &["stream of Device(1)", "from Host to Device(0)"],
        );
    });
}

/// The canary of the mock's memory: what writes to freed memory must not go unseen.
#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn a_write_to_freed_memory_ends_the_process() {
    let output = scene_output("errors::a_write_to_freed_memory_ends_the_process", &[], || {
        let device = CudaDevice::open(0).unwrap();
        let arena = device.arena(4096).unwrap();
        let address = arena.alloc(16).unwrap().bytes().address();
        drop(arena);
        // SAFETY: the mock keeps freed memory mapped for a while, so that this is found out.
        unsafe { address.write(1) };
        let _ = device.arena(4096);
    });
    if let Some(output) = output {
        assert!(!output.status.success());
        assert_says(
            &String::from_utf8_lossy(&output.stderr),
            &["freed device memory was written at offset 0"],
        );
    }
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn a_probe_lists_what_there_is() {
    let settings =
        [("TERRACE_MOCK_DEVICES", "2"), ("TERRACE_MOCK_MEMORY", "3GiB"), ("TERRACE_MOCK_SM", "120")];
    scene("errors::a_probe_lists_what_there_is", &settings, || {
        let probe = probe();
        assert_eq!((probe.driver_version, &probe.problem), (Some((13, 0)), &None));
        let found = probe.libraries[0].search.found.as_ref().unwrap();
        assert!(found.ends_with("libcuda.so.1"), "{found:?}");
        assert_eq!(probe.libraries[1].version.as_deref(), Some("13.0"));
        let cards: Vec<_> = probe.devices.iter().map(|card| &card.properties).collect();
        assert_eq!(cards.len(), 2);
        assert_eq!(cards[1].name, "Mock Accelerator 1");
        assert_eq!((cards[1].capability.to_string().as_str(), cards[1].memory_bytes), ("12.0", 3 << 30));
        assert_eq!(cards[1].bus_id, "0000:e1:00.0");
    });
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn a_driver_without_devices_is_said() {
    scene("errors::a_driver_without_devices_is_said", &[("TERRACE_MOCK_DEVICES", "0")], || {
        assert_says(&probe().problem.unwrap(), &["shows no device"]);
        assert_says(&refusal(CudaDevice::open(0)), &["shows 0"]);
    });
}
