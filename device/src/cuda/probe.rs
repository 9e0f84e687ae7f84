//! What there is of CUDA on this machine, for reports. Nothing here fails or panics: what is missing is said.

use super::device::{Properties, device_count};
use super::driver;
use super::library::{Library, Search};
use crate::DeviceError;
use std::fs;
use std::path::Path;
use std::str::FromStr;

/// What there is of CUDA.
#[derive(Debug, Clone)]
pub struct Probe {
    /// Every library that the backend may use.
    pub libraries: Vec<LibraryReport>,
    /// The newest CUDA that the driver supports, as major and minor.
    pub driver_version: Option<(u32, u32)>,
    /// Devices, also those that are too old.
    pub devices: Vec<CardReport>,
    /// Why there are no devices, if there are none.
    pub problem: Option<String>,
}

/// A library that the backend may use.
#[derive(Debug, Clone)]
pub struct LibraryReport {
    /// Its file's name.
    pub name: &'static str,
    /// Where it is, or where it was looked for.
    pub search: Search,
    /// Its version, if it was found and says.
    pub version: Option<String>,
}

/// A device and how it is connected.
#[derive(Debug, Clone)]
pub struct CardReport {
    /// What the device is.
    pub properties: Properties,
    /// The memory node of the host that it is attached to.
    pub numa_node: Option<u32>,
    /// The link as it is now; idle cards slow theirs down.
    pub link: Option<Link>,
    /// The link at its best.
    pub link_max: Option<Link>,
}

/// A PCI Express link.
#[derive(Debug, Clone, PartialEq)]
pub struct Link {
    /// Lanes.
    pub width: u32,
    /// Per lane, in the kernel's words: `16.0 GT/s PCIe`.
    pub speed: String,
}

/// Looks for libraries and devices. Libraries that are found stay loaded.
pub fn probe() -> Probe {
    let libraries = Library::ALL.map(|library| LibraryReport {
        name: library.name(),
        search: library.open().clone(),
        version: library.is_found().then(|| version(library)).flatten(),
    });
    let (devices, problem) = match devices() {
        Ok(devices) if devices.is_empty() => {
            (devices, Some("the driver shows no device (CUDA_VISIBLE_DEVICES limits them)".to_owned()))
        }
        Ok(devices) => (devices, None),
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    let driver_version = driver::version_if_started();
    Probe { libraries: libraries.into(), driver_version, devices, problem }
}

fn devices() -> Result<Vec<CardReport>, DeviceError> {
    driver::start()?;
    (0..device_count()?).map(|ordinal| Ok(card(Properties::read(ordinal)?.1))).collect()
}

/// Where Linux tells of devices by their address.
const PCI: &str = "/sys/bus/pci/devices";

/// The memory node of the host that the device at an address is attached to.
pub(super) fn memory_node(bus_id: &str) -> Option<u32> {
    node_in(&Path::new(PCI).join(bus_id))
}

fn card(properties: Properties) -> CardReport {
    let folder = Path::new(PCI).join(&properties.bus_id);
    let link = |which: &str| link_in(&folder, which);
    CardReport { numa_node: node_in(&folder), link: link("current"), link_max: link("max"), properties }
}

fn link_in(folder: &Path, which: &str) -> Option<Link> {
    Some(Link {
        width: read(folder, &format!("{which}_link_width"))?,
        speed: read(folder, &format!("{which}_link_speed"))?,
    })
}

/// Where memory has one node the kernel says -1.
fn node_in(folder: &Path) -> Option<u32> {
    read::<i32>(folder, "numa_node").and_then(|node| u32::try_from(node).ok())
}

fn read<T: FromStr>(folder: &Path, name: &str) -> Option<T> {
    fs::read_to_string(folder.join(name)).ok()?.trim().parse().ok()
}

fn version(library: Library) -> Option<String> {
    match library {
        Library::Driver => {
            let (major, minor) = driver::version_if_started()?;
            Some(format!("CUDA {major}.{minor}"))
        }
        Library::Nvrtc => library.version().map(|(major, minor, _)| format!("{major}.{minor}")),
        Library::CublasLt => {
            library.version().map(|(major, minor, patch)| format!("{major}.{minor}.{patch}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::CudaDevice;

    #[test]
    fn what_linux_tells_of_a_card() {
        let folder = std::env::temp_dir().join(format!("terrace-pci-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let write = |name: &str, text: &str| fs::write(folder.join(name), text).unwrap();
        assert_eq!((node_in(&folder), link_in(&folder, "current")), (None, None));
        write("numa_node", "-1\n");
        write("current_link_width", "16\n");
        write("current_link_speed", "2.5 GT/s PCIe\n");
        let link = Link { width: 16, speed: "2.5 GT/s PCIe".into() };
        assert_eq!((link_in(&folder, "current"), link_in(&folder, "max")), (Some(link), None));
        assert_eq!(node_in(&folder), None, "memory has one node");
        write("numa_node", "1\n");
        assert_eq!(node_in(&folder), Some(1));
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn what_is_missing_is_said() {
        let probe = probe();
        assert_eq!(probe.libraries.len(), 3);
        for library in &probe.libraries {
            assert!(library.search.found.is_some() || library.search.looked_in.len() > 1, "{library:?}");
        }
        assert_eq!(probe.devices.is_empty(), probe.problem.is_some(), "{probe:?}");
        if probe.libraries[0].search.found.is_none() {
            let message = CudaDevice::open(0).unwrap_err().to_string();
            assert!(
                message.contains("libcuda.so.1 was looked for in") && message.contains("`HostDevice`"),
                "{message}"
            );
            assert_eq!(probe.problem, Some(message));
        }
    }
}
