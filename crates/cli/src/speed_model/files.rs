//! Model files on disk: written whole or not at all, the replaced one kept beside.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use muxflow_predictor::{TrainedModel, file};
use muxflow_types::GpuType;

/// Writes a file so that a reader sees the old one or the new one, never a part.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let failed = || format!("cannot write {}", path.display());
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(name);
    let mut out = std::fs::File::create(&temporary).with_context(failed)?;
    let written = out.write_all(bytes).and_then(|()| out.sync_all());
    drop(out);
    if let Err(error) = written.and_then(|()| std::fs::rename(&temporary, path)) {
        // What is left of the temporary file is only in the way.
        std::fs::remove_file(&temporary).ok();
        return Err(error).with_context(failed);
    }
    Ok(())
}

/// The model in use of a GPU type in a folder.
pub(crate) fn model_path(folder: &Path, gpu_type: &GpuType) -> PathBuf {
    folder.join(format!("{}.model", gpu_type.as_str().replace(['/', ':'], "_")))
}

/// The checksum of a model file, as it names itself.
pub(crate) fn checksum(bytes: &[u8]) -> String {
    format!("{:08x}", file::crc32(bytes))
}

/// Reads a model file for a GPU type, with its checksum.
pub(crate) fn read_model(
    path: &Path,
    gpu_type: Option<&GpuType>,
) -> anyhow::Result<(TrainedModel, String)> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let model = match gpu_type {
        Some(gpu_type) => file::from_bytes_for(&bytes, gpu_type),
        None => file::from_bytes(&bytes),
    };
    let model = model.with_context(|| path.display().to_string())?;
    Ok((model, checksum(&bytes)))
}
