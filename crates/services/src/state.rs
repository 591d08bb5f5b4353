//! What is written down of a service: its declaration and its replicas, one file each.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use muxflow_api::service::ServiceDeclaration;

use crate::ServiceError;
use crate::service::Remembered;

/// Puts a new text in the place of a file, whole or not at all, also when the power fails.
pub(crate) fn write(path: &Path, text: &str) -> std::io::Result<()> {
    let beside = path.with_extension("new");
    let mut file = File::create(&beside)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&beside, path)?;
    path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
}

/// The text of a file.
pub(crate) fn text(declared: &ServiceDeclaration, replicas: &[Remembered]) -> String {
    let replicas: Vec<serde_json::Value> = replicas
        .iter()
        .map(|r| {
            serde_json::json!({ "name": r.name, "gpu": r.place, "port": r.port, "mark": r.mark })
        })
        .collect();
    serde_json::json!({ "version": 1, "declared": declared, "replicas": replicas }).to_string()
}

/// What a file says.
pub(crate) fn read(path: &Path) -> Result<(ServiceDeclaration, Vec<Remembered>), ServiceError> {
    let wrong = |reason: String| ServiceError::State {
        path: path.to_owned(),
        reason: format!("{reason}; remove the file to forget this service"),
    };
    let text = std::fs::read_to_string(path).map_err(|e| wrong(e.to_string()))?;
    let value: serde_json::Value = serde_json::from_str(&text).map_err(|e| wrong(e.to_string()))?;
    if value["version"] != 1 {
        return Err(wrong(format!("`version` is {}, and this program reads 1", value["version"])));
    }
    let declared = serde_json::from_value(value["declared"].clone())
        .map_err(|e| wrong(format!("`declared`: {e}")))?;
    let list = value["replicas"].as_array().into_iter().flatten();
    let replicas = list.filter_map(|one| {
        Some(Remembered {
            name: one["name"].as_str()?.to_owned(),
            place: one["gpu"].as_str()?.to_owned(),
            port: u16::try_from(one["port"].as_u64()?).ok()?,
            mark: one["mark"].as_str().map(str::to_owned),
        })
    });
    Ok((declared, replicas.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_down_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        let declared: ServiceDeclaration =
            serde_json::from_str(r#"{"name": "a", "command": ["x"], "slo_ms": 20.5}"#).unwrap();
        let one = |name: &str, mark: Option<&str>| Remembered {
            name: name.into(),
            place: "GPU-1".into(),
            port: 4242,
            mark: mark.map(str::to_owned),
        };
        let replicas = vec![one("a-0", None), one("a-1", Some("0123"))];
        std::fs::write(&path, text(&declared, &replicas)).unwrap();
        assert_eq!(read(&path).unwrap(), (declared, replicas));
        for text in ["{", "{\"version\": 2}", "{\"version\": 1, \"declared\": {}}"] {
            std::fs::write(&path, text).unwrap();
            let error = read(&path).unwrap_err().to_string();
            assert!(error.contains("a.json") && error.contains("remove the file"), "{error}");
        }
    }
}
