//! Small real file systems on loop devices, with the sector size of one's choice. They need root.
//!
//! A mount is seen only by the thread that made it and the threads that thread starts: it lives in a mount namespace
//! of its own. The loop device is told to go away with its last user. So no mount and no device stays behind, even
//! when a test is killed.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// An ext4 file system on a loop device, mounted where only this thread sees it.
#[derive(Debug)]
pub struct LoopDisk {
    /// Holds the image and the mount point.
    home: TempDir,
    is_mounted: bool,
}

impl LoopDisk {
    /// A new file system of `bytes` on a device with sectors of `sector_bytes`.
    ///
    /// # Errors
    /// Why there can be none here: no root, no loop devices, no `mkfs.ext4`.
    pub fn new(bytes: u64, sector_bytes: u32) -> Result<Self, String> {
        let home = tempfile::tempdir_in(image_home()).map_err(|e| e.to_string())?;
        own_mounts().map_err(|e| format!("no mount namespace: {e}"))?;
        let (image, mount) = (home.path().join("image"), home.path().join("mount"));
        File::create(&image).and_then(|f| f.set_len(bytes)).map_err(|e| e.to_string())?;
        std::fs::create_dir(&mount).map_err(|e| e.to_string())?;
        let sector = sector_bytes.to_string();
        let find = ["--find", "--show", "--sector-size", &sector];
        let device = output(Command::new("losetup").args(find).arg(&image))?;
        let device = AttachedDevice(PathBuf::from(device.trim()));
        // No journal: what is tested is the data path, and a commit for every file made is most of the time.
        let options = ["-q", "-F", "-b", "4096", "-m", "0", "-O", "^has_journal"];
        output(Command::new("mkfs.ext4").args(options).arg(&device.0))?;
        mount_device(&device.0, &mount).map_err(|e| format!("mounting {}: {e}", device.0.display()))?;
        // Detaching a mounted device makes it go away with the mount.
        drop(device);
        Ok(Self { home, is_mounted: true })
    }

    /// Where it is mounted.
    pub fn path(&self) -> PathBuf {
        self.home.path().join("mount")
    }

    /// The file that holds its sectors.
    pub fn image(&self) -> PathBuf {
        self.home.path().join("image")
    }

    /// Makes the mounted file system refuse writes. No file may be open for writing, but a descriptor that was closed may
    /// be in use for a moment longer: by a completion of the kernel, or by a child that is about to run its program.
    ///
    /// # Errors
    /// What the operating system said, for ten seconds.
    pub fn make_read_only(&self) -> io::Result<()> {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            match mount(None, &self.path(), None, libc::MS_REMOUNT | libc::MS_RDONLY, None) {
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) && Instant::now() < deadline => {
                    std::thread::yield_now();
                }
                result => return result,
            }
        }
    }

    /// Has the file system do what it does when it finds itself damaged: refuse writes, whatever is open.
    ///
    /// # Errors
    /// What the operating system said.
    pub fn fail_file_system(&self) -> io::Result<()> {
        mount(None, &self.path(), None, libc::MS_REMOUNT, Some("abort"))
    }

    /// Takes the file system out of the directory tree, as `umount --lazy` does: what is open stays usable.
    ///
    /// # Errors
    /// What the operating system said.
    pub fn unmount(&mut self) -> io::Result<()> {
        self.is_mounted = false;
        unmount(&self.path())
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        if self.is_mounted
            && let Err(error) = unmount(&self.path())
        {
            println!("{} stays mounted: {error}", self.path().display());
        }
    }
}

/// A loop device; dropping it detaches it, at once or with its last user.
struct AttachedDevice(PathBuf);

impl Drop for AttachedDevice {
    fn drop(&mut self) {
        if let Err(error) = output(Command::new("losetup").arg("--detach").arg(&self.0)) {
            println!("{} stays attached: {error}", self.0.display());
        }
    }
}

/// Gives this thread, and the threads it will start, a mount namespace of their own. Safe to repeat.
///
/// # Errors
/// What the operating system said: it takes root.
pub fn own_mounts() -> io::Result<()> {
    // SAFETY: a system call without memory; it concerns this thread alone.
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
        return Err(io::Error::last_os_error());
    }
    mount(None, Path::new("/"), None, libc::MS_REC | libc::MS_PRIVATE, None)
}

/// Mounts a tmpfs of `bytes` that only this thread, and the threads it starts, see.
///
/// # Errors
/// What the operating system said: it takes root.
pub fn mount_tmpfs(at: &Path, bytes: u64) -> io::Result<()> {
    own_mounts()?;
    mount(Some(Path::new("tmpfs")), at, Some(c"tmpfs"), 0, Some(&format!("size={bytes}")))
}

/// Takes a mount out of the tree; it ends with its last open file.
///
/// # Errors
/// What the operating system said.
pub fn unmount(at: &Path) -> io::Result<()> {
    let at = c_path(at);
    // SAFETY: a system call on a NUL-terminated string.
    if unsafe { libc::umount2(at.as_ptr(), libc::MNT_DETACH) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// In memory where possible: the file systems are what is tested, not the drive below.
fn image_home() -> &'static Path {
    let shared_memory = Path::new("/dev/shm");
    if shared_memory.is_dir() { shared_memory } else { Path::new(env!("CARGO_TARGET_TMPDIR")) }
}

fn mount_device(device: &Path, at: &Path) -> io::Result<()> {
    mount(Some(device), at, Some(c"ext4"), libc::MS_NOATIME, None)
}

fn mount(
    source: Option<&Path>,
    at: &Path,
    kind: Option<&std::ffi::CStr>,
    flags: libc::c_ulong,
    data: Option<&str>,
) -> io::Result<()> {
    let source = source.map(c_path);
    let at = c_path(at);
    let data = data.map(|text| CString::new(text).expect("mount options have no NUL"));
    let pointer = |text: Option<&std::ffi::CStr>| text.map_or(std::ptr::null(), std::ffi::CStr::as_ptr);
    // SAFETY: a system call on NUL-terminated strings that outlive it, or null where it takes that.
    let status = unsafe {
        let (source, data) = (pointer(source.as_deref()), pointer(data.as_deref()));
        libc::mount(source, at.as_ptr(), pointer(kind), flags, data.cast())
    };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_encoded_bytes()).expect("paths have no NUL")
}

/// The standard output of a command that succeeds.
fn output(command: &mut Command) -> Result<String, String> {
    let result = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    if !result.status.success() {
        let text = String::from_utf8_lossy(&result.stderr);
        return Err(format!("{command:?}: {}", text.trim()));
    }
    Ok(String::from_utf8_lossy(&result.stdout).into_owned())
}
