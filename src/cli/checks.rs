//! What is refused before anything is read or written that takes time: a mistake in a path is no reason to
//! tokenise a data set first.

use super::retention;
use crate::config::run;
use crate::error::{CliError, advice};
use std::fs::{File, TryLockError};
use std::num::NonZeroU64;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use terrace_models::{Model, SafetensorsSource, holds_weights};
use terrace_zero::create_dir_durably;

const MERGE_ADAPTER: &str = "merge it into its model with peft (AutoPeftModelForCausalLM.from_pretrained, merge_and_unload, save_pretrained) and give \
                             that folder";

/// The flag `--model` names a folder with a `config.json`. Says so where an adapter lies beside the model.
///
/// # Errors
/// It does not.
pub fn model(folder: &Path) -> Result<(), CliError> {
    let shown = folder.display();
    let has_adapter = || folder.join("adapter_config.json").exists();
    let detail = match std::fs::metadata(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            "there is no such folder; give a Hugging Face model folder on this machine (nothing is downloaded)".into()
        }
        Err(error) => format!("{error}; {}", advice(&error)),
        Ok(found) if !found.is_dir() => {
            "this is a file; give the folder that holds config.json and the weights".into()
        }
        Ok(_) => match std::fs::metadata(folder.join("config.json")) {
            Ok(_) if has_adapter() && has_no_weights(folder) => {
                format!("the folder holds an adapter and no weights of its model; {MERGE_ADAPTER}")
            }
            Ok(_) => {
                if has_adapter() {
                    eprintln!(
                        "warning: --model {shown}: adapter_config.json names an adapter, which is not applied; {MERGE_ADAPTER}"
                    );
                }
                return Ok(());
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && has_adapter() => {
                format!("the folder holds an adapter and no model; {MERGE_ADAPTER}")
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                "the folder has no config.json; give a Hugging Face model folder (config.json, safetensors, tokenizer.json)"
                    .into()
            }
            Err(error) => format!("config.json: {error}; {}", advice(&error)),
        },
    };
    Err(CliError::Failed(format!("--model {shown}: {detail}")))
}

/// Whether the weights of an adapter are all that a folder has.
fn has_no_weights(folder: &Path) -> bool {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let names: Vec<String> = files.filter_map(|name| name.into_string().ok()).collect();
    let mut weights = names.iter().filter(|name| name.ends_with(".safetensors"));
    names.iter().any(|name| name.starts_with("adapter_model."))
        && weights.all(|name| name.starts_with("adapter_model."))
}

/// As [`output`], of a run, which writes folders of its own there before the trained model, if it `saves` after every so many steps, and
/// else gives those of an earlier run other names, if it `begins`. Makes the folder, and gives what keeps other runs out of it as long as
/// it lives, and removes it afterwards if nothing came to be there. Where there are no locks, nobody is kept out.
///
/// # Errors
/// The output holds models of somebody else, another run writes there, or `model` or a file is where saves go to; or as [`output`].
pub fn run_output(
    output: &Path,
    model: &Path,
    saves: Option<NonZeroU64>,
    begins: bool,
) -> Result<Claim, CliError> {
    let changes_saves = saves.is_some() || begins;
    let inside = match (output.canonicalize(), model.canonicalize()) {
        (Ok(output), Ok(model)) => model.strip_prefix(output).map(Path::to_owned).ok(),
        _ => None,
    };
    let save = inside.as_ref().and_then(|inside| retention::step_of(inside.iter().next()?.to_str()?));
    let shown = output.display();
    if save.is_some() && changes_saves {
        return Err(CliError::Usage(format!(
            "--model {} is in a folder of --output {shown} that this run may rename, or its saves replace or remove; give another --output, \
             or a copy of the model, which --resume takes as well",
            model.display()
        )));
    }
    // A run writes its metrics there before anything else. Where they are gone, its state is proof of it.
    let is_input = inside.is_some_and(|inside| inside.as_os_str().is_empty());
    let is_new =
        !output.join("metrics.jsonl").exists() && !run::default_disk(output).join("manifest.bin").exists();
    if holds_weights(output) && !is_input && is_new {
        return Err(CliError::Usage(format!(
            "--output {shown} holds a model that no run of finetune wrote there: the trained weights would replace it; give another folder"
        )));
    }
    // A folder that is not there holds none.
    let theirs =
        if is_new && changes_saves { retention::saves(output).unwrap_or_default() } else { Vec::new() };
    if let Some((_, save)) = theirs.first() {
        return Err(CliError::Usage(format!(
            "--output {shown} holds {}, which no run of finetune wrote there: this run may rename such folders, or its saves replace or \
             remove them; give another folder",
            save.display()
        )));
    }
    let in_the_way = saves.and_then(|every| retention::in_the_way(output, every.get()).ok()?);
    if let Some(path) = in_the_way {
        return Err(CliError::Usage(format!(
            "--output {shown}: {} is not a folder, and a save of this run may have that name; move it away, or give another folder",
            path.display()
        )));
    }
    self::output(output, model)?;
    let failed = |doing: &str, e: std::io::Error| {
        CliError::Failed(format!("--output {shown}: {doing} the folder: {e}; {}", advice(&e)))
    };
    let mut claim = Claim { made: missing(output), folder: None };
    create_dir_durably(output).map_err(|e| failed("creating", e))?;
    let folder = File::open(output).map_err(|e| failed("opening", e))?;
    if matches!(folder.try_lock(), Err(TryLockError::WouldBlock)) {
        claim.made.clear();
        return Err(CliError::Failed(format!(
            "--output {shown}: another run writes there; give an --output of its own to each"
        )));
    }
    claim.folder = Some(folder);
    Ok(claim)
}

/// A run's hold on the folder that it writes to.
#[derive(Debug)]
pub struct Claim {
    /// The folders that it made, the innermost first.
    made: Vec<PathBuf>,
    /// Locked.
    folder: Option<File>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        // What is not empty is not removed, and neither is what is around it.
        let _ = self.made.iter().try_for_each(std::fs::remove_dir);
        self.folder = None;
    }
}

/// The folders of a path that are not there, the innermost first.
fn missing(path: &Path) -> Vec<PathBuf> {
    let is_missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
    path.ancestors().take_while(is_missing).map(Path::to_owned).collect()
}

/// As [`output`], for the model that a step of a run had: it takes the place of such a model, and of no other.
///
/// # Errors
/// The output holds a model of somebody else; or as [`output`].
pub fn export_output(output: &Path, model: &Path) -> Result<(), CliError> {
    if let Some(file) =
        ["manifest.bin", "state.bin"].map(|name| output.join(name)).iter().find(|file| file.exists())
    {
        return Err(CliError::Usage(format!(
            "--output {} is a directory of training state ({} is there), and who removes that would remove the model too; give another folder",
            output.display(),
            file.display()
        )));
    }
    let is_earlier = || {
        output.join("metrics.jsonl").exists()
            || SafetensorsSource::open(output).is_ok_and(|found| found.is_export())
    };
    self::output(output, model)?;
    if holds_weights(output) && !is_earlier() {
        return Err(CliError::Usage(format!(
            "--output {} holds a model that neither finetune nor export wrote there, or an earlier version did: it would be replaced; remove it, or give \
             another folder",
            output.display()
        )));
    }
    Ok(())
}

/// The folder that `--output` names can be written; `model` is the folder that is read.
///
/// # Errors
/// Both are the same, which would replace the model by what is made of it, or the folder cannot be written.
pub fn output(output: &Path, model: &Path) -> Result<(), CliError> {
    let same =
        |a: std::io::Result<PathBuf>, b: std::io::Result<PathBuf>| matches!((a, b), (Ok(a), Ok(b)) if a == b);
    if same(output.canonicalize(), model.canonicalize()) {
        return Err(CliError::Usage(format!(
            "--output {} is the folder of --model: the trained weights would replace the model; give another folder",
            output.display()
        )));
    }
    for name in ["config.json", "model.safetensors", "model.safetensors.index.json"] {
        if output.join(name).is_dir() {
            return Err(CliError::Usage(format!(
                "--output {}: {name} there is a folder, and a model has a file of that name; move it away, or give another folder",
                output.display()
            )));
        }
    }
    writable("--output", output)
}

/// Says so if the files of a model's folder hold tensors that the model has no parameter for.
pub fn warn_of_unused(source: &SafetensorsSource, model: &Model, folder: &Path) {
    let unused = source.unused(model);
    let Some(first) = unused.first() else { return };
    eprintln!(
        "warning: --model {}: {} of its tensors are no parameters of the model that its config.json describes and are left out, the first of \
         them `{first}`; is it the config.json of these weights?",
        folder.display(),
        unused.len()
    );
}

/// The directories for state on disk can be made and written to. Making them is left to the store, which makes them durably.
///
/// # Errors
/// One cannot.
pub fn disks(dirs: &[PathBuf]) -> Result<(), CliError> {
    dirs.iter().try_for_each(|dir| writable("--disk", dir))
}

/// A directory that is only planned, on this machine, need not be there: what it would be made in is.
///
/// # Errors
/// It is something else.
pub fn planned_disk(dir: &Path) -> Result<(), CliError> {
    let whole = std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned());
    let Some(existing) = whole.ancestors().find(|path| path.symlink_metadata().is_ok()) else {
        return Ok(());
    };
    if !existing.is_dir() {
        let detail = "is not a directory; give a folder, or a name that is free";
        return Err(CliError::Failed(format!("--disk {}: {} {detail}", dir.display(), existing.display())));
    }
    if existing != whole {
        eprintln!(
            "note: --disk {}: there is no such folder; the disk of {} is meant, where a run would make it",
            dir.display(),
            existing.display()
        );
    }
    Ok(())
}

/// A file that is written at the end of a run can be written.
///
/// # Errors
/// It cannot.
pub fn file(flag: &str, path: &Path) -> Result<(), CliError> {
    let refused = |detail: String| Err(CliError::Failed(format!("{flag} {}: {detail}", path.display())));
    if path.is_dir() {
        return refused("this is a directory; give the name of a file".into());
    }
    let is_new = path.symlink_metadata().is_err();
    match File::options().append(true).create(true).open(path) {
        Ok(_) => {
            // What is refused later leaves nothing behind. An empty file that cannot be removed again does no harm.
            let _ = is_new.then(|| std::fs::remove_file(path));
            Ok(())
        }
        Err(error) => refused(format!("{error}; {}", advice(&error))),
    }
}

/// Tries to write where `dir` is, or in the closest directory above it that exists.
pub(super) fn writable(flag: &str, dir: &Path) -> Result<(), CliError> {
    let refused = |detail: String| Err(CliError::Failed(format!("{flag} {}: {detail}", dir.display())));
    let whole = match std::path::absolute(dir) {
        Ok(whole) => whole,
        Err(_) => return refused("the path is empty; give a folder".into()),
    };
    let existing = whole.ancestors().find(|path| path.symlink_metadata().is_ok()).unwrap_or(&whole);
    if !existing.is_dir() {
        let subject = if existing == whole { "this".into() } else { existing.display().to_string() };
        return refused(format!("{subject} is not a directory; give a folder, or a name that is free"));
    }
    // A file that has no name leaves nothing behind, whenever the process is killed. Not every file system has them.
    if File::options().write(true).custom_flags(libc::O_TMPFILE).open(existing).is_ok() {
        return Ok(());
    }
    let probe = existing.join(format!(".terrace-probe-{}", std::process::id()));
    match File::create_new(&probe) {
        Ok(_) => {
            // An empty file that cannot be removed again does no harm.
            let _ = std::fs::remove_file(&probe);
            Ok(())
        }
        Err(error) => refused(format!("writing in {}: {error}; {}", existing.display(), advice(&error))),
    }
}
