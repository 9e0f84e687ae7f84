//! Compiled images on disk.
//!
//! One file per image, named by the source and the hash of all that decides the image: text, headers, options (the
//! architecture among them) and the compiler's version. Files are written beside and renamed, so a reader sees a whole
//! one or none, whoever else compiles the same; an entry that is damaged all the same does not pass its checksum.
//!
//! ```text
//! offset  bytes  little-endian
//!      0      8  "TERRKERN"
//!      8     16  key, which the file's name repeats
//!     24      8  XXH3 (64 bits) of the image
//!     32      8  length of the image
//!     40      …  image
//! ```

use super::compiler::Source;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use twox_hash::{XxHash3_64, XxHash3_128};

const MAGIC: &[u8; 8] = b"TERRKERN";
const HEADER_BYTES: usize = 40;

/// Where one image belongs.
#[derive(Debug)]
pub(super) struct Cache {
    file: PathBuf,
    key: u128,
}

impl Cache {
    pub(super) fn new(folder: &Path, source: &Source<'_>, options: &[String], compiler: (u32, u32)) -> Self {
        let mut hash = XxHash3_128::new();
        // Lengths go first, so that no two lists run together to the same bytes.
        let mut add = |text: &str| {
            hash.write(&(text.len() as u64).to_le_bytes());
            hash.write(text.as_bytes());
        };
        add(&format!("{}.{}", compiler.0, compiler.1));
        add(source.name);
        add(source.text);
        for (name, text) in source.headers {
            add(name);
            add(text);
        }
        add("options");
        options.iter().for_each(|option| add(option));
        let key = hash.finish_128();
        let plain = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' };
        let name: String = source.name.chars().map(plain).collect();
        Self { file: folder.join(format!("{name}.{key:032x}")), key }
    }

    /// PTX that is the same whatever compiler made it.
    pub(super) fn of_prebuilt(folder: &Path, source: &Source<'_>) -> Self {
        Self::new(folder, source, &["PTX".to_owned()], (0, 0))
    }

    /// The image, if there is a whole one.
    pub(super) fn read(&self) -> Option<Vec<u8>> {
        let mut bytes = fs::read(&self.file).ok()?;
        let header = bytes.get(..HEADER_BYTES)?;
        let image = &bytes[HEADER_BYTES..];
        if header != self.header(image) {
            return None;
        }
        bytes.drain(..HEADER_BYTES);
        Some(bytes)
    }

    /// Writes the image; where that fails, the next run compiles again.
    pub(super) fn write(&self, image: &[u8]) {
        static WRITES: AtomicU64 = AtomicU64::new(0);
        let write = WRITES.fetch_add(1, Ordering::Relaxed);
        let beside = self.file.with_extension(format!("{}-{write}.new", std::process::id()));
        let folder = self.file.parent().expect("an entry lies in the cache's folder");
        let mut bytes = self.header(image);
        bytes.extend_from_slice(image);
        let written = fs::create_dir_all(folder)
            .and_then(|()| fs::write(&beside, &bytes))
            .and_then(|()| fs::rename(&beside, &self.file));
        if written.is_err() {
            let _ = fs::remove_file(&beside);
        }
    }

    fn header(&self, image: &[u8]) -> Vec<u8> {
        let mut header = Vec::with_capacity(HEADER_BYTES + image.len());
        header.extend_from_slice(MAGIC);
        header.extend_from_slice(&self.key.to_le_bytes());
        header.extend_from_slice(&XxHash3_64::oneshot(image).to_le_bytes());
        header.extend_from_slice(&(image.len() as u64).to_le_bytes());
        header
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: Source<'_> =
        Source { name: "add/one.cu", text: "kernel", headers: &[("a.h", "text")], options: &[] };

    fn key(source: &Source<'_>, options: &[&str], compiler: (u32, u32)) -> u128 {
        let options: Vec<String> = options.iter().map(|&option| option.to_owned()).collect();
        Cache::new(Path::new("folder"), source, &options, compiler).key
    }

    #[test]
    fn whatever_decides_the_image_is_in_the_key() {
        let keys = [
            key(&SOURCE, &["x"], (13, 0)),
            key(&SOURCE, &["x"], (13, 1)),
            key(&SOURCE, &["y"], (13, 0)),
            key(&SOURCE, &["x", ""], (13, 0)),
            key(&Source { text: "kernel2", ..SOURCE }, &["x"], (13, 0)),
            key(&Source { headers: &[("a.h", "other")], ..SOURCE }, &["x"], (13, 0)),
            key(&Source { headers: &[], ..SOURCE }, &["x"], (13, 0)),
        ];
        let different: std::collections::BTreeSet<_> = keys.iter().collect();
        assert_eq!(different.len(), keys.len());
        assert_eq!(keys[0], key(&SOURCE, &["x"], (13, 0)));
    }

    #[test]
    fn a_damaged_entry_is_no_entry() {
        let folder = std::env::temp_dir().join(format!("terrace-kernel-cache-{}", std::process::id()));
        let cache = Cache::new(&folder, &SOURCE, &[], (13, 0));
        assert_eq!(cache.read(), None);
        cache.write(b"image");
        assert_eq!(cache.read().as_deref(), Some(&b"image"[..]));
        let whole = fs::read(&cache.file).unwrap();
        for damage in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[damage] ^= 1;
            fs::write(&cache.file, &bytes).unwrap();
            assert_eq!(cache.read(), None, "byte {damage}");
            fs::write(&cache.file, &whole[..damage]).unwrap();
            assert_eq!(cache.read(), None, "cut at {damage}");
        }
        cache.write(b"other");
        assert_eq!(cache.read().as_deref(), Some(&b"other"[..]));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "no temporary file is left");
        fs::remove_dir_all(&folder).unwrap();
    }
}
