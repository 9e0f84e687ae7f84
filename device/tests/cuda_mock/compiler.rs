//! Compiling kernel sources, and the folder of compiled ones.

use crate::{calls, scene};
use std::path::{Path, PathBuf};
use terrace_device::cuda::{Compiler, CudaDevice, Library, Module, Origin, Source};

const SOURCE: Source<'_> = Source {
    name: "add_one.cu",
    text: "extern \"C\" __global__ void add_one(int *x, unsigned n) {}\n",
    headers: &[("types.cuh", "typedef unsigned u32;")],
    options: &["--std=c++17"],
};

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("terrace-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    folder
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn images_are_kept() {
    scene("compiler::images_are_kept", &[], || {
        let device = CudaDevice::open(0).unwrap();
        let folder = folder("kept");
        let compiler = Compiler::new(&device).with_cache(Some(folder.join("a/b")));
        let first = compiler.compile(&SOURCE).unwrap();
        assert_eq!(first.origin, Origin::Compiled);
        let again = compiler.compile(&SOURCE).unwrap();
        assert_eq!((again.origin, again.bytes), (Origin::Cached, first.bytes.clone()));
        Module::load(&device, &first.bytes).unwrap();
        let text = String::from_utf8_lossy(&first.bytes);
        assert!(text.contains("// types.cuh\ntypedef unsigned u32;"), "headers are seen: {text}");
        let entries: Vec<_> =
            std::fs::read_dir(folder.join("a/b")).unwrap().map(|e| e.unwrap().path()).collect();
        assert_eq!(entries.len(), 1);
        let mut damaged = std::fs::read(&entries[0]).unwrap();
        *damaged.last_mut().unwrap() ^= 1;
        std::fs::write(&entries[0], damaged).unwrap();
        let mended = compiler.compile(&SOURCE).unwrap();
        assert_eq!((mended.origin, mended.bytes), (Origin::Compiled, first.bytes));
        assert_eq!(compiler.compile(&SOURCE).unwrap().origin, Origin::Cached);
        let other = Source { options: &["--std=c++20"], ..SOURCE };
        assert_eq!(compiler.compile(&other).unwrap().origin, Origin::Compiled);
        std::fs::remove_dir_all(&folder).unwrap();
        // Where nothing can be kept it compiles all the same.
        let nowhere = Compiler::new(&device).with_cache(Some(PathBuf::from("/proc/terrace")));
        assert_eq!(nowhere.compile(&SOURCE).unwrap().origin, Origin::Compiled);
        assert!(calls("cuModuleLoadDataEx") == 1);
    });
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn the_compilers_messages_are_in_the_error() {
    scene("compiler::the_compilers_messages_are_in_the_error", &[], || {
        let device = CudaDevice::open(0).unwrap();
        let source = Source { text: "int x;\n#error too small\n", ..SOURCE };
        let message = Compiler::new(&device).with_cache(None).compile(&source).unwrap_err().to_string();
        for part in [
            "add_one.cu was refused",
            "NVRTC 13.0",
            "NVRTC_ERROR_COMPILATION",
            "add_one.cu(2): error",
            "too small",
        ] {
            assert!(message.contains(part), "{part} in: {message}");
        }
        let option = Source { options: &["oops"], ..SOURCE };
        let message = Compiler::new(&device).with_cache(None).compile(&option).unwrap_err().to_string();
        assert!(message.contains("INVALID_OPTION"), "{message}");
    });
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn code_is_for_the_very_card() {
    for (sm, architecture) in
        [("80", "sm_80"), ("89", "sm_89"), ("90", "sm_90"), ("120", "sm_120"), ("130", "compute_121")]
    {
        scene(
            "compiler::code_is_for_the_very_card",
            &[("TERRACE_MOCK_SM", sm), ("WANTED", architecture)],
            || {
                let wanted = std::env::var("WANTED").unwrap();
                let device = CudaDevice::open(0).unwrap();
                let image = Compiler::new(&device).with_cache(None).compile(&SOURCE).unwrap();
                let text = String::from_utf8(image.bytes.clone()).unwrap();
                assert_eq!(text.lines().next(), Some(format!("TERRACE-MOCK-IMAGE {wanted}").as_str()));
                Module::load_image(&device, &image).unwrap().function("add_one").unwrap();
            },
        );
    }
}

/// The first folder on the loader's path with the mock's libraries.
fn mock() -> PathBuf {
    let own = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let mut folders = own.split(':').map(PathBuf::from);
    folders.find(|folder| folder.join("libcuda.so.1").exists()).expect("the mock driver is on the path")
}

/// A folder with some of the mock's libraries.
fn some_libraries(folder: &Path, names: &[&str]) {
    std::fs::create_dir_all(folder).unwrap();
    for name in names {
        std::os::unix::fs::symlink(mock().join(name), folder.join(name)).unwrap();
    }
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn a_compiler_is_not_newer_than_the_driver() {
    for (driver, version) in [("13.0", (13, 0)), ("12.1", (12, 4)), ("14.2", (13, 0))] {
        let settings = [("TERRACE_MOCK_DRIVER", driver), ("WANTED", &format!("{}.{}", version.0, version.1))];
        scene("compiler::a_compiler_is_not_newer_than_the_driver", &settings, || {
            let device = CudaDevice::open(0).unwrap();
            let image = Compiler::new(&device).with_cache(None).compile(&SOURCE).unwrap();
            let wanted = format!("// NVRTC {}\n", std::env::var("WANTED").unwrap());
            assert!(String::from_utf8_lossy(&image.bytes).contains(&wanted), "{wanted}");
            Module::load_image(&device, &image).unwrap();
        });
    }
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn code_that_is_too_new_is_said() {
    let folder = folder("newer-compiler");
    some_libraries(&folder, &["libcuda.so.1", "libnvrtc.so.13"]);
    let settings = [("LD_LIBRARY_PATH", folder.to_str().unwrap()), ("TERRACE_MOCK_DRIVER", "12.4")];
    scene("compiler::code_that_is_too_new_is_said", &settings, || {
        let device = CudaDevice::open(0).unwrap();
        let image = Compiler::new(&device).with_cache(None).compile(&SOURCE).unwrap();
        let message = Module::load_image(&device, &image).unwrap_err().to_string();
        for part in ["NVRTC 13.0 compiled it", "supports CUDA 12.4", "pip install nvidia-cuda-nvrtc-cu12"] {
            assert!(message.contains(part), "{part} in: {message}");
        }
        let ptx = b"//\n// Generated by NVIDIA NVVM Compiler\n//\n\n.version 9.0\n.target sm_80\n";
        let message = Module::load(&device, ptx).unwrap_err().to_string();
        for part in ["UNSUPPORTED_PTX_VERSION (222)", "it is PTX 9.0", "supports CUDA 12.4"] {
            assert!(message.contains(part), "{part} in: {message}");
        }
    });
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn a_compiler_that_lacks_functions_is_too_old() {
    let folder = folder("older-compiler");
    some_libraries(&folder, &["libcuda.so.1"]);
    let source = folder.join("nvrtc.c");
    std::fs::write(
        &source,
        "int nvrtcVersion(int *major, int *minor) { *major = 11, *minor = 0; return 0; }",
    )
    .unwrap();
    let library = folder.join("libnvrtc.so");
    let mut compiler = std::process::Command::new("g++");
    compiler.args(["-shared", "-fPIC", "-x", "c", "-o"]).args([&library, &source]);
    assert!(compiler.status().unwrap().success());
    let settings = [("LD_LIBRARY_PATH", folder.to_str().unwrap()), ("TERRACE_MOCK_DRIVER", "11.0")];
    scene("compiler::a_compiler_that_lacks_functions_is_too_old", &settings, || {
        let device = CudaDevice::open(0).unwrap();
        let compiler = Compiler::new(&device).with_cache(None).with_prebuilt(None);
        let message = compiler.compile(&SOURCE).unwrap_err().to_string();
        for part in ["libnvrtc.so is too old", "nvrtcGetSupportedArchs", "pip install nvidia-cuda-nvrtc-cu11"]
        {
            assert!(message.contains(part), "{part} in: {message}");
        }
    });
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn without_a_compiler_there_is_advice_or_prebuilt_code() {
    let folder = folder("driver-only");
    some_libraries(&folder, &["libcuda.so.1"]);
    // Written where there is a compiler, before the scene takes it away.
    let ptx = folder.join("ptx");
    if std::env::var_os("TERRACE_PTX").is_none() {
        Compiler::write_prebuilt(&SOURCE, &ptx).unwrap();
    }
    let settings = [("LD_LIBRARY_PATH", folder.to_str().unwrap()), ("TERRACE_PTX", ptx.to_str().unwrap())];
    scene("compiler::without_a_compiler_there_is_advice_or_prebuilt_code", &settings, || {
        if let Some(path) = &Library::Nvrtc.open().found {
            println!("not tested: this machine has {}", path.display());
            return;
        }
        let device = CudaDevice::open(0).unwrap();
        let compiler = Compiler::new(&device).with_cache(None);
        let image = compiler.compile(&SOURCE).unwrap();
        assert_eq!(image.origin, Origin::Prebuilt);
        Module::load_image(&device, &image).unwrap().function("add_one").unwrap();
        // Of other sources there is none.
        let other = Source { text: "__global__ void other() {}", ..SOURCE };
        let message = compiler.compile(&other).unwrap_err().to_string();
        assert!(message.contains("and PTX of this version's kernels in"), "{message}");
        let message = compiler.with_prebuilt(None).compile(&SOURCE).unwrap_err().to_string();
        for part in
            ["add_one.cu", "libnvrtc", "LD_LIBRARY_PATH", "pip install nvidia-cuda-nvrtc", "CUDA toolkit"]
        {
            assert!(message.contains(part), "{part} in: {message}");
        }
    });
    std::fs::remove_dir_all(&folder).unwrap();
}
